"""How often 95 % intervals hold the true value: on packed text, replicates of rows or documents; of correlations.

Texts are put end to end and cut into rows of 32 words. A replicate is 256 consecutive rows, no row in two of them, and
the true value is of all replicates together. Or `isoloss.compare` reads pages drawn at random, and the true value is of
all pages. What is measured is kept in a folder, from which a run goes on. The part `associations` needs no text: it
draws suites of checkpoints whose measure and outcome have a known correlation at one loss.

Shapes: R replicates.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
from timing import heading, record_of  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from isoloss import compare, compare_traces  # noqa: E402
from isoloss.comparison.models import TITLES  # noqa: E402
from isoloss.errors import IsolossError  # noqa: E402
from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import FlatnessCallback, loss_rises  # noqa: E402
from isoloss.flatness.robustness import ROBUSTNESS, Noise  # noqa: E402
from isoloss.lab.evaluation.input_config import InputConfig  # noqa: E402
from isoloss.statistics.association import Association, associate  # noqa: E402
from isoloss.text.packing import pack  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers")
WORDS, LENGTH, ROWS, STEPS = 1000, 32, 256, 1000
OF_A_NOVEL = 4  # replicates
QUANTITIES = ("trace", "trace by FlatnessCallback", "loss", "difference of traces", "difference of losses")
# all rows that `isoloss.compare` prints of models; bits per byte are a multiple of the loss, and words have no bytes
COMPARED = tuple(name for name in TITLES if name != "bits-per-byte")
COMPARISONS, PAGES = 200, 50  # how many, of how many pages each
CHECKPOINTS, SUITES = 6, {5: 2000, 10: 1000, 24: 500}  # of a cluster; by how many clusters they have
CORRELATIONS = (0.0, 0.6)
DESIGNS = {  # how much the loss differs between clusters, in nats, and the part of the checkpoints that are missing
    "the loss falls along the steps": (0.2, 0.0),
    "the loss differs between clusters, too, and 30 % of the checkpoints are missing": (1.5, 0.3),
}
PART_OF_CLUSTERS = 0.5  # of the variance at one loss
TRUE_PAIRS, TRUE_ROWS = 16, 10  # of the true rises under noise: pairs of draws for each part of every 10th row


class Texts:
    """Web pages and novels as ids of the commonest words of the pages; all other words are 2."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "openwebtext-1000" / "openwebtext-1000.decoded.jsonl").read_text().splitlines()
        pages = [json.loads(line)["text"].lower().split() for line in lines]
        names, counts = np.unique(np.concatenate(pages), return_counts=True)
        self._ids = {str(name): number + 3 for number, name in enumerate(names[np.argsort(-counts)[: WORDS - 3]])}
        self.lines = lines
        self.pages = [self._read(page) for page in pages if page]
        self.novels = [self._read(path.read_text().lower().split()) for path in sorted(folder.glob("novels/*.txt"))]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return what reads text as the pages were read."""
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 2, **self._ids}, unk_token="<unk>"))
        backend.normalizer = tokenizers.normalizers.Lowercase()
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")

    def _read(self, words: list[str]) -> np.ndarray[Any, Any]:
        return np.array([self._ids.get(word, 2) for word in words])


def packed(texts: list[np.ndarray[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (n, 32) of texts end to end, and (n,) the text in which each begins."""
    rows = np.concatenate(list(pack(iter(texts), LENGTH)))
    starts = np.arange(len(rows)) * LENGTH
    return torch.from_numpy(rows), torch.from_numpy(np.searchsorted(np.cumsum([*map(len, texts)]), starts, "right"))


