"""What all measures of flatness have in common, each against it: truth, errors, stops, inputs, and what they refuse."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from dense_curvature import VOCAB, batch_of, bert, dense_gauss_newton, dense_hessian, flat, gpt2, windows
from flatness_measures import BY_BATCH, MEASURES, PROBES, STREAMS, WAYS, stream, unlabeled
from small_models import cut
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness import (
    InterruptedEstimate,
    Noise,
    Rounding,
    _measurement,
    empirical_fisher_trace,
    fisher_rao_norm,
    fisher_trace,
    hessian_trace,
    largest_eigenvalues,
    loss_rises,
    noise_sharpness,
    relative_flatness,
    sam_sharpness,
    spectral_density,
    squared_parameter_norm,
    weighted_fisher_trace,
)
from isoloss.statistics.comparison import paired_difference

pytestmark = pytest.mark.slow

FUNCTIONS = [
    *(fisher_trace, empirical_fisher_trace, fisher_rao_norm, weighted_fisher_trace, hessian_trace),
    *(relative_flatness, sam_sharpness, noise_sharpness, largest_eigenvalues, spectral_density),
]

# --- truth -----------------------------------------------------------------------------------------------------------


def theta(model):
    return flat(dict(model.named_parameters()))


def of_decoder(model, batches, *, causal):
    """sum_{s,s'} <w_s, w_s'> Tr H_ss' by the dense Hessian of the decoder's weight, untied from the embeddings."""
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    (name,) = (name for name, value in model.named_parameters() if value is head.weight)
    hessian = dense_hessian(model, batches, causal=causal, parameters={name: head.weight})
    weight = head.weight.detach()
    return float(torch.einsum("sd,td,sete->", weight, weight, hessian.view(*weight.shape, *weight.shape)))


def mean_square_gradient(model, batches, *, causal):
    """The mean over predicted positions of the squared norm of the gradient of its loss."""
    norms = []
    for batch in batches:
        for row, position in (batch["labels"] != -100).nonzero().tolist():
            inputs = {name: value[row : row + 1] for name, value in batch.items() if name != "labels"}
            logits = model(**inputs).logits[0, position - causal]
            loss = nn.functional.cross_entropy(logits, batch["labels"][row, position])
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            norms.append(sum(float(g.square().sum()) for g in gradients if g is not None))
    return sum(norms) / len(norms)


EXACT = {
    "fisher-rao": lambda m, b, **o: float(theta(m) @ dense_gauss_newton(m, b, **o) @ theta(m)),
    "relative": of_decoder,
    "eigenvalue": lambda m, b, **o: float(torch.linalg.eigvalsh(dense_gauss_newton(m, b, **o))[-1]),
}
SAMPLED = {
    "fisher": lambda m, b, **o: float(dense_gauss_newton(m, b, **o).trace()),
    "paper": lambda m, b, **o: float(dense_gauss_newton(m, b, **o).trace()),
    "empirical": mean_square_gradient,
    "hessian": lambda m, b, **o: float(dense_hessian(m, b, **o).trace()),
    "weighted": lambda m, b, **o: float(theta(m).square() @ dense_gauss_newton(m, b, **o).diagonal()),
    "density": lambda m, b, **o: float(dense_gauss_newton(m, b, **o).trace()),
}
MODELS = {
    "bert": (bert, False),
    "bert, untied, sdpa": (lambda: bert(tied=False, attention="sdpa"), False),
    "gpt2": (gpt2, True),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", EXACT)
def test_the_value_is_the_dense_truth(name, kind):
    (make, causal), batches = MODELS[kind], [batch_of(4, seed=1, padded=True), batch_of(3, seed=2)]
    found = MEASURES[name](make(), batches)
    assert found.value == pytest.approx(EXACT[name](make(), batches, causal=causal), rel=1e-8)
    assert (found.samples, found.num_predictions, found.num_probes) == (7, 11, 0)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "gpt2") for name in SAMPLED), ("fisher", "bert"), ("hessian", "bert")]
)
def test_the_mean_over_probes_is_the_dense_truth(name, kind):
    """The inputs are the same in every copy, so that the error is that of the probes."""
    make, causal = MODELS[kind]
    batch, copies = batch_of(12), {"paper": 8, "weighted": 20}.get(name, 40)
    truth = SAMPLED[name](make(), [batch], causal=causal)
    given = {key: value.repeat(copies, 1) for key, value in batch.items()}
    options = {"num_probes": 40} if name == "density" else {}
    found = MEASURES[name](make(), [{**given, "documents": torch.arange(12 * copies) // 12}], **options)
    assert abs(found.value - truth) < 4 * found.stderr
    # the Hessian's trace is a sum of two parts, the larger of which is the Fisher's
    size = SAMPLED["fisher" if name == "hessian" else name](make(), [batch], causal=causal)
    assert found.stderr < 0.3 * size
    assert found.samples == (40 if name == "density" else copies)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_influences_give_the_error_and_parts_add_up(name):
    found = STREAMS[name](windows(), stream(6, 5), causal=False)
    assert found.samples == (6 if name in BY_BATCH else 30)
    assert found.influence.shape == (found.samples,)
    n = found.samples
    assert math.sqrt(float((found.influence**2).sum()) / (n * (n - 1))) == pytest.approx(found.stderr, rel=1e-9)
    # the residuals, of which the influences are made by leaving out each cluster, add up to 0
    sizes = np.array([len(labels[labels != -100]) for batch in stream(6, 5) for labels in batch["labels"]])
    residuals = found.influence * (1 if name in BY_BATCH else sizes.sum() - sizes)
    assert abs(residuals.sum()) < 1e-9 * abs(residuals).sum()
    for parts in (found.by_parameter, found.by_layer):
        assert parts is None or sum(parts.values()) == pytest.approx(found.value, rel=1e-10)
    assert (found.by_parameter is None) == (name in ("fisher-rao", "sam"))


@pytest.mark.parametrize("name", ["hessian", "weighted", "noise", "eigenvalue"])
def test_the_error_is_the_spread_over_fresh_inputs_and_probes(name):
    options = {"noise": {"relative_std": 0.3, "num_probes": 6}, "eigenvalue": {"rtol": 1e-6}}.get(name, {})
    models, found, differences = [windows(), windows()], [], []
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    for repetition in range(24):
        given = options | {"seed": repetition}
        batches = stream(1, 24, seed=repetition)
        one, other = (MEASURES[name](model, batches, causal=False, **given) for model in models)
        found.append(one)
        differences.append(paired_difference(one, other))
    for estimates in (found, differences):
        spread = float(np.std([e.value for e in estimates], ddof=1))
        # a standard deviation over 24 repetitions is right to 15 %; that of a difference of noise is on the safe side
        safe = 0.0 if name == "noise" else 0.55
        assert safe < spread / math.sqrt(sum(e.stderr**2 for e in estimates) / 24) < 1.45


# --- streams, stops and interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in [*STREAMS, "noise", "relative"] if name not in BY_BATCH])
def test_the_cut_into_batches_does_not_count_and_documents_do(name):
    measure, model, batch, done = MEASURES[name], gpt2(), batch_of(11), []
    whole = measure(model, [batch], num_sequences=11)
    parts = cut(batch, [3, 6, 2])
    apart = measure(model, iter(parts), progress=done.append)
    assert (apart.value, apart.stderr) == pytest.approx((whole.value, whole.stderr), rel=1e-8)
    assert name == "noise" or done == [3, 9, 11]
    documents = measure(model, cut({**batch, "documents": torch.arange(11) // 4}, [3, 6, 2]))
    assert name == "hessian" or documents.value == pytest.approx(whole.value, rel=1e-9)  # it has a probe a document
    assert documents.samples == 3
    fewer = measure(model, parts, num_sequences=9)
    assert fewer.details["sequences"] == 9
    if "seed" in inspect.signature(getattr(measure, "func", measure)).parameters:
        assert measure(model, [batch], seed=1).value != whole.value
    with pytest.raises(IsolossError, match="all batches have `documents`, or none has"):
        measure(model, [{**parts[0], "documents": torch.arange(3)}, parts[1]])


@pytest.fixture
def _looks_early(monkeypatch):
    monkeypatch.setattr(_measurement, "FIRST_CHECK", 8)


@pytest.mark.usefixtures("_looks_early")
@pytest.mark.parametrize("name", ["fisher", "hessian", "sam"])
def test_a_stream_stops_as_asked(name):
    size = 1 if name in BY_BATCH else 4
    model, batches, seen, measure = windows(), stream(20 // size, size), [], STREAMS[name]
    few = measure(model, batches, causal=False, num_sequences=12, progress=seen.append)
    assert (few.details["sequences"], seen[-1], few.details["ended"]) == (12, 12, "num_sequences")
    short = measure(model, batches, causal=False, seconds=1e-9)
    assert (short.samples, short.details["ended"]) == (8, "seconds")
    whole = measure(model, batches, causal=False)
    assert (whole.samples, whole.details["ended"]) == (20, "end of the batches")
    at = {n: measure(model, batches, causal=False, num_sequences=n) for n in (8, 16)}
    ends = [("rtol", e.samples, e.value) for e in at.values() if e.stderr <= 0.999 * abs(e.value)]
    enough = measure(model, batches, causal=False, rtol=0.999)
    expected = [*ends, ("end of the batches", 20, whole.value)][0]
    assert (enough.details["ended"], enough.samples, enough.value) == expected


@pytest.mark.usefixtures("_looks_early")
@pytest.mark.parametrize("name", PROBES)
def test_probes_stop_as_asked(name):
    model, batches, seen, measure = windows(), stream(2, 8), [], PROBES[name]
    found = measure(model, batches, causal=False, num_probes=5, num_sequences=9, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5]
    assert (found.num_probes, found.details["sequences"], found.details["ended"]) == (5, 9, "num_probes")
    enough = measure(model, batches, causal=False, rtol=0.999)
    assert (enough.num_probes, enough.details["ended"]) == (8, "rtol")
    short = measure(model, batches, causal=False, seconds=1e-9)
    assert (short.num_probes, short.details["ended"]) == (2, "seconds")


@pytest.mark.parametrize("name", ["fisher", "hessian", "sam", *PROBES])
def test_ctrl_c_leaves_an_estimate_where_there_is_an_error_bar(name):
    def stop(done):
        if done == last:
            raise KeyboardInterrupt

    last, batches = 3 if name in PROBES else 18, stream(4, 6)
    with pytest.raises(InterruptedEstimate) as stopped:
        MEASURES[name](windows(), batches, causal=False, progress=stop)
    options, batches = ({"num_probes": 3}, batches) if name in PROBES else ({}, batches[:3])
    partial, whole = stopped.value.partial, MEASURES[name](windows(), batches, causal=False, **options)
    assert (partial.value, partial.stderr) == (whole.value, whole.stderr)
    assert partial.details["ended"] == "interrupted"
    last, batches = 1, cut(batch_of(7), [1, 6])
    with pytest.raises(KeyboardInterrupt) as stopped:
        MEASURES[name](windows(), batches, causal=False, progress=stop)
    assert not isinstance(stopped.value, InterruptedEstimate)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    """The value of each measure, of GPT-2 on two batches."""
    return {name: measure(gpt2(), batches()) for name, measure in MEASURES.items()}


def batches():
    return [batch_of(4, seed=1), batch_of(4, seed=2)]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", MEASURES)
def test_the_model_is_left_as_it_was_found_whatever_the_callers_mode(name, mode, plain):
    model, kept = gpt2(), gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradient = torch.ones_like(model.transformer.ln_f.bias)
    model.train().transformer.ln_f.bias.grad = gradient
    with mode():
        found = MEASURES[name](model, [{key: value.clone() for key, value in batch.items()} for batch in batches()])
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    assert found.value == pytest.approx(plain[name].value, rel=1e-9)
    assert model.training
    assert model.transformer.ln_f.bias.grad is gradient
    assert bool((gradient == 1).all())
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 1
    for ours, theirs in zip(model.parameters(), kept.parameters(), strict=True):
        assert ours.requires_grad
        assert torch.equal(ours, theirs)


def compiled_in_part():
    model = gpt2()
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    with torch.no_grad():
        model(input_ids=batches()[0]["input_ids"])  # compiles
    return model


def checkpointed(*, use_reentrant):
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


WRAPPED = {
    "compiled": lambda: torch.compile(gpt2(), backend="eager"),
    "compiled in part": compiled_in_part,
    "checkpointed": lambda: checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: checkpointed(use_reentrant=True),
    "parallel": lambda: nn.DataParallel(gpt2()),
}


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("model", WRAPPED)
def test_a_models_wrapper_changes_no_measure(model, name, plain):
    made = WRAPPED[model]()
    modes = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in made.modules()]
    found = MEASURES[name](made, batches())
    assert found.value == pytest.approx(plain[name].value, rel=1e-9)
    if found.by_parameter:
        assert list(found.by_parameter) == list(plain[name].by_parameter)
    assert [(m.training, getattr(m, "gradient_checkpointing", None)) for m in made.modules()] == modes


@pytest.mark.parametrize("name", MEASURES)
def test_models_that_have_no_such_measure_are_refused(name):
    measure = MEASURES[name]
    with pytest.raises(IsolossError, match="has dropout"):
        measure(bert(dropout=0.5).train(), batches())
    broken = bert()
    with torch.no_grad():
        broken.bert.embeddings.word_embeddings.weight[3] = math.nan
    with pytest.raises(IsolossError, match="NaN or infinite"):
        measure(broken, batches())
    if name != "relative":  # which is of the last linear map, trainable or not
        with pytest.raises(IsolossError, match="no trainable parameter"):
            measure(bert().requires_grad_(False), batches())


# --- parameters ------------------------------------------------------------------------------------------------------

OF_PARAMETERS = {
    **{name: measure for name, measure in MEASURES.items() if name != "relative"},
    "norm": lambda model, batches, **options: squared_parameter_norm(model, **options),
}


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_given_parameters_count_and_no_others(name):
    measure, model, other = OF_PARAMETERS[name], bert(), bert()
    key = "bert.encoder.layer.0.attention.self.value.weight"
    weight, foreign = model.get_parameter(key), other.get_parameter(key)
    with pytest.raises(IsolossError, match=r"parameters has x and 1 more, which BertForMaskedLM does not have"):
        measure(model, batches(), parameters={"x": foreign, "y": foreign, "z": weight})
    with pytest.raises(IsolossError, match="parameters is empty"):
        measure(model, batches(), parameters={})
    expected = measure(model, batches(), parameters={key: weight})
    assert expected.value != measure(model, batches()).value
    model.requires_grad_(False)
    assert measure(model, batches(), parameters={key: weight}).value == pytest.approx(expected.value, rel=1e-9)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    if name != "noise":  # its draws go by name
        assert measure(model, batches(), parameters={"w": weight}).value == pytest.approx(expected.value, rel=1e-9)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASURES)
def test_a_batch_without_a_label_is_skipped_and_counted(name, plain):
    found = MEASURES[name](gpt2(), [*batches(), unlabeled()])
    assert found.value == pytest.approx(plain[name].value, rel=1e-12)
    assert (plain[name].details["skipped_batches"], found.details["skipped_batches"]) == (0, 1)
    with pytest.raises(IsolossError, match=r"nothing is predicted: every label|at least 2 batches"):
        MEASURES[name](gpt2(), [unlabeled(), unlabeled()])


@pytest.mark.parametrize("name", ["fisher", "paper", "fisher-rao", "noise"])
def test_a_skipped_batch_is_what_it_would_be_in_a_larger_one(name):
    """Its sequences count as some that predict nothing, wherever it comes and however the stream is cut."""
    given = [unlabeled(2), batch_of(4, seed=1), unlabeled(1, seed=8), batch_of(4, seed=2)]
    whole = {key: torch.cat([batch[key] for batch in given]) for key in given[0]}
    apart, together = MEASURES[name](gpt2(), given), MEASURES[name](gpt2(), [whole])
    assert (apart.value, apart.stderr) == pytest.approx((together.value, together.stderr), rel=1e-9)
    assert apart.samples == together.samples
    assert apart.details["skipped_batches"] == 2


BATCH = batch_of(4, seed=1)
REFUSED = {
    "none": ([], "no batches"),
    "a single batch": (BATCH, "batches is a single batch; pass an iterable of batches"),
    "a number": ([3], "batch 0 is a int, not a mapping of input_ids, labels"),
    "no labels": ([{"input_ids": BATCH["input_ids"]}], "batch 0: there are no `labels` of shape"),
    "float ids": ([{**BATCH, "input_ids": torch.ones(4, 4)}], "input_ids are torch.float32; ids are integers"),
    "float labels": ([{**BATCH, "labels": torch.ones(4, 4)}], "labels are torch.float32"),
    "short labels": ([{**BATCH, "labels": BATCH["labels"][:, :3]}], r"labels of shape \(4, 3\) do not fit input_ids"),
    "large ids": ([{**BATCH, "input_ids": BATCH["input_ids"] + VOCAB}], "the model knows ids 0 to 4"),
    "a negative label": (
        [{**BATCH, "labels": BATCH["labels"].where(BATCH["labels"] < 0, -1)}],
        "a label is -1; .* -100",
    ),
    "long sequences": ([batch_of(4, length=5)], "sequences have 5 positions; the model takes at most 4"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", MEASURES)
def test_batches_of_bad_form_are_one_sentence(name, case):
    given, sentence = REFUSED[case]
    with pytest.raises(IsolossError, match=sentence):
        MEASURES[name](gpt2(), given)


@pytest.mark.parametrize("name", [name for name in MEASURES if name not in ("eigenvalue", "density")])
def test_one_sample_has_no_error_bar(name):
    with pytest.raises(IsolossError, match=r"at least 2 (independent|batches)"):
        MEASURES[name](gpt2(), [batch_of(1)])


# --- settings --------------------------------------------------------------------------------------------------------


def rounding(model, batches, **options):
    return loss_rises(model, batches, {"rise": Rounding(**options)})


def noise(model, batches, **options):
    return loss_rises(model, batches, {"rise": Noise(**options)})


@pytest.mark.parametrize(
    ("measure", "options", "sentence"),
    [
        *((measure, {"rtol": 1.5}, r"rtol is 1\.5; it is a fraction of the value") for measure in FUNCTIONS[:8]),
        *(
            (measure, {"num_sequences": 1}, "num_sequences is 1; an error bar needs at least 2")
            for measure in FUNCTIONS
        ),
        *((measure, {"seconds": 0.0}, r"seconds is 0\.0; it must be more than 0") for measure in FUNCTIONS),
        (fisher_trace, {"method": "x"}, "method is 'x'; it is one of ghost, paper"),
        (fisher_trace, {"num_probes": 0}, "num_probes is 0; it must be at least 1"),
        (fisher_trace, {"rescaling": "least"}, "rescaling is 'least'; it is 'minimal' or None"),
        (weighted_fisher_trace, {"num_probes": 0}, "num_probes is 0"),
        (hessian_trace, {"method": "exact"}, "'exact'; it is one of residual, published-code"),
        (hessian_trace, {"num_probes": 0}, "num_probes is 0"),
        (hessian_trace, {"num_probes": 2, "method": "published-code"}, "num_probes is 2"),
        (hessian_trace, {"group_size": 0}, "group_size is 0"),
        (hessian_trace, {"group_size": 99}, "at least 2 independent"),
        (sam_sharpness, {"rho": 0.0}, r"rho is 0\.0"),
        (sam_sharpness, {"rho": math.inf}, "rho is inf"),
        (sam_sharpness, {"num_steps": 0}, "num_steps is 0"),
        (noise_sharpness, {"relative_std": -1.0}, r"relative_std is -1\.0"),
        (noise_sharpness, {"num_probes": 1}, "num_probes is 1"),
        (largest_eigenvalues, {"matrix": "fisher"}, "'fisher'; it is one of gauss-newton, hessian"),
        (largest_eigenvalues, {"num_eigenvalues": 0}, "num_eigenvalues is 0"),
        (largest_eigenvalues, {"num_eigenvalues": 28}, r"num_eigenvalues is 28.*number of parameters \(27\)"),
        (largest_eigenvalues, {"num_eigenvalues": 4, "max_iterations": 3}, r"max_iterations \(3\)"),
        (largest_eigenvalues, {"rtol": 0.0}, r"rtol is 0\.0"),
        (spectral_density, {"num_probes": 1}, "num_probes is 1"),
        (spectral_density, {"num_steps": 0}, "num_steps is 0"),
        (spectral_density, {"matrix": "x"}, "'x'; it is one of"),
        (lambda *_, **o: Rounding(**o), {"bits": 1}, "bits is 1; it must be from 2 to 8"),
        (
            lambda *_, **o: Rounding(**o),
            {"bits": 4, "group_size": 0},
            "group_size is 0; it must be at least 1",
        ),
        (lambda *_, **o: Rounding(**o), {"bits": 4, "grid": "nf5"}, "grid is 'nf5'; it is one of symmetric, .*, nf4"),
        (lambda *_, **o: Rounding(**o), {"bits": 3, "grid": "nf4"}, "bits is 3; the grid nf4 has 4 bits"),
        (lambda *_, **o: Noise(**o), {"relative_std": 0.0}, r"relative_std is 0\.0; it must be more than 0 and finite"),
        (lambda *_, **o: Noise(**o), {"relative_std": 0.1, "pairs": 0}, "pairs is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(measure, options, sentence):
    causal = {"causal": False} if measure in FUNCTIONS else {}
    with pytest.raises(IsolossError, match=sentence):
        measure(windows(), [batch_of(3), batch_of(3)], **causal, **options)


@pytest.mark.parametrize("measure", FUNCTIONS)
def test_an_unknown_option_is_refused_with_the_names_of_all(measure):
    with pytest.raises(TypeError, match="unexpected argument 'rtoll'; the options are num_sequences, rtol"):
        measure(windows(), stream(2, 3), rtoll=0.1)


def test_loss_rises_refuses_what_the_others_do():
    for given, sentence in REFUSED.values():
        with pytest.raises(IsolossError, match=sentence):
            loss_rises(gpt2(), given)
