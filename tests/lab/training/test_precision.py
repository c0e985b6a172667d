"""bfloat16 by autocast: what runs in it, and what does not."""

import json

import pytest
import torch
from running import small, trained
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.models.lstm import has_bfloat16_lstm
from isoloss.lab.models.make import make_model
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.run_config import ModelConfig, ObjectiveConfig

ARCHITECTURES = [("bert", "d16"), ("bert-pre-ln", "d16"), ("lstm", "h16"), ("opt", "d16")]


def products(model):
    """Note the dtypes of the outputs of the model's linear layers."""
    found = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LSTM):
            module.register_forward_hook(lambda _m, _i, out: found.append(getattr(out, "dtype", None) or out[0].dtype))
    return found


@pytest.mark.parametrize(("architecture", "size"), ARCHITECTURES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_model_runs_in_the_precision_and_the_gradients_are_float32(architecture, size, precision):
    language = PairLanguage(is_ragged=True)
    causal = architecture == "opt"
    objective = ObjectiveConfig(kind="causal" if causal else "masked")
    config = small(model=ModelConfig(architecture=architecture, size=size, dropout=0.0), objective=objective)
    model = make_model(config.model, language, seed=0)
    batch = training_batch(language, config, 1, torch.device("cpu")).inputs
    exact = prediction_loss(model.double(), batch, causal=causal)
    wanted = torch.autograd.grad(exact, list(model.parameters()), allow_unused=True)
    model.float()
    dtypes = products(model)
    if architecture == "lstm" and precision == "bfloat16" and not has_bfloat16_lstm():
        with pytest.raises(IsolossError, match="this CPU has no LSTM in bfloat16"):
            prediction_loss(model, batch, causal=causal, precision=precision)
        return
    loss = prediction_loss(model, batch, causal=causal, precision=precision)
    loss.backward()
    assert set(dtypes) == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
    assert loss.dtype == torch.float32
    # bfloat16 has 8 bits: its rounding is 2^-9
    tolerance = 2**-6 if precision == "bfloat16" else 1e-5
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    error = square = 0.0
    for p, g in zip(model.parameters(), wanted, strict=True):
        if g is not None:
            assert p.grad.dtype == torch.float32
            error += float((p.grad - g).square().sum())
            square += float(g.square().sum())
    assert (error / square) ** 0.5 < 4 * tolerance


def test_a_run_says_it_and_comes_close(tmp_path):
    runs = [trained(tmp_path / name, small(precision=name)) for name in ("bfloat16", "float32")]
    first = json.loads((runs[0].path / "log.jsonl").read_text().splitlines()[0])
    assert first["precision"] == "bfloat16"
    ours, exact = (run.metrics()[-1]["loss_nats"] for run in runs)
    assert ours != exact
    assert ours == pytest.approx(exact, rel=0.02)
