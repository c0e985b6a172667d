"""Studies: plans of many runs and measures, executors that run them, and verdicts on claims.

A study is a Python file that defines a `Study`:

    from isoloss.lab.languages.config import LAPTOP_PCFG
    from isoloss.run_config import ModelConfig, TrainConfig
    from isoloss.studies import Experiment, Measurement, Scale, Study

    RUNS = {
        f"dropout-{rate}": Experiment(
            config=TrainConfig(language=LAPTOP_PCFG, model=ModelConfig(dropout=rate), steps=2000, checkpoints=(1000,)),
            measurements=(Measurement(measures=("loss", "trace", "probe-root")),),
        )
        for rate in (0.0, 0.1)
    }
    STUDY = Study(name="dropout", scales={"laptop": Scale(description="five minutes", experiments=RUNS)})

`isoloss study run dropout.py` trains, measures and writes the page. The file assigns the study to `STUDY`, or defines
a function `study()` that returns it.
"""

from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lazy import exports
from isoloss.studies.plan import Experiment, Measurement, Resources, Scale
from isoloss.studies.study import PageParts, Study, load_study

__all__ = ["Card", "Claim", "Contrast", "Experiment", "ExternalCheckpoint", "Measurement", "PageParts", "Resources",
           "Results", "Scale", "Study", "StudyFolder", "SummaryTable", "Trend", "load_study"]  # fmt: skip

_EXPORTS = {
    "Card": "isoloss.report.html",
    "Claim": "isoloss.studies.claims",
    "Contrast": "isoloss.studies.claims",
    "Results": "isoloss.studies.results",
    "StudyFolder": "isoloss.studies.folder",
    "SummaryTable": "isoloss.studies.summary",
    "Trend": "isoloss.studies.claims",
}
__getattr__, __dir__ = exports(__name__, _EXPORTS)
