"""Results of a study of the paper without runs: whatever its plan measures, at known values."""

import functools
import json
from types import SimpleNamespace

from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import judge_claims
from isoloss.studies.results import CheckpointEstimate, Results

KEYS = {
    "loss": ("entropy", "kl", "loss"),
    "features": ("effective-dimension", "effective-rank", "cka-truth"),
    "minimal-trace-by-kind": ("attention-q", "attention-v", "mlp-up", "mlp-down", "norms"),
    "bracket-parts": (
        *("attention-trace", "neurons-trace", "neurons-minimal-trace", "parts-trace", "parts-minimal-trace"),
        *("cancellation", "bound-ratio"),
    ),
    "rescaling-control": ("trace-rescaled-at-random", "minimal-trace-rescaled-at-random"),
    "span-1": ("layer-0", "layer-1", "layer-2", "bayes", "majority"),
}
ACCURACIES = ("prefix-", "root", "level-", "layer-", "bayes", "majority", "needed-", "spare-")


class Known(Results):
    """Results whose runs have a number of parameters and nothing else."""

    def run(self, name):
        return SimpleNamespace(result=lambda: {"num_parameters": 1000})


def keys_of(measure, language):
    """The names of the estimates of a measure."""
    if measure in ("bracket-probes", "bracket-tokens"):
        shots = [n for n in (4, 8, 16, 32, 64) if n < 2**language.length]
        prefix = "r2" if measure == "bracket-probes" else "tokens-r2"
        return [f"{prefix}-{task}-{n}" for n in shots for task in ("g", "abs-g", "zero", "parity")]
    return KEYS.get(measure, (measure,))


@functools.cache
def settings(measure, given):
    return {} if measure == "rescaling-control" else settings_of(measure, json.loads(given))


def known_results(scale, value, folder=None, ended=lambda arm, step: step):
    """Results with `value(unit, arm, key)` at every checkpoint; `ended` gives the step at which an arm has it."""
    checkpoints = {}
    for unit in scale.units:
        for arm, experiment in scale.arms(unit).items():
            for part in experiment.measurements:
                for step in experiment.steps(part):
                    at = checkpoints.setdefault((unit.run(arm), ended(arm, step)), {})
                    for measure in part.measures:
                        given = settings(measure, json.dumps(dict(part.settings)))
                        names = [name for name in keys_of(measure, unit.language) if name not in at]
                        at |= {name: known(name, value(unit, arm, name), given) for name in names}
    return Known(scale, checkpoints, folder)


def known(key, value, given):
    """An exact estimate."""
    is_accuracy = any(word in key for word in ACCURACIES)
    exact = Estimate(
        value=value,
        stderr=0.0,
        samples=0,
        unit="R²" if "r2-" in key else "accuracy" if is_accuracy else "nats per predicted token",
        num_predictions=100,
        method="known",
        details={"majority_rate": 0.2, "bayes_accuracy": 1.0} if is_accuracy else {},
    )
    return CheckpointEstimate.of(exact, inputs="the same", settings=given, examples={})


def judged(study, results, scale="laptop"):
    """The result of every claim."""
    return judge_claims(study.claims, results, loss_margin=study.loss_margin, has_verdicts=study.has_verdicts(scale))


def verdicts(study, results, scale="laptop"):
    """The verdict of each case of each claim."""
    return {(one.claim.id, each.case): each.verdict for one in judged(study, results, scale) for each in one.answers}
