"""Parts of parameters, from one backward pass to a measurement, against dense gradients by sequence."""

import pickle
import types

import pytest
import torch
import torch.distributed as dist
from plain_gradients import DEBERTA, batch_of, build, check_norms, make
from small_models import bert, cut, gpt2, llama, rows

from isoloss.comparison.traces import WithLoss
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace, hessian_trace, weighted_fisher_trace
from isoloss.flatness._ghost.auxiliary import AuxiliarySample
from isoloss.flatness._measurement import InterruptedEstimate, Measurement, StopCriteria, measure
from isoloss.flatness._parameters import ParameterBlocks, ParameterColumns
from isoloss.flatness.fisher import ExactLabels, SampledLabels
from isoloss.flatness.hessian import _PublishedCode, _WithResidual
from isoloss.flatness.norms import _Weighted
from isoloss.lab.models.lstm import LSTMConfig, LSTMForMaskedLM

OPTIONS = [["whole", "blocks"], ["whole", "each"], ["mixed", "whole"], ["whole", "mixed"], ["each", "blocks"]]
OPTIONS += [["each", "whole"], ["blocks", "blocks"], ["blocks", "whole"], ["whole", "whole"]]


def groups_of(number, kind):
    """Groups of an axis: one; of neighbors, as of heads; taken in turn, as where they are interleaved; one each."""
    size = 3 if number % 3 == 0 else 2 if number % 2 == 0 else 1
    of = {
        "whole": 0 * torch.arange(number),
        "each": torch.arange(number),
        "blocks": torch.arange(number) // (number // size),
        "mixed": torch.arange(number) % size,
    }
    return of[kind]


def splits_of(parameters, start=0):
    """A split of every parameter, each kind in turn."""
    splits = {}
    for number, (name, parameter) in enumerate(parameters.items(), start=start):
        kinds = OPTIONS[number % len(OPTIONS)]
        a, b = parameter.shape[0], parameter.shape[-1] if parameter.ndim > 1 else 1
        splits[name] = ParameterBlocks(groups_of(a, kinds[0]), groups_of(b, kinds[1]))
    return splits


def lstm():
    torch.manual_seed(0)
    config = LSTMConfig(vocab_size=40, hidden_size=6, num_hidden_layers=2, num_directions=2, hidden_dropout_prob=0.0)
    return LSTMForMaskedLM(config).double().eval()


def deberta():
    options = {**DEBERTA, "pooler_hidden_size": 16, "share_att_key": True, "position_buckets": 4}
    return make("DebertaV2Config", "DebertaV2ForMaskedLM", {**options, "norm_rel_ebd": "layer_norm"})


MODELS = {name: lambda name=name: build(name) for name in ("bert", "gpt2", "albert")}
MODELS |= {"llama": lambda: llama(40), "lstm": lstm, "deberta": deberta}


@pytest.mark.parametrize("name", MODELS)
def test_every_part_has_the_norm_of_its_entries(name):
    model = MODELS[name]()
    for start in (0, 4):
        blocks = splits_of(dict(model.named_parameters()), start)
        check_norms(model, batch_of(), causal=name in ("gpt2", "llama"), rtol=1e-9, blocks=blocks)


@pytest.mark.parametrize("size", [1, 5, 6, 100])
def test_squares_are_summed_whatever_the_blocks(size, monkeypatch):
    monkeypatch.setattr("isoloss.flatness._parameters._PART", size)
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves = ParameterBlocks(torch.tensor([0, 0, 1, 1, 1]), torch.zeros(6, dtype=torch.int64))
    columns = ParameterColumns({"split": values, "whole": values}, {"split": halves})
    expected = torch.stack([values[:2].square().sum(), values[2:].square().sum()])
    torch.testing.assert_close(columns.squares("split", values), expected)
    torch.testing.assert_close(columns.squares("whole", values.T), expected.sum()[None])
    assert columns.squares("whole", values.bfloat16()).dtype == torch.float64


# --- measurements ----------------------------------------------------------------------------------------------------


