"""The curvature along a direction, against the Fisher matrix written out; and the direction of a run's next update."""

import dataclasses

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from isoloss import evaluate, pretrain
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.flatness import directional_sharpness
from isoloss.lab.evaluation.pretraining import next_update
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig

VOCAB = 5
SIZES = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1}


def bert():
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=6, **SIZES)).double().eval()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=4, n_layer=1, n_head=1, n_positions=6)).double().eval()


@pytest.mark.parametrize("make", [bert, gpt2])
def test_it_is_the_quadratic_form_of_the_fisher_matrix(make):
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(0, VOCAB, (4, 5))
    labels = ids if make is gpt2 else torch.where(torch.arange(5) % 2 == 0, ids, -100)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    flat = torch.cat([part.reshape(-1) for part in direction.values()])
    flat = flat / flat.norm()
    forms = []
    for row in range(4):
        log_p = model(input_ids=ids[row : row + 1]).logits[0].log_softmax(-1)
        places = range(4) if make is gpt2 else (0, 2, 4)
        form = 0.0
        for place in places:
            for token in range(VOCAB):  # the Fisher: the expected square of the derivative of log p
                found = torch.autograd.grad(log_p[place, token], list(model.parameters()), retain_graph=True)
                along = torch.cat([part.reshape(-1) for part in found]) @ flat
                form += log_p[place, token].exp().item() * along.item() ** 2
        forms.append(form / len(places))
    estimate = directional_sharpness(model, direction, [{"input_ids": ids, "labels": labels}])
    assert estimate.value == pytest.approx(sum(forms) / 4, rel=1e-9)
    assert estimate.stderr == pytest.approx(torch.tensor(forms).std().item() / 2, rel=1e-6)
    # its length and sign do not matter
    other = directional_sharpness(
        model, {name: -3 * part for name, part in direction.items()}, [{"input_ids": ids, "labels": labels}]
    )
    assert other.value == pytest.approx(estimate.value, rel=1e-9)


def test_what_is_no_direction_is_refused():
    model = bert()
    ids = torch.randint(0, VOCAB, (4, 5))
    batches = [{"input_ids": ids, "labels": ids}]
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(IsolossError, match="the direction is 0 everywhere"):
        directional_sharpness(model, zero, batches)
    first, *names = zero
    with pytest.raises(IsolossError, match=r"only one of them has bert\.embeddings\.LayerNorm\.bias"):
        directional_sharpness(model, {}, batches)
    with pytest.raises(IsolossError, match=rf"the direction's {first} has the shape \(2,\)"):
        directional_sharpness(model, {**zero, first: torch.ones(2)}, batches)
    with pytest.raises(IsolossError, match="the direction is not finite"):
        directional_sharpness(model, {**zero, names[0]: zero[names[0]] + torch.inf}, batches)


LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
CONFIG = TrainConfig(
    language=LANGUAGE,
    model=ModelConfig(architecture="llama", size="d16", layers=1, dropout=0.0),
    objective=ObjectiveConfig(kind="causal"),
    batch_size=16,
    steps=7,
    device="cpu",
    threads=1,
)
ALGORITHMS = {  # with a constant rate, which a longer run has as well
    "adamw": {"optimizer": OptimizerConfig(warmup_steps=2)},
    "muon": {"optimizer": OptimizerConfig(name="muon", warmup_steps=2)},
    "adversary": {
        "algorithm": AdversarialConfig(task="root", head_examples=20, loss_examples=20, task_examples=50),
        "optimizer": OptimizerConfig(warmup_steps=2),
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_next_update_is_that_of_a_run_with_one_step_more(tmp_path, name):
    config = dataclasses.replace(CONFIG, **ALGORITHMS[name])
    run = pretrain(tmp_path / "run", config)
    longer = pretrain(tmp_path / "longer", dataclasses.replace(config, steps=8, checkpoints=(7,)))
    before, after = (load_model(longer.checkpoint(step)).model.state_dict() for step in (7, 8))
    update = next_update(run, LANGUAGE.build())
    assert all(torch.equal(part, after[key] - before[key]) for key, part in update.items())
    assert any(part.abs().max() > 0 for part in update.values())
    assert run.steps() == [7]


def test_the_measure_takes_the_update_where_training_ended(tmp_path):
    stage = StageConfig(steps=400, optimizer=OptimizerConfig(warmup_steps=2), target_kl=0.5, validate_every=10)
    config = dataclasses.replace(CONFIG, steps=400, stages=(stage,), log_every=10, checkpoints=(0,))
    run = pretrain(tmp_path / "run", config)
    end = run.last_step()
    assert end < 400
    (found,) = evaluate(run.path, "directional-sharpness", steps="last", settings={"num_sequences": 50})
    estimate = found.estimates["directional-sharpness"]
    assert estimate.value > 0
    update = next_update(run, LANGUAGE.build())
    length = torch.cat([part.reshape(-1) for part in update.values()]).norm()
    assert estimate.details["length"] == pytest.approx(float(length), rel=1e-5)
    with pytest.raises(IsolossError, match=f"the optimizer's state is kept only at the last step, {end}, not at 0"):
        evaluate(run.path, "directional-sharpness", steps=0)
    with pytest.raises(IsolossError, match="has an optimizer to continue with: leave out --language"):
        evaluate(run.checkpoint(end), "directional-sharpness", language=LANGUAGE)
