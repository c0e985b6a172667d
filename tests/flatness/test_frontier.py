"""The frontier of learning and forgetting, against gradient descent in closed form on a quadratic loss."""

import dataclasses

import numpy as np
import pytest
import torch
from dense_curvature import VOCAB, batch_of, gpt2
from quadratic_model import OfLosses, batch
from scipy.optimize import brentq
from transformers import GPT2LMHeadModel

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import forgetting_frontier
from isoloss.lab.evaluation.context import language_inputs
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.presets import framed
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import derive

WIDTH, STEPS, RATES = 4, 12, (0.01, 0.03, 0.1, 0.3)


class Quadratic:
    """Linear regression on two texts: tokens 0 to 39 are of the old one, the rest of the new one."""

    def __init__(self, seed=0, held_out=40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(60 + held_out, WIDTH, generator=generator, dtype=torch.float64)
        noise = 0.1 * torch.randn(60 + held_out, generator=generator, dtype=torch.float64)
        truths = torch.tensor([[1.0, -1.0, 0.5, 0.0], [1.5, -0.5, 0.0, 0.5]], dtype=torch.float64)
        of_new = (torch.arange(len(x)) >= 40).long()
        self.x, self.y = x, (x * truths[of_new]).sum(dim=1) + noise
        self.start = torch.linalg.lstsq(x[:40], self.y[:40]).solution
        self.model = OfLosses(self.losses, self.start.clone())
        self.old, self.new = [batch(range(40))], [batch(range(40, 60)), batch(range(60, 60 + held_out))]

    def losses(self, w):
        return (self.x @ w - self.y).square() / 2 + 0.5

    def after(self, rate):
        """Return the weights after gradient descent: w* + (1 - rate H)^steps (w - w*)."""
        x, y = self.x[40:60], self.y[40:60]
        best, shrink = torch.linalg.lstsq(x, y).solution, torch.eye(WIDTH, dtype=torch.float64) - rate * x.T @ x / 20
        return best + torch.linalg.matrix_power(shrink, STEPS) @ (self.start - best)

    def rises(self, rate):
        return self.losses(self.after(rate)) - self.losses(self.start)

    def measured(self, **options):
        options = {"learning_rates": RATES, "num_steps": STEPS, "optimizer": "sgd", "causal": False, **options}
        return forgetting_frontier(self.model, self.old, self.new, **options)


def test_gain_and_forgetting_are_those_of_gradient_descent_in_closed_form():
    truth = Quadratic()
    truth.model.w.grad = torch.ones(WIDTH, dtype=torch.float64)
    found = truth.measured(gain=0.1)
    assert truth.model.w.equal(truth.start)
    assert truth.model.w.grad.eq(1).all()
    for rate in RATES:
        rises = truth.rises(rate)
        # of the sequences after the half that is trained on, the first one counts as touched
        for name, each in ((f"gain-{rate}", -rises[61:]), (f"forgetting-{rate}", rises[:40])):
            expected = each.mean().item(), each.std().item() / len(each) ** 0.5
            assert (found[name].value, found[name].stderr) == pytest.approx(expected, rel=1e-8)
    rate = brentq(lambda rate: float(truth.rises(rate)[61:].mean()) + 0.1, 1e-3, 0.3)
    frontier = found["frontier"]
    assert frontier.details["learning_rate"] == pytest.approx(rate, rel=2e-3)
    exact = float(truth.rises(rate)[:40].mean())
    assert abs(frontier.value - exact) <= frontier.details["interpolation_error"] < 0.1 * exact
    assert found == truth.measured(gain=0.1)


def test_the_error_is_how_far_the_forgetting_varies_over_texts():
    """The training text stays; documents of both texts to measure on are drawn again."""
    truth, generator, found = Quadratic(held_out=4000), torch.Generator().manual_seed(1), []
    truth.x[:40] = torch.randn(40, WIDTH, generator=generator, dtype=torch.float64)
    for _ in range(40):
        old, new = torch.randperm(2000, generator=generator)[:41] + 60, torch.randperm(2000, generator=generator)[:41]
        truth.old, truth.new = [batch(old)], [batch(range(40, 60)), batch(new + 2060)]
        found.append(truth.measured(gain=0.2, learning_rates=RATES[2:])["frontier"])
    spread = np.std([each.value for each in found], ddof=1)
    assert np.mean([each.stderr for each in found]) == pytest.approx(spread, rel=0.25)
    assert found[0].samples == 41 + 40
    assert found[0].stderr ** 2 - found[0].details["interpolation_error"] ** 2 == pytest.approx(
        np.square(found[0].influence).sum() / (81 * 80)
    )


def test_what_was_trained_on_is_not_measured():
    truth = Quadratic()
    # the fourth document begins in the half that is trained on, the fifth is the first one after it
    documents = torch.arange(60) // 6
    truth.new = [batch(range(40, 60), documents[:20]), batch(range(60, 100), documents[20:])]
    truth.old = [batch(range(40), torch.arange(40))]
    gain = truth.measured()["gain-0.1"]
    assert gain.value == pytest.approx(-float(truth.rises(0.1)[64:].mean()), rel=1e-8)
    assert (gain.samples, gain.details["clusters"]) == (6, "documents")
    truth.new = [batch(range(40, 60), documents[:20]), batch(range(60, 70), documents[20:30])]
    with pytest.raises(IsolossError, match=r"the new text has 30 sequences of 5 documents in 2 batches"):
        truth.measured()


def test_adamw_is_torchs():
    # the same twice: what is learned is there again
    model, old, new = gpt2(), [batch_of(8, seed=1)], [batch_of(6, seed=2), {**batch_of(6, seed=2)}]
    for number, each in enumerate(new):
        each["documents"] = torch.arange(6 * number, 6 * number + 6)
    old[0]["documents"] = torch.arange(8)
    gain = forgetting_frontier(model, old, new, gain=1e-9, learning_rates=(1e-2,), num_steps=5)["gain-0.01"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)

    def loss(given, rows=slice(None)):
        logits = model(input_ids=given["input_ids"][rows]).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), given["labels"][rows, 1:])

    before = loss(new[1], slice(1, None)).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss(new[0]).backward()
        optimizer.step()
    assert gain.value == pytest.approx(before - loss(new[1], slice(1, None)).item(), rel=1e-9)


