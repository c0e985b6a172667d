"""Where a run stands among its stages: a function of its config, its step and the targets that were reached."""

from __future__ import annotations

from isoloss.run_config import TrainConfig


class Stages:
    """The stages of a run; one without stages has one, the run itself. An index counts from 0, a step from the start.

    Attributes:
        configs: Each stage as the config of a run of its own.
        reached: Steps at which a stage ended at its target.

    Example:
        >>> from isoloss.languages.config import LAPTOP_PCFG
        >>> from isoloss.run_config import StageConfig
        >>> few = (StageConfig(steps=100, target_kl=0.1), StageConfig(steps=20))
        >>> stages = Stages(TrainConfig(language=LAPTOP_PCFG, stages=few))
        >>> stages.num_ended(50), stages.ended(0, 50)
        (0, None)
        >>> stages.reached.append(50)
        >>> stages.num_ended(50), stages.ended(0, 50), stages.begin(1), stages.ends
        (1, 'target reached', 50, (50, 70))
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.configs = config.stage_configs()
        self.reached: list[int] = []

    @property
    def ends(self) -> tuple[int, ...]:
        """The last step of each stage, of those to come as if no further target were reached."""
        return self._config.stage_ends(self.reached)

    def begin(self, index: int) -> int:
        """Return the number of steps before a stage."""
        return self.ends[index - 1] if index else 0

    def num_ended(self, step: int) -> int:
        """Return how many stages have ended after `step` steps, which is the index of the next one."""
        return sum(end <= step for end in self.ends)

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this step."""
        return self.num_ended(step) == len(self.configs)

    def target(self, index: int, step: int) -> tuple[str, float] | None:
        """Return what the model is compared with after `step`, a step of this stage; None: it is not compared."""
        stage = self._config.stages[index]
        return stage.target if step % stage.validate_every == 0 or step == self.ends[index] else None

    def ended(self, index: int, step: int) -> str | None:
        """Return why a stage ended with this step; None: it did not."""
        if step != self.ends[index]:
            return None
        if self._config.stages[index].target is None:
            return "steps done"
        return "target reached" if step in self.reached else "target not reached"
