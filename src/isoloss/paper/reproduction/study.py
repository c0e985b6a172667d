"""The study of every figure and table of the paper."""

from pathlib import Path

from isoloss.paper.reproduction.answer import answer
from isoloss.paper.reproduction.comparing import contrasts, measures
from isoloss.paper.reproduction.paper_scale import AUTHORS, PAPER
from isoloss.paper.reproduction.scales import EVENING, SMOKE
from isoloss.paper.reproduction.tables import tables
from isoloss.paper.reproduction.workstation import WORKSTATION
from isoloss.studies.spec import Study

STUDY = Study(
    name="paper",
    scales={"evening": EVENING, "smoke": SMOKE, "workstation": WORKSTATION, "paper": PAPER, "authors": AUTHORS},
    title="Same pre-training loss, better downstream?",
    lead=(
        "The paper claims that models with the same pre-training loss transfer differently, and that the flatter ones "
        "transfer better. This study has its experiments: sizes, training for longer, SGD, an adversary, the look-up "
        "table, and others that it does not have, such as a helper as a positive control.",
        "At the small scales, languages have so few sentences that the loss and every accuracy are exact sums. Each "
        "model is compared with another one at its own loss, interpolated between two checkpoints.",
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
