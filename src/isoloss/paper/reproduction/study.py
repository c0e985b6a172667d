"""The study of every figure and table of the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isoloss.paper.answer import from_template
from isoloss.paper.reproduction import band
from isoloss.paper.reproduction.compare import by_dataset, contrasts, measures
from isoloss.paper.reproduction.gpu_scales import AUTHORS, PAPER, WORKSTATION
from isoloss.paper.reproduction.spec import EVENING, SMOKE
from isoloss.paper.reproduction.tables import tables
from isoloss.studies.claims import Answer, ClaimResult, Verdict
from isoloss.studies.results import Results
from isoloss.studies.spec import Study

LANGUAGES = {"pcfg": "grammars", "hmm": "hidden Markov models"}
# claims about transfer and flatness of one pair
PAIRS = (
    *("sgd", "noise", "longer", "larger", "adversary", "helper", "pre-ln"),
    *("hmm-sgd", "text-unregularized", "text-sam"),
)


def answer(claims: Sequence[ClaimResult], results: Results) -> Sequence[str]:
    """Return what the study answers, a sentence each, from the results and the verdicts on its claims."""
    template = Path(__file__).with_name("answer.j2")
    return from_template(template, claims, spreads=list(_spreads(results)), **_agreement(claims))


def _spreads(results: Results) -> Iterator[dict[str, Any]]:
    """Yield how far accuracies and the KL spread over models of about one loss, for each dataset with a known KL."""
    for data in by_dataset(results):
        dataset = data.dataset
        if band.models(data):
            kl, *probes = band.spreads(data).items()
            yield {
                "languages": LANGUAGES.get(dataset.name, dataset.title),
                "band": f"{dataset.band:.0%}",
                "models": len(band.in_band(data)),
                "kl": " to ".join(f"{end.value:.3g}" for end in kl[1].ends),
                "accuracies": [
                    f"{' to '.join(f'{100 * end.value:.1f}' for end in each.ends)} % on {key.removeprefix('probe-')}"
                    for key, each in probes
                ],
            }


def _agreement(claims: Sequence[ClaimResult]) -> dict[str, int]:
    """Return how often the model that is flatter at the same loss is the one that transfers better."""
    by_id = {result.claim.id: result for result in claims}
    counts = Counter(agree=0, disagree=0, open=0, untested=0)
    for name in PAIRS:
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
    return counts


def _significant_sign(one: Answer) -> int:
    """Return the sign of a difference whose verdict is significant, else 0."""
    if one.difference is None or one.verdict not in (Verdict.SHOWN, Verdict.CONTRADICTED):
        return 0
    return 1 if one.difference.value > 0 else -1


STUDY = Study(
    name="paper",
    scales={"evening": EVENING, "smoke": SMOKE, "workstation": WORKSTATION, "paper": PAPER, "authors": AUTHORS},
    title="Same pre-training loss, better downstream?",
    lead=(
        "The paper claims that models with the same pre-training loss transfer differently, and that the flatter ones "
        "transfer better. This study repeats its experiments (model size, longer training, SGD, an adversary, the "
        "look-up table) and adds others, such as a helper: a model trained to do well on a task, the positive control. "
        "An arm is a variant of one model, the control. A cooldown is a final phase of AdamW on exact labels with a "
        "learning rate that decays to 0.",
        "At the small scales, the grammars and hidden Markov models have so few sentences that the loss and every "
        "accuracy are exact sums. Models are compared at the same loss: one of the two is interpolated between two of "
        "its checkpoints.",
    ),
    claims=Path(__file__).with_name("claims.toml"),
    contrasts=contrasts,
    measures=measures,
    tables=tables,
    answer=answer,
    page="isoloss.paper.reproduction.page:parts",
    first_page_blocks=2,
    block_name="languages",
)
