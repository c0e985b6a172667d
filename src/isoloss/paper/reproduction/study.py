"""The study of every figure and table of the paper."""

from pathlib import Path

from isoloss.paper.reproduction.answer import answer
from isoloss.paper.reproduction.compare import contrasts, measures
from isoloss.paper.reproduction.gpu_scales import AUTHORS, PAPER, WORKSTATION
from isoloss.paper.reproduction.spec import EVENING, SMOKE
from isoloss.paper.reproduction.tables import tables
from isoloss.studies.spec import Study

STUDY = Study(
    name="paper",
    scales={"evening": EVENING, "smoke": SMOKE, "workstation": WORKSTATION, "paper": PAPER, "authors": AUTHORS},
    title="Same pre-training loss, better downstream?",
    lead=(
        "The paper claims that models with the same pre-training loss transfer differently, and that the flatter ones "
        "transfer better. This study repeats its experiments (model size, longer training, SGD, an adversary, the "
        "look-up table) and adds others, such as a helper: a model trained to do well on a task, the positive control. "
        "An arm is a variant of one model, the control. A polish is a final phase of AdamW on exact labels with a "
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