def stream(sequences=80, vocab=7, size=16, **options):
    batch = rows(sequences, 5, vocab, predicted=((1, 3), (2,)), **options)
    return cut({**batch, "documents": torch.arange(sequences)}, [size] * (sequences // size))


def measured(model, batches, splits, kind=ExactLabels, *, stopping=None, progress=None, **options):
    """The measurement and its estimate."""
    source = kind(model, num_probes=1, seed=4, parameter_blocks=splits, **options)
    made = Measurement(source)
    return made, made.measure(batches, stopping or StopCriteria(), progress=progress)


def assert_like_plain(found, plain, rtol=1e-9):
    assert (found.value, found.stderr) == pytest.approx((plain.value, plain.stderr), rel=rtol)
    for field in ("by_parameter", "by_parameter_stderr", "by_layer", "by_layer_stderr"):
        mine, theirs = getattr(found, field), getattr(plain, field)
        assert (mine is None) == (theirs is None)
        if theirs is not None:  # a sum of two has no errors by parameter
            assert mine == pytest.approx(theirs, rel=rtol, abs=1e-12 * abs(plain.value))
    for field in ("without_embeddings", "without_embeddings_stderr"):
        assert found.details[field] == pytest.approx(plain.details[field], rel=rtol)


@pytest.mark.parametrize("made", [bert, gpt2])
def test_parts_add_up_to_the_plain_estimate(made):
    model, batches = made(7), stream()
    splits = splits_of(dict(model.named_parameters()))
    plain = fisher_trace(model, batches, seed=4)
    of_parts, found = measured(model, batches, splits)
    assert_like_plain(found, plain)
    assert found.influence == pytest.approx(plain.influence, rel=1e-7, abs=1e-7 * plain.value)
    columns = of_parts.columns()
    everything = columns.weighted(torch.ones(len(columns.ratios)))
    assert everything[:2] == pytest.approx((plain.value, plain.stderr), rel=1e-9)
    start = 0
    for name in plain.by_parameter:
        own = torch.zeros(len(columns.ratios))
        own[start : start + splits[name].num_blocks] = 1
        start += splits[name].num_blocks
        expected = plain.by_parameter[name], plain.by_parameter_stderr[name]
        assert columns.weighted(own)[:2] == pytest.approx(expected, rel=1e-8, abs=1e-12 * plain.value)
    assert columns.a.shape == (80, start) == (found.samples, len(columns.ratios))


def test_a_part_that_is_rescaled_has_the_trace_of_the_rescaled_model():
    """Values times s and the output's columns over s, by head: other parameters of the same function."""
    model, batches = bert(7), stream()
    names = [f"bert.encoder.layer.0.attention.{part}" for part in ("self.value.weight", "self.value.bias")]
    names.append("bert.encoder.layer.0.attention.output.dense.weight")
    heads, whole = torch.arange(8) // 4, torch.zeros(8, dtype=torch.int64)
    splits = {
        names[0]: ParameterBlocks(heads, whole),
        names[1]: ParameterBlocks(heads, whole[:1]),
        names[2]: ParameterBlocks(whole, heads),
    }
    of_parts, _ = measured(model, batches, splits)
    scale = torch.tensor([3.0, 0.5], dtype=torch.float64)
    weights = torch.ones(len(of_parts.columns().ratios), dtype=torch.float64)
    columns = of_parts._source.columns.of
    weights[columns[names[0]]], weights[columns[names[1]]], weights[columns[names[2]]] = scale**-2, scale**-2, scale**2
    found = of_parts.columns().weighted(weights)
    named = dict(model.named_parameters())
    with torch.no_grad():
        named[names[0]] *= scale[heads][:, None]
        named[names[1]] *= scale[heads]
        named[names[2]] /= scale[heads]
    rescaled = fisher_trace(model, batches, seed=4)
    assert found[:2] == pytest.approx((rescaled.value, rescaled.stderr), rel=1e-8)
    torch.testing.assert_close(found.influence, torch.from_numpy(rescaled.influence), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "plain", "options"),
    [
        (SampledLabels, lambda *of: fisher_trace(*of, method="paper", num_probes=1, seed=4), {}),
        (_Weighted, lambda *of: weighted_fisher_trace(*of, seed=4), {}),
        (_WithResidual, lambda *of: hessian_trace(*of, group_size=1, seed=4), {}),
        (_PublishedCode, lambda *of: hessian_trace(*of, method="published-code", seed=4), {}),
    ],
)
def test_other_measures_have_parts(kind, plain, options):
    model, batches = bert(7, layers=1), stream(12, size=4)
    parameters = {name: value for name, value in model.named_parameters() if name != "cls.predictions.bias"}
    splits = splits_of(parameters)
    of_parts, found = measured(model, batches, splits, kind, **options)
    expected = plain(model, batches)
    assert_like_plain(found, expected)
    assert found.method == expected.method
    columns = of_parts.columns()
    everything = columns.weighted(torch.ones(len(columns.ratios)))
    assert everything[:2] == pytest.approx((expected.value, expected.stderr), rel=1e-9)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    span = of_parts._source.columns.of[name]
    one = splits[name]
    for part in (0, one.num_blocks - 1):  # a part and the rest are another split
        rows_of, columns_of = one.rows == part // one.num_columns, one.columns == part % one.num_columns
        other, _ = measured(model, batches, {name: ParameterBlocks((~rows_of).long(), (~columns_of).long())}, kind)
        at = other._source.columns.of[name].start
        torch.testing.assert_close(columns.ratios[span.start + part], other.columns().ratios[at], rtol=1e-9, atol=0)


def test_a_finish_makes_the_estimate_the_limit_and_the_interruption(monkeypatch):
    model, batches = bert(7), stream(160)
    splits = splits_of(dict(model.named_parameters()))
    seen = []

    def finish(estimate, columns):
        seen.append(estimate.samples)
        value, stderr, _ = columns.weighted(torch.full((len(columns.ratios),), 2.0))
        return types.SimpleNamespace(value=value, stderr=stderr * 1e-6, whole=estimate)

    def run_it(**options):
        return measure(
            ExactLabels, model, batches, options, num_probes=1, seed=4, parameter_blocks=splits, finish=finish
        )

    found = run_it()
    assert found.value == pytest.approx(2 * found.whole.value, rel=1e-12)
    assert run_it(rtol=1e-6).whole.samples == 64  # by the error that `finish` gives
    assert seen == [160, 64, 64]

    def stop(done):
        if done == 48:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedEstimate) as caught:
        run_it(progress=stop)
    assert caught.value.partial.whole.samples == 48


