"""The study of every figure and table of the paper."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from isoloss.paper.reproduction.claims import CLAIMS
from isoloss.paper.reproduction.cpu_scales import EVENING, LAPTOP, SMOKE
from isoloss.paper.reproduction.gpu_scales import AUTHORS, PAPER, WORKSTATION
from isoloss.paper.reproduction.tables import tables
from isoloss.report.html import Card, Tone
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Answer, ClaimResult, Verdict
from isoloss.studies.results import Results
from isoloss.studies.spec import Study

# claims about transfer and flatness of one pair
PAIRS = (
    *("sgd", "noise", "longer", "larger", "adversary", "helper", "pre-ln"),
    *("hmm-sgd", "text-unregularized", "text-sam"),
)


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether models of one loss can differ, whether flatness tells them apart, and whether training helps."""
    by_id = {result.claim.id: result for result in claims}
    # all cards are of task B, as the gates are
    longer = dataclasses.replace(
        by_id["longer-transfer"],
        answers=tuple(sorted(by_id["longer-transfer"].answers, key=lambda one: one.case != "B")),
    )
    differ = card_of("Can models of one loss transfer differently?", by_id["adversary-transfer"])
    return [
        dataclasses.replace(differ, detail=f"a model trained against the task; {differ.detail}"),
        _agreement_card(claims),
        card_of("Does longer training help at the same loss?", longer),
    ]


def _agreement_card(claims: Sequence[ClaimResult]) -> Card:
    counts, pairs = _agreement(claims)
    both = counts["agree"] + counts["disagree"]
    tone: Tone = "unclear"
    if both and 0 in (counts["agree"], counts["disagree"]):
        tone = "good" if counts["agree"] else "bad"
    return Card(
        label="Is the flatter model the better one?",
        value=f"In {counts['agree']} of {both} comparisons" if both else "Not shown",
        detail=f"A comparison is of one measure of flatness with one of transfer. {both} of them, of {pairs} of "
        f"{len(PAIRS)} pairs of kinds of models, have two significant differences; {counts['open']} have not, "
        f"{counts['untested']} were not tested. Comparisons of the same models are not independent.",
        tone=tone,
    )


def _agreement(claims: Sequence[ClaimResult]) -> tuple[dict[str, int], int]:
    """Return how often the flatter model at the same loss is the better one, and how many of `PAIRS` say so or not."""
    by_id = {result.claim.id: result for result in claims}
    counts = Counter(agree=0, disagree=0, open=0, untested=0)
    decided = set()
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
                    decided.add(name)
    return counts, len(decided)


def _significant_sign(one: Answer) -> int:
    """Return the sign of a difference whose verdict is significant, else 0."""
    if one.difference is None or one.verdict not in (Verdict.SHOWN, Verdict.CONTRADICTED):
        return 0
    return 1 if one.difference.value > 0 else -1


STUDY = Study(
    name="paper",
    scales={
        "laptop": LAPTOP,
        "smoke": SMOKE,
        "evening": EVENING,
        "workstation": WORKSTATION,
        "paper": PAPER,
        "authors": AUTHORS,
    },
    title="Same pre-training loss, better downstream?",
    lead=(
        "Language models whose loss is the same, but not their size, training time or algorithm. The loss is the KL to "
        "the true conditionals (on text: the cross-entropy), flatness the trace of the Fisher information (a smaller "
        "trace is flatter), and transfer the accuracy of a linear probe or of fine-tuning on a downstream task; on "
        "grammars, tasks A, B and C ask for the likeliest symbol over the sentence and two shorter beginnings. The "
        "adversary is trained to spoil one task.",
        "The paper claims that models with the same pre-training loss transfer differently, and that the flatter ones "
        "transfer better. This study repeats its experiments (model size, longer training, SGD, an adversary, the "
        "look-up table) and adds others, such as a helper: a model trained to do well on a task, the positive control. "
        "An arm is a variant of one model, the control. A cooldown is a final phase of AdamW with a learning rate that "
        "decays to 0, on exact labels where the truth is a grammar or a hidden Markov model.",
        "At the scales for two cores, the hidden Markov models have so few sentences that the loss and every accuracy "
        "are exact sums; on grammars, all models are measured on the same sampled sentences. Models are compared at "
        "the same loss: one of the two is interpolated between two of its checkpoints.",
    ),
    claims=CLAIMS,
    loss_margin=0.002,
    verdicts_at=("laptop", "evening", "paper", "authors"),
    tables=tables,
    answer=answer,
    page="isoloss.paper.reproduction.page:parts",
    first_page_blocks=2,
    block_name="languages",
)