def test_a_rate_that_diverges_and_a_gain_out_of_reach_are_said():
    truth = Quadratic()
    with pytest.warns(IsolossWarning, match=r"diverges at the learning rate 1e\+30: it is left out"):
        found = truth.measured(learning_rates=(0.1, 1e30, 1e31))
    assert [*found] == ["frontier", "gain-0.1", "forgetting-0.1"]
    with pytest.raises(IsolossError, match=r"diverges at the smallest learning rate, 1e\+30"):
        truth.measured(learning_rates=(1e30,))
    with pytest.warns(
        IsolossWarning, match=r"no learning rate reaches a gain of 9 nats: the largest gain is 0\.\d+ na"
    ):
        assert "frontier" not in truth.measured(gain=9.0)
    assert truth.model.w.equal(truth.start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rates": (0.1, 0.01)}, r"learning_rates is \(0\.1, 0\.01\); name rates above 0, in ascending order"),
        ({"gain": 0.0}, r"gain is 0\.0; it must be more than 0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; it is one of adamw, sgd"),
    ],
)
def test_what_is_no_frontier_is_refused(options, message):
    with pytest.raises(IsolossError, match=message):
        Quadratic().measured(**options)
    narrow = gpt2().to(torch.bfloat16)
    with pytest.raises(IsolossError, match=r"wte\.weight is torch\.bfloat16, in which small steps are lost"):
        forgetting_frontier(narrow, [batch_of(8)], [batch_of(6), batch_of(6)])


def test_the_measure_reads_the_other_text(tmp_path):
    gpt2().float().save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    for name in ("old", "new"):
        np.save(tmp_path / f"{name}.npy", generator.integers(0, VOCAB, (60, 4)))
    settings = {"frontier_with": str(tmp_path / "new.npy"), "frontier_gain": 0.01, "frontier_steps": 2}
    settings |= {"frontier_rates": (1e-2, 3e-2), "num_sequences": 20}
    (found,) = evaluate(tmp_path / "model", "frontier", data=str(tmp_path / "old.npy"), settings=settings)
    assert [*found.estimates][1:] == ["gain-0.01", "forgetting-0.01", "gain-0.03", "forgetting-0.03"]
    assert found.estimates["gain-0.01"].details["new"].startswith("32 sequences of 4 tokens drawn from the 60")
    with pytest.raises(IsolossError, match="frontier_with names no other text"):
        evaluate(tmp_path / "model", "frontier", data=str(tmp_path / "old.npy"))


@pytest.mark.parametrize(("frame", "special"), [(lambda grammar: grammar, 2), (framed, 4)], ids=["plain", "framed"])
def test_the_other_grammar_has_one_level_of_rules_drawn_anew(tmp_path, frame, special):
    plain = PCFGConfig(levels=1, symbols_per_level=2, rules_per_symbol=2, vocab_size=VOCAB - special)
    grammar = frame(plain)
    gpt2().float().save_pretrained(tmp_path)
    settings = {"frontier_level": 1, "frontier_gain": 0.01, "frontier_steps": 4, "num_sequences": 32}
    settings |= {"frontier_rates": (3e-2,)}
    (found,) = evaluate(tmp_path, "frontier", language=grammar, settings=settings)
    # a text of the other grammar, drawn as the measure draws it, as token ids
    other = frame(dataclasses.replace(plain, redrawn_level=1)).build()
    objective = ObjectiveConfig(kind="causal")
    old, new = (
        language_inputs(language, objective, num_sequences=number, seed=seed)
        for language, number, seed in ((grammar.build(), 32, 0), (other, 64, derive(0, "frontier")))
    )
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    expected = forgetting_frontier(
        model, old.batches, new.cut(8).batches, gain=0.01, learning_rates=(3e-2,), num_steps=4, causal=True
    )
    for name, estimate in expected.items():
        assert found.estimates[name].value == pytest.approx(estimate.value, rel=1e-5)
    assert expected["frontier"].value != 0
    with pytest.raises(IsolossError, match=r"names no level: give one of the grammar, 0 to 1, .* \(--frontier-level\)"):
        evaluate(tmp_path, "frontier", language=grammar)
    with pytest.raises(IsolossError, match="frontier_level is 2: give one of the grammar, 0 to 1, whose rules change"):
        evaluate(tmp_path, "frontier", language=grammar, settings={**settings, "frontier_level": 2})
    # what would be passed over, or change two levels at once
    with pytest.raises(IsolossError, match="frontier_with is old, but the model is measured on a language"):
        evaluate(tmp_path, "frontier", language=grammar, settings={**settings, "frontier_with": "old"})
    with pytest.raises(IsolossError, match="the grammar itself has level 0 drawn anew"):
        evaluate(tmp_path, "frontier", language=frame(dataclasses.replace(plain, redrawn_level=0)), settings=settings)
    np.save(tmp_path / "old.npy", np.zeros((4, 4), np.int64))
    with pytest.raises(IsolossError, match="frontier_level is 1, but the model is measured on a text"):
        evaluate(tmp_path, "frontier", data=str(tmp_path / "old.npy"), settings=settings)
