"""A study of one run that two processes train."""

STUDY = """
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Resources, Scale, Study

language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
model = ModelConfig(size="d16", dropout=0.0)
config = TrainConfig(language=language, model=model, steps={steps}, batch_size=8, checkpoints=(3,))
measured = Measurement(measures=("loss",), settings={{"loss_sentences": 16}})
run = Experiment(config=config, measurements=(measured,), needs=Resources(processes=2))
STUDY = Study(name="spread", scales={{"tiny": Scale(description="seconds", experiments={{"run": run}})}})
"""


def write(folder, *, steps):
    """Write the study's file; return it."""
    file = folder / "spread.py"
    file.write_text(STUDY.format(steps=steps))
    return file