def batches(texts: Texts) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each replicate with the name of its case."""
    rows, of_row = packed(texts.pages)
    for part, documents in zip(rows.split(ROWS), of_row.split(ROWS), strict=True):
        if len(part) == ROWS:
            yield "without documents", {"input_ids": part, "labels": part}
            yield "with documents", {"input_ids": part, "labels": part, "documents": documents}
    for novel in texts.novels:
        for part in packed([novel])[0].split(ROWS)[:OF_A_NOVEL]:
            yield "novels, without documents", {"input_ids": part, "labels": part}


def trained(seed: int, rows: torch.Tensor, folder: Path) -> GPT2LMHeadModel:
    """Return a small GPT-2, from the folder where it is there."""
    if not folder.exists():
        torch.manual_seed(seed)
        sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
        no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, **sizes, **no_dropout)
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(STEPS):
            batch = rows[torch.randint(len(rows), (64,), generator=torch.Generator().manual_seed(step))]
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
        model.save_pretrained(folder)
    return GPT2LMHeadModel.from_pretrained(folder).eval()


def measured(models: Mapping[str, GPT2LMHeadModel], batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the value, the interval and the predictions of each quantity, and what the errors are over."""
    callback = FlatnessCallback([batch], every=1, seed=1)
    step = TrainerState(global_step=1, is_world_process_zero=True)
    callback.on_step_end(TrainingArguments("unused"), step, TrainerControl(), model=models["b"])
    comparison = compare_traces(models, [batch])
    first = comparison.models["a"]
    differences = (comparison.difference(name, "a", "b") for name in ("trace", "loss"))
    found = (first["trace"], callback.traces[1], first["loss"], *differences)
    values = {name: (e.value, *e.ci95, e.num_predictions) for name, e in zip(QUANTITIES, found, strict=True)}
    return {"values": values, "over": first["trace"].details["clusters"]}


def rows_of(models: Mapping[str, GPT2LMHeadModel], texts: Texts, number: int, folder: Path) -> dict[str, Any]:
    """Return the intervals of each row by `isoloss.compare` on pages drawn at random, with fresh draws of noise."""
    chosen = np.random.default_rng([PAGES, number]).choice(len(texts.lines), PAGES, replace=False)
    file = folder / "pages.jsonl"
    file.write_text("".join(texts.lines[page] + "\n" for page in sorted(chosen)))
    how = {"tokenizer": texts.tokenizer(), "inputs": InputConfig(length=LENGTH)}
    comparison = compare(models, data=file, num_sequences=ROWS, seed=number, **how)
    values = {}
    for name in COMPARED:
        one, difference = comparison.models["a"][name], comparison.difference(name, "a", "b")
        values[name] = [(each.value, *each.ci95, each.freedom) for each in (one, difference)]
    return {"values": values, "rows_of_rises": comparison.models["a"]["int4-rise"].details["sequences"]}