def test_models_that_are_compared_have_parts_with_their_loss_and_an_auxiliary_sample():
    model, batches = bert(7), stream(320, size=80)
    splits = splits_of(dict(model.named_parameters()))
    sample = AuxiliarySample.read(model, stream(1280, size=80, seed=1))
    made = []
    for given in (None, splits):
        source = WithLoss(model, num_probes=1, seed=4, parameter_blocks=given)
        source.separate = False
        made.append((Measurement(source, auxiliary_sample=sample), source))
    (plain, _), (of_parts, source) = made
    expected, found = (one.measure(batches, StopCriteria()) for one, _ in made)
    assert expected.details["auxiliary_bigrams"]
    assert_like_plain(found, expected)
    columns, result = of_parts.columns(), plain.result()
    everything = columns.weighted(torch.ones(len(columns.ratios)))
    assert everything[:2] == pytest.approx((expected.value, expected.stderr), rel=1e-9)
    torch.testing.assert_close(everything.influence, result.influence, rtol=1e-6, atol=1e-6 * result.value)
    others = [name not in found.details["embeddings"] for name in found.by_parameter]
    rest = columns.weighted(torch.tensor(others)[source.columns.parameter_ids])
    assert rest[:2] == pytest.approx(result.part[:2], rel=1e-9)
    torch.testing.assert_close(rest.influence, result.part.influence, rtol=1e-6, atol=1e-6 * result.value)
    assert source.loss(None, 480).samples == 320


def test_the_parts_of_processes_join(monkeypatch):
    model, batches = bert(7), stream()
    splits = splits_of(dict(model.named_parameters()))
    gathered = []
    for name, value in {"is_available": True, "is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)

    def gather(results, mine):
        gathered.append(pickle.loads(pickle.dumps(mine)))
        results[:] = [*gathered[-2:]] if len(gathered) > 1 else [gathered[0], gathered[0]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    halves = []
    for rank, part in enumerate((batches[:2], batches[2:])):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        made = Measurement(ExactLabels(model, num_probes=1, seed=4, parameter_blocks=splits), distributed=True)
        found = made.measure(part, StopCriteria())
        halves.append(made)
    both = halves[1].columns()
    assert (found.samples, found.details["processes"], len(both.a)) == (80, 2, 80)
    assert torch.equal(both.a[:32], gathered[0][2][0].columns().a)
    assert torch.equal(both.a[32:], gathered[1][2][0].columns().a)
    everything = both.weighted(torch.ones(len(both.ratios)))
    assert everything[:2] == pytest.approx((found.value, found.stderr), rel=1e-10)


def test_splits_that_do_not_fit_are_refused():
    model, whole = bert(7), torch.zeros(8, dtype=torch.int64)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    with pytest.raises(IsolossError, match=r"split of .*query.weight is of \(8, 1\) rows and columns; .* \(8, 8\)"):
        measured(model, stream(), {name: ParameterBlocks(torch.arange(8), whole[:1])})
    with pytest.raises(IsolossError, match="other is split, but it is not one of the 42 measured parameters"):
        measured(model, stream(), {"other": ParameterBlocks(whole, whole)})
    with pytest.raises(IsolossError, match=r"the groups of the rows of a split are \[0, 2\]; they count from 0"):
        ParameterBlocks(torch.tensor([0, 2, 2]), whole)
    with pytest.raises(IsolossError, match=r"columns of a split are torch\.float32 of shape"):
        ParameterBlocks(whole, torch.zeros(3))


def test_a_gradient_that_is_not_finite_is_named_by_its_parameter(monkeypatch):
    model, batches = bert(7), stream(16)
    splits = splits_of(dict(model.named_parameters()))
    name = "bert.encoder.layer.0.intermediate.dense.weight"

    class Broken(ExactLabels):
        def measure(self, batch):
            terms = super().measure(batch)
            terms.values[0, self.columns.of[name].stop - 1] = float("nan")
            return terms

    with pytest.raises(IsolossError, match=f"the gradient of {name} is not finite"):
        measured(model, batches, splits, Broken)
