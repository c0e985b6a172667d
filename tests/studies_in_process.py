"""Studies carried out within the tests' own process, and one of a few seconds that has blocks, claims and seeds."""

from isoloss.cli import study as command
from isoloss.cli.main import main
from isoloss.studies import load_study
from isoloss.studies.folder import StudyFolder
from isoloss.studies.page import report
from isoloss.studies.run.loop import Loop, Options

BLOCKS = """
from dataclasses import dataclass, replace

from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Claim, Contrast, Experiment, Measurement, Study, SummaryTable
from isoloss.studies.results import change, over_seeds


@dataclass(frozen=True, kw_only=True)
class Scale:
    description: str = "seconds"
    seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def experiments(self):
        return {
            f"{group}-{seed}": Experiment(
                config=config(seed, dropout), measurements=(measured(seed),), group=group, block=i
            )
            for group, dropout in (("plain", 0.0), ("dropped", 0.3))
            for i, seed in enumerate(self.seeds)
        }

    def with_seed_offset(self, offset):
        return replace(self, seeds=tuple(seed + 100 * offset for seed in self.seeds))


def config(seed, dropout):
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8, seed=seed)
    model = ModelConfig(size="d16", dropout=dropout)
    return TrainConfig(language=language, model=model, steps=6, batch_size=8, seed=seed, checkpoints=(3,))


def measured(seed):
    settings = {"loss_sentences": 16, "num_sequences": 8, "seed": 1000 + seed}
    return Measurement(measures=("loss", "trace"), settings=settings)


def pairs(results):
    seeds = dict.fromkeys(one.config.seed for one in results.experiments.values())
    return [(results.at(f"plain-{seed}"), results.at(f"dropped-{seed}")) for seed in seeds]


def dropout(results):
    return Contrast(names=("plain", "dropped"), pairs=pairs(results), needs_same_loss=False)


def tables(results):
    rows = [
        ((name,), {key: over_seeds([pair[i][key] for pair in pairs(results)]) for key in ("kl", "trace")})
        for i, name in enumerate(("plain", "dropped"))
    ]
    return (SummaryTable("means", "means over seeds", ("group",), rows, "Means over seeds."),)


STUDY = Study(
    name="blocks",
    scales={"tiny": Scale()},
    claims=(
        Claim(id="dropout-flatter", statement="Dropout makes a model flatter", paper="none", of=dropout,
              measures="flatness", direction="decrease"),
        Claim(id="dropout-same-loss", statement="Dropout leaves the loss where it is", paper="none", of=dropout,
              measures="kl", direction="no change within", margin=0.5),
    ),
    tables=tables,
    block_name="grammars",
)
"""


def write(folder):
    """Write the study's file; return it."""
    (folder / "blocks.py").write_text(BLOCKS)
    return folder / "blocks.py"


def run(loop, options):
    """An executor of a few lines: every attempt in turn, in this process."""
    for attempt in loop:
        loop.finish(attempt, main(list(attempt.arguments)))


def carry_out(units, folder, execute=run, **options):
    """Carry out a plan by an executor, as `isoloss study run` does; return what it said and which units were done."""
    said = []
    made = Options(**options)
    loop = Loop(units, folder, made, say=said.append)
    execute(loop, made)
    loop.raise_failures()
    return said, [line.partition(":")[0] for line in said if ": done in" in line]


def finish(folder, seed_offset=0):
    """Make the study in blocks, without any page but the last; return its folder."""
    made = StudyFolder(load_study(write(folder)), folder / "out", seed_offset=seed_offset)
    made.prepare()
    carry_out(made.plan(), made.path)
    report(made)
    return made.path


def call(capsys, *words, status=0):
    """Return what `isoloss study` prints."""
    capsys.readouterr()
    assert command.main([str(word) for word in words]) == status
    return capsys.readouterr().out
