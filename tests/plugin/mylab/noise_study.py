"""A study: does noise on the gradient find a flatter model with the same loss?"""

from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study
from mylab.dice import DiceConfig
from mylab.noise import GradientNoiseConfig


def _experiments(steps: int) -> dict[str, Experiment]:
    measured = Measurement(
        measures=("loss", "trace", "top1", "probe-total"),
        settings={
            "loss_sentences": 256,
            "num_sequences": 128,
            "top1_guesses": 1,
            "num_train": 256,
            "num_test": 256,
            "probe_seeds": 2,
            "probe_epochs": 5,
        },
    )
    common = {"language": DiceConfig(), "model": ModelConfig(size="d16"), "steps": steps, "batch_size": 32}
    return {
        "plain": Experiment(config=TrainConfig(**common), measurements=(measured,)),
        "noisy": Experiment(config=TrainConfig(**common, algorithm=GradientNoiseConfig()), measurements=(measured,)),
    }


STUDY = Study(
    name="noise",
    scales={
        "smoke": Scale(description="a test of seconds", experiments=_experiments(20)),
        "full": Scale(description="a minute", experiments=_experiments(2000)),
    },
    title="Noise on the gradient",
)