def true_rows(models: Mapping[str, GPT2LMHeadModel], texts: Texts, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the first model's value and the difference on all rows of all pages, from the folder where they are."""
    file = folder / "true_rows.json"
    if not file.exists():
        data = folder / "all.jsonl"
        data.write_text("".join(line + "\n" for line in texts.lines))
        how = {"tokenizer": texts.tokenizer(), "inputs": InputConfig(length=LENGTH)}
        whole = compare(models, data=data, num_sequences=10**6, seed=-1, robustness=False, **how)
        rows, documents = packed(texts.pages)
        some = {"input_ids": rows[::TRUE_ROWS], "labels": rows[::TRUE_ROWS], "documents": documents[::TRUE_ROWS]}
        every = {"input_ids": rows, "labels": rows, "documents": documents}
        found: dict[str, list[float]] = {name: [] for name in COMPARED}
        for model, estimates in whole.models.items():
            for name, change in ROBUSTNESS.items():
                is_noise = isinstance(change, Noise)
                change = replace(change, pairs=TRUE_PAIRS, seed=-1) if is_noise else change
                estimates |= loss_rises(models[model], [some if is_noise else every], {name: change})
            for name in COMPARED:
                found[name].append(estimates[name].value)
        write_text(file, json.dumps({name: (first, first - second) for name, (first, second) in found.items()}))
    true: dict[str, tuple[float, float]] = json.loads(file.read_text())
    return true


def covered(replicates: list[dict[str, Any]], quantity: str) -> list[bool]:
    """Return (R,) whether each interval holds the value of all replicates together."""
    values, low, high, predictions = np.array([each["values"][quantity] for each in replicates]).T
    truth = np.average(values, weights=predictions)
    return ((low < truth) & (truth < high)).tolist()


def kept(file: Path, measure: Iterator[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the replicates in a file, after measuring those that are not there yet."""
    done = len(file.read_text().splitlines()) if file.exists() else 0
    for of_replicate in itertools.islice(measure, done, None):
        found = of_replicate()
        with file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
    return [json.loads(line) for line in file.read_text().splitlines()]


def share(holds: Sequence[bool]) -> tuple[float, float]:
    """Return the share of intervals that hold the true value, and its standard error."""
    mean = float(np.mean(holds))
    return mean, math.sqrt(mean * (1 - mean) / len(holds))


def percent(shares: Iterable[tuple[float, float]]) -> str:
    """Return shares as the cells of a row."""
    return " | ".join(f"{100 * value:.1f} ± {100 * error:.1f} %" for value, error in shares)


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables of the records of both parts."""
    of_rows, compared = parts["rows"], parts["comparisons"]
    title = "How often 95 % intervals on packed text hold the true value"
    lines = [
        f"# {title}",
        "",
        f"Two GPT-2s of width 32 with 2 layers, after {STEPS} steps on the web pages from two initializations. Texts "
        f"are put end to end and cut into rows of {LENGTH} words. The interval is `ci95`; standard errors of the "
        "shares are over replicates.",
        "",
        "## Values and differences by `isoloss.compare`, over documents",
        "",
        *heading(title, dict(compared))[2:],
        f"A repetition draws {PAGES} web pages at random, and `isoloss.compare` reads {ROWS} rows of them, of which "
        f"{compared['rows_of_rises']} for the rises, with a seed of its own for all draws. The true value is of all "
        f"rows of all {compared['pages']:,} pages; of rises under noise, of every {TRUE_ROWS}th row with "
        f"{32 * TRUE_PAIRS} draws. As a page has up to {compared['longest']:,} rows, {PAGES} pages count as much as "
        f"{compared['effective']:.0f} of one length (the median over repetitions), which the intervals allow for.",
        "",
        "| row | repetitions | true value of the first | intervals that hold it | true difference | that hold it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (one, difference) in compared["covered"].items():
        true = [f"{value:.3g}" for value in compared["true"][name]]
        lines.append(
            f"| {TITLES[name]} | {compared['repetitions']} | {true[0]} | {percent([one])} | {true[1]} | "
            f"{percent([difference])} |"
        )
    lines += [
        "",
        "## Estimates and differences, by what the errors are over",
        "",
        *heading(title, dict(of_rows))[2:],
        f"A replicate is {ROWS} consecutive rows, no row is in two, and the true value is that of all replicates of "
        "the case together. The trace and the loss of the first model and the differences are by `compare_traces`, the "
        "callback measures the second with other probes, by `fisher_trace`. A replicate within a single text has no "
        "interval with `documents`: the call is refused.",
        "",
        "| case | replicates | refused | " + " | ".join(QUANTITIES) + " |",
        "|---|---:|---:|" + "---:|" * len(QUANTITIES),
    ]
    for case, numbers in of_rows["cases"].items():
        shares = percent(numbers["covered"].values())
        lines.append(f"| {case} | {numbers['replicates']} | {numbers['refused']} | {shares} |")
    lines += ["", "What the results say that the errors are over, of the replicates:", ""]
    for case, numbers in of_rows["cases"].items():
        lines += [f"- {case}: {', '.join(f'{over} ({number})' for over, number in numbers['over'].items())}"]
    return "\n".join(lines) + "\n"


def of_comparisons(models: Mapping[str, GPT2LMHeadModel], texts: Texts, work: Path) -> dict[str, Any]:
    """Return the record of the rows of `isoloss.compare`."""
    repetitions = (functools.partial(rows_of, models, texts, number, work) for number in range(COMPARISONS))
    drawn = kept(work / "comparisons.jsonl", repetitions)
    true = true_rows(models, texts, work)
    values = np.array([[each["values"][name] for name in COMPARED] for each in drawn])  # (R, rows, 2, 4)
    truth = np.array([true[name] for name in COMPARED])
    holds = (values[..., 1] < truth) & (truth < values[..., 2])
    _, of_row = packed(texts.pages)
    return {
        "repetitions": len(drawn),
        "pages": len(texts.lines),
        "rows_of_rises": drawn[0]["rows_of_rises"],
        "longest": int(torch.bincount(of_row).max()),
        "effective": 1 + float(np.median(values[:, 0, 1, 3])),
        "true": true,
        "covered": {name: [share(holds[:, i, j].tolist()) for j in range(2)] for i, name in enumerate(COMPARED)},
    }


def of_rows(models: Mapping[str, GPT2LMHeadModel], texts: Texts, work: Path) -> dict[str, Any]:
    """Return the record of replicates of consecutive rows."""

    def replicate(case: str, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        try:
            return {"case": case, **measured(models, batch)}
        except IsolossError as error:
            return {"case": case, "refused": str(error)}

    replicates = kept(work / "replicates.jsonl", (functools.partial(replicate, *each) for each in batches(texts)))
    cases: dict[str, Any] = {}
    for case in dict.fromkeys(each["case"] for each in replicates):
        of_case = [each for each in replicates if each["case"] == case]
        found = [each for each in of_case if "values" in each]
        counted = (each["over"] if case != "with documents" else "documents" for each in found)
        cases[case] = {
            "replicates": len(found),
            "refused": len(of_case) - len(found),
            "covered": {quantity: share(covered(found, quantity)) for quantity in QUANTITIES},
            "over": dict(Counter(counted)),
        }
    return {"cases": cases}


def suite(rng: np.random.Generator, groups: int, design: str, r: float) -> dict[str, Any]:
    """Return checkpoints of clusters along steps, with the correlation r of measure and outcome at one loss."""
    between, missing = DESIGNS[design]
    seed, step = np.divmod(np.arange(groups * CHECKPOINTS), CHECKPOINTS)
    noise = rng.standard_normal(len(seed))
    loss = 3 * np.exp(-step / 4) + between * rng.standard_normal(groups)[seed] + 0.05 * noise

    def both(number: int) -> np.ndarray[Any, Any]:
        first, second = rng.standard_normal((2, number))
        return np.stack([first, r * first + math.sqrt(1 - r * r) * second])

    of_clusters, of_checkpoints = both(groups)[:, seed], both(len(seed))
    x, y = math.sqrt(PART_OF_CLUSTERS) * of_clusters + math.sqrt(1 - PART_OF_CLUSTERS) * of_checkpoints
    x[rng.random(len(seed)) < missing] = math.nan
    # the loss is a cause of both
    return {"seed": seed, "step": step, "loss": loss, "measure": x + 1.5 * loss, "outcome": y - 2 * loss}


def association(columns: Mapping[str, Any]) -> Association:
    """Return the one association of a suite."""
    names: dict[str, Any] = {
        "measures": ["measure"],
        "outcomes": ["outcome"],
        "loss": "loss",
        "clusters": "seed",
        "along": "step",
    }
    return associate(columns, **names)[0]


def of_suite(groups: int, design: str, number: int) -> dict[str, Any]:
    """Return what is found in a suite for each true correlation, and whether its smallest detectable one is."""
    rng = np.random.default_rng([groups, [*DESIGNS].index(design), number])
    found: dict[str, Any] = {}
    for r in CORRELATIONS:
        one = association(suite(rng, groups, design, r))
        parts = {"pearson": one.pearson, "spearman": one.spearman, "within_band": one.within_band}
        intervals = {name: None if each is None else each.interval95 for name, each in parts.items()}
        found[f"{r:g}"] = {**intervals, "p": one.p_permutation, "shown": one.shown, "detectable": one.detectable}
    smallest = min(found["0"]["detectable"], 1 - 1e-9)
    return {**found, "detected": association(suite(rng, groups, design, smallest)).shown}


def rank_correlation(design: str, r: float) -> float:
    """Return Spearman's correlation given the loss over many clusters."""
    drawn = suite(np.random.default_rng(0), 50_000, design, r)
    there = np.isfinite(drawn["measure"])
    ranks = [np.argsort(np.argsort(drawn[name][there])) for name in ("measure", "outcome", "loss")]
    inverse = np.linalg.inv(np.corrcoef(ranks))
    return -float(inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1]))


def of_associations(work: Path) -> list[dict[str, Any]]:
    """Return a record of each design and number of clusters."""
    records = []
    for design, groups in itertools.product(DESIGNS, SUITES):
        drawn = (functools.partial(of_suite, groups, design, number) for number in range(SUITES[groups]))
        suites = kept(work / f"associations-{[*DESIGNS].index(design)}-{groups}.jsonl", drawn)
        record: dict[str, Any] = {"design": design, "clusters": groups, "covered": {}}
        for r in CORRELATIONS:
            found = [each[f"{r:g}"] for each in suites]
            for name in ("pearson", "spearman", "within_band"):
                truth = rank_correlation(design, r) if name == "spearman" else r
                intervals = [each[name] for each in found if each[name] is not None]
                record["covered"][f"{name} {r:g}"] = share([low < truth < high for low, high in intervals])
            record[f"p below 0.05, {r:g}"] = share([each["p"] < 0.05 for each in found])
            record[f"shown, {r:g}"] = share([each["shown"] for each in found])
        record["detectable"] = float(np.median([each["0"]["detectable"] for each in suites]))
        record["detected"] = share([each["detected"] for each in suites])
        records.append(record)
    return records


def page_of_associations(record: Mapping[str, Any]) -> str:
    """Return the tables of correlations at one loss."""
    lines = heading("How often 95 % intervals of correlations at one loss hold the true value", dict(record))
    numbers = ", ".join(f"{number:,} suites of {groups} clusters" for groups, number in SUITES.items())
    lines += [
        f"Of each kind {numbers} with {CHECKPOINTS} checkpoints each, by `isoloss.statistics."
        "association.associate`. The loss causes measure and outcome; at one loss they correlate by r, and half of "
        "their variance is between clusters. Standard errors are over suites. Intervals are of Pearson's and "
        "Spearman's correlation given the loss, and of Pearson's at one loss (band), where there is one.",
    ]
    for design in DESIGNS:
        lines += ["", f"## Where {design}", ""]
        cells = [f"{name}, r = {r:g}" for r in CORRELATIONS for name in ("Pearson", "Spearman", "band")]
        lines += [f"| clusters | {' | '.join(cells)} |", "|---:|" + "---:|" * len(cells)]
        some = [each for each in record["cases"] if each["design"] == design]
        lines += [f"| {each['clusters']} | {percent(each['covered'].values())} |" for each in some]
        lines += ["", "| clusters | p below 0.05, r = 0 | shown, r = 0 | shown, r = 0.6 | smallest r | shown there |"]
        lines += ["|---:|---:|---:|---:|---:|---:|"]
        for each in some:
            shares = percent(each[name] for name in ("p below 0.05, 0", "shown, 0", "shown, 0.6"))
            detected = percent([each["detected"]])
            lines.append(f"| {each['clusters']} | {shares} | {each['detectable']:.2f} | {detected} |")
    lines += [
        "",
        "Shown: the interval of Pearson's is without 0, and the p-value is below 0.05. The smallest r is what suites "
        "with r = 0 call the smallest that they could show (the median), and the last column is how often it is shown "
        "in another suite that has what the first suite said.",
    ]
    return "\n".join(lines) + "\n"


PARTS = {"rows": of_rows, "comparisons": of_comparisons}


def main() -> None:
    """Measure what is not there yet of a part, and write the result; the other parts stay as they were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "associations"], help="which part to measure")
    parser.add_argument("data", type=Path, nargs="?", help="the folder with openwebtext-1000 and novels")
    parser.add_argument("--work", type=Path, default=Path("runs/interval-coverage"), help="where the run goes on from")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.part == "associations":
        record = {**record_of("interval_coverage.py", ("isoloss", "numpy")), "cases": of_associations(args.work)}
        write_text(RESULTS / "association_coverage.json", json.dumps(record, indent=2) + "\n")
        write_text(RESULTS / "association_coverage.md", page_of_associations(record))
        print(page_of_associations(record))
        return
    if args.data is None:
        parser.error(f"the part {args.part} needs the folder of its texts")
    texts = Texts(args.data)
    rows, _ = packed(texts.pages)
    models = {name: trained(seed, rows, args.work / name) for seed, name in enumerate("ab")}
    file = RESULTS / "interval_coverage.json"
    parts = json.loads(file.read_text())
    parts[args.part] = {**record_of("interval_coverage.py", LIBRARIES), **PARTS[args.part](models, texts, args.work)}
    write_text(file, json.dumps(parts, indent=2) + "\n")
    write_text(RESULTS / "interval_coverage.md", page(parts))
    print(page(parts))


if __name__ == "__main__":
    main()
