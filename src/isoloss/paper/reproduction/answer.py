"""The study's answer in five sentences, written from its results and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isoloss.paper.reproduction import band
from isoloss.paper.reproduction.band import Model, Spread
from isoloss.paper.reproduction.compare import replicates
from isoloss.paper.reproduction.spec import Dataset, StudySize
from isoloss.statistics.estimate import Estimate, number
from isoloss.studies.claims import Answer, ClaimResult
from isoloss.studies.results import UNITS, Results
from isoloss.studies.verdicts import Verdict

_VERBS = {
    Verdict.SHOWN: "yes",
    Verdict.CONTRADICTED: "no, the opposite is shown",
    Verdict.NOT_SHOWN: "not shown",
    Verdict.NOT_TESTED: "not tested",
}
_LANGUAGES = {"pcfg": "grammars", "hmm": "hidden Markov models"}
# claims about transfer and flatness of one pair
_PAIRS = (
    *("sgd", "noise", "longer", "larger", "adversary", "helper", "pre-ln"),
    *("hmm-sgd", "text-unregularized", "text-sam"),
)


def answer(claims: Sequence[ClaimResult], results: Results) -> Sequence[str]:
    """Return what the study answers, a sentence each, from the results and that of every claim of its claims.toml."""
    by_id = {result.claim.id: result for result in claims}

    def verdicts(name: str) -> str:
        return _verdicts(by_id[name].answers)

    return (
        _spreads(results),
        "At the same loss, does the training algorithm change transfer? The adversary transfers worse: "
        f"{verdicts('adversary-transfer')}; is it sharper? {verdicts('adversary-sharper')}; the helper transfers "
        f"better: {verdicts('helper-transfer')}; on text, a model without dropout and weight decay transfers worse: "
        f"{verdicts('text-unregularized-transfer')}, with SAM it transfers better: {verdicts('text-sam-transfer')}; "
        f"and a trained model transfers better than the look-up table, whose KL is 0: {verdicts('lookup-transfer')}.",
        "At the same loss, do longer training and a larger model improve transfer? Longer training on grammars: "
        f"{verdicts('longer-transfer')}, on hidden Markov models: {verdicts('hmm-longer-transfer')}; a larger model on "
        f"grammars: {verdicts('larger-transfer')}, on hidden Markov models: {verdicts('hmm-larger-transfer')}; on "
        f"grammars, is the longer-trained model flatter? {verdicts('longer-flatter')}; is the larger one? "
        f"{verdicts('larger-flatter')}.",
        "At the same loss, does SGD with sampled labels after AdamW flatten the model? On grammars: "
        f"{verdicts('sgd-flatter')}; on hidden Markov models: {verdicts('hmm-sgd-flatter')}; does the model transfer "
        f"better? On grammars: {verdicts('sgd-transfer')}; on hidden Markov models: {verdicts('hmm-sgd-transfer')}.",
        _agreement(by_id),
    )


def _spreads(results: Results) -> str:
    """Return how far accuracies spread over models of about one loss, and how far their KL does."""
    scale: StudySize = results.scale
    parts = []
    for dataset in scale.datasets:
        if not band.models(results, dataset):
            continue
        languages, near = _LANGUAGES.get(dataset.name, dataset.title), band.in_band(results, dataset)
        kl, *probes = band.spreads(results, dataset).items()
        if len(near) == 1:
            parts.append(f"on {languages}, no other model has a KL within {dataset.band:.0%} of the control's")
        else:
            accuracies = " and ".join(f"{_spread(each)} on {key.removeprefix('probe-')}" for key, each in probes)
            low, high = (end.value for end in kl[1].ends)
            parts.append(
                f"on {languages}, {len(near)} models ({_kinds(results, dataset, near)}) with a mean KL of {low:.3g} to "
                f"{high:.3g} nats have probe accuracies of {accuracies}"
            )
    found = "; ".join(parts)
    extremes = "; these are the extremes of several models, and the differences in KL explain part of it"
    return (
        f"How much does transfer vary among models of about the same loss? {found[0].upper()}{found[1:]}"
        f"{extremes if 'with a mean KL' in found else ''}."
    )


def _kinds(results: Results, dataset: Dataset, models: Sequence[Model]) -> str:
    """Return the sizes of these models, and which of them were trained to change transfer."""
    runs = [replicates(results, dataset)[0].run(model.arm) for model in models]
    sizes = dict.fromkeys(results.experiments[run].size for run in runs)
    trained = [name for name in ("adversary", "helper") if any(model.arm.startswith(name) for model in models)]
    among = f"; among them the {' and the '.join(trained)}" if trained else ""
    return ", ".join(sizes) + among


def _spread(accuracy: Spread) -> str:
    low, high = (f"{100 * end.value:.1f}" for end in accuracy.ends)
    return f"{low} to {high} %"


def _verdicts(answers: Sequence[Answer]) -> str:
    """Return the verdict on each case with its difference; cases of one verdict share the words."""
    groups: dict[Verdict, list[Answer]] = {}
    for one in answers:
        groups.setdefault(one.verdict, []).append(one)
    parts = {verdict: "; ".join(filter(None, map(_in_numbers, some))) for verdict, some in groups.items()}
    return ", ".join(
        f"{_VERBS[verdict]} ({numbers})" if numbers else _VERBS[verdict] for verdict, numbers in parts.items()
    )


def _in_numbers(one: Answer) -> str:
    if one.difference is None:
        return one.case
    return f"{one.case} {_signed(one.difference)}".strip()


def _signed(difference: Estimate) -> str:
    unit = UNITS.get(difference.unit, difference.unit)
    return f"{'+' if difference.value > 0 else ''}{number(difference)} {unit}"


def _agreement(by_id: Mapping[str, ClaimResult]) -> str:
    """Return how often the model that is flatter at the same loss is the one that transfers better."""
    counts = dict.fromkeys(("agree", "disagree", "open", "untested"), 0)
    for name in _PAIRS:
        flatness = by_id.get(f"{name}-flatter") or by_id[f"{name}-sharper"]
        for sharper in flatness.answers:
            for better in by_id[f"{name}-transfer"].answers:
                if better.contrast != sharper.contrast:
                    continue
                signs = [_significant_sign(one) for one in (sharper, better)]
                if Verdict.NOT_TESTED in (sharper.verdict, better.verdict):
                    counts["untested"] += 1
                elif 0 in signs:
                    counts["open"] += 1
                else:
                    counts["agree" if signs[0] != signs[1] else "disagree"] += 1
    significant = counts["agree"] + counts["disagree"]
    return (
        f"Does flatness predict transfer at the same loss? Of {significant + counts['open']} comparisons, each of one "
        f"measure of flatness and one of transfer, both differences are significant in {significant}: the flatter "
        f"model transfers better in {counts['agree']} and worse in {counts['disagree']}; {counts['untested']} more "
        "were not tested (comparisons of the same models are not independent)."
    )


def _significant_sign(one: Answer) -> int:
    """Return the sign of a difference whose verdict is significant, else 0."""
    if one.difference is None or one.verdict not in (Verdict.SHOWN, Verdict.CONTRADICTED):
        return 0
    return 1 if one.difference.value > 0 else -1
