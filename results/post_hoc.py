"""What the kept results say that no claim asked for: computed from the tables of values by numpy and scipy alone.

    python results/post_hoc.py

It prints tables of docs/method/studies.md: the claims of dose-response, optimizers and paper; and, made after the
results were known, the signs of all arms, of the first design of dose-response the trend over all doses, and of the
first design of optimizers what effective rank explains, errors over optimizers, baselines and rises in nats. Each
function returns rows of cells.
"""

import functools
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import polars as pl
from scipy.stats import t

RESULTS = Path(__file__).parent
PILOT = RESULTS / "dose-response/pilot.toml"
DOSE_RESPONSE = ("dose-response", "dose-response-repeated")
OPTIMIZERS = ("optimizers", "optimizers-repeated")
SLOPES = ("dose-response-24-grammars", "dose-response-24-grammars-repeated")
RATES = ("optimizers-three-rates", "optimizers-three-rates-repeated")

DOSES = ("sharp-3", "sharp-2", "sharp-1", "sham", "flat-1", "flat-2", "flat-3")  # from the sharpest to the flattest
NOISES = ("sham", "noise-1", "noise-2", "noise-3")
PROBES = tuple(f"few-shot-prefix-{length}-{shots}" for shots in (30, 100) for length in (2, 4))
NEEDED, SPARE = "few-shot-needed-2-50", "few-shot-spare-2-50"
TRANSFER = dict.fromkeys(PROBES, 0.25)  # their mean

ARMS = {
    "sgd": "SGD after AdamW",
    "sam": "SAM",
    "lawa": "AdamW, averaged weights (LAWA)",
    "adamw": "AdamW",
    "wsd": "AdamW, decaying rate (WSD)",
    "schedule-free": "Schedule-free AdamW",
    "muon": "Muon",
    "soap": "SOAP",
}
ACCURACIES = {"few-shot-prefix-4-30": "prefix-4", "few-shot-root-30": "root", "layer-2": "spans"}


GRAMMARS = r"^g(?<grammar>\d+)-s(?<seed>\d+)-(?<arm>.*)$"


@functools.cache
def values(name, runs=GRAMMARS):
    """Return a row for each last checkpoint of a study's `runs`: the parts of their names, and what was measured."""
    rows = pl.read_parquet(RESULTS / name / "values.parquet")
    rows = rows.filter(pl.col("step") == pl.col("step").max().over("run"), pl.col("run").str.contains(runs))
    return (
        rows.with_columns(parts=pl.col("run").str.extract_groups(runs))
        .unnest("parts")
        .pivot(on="estimate", index=["grammar", "seed", "arm"], values="value")
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def digits(error, significant=2):
    """How many decimals show an error's significant digits."""
    return max(0, significant - 1 - math.floor(math.log10(error)))


def signed(value, decimals):
    """A number with a minus sign of its own."""
    return f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def with_error(value, error):
    """A value with its standard error."""
    return f"{signed(value, digits(error))} ± {error:.{digits(error)}f}"


def mean(samples, factor=1.0):
    """Return mean and standard error of independent samples."""
    samples = factor * np.asarray(samples)
    return samples.mean(), samples.std(ddof=1) / math.sqrt(len(samples))


def interval(samples):
    """The 95 % interval of the mean of independent samples, by Student's t."""
    value, error = mean(samples)
    half = t.ppf(0.975, len(samples) - 1) * error
    decimals = max(2, digits(error))
    return f"{signed(value - half, decimals)} to {signed(value + half, decimals)}"


# --- dose-response: the trend -----------------------------------------------------------------------------------------


def trends(rows, outcome, arms=DOSES, adjusted=True):
    """Return each grammar's slope of an outcome on -log2 of the minimal trace over some arms, in points a halving.

    Every seed has a base of its own, so slopes are fitted within seeds, and the mean over seeds is taken. An outcome is
    a weight for each accuracy; it is adjusted to one KL by the pilot's slopes.
    """
    slopes = {each["measure"]: each["value"] for each in tomllib.loads(PILOT.read_text())["slopes"]}
    found = {}
    for (grammar, _), unit in rows.filter(pl.col("arm").is_in(arms)).group_by("grammar", "seed", maintain_order=True):
        flatness, kl = -np.log2(unit["minimal-trace"].to_numpy()), unit["kl"].to_numpy()
        accuracy = sum(
            weight * (100 * unit[key].to_numpy() - adjusted * slopes[key] * kl) for key, weight in outcome.items()
        )
        found.setdefault(grammar, []).append(np.polyfit(flatness, accuracy, 1)[0])
    return [np.mean(found[grammar]) for grammar in sorted(found)]


def trend_table():
    """Return the slopes of all outcomes over all doses, and of the mean of the four probes over some."""
    draws = [values(name) for name in DOSE_RESPONSE]
    both = pl.concat(draws, how="diagonal")
    outcomes = {
        "**mean of the four prefix probes**": TRANSFER,
        "prefix-2, 30 examples": {PROBES[0]: 1},
        "prefix-4, 30": {PROBES[1]: 1},
        "prefix-2, 100": {PROBES[2]: 1},
        "prefix-4, 100": {PROBES[3]: 1},
        "needed-2, 50": {NEEDED: 1},
        "spare-2, 50": {SPARE: 1},
        "needed-2 minus spare-2": {NEEDED: 1, SPARE: -1},
    }
    parts = {
        "the mean, on the flat side alone": DOSES[3:],
        "on the sharp side alone": DOSES[:4],
        "without the strongest reward": DOSES[1:],
        "over label noise instead": NOISES,
    }
    asked = [(name, outcome, DOSES) for name, outcome in outcomes.items()]
    asked += [(name, TRANSFER, arms) for name, arms in parts.items()]
    studies = ("both replications", "95 % interval", "first replication", "second replication", "both, not adjusted")
    yield ("outcome", *studies)
    for name, outcome, arms in asked:
        slopes = trends(both, outcome, arms)
        each = [with_error(*mean(trends(draw, outcome, arms))) for draw in draws]
        plain = with_error(*mean(trends(both, outcome, arms, adjusted=False)))
        yield (name, with_error(*mean(slopes)), interval(slopes), *each, plain)


# --- partial correlations ---------------------------------------------------------------------------------------------


def partial(x, y, given):
    """Return the correlation of what is left of x and y (G, n) within each of G groups after least squares."""
    x, y, *given = ((each - each.mean(axis=1, keepdims=True)).ravel() for each in (x, y, *given))
    others = np.stack(given, axis=1)
    x, y = (each - others @ np.linalg.lstsq(others, each, rcond=None)[0] for each in (x, y))
    return x @ y / math.sqrt((x @ x) * (y @ y))


def jackknifed(x, y, given, axis):
    """Return the partial correlation of x and y (G, n), its error and 95 % interval, by the jackknife over an axis."""
    number = x.shape[axis]
    z = math.atanh(partial(x, y, given))
    left = ([np.delete(each, i, axis) for each in (x, y, *given)] for i in range(number))
    without = np.array([math.atanh(partial(a, b, others)) for a, b, *others in left])
    error = math.sqrt((number - 1) / number * np.square(without - z).sum())
    half = t.ppf(0.975, number - 1) * error
    return math.tanh(z), error * (1 - math.tanh(z) ** 2), (math.tanh(z - half), math.tanh(z + half))


def rank_and_transfer():
    """Return how effective rank goes with accuracy over the doses, within bases, given the KL; errors over grammars."""
    rows = pl.concat([values(name) for name in DOSE_RESPONSE], how="diagonal")
    rows = rows.filter(pl.col("arm").is_in(DOSES)).sort("grammar", "seed", "arm")
    bases = (rows["grammar"].n_unique(), -1, len(DOSES))  # grammars, seeds, doses

    def within(key):
        cube = rows[key].to_numpy().reshape(bases)
        return (cube - cube.mean(axis=2, keepdims=True)).reshape(bases[0], -1)

    rank, kl = within("effective-rank"), within("kl")
    yield ("accuracy", "correlation with effective rank", "95 % interval")
    for name, keys in (("prefix-4, 30 examples", PROBES[1:2]), ("mean of the four prefix probes", PROBES)):
        value, error, (low, high) = jackknifed(rank, sum(map(within, keys)), [kl], axis=0)
        yield name, with_error(value, error), f"{low:.2f} to {high:.2f}"


# --- optimizers -------------------------------------------------------------------------------------------------------


def by_optimizer(name, key, arms=tuple(ARMS)):
    """Return what was measured of each grammar and optimizer (G, 8)."""
    rows = values(name)
    return np.stack([rows.filter(pl.col("arm") == arm).sort("grammar")[key].to_numpy() for arm in arms], axis=1)


def association_table():
    """Return partial correlations across optimizers, with intervals over grammars and over optimizers; both draws."""
    logs = {"minimal trace": "minimal-trace", "trace": "trace"}
    pairs = [(predictor, "KL", key) for key in ACCURACIES for predictor in ("minimal trace", "effective rank")]
    pairs += [("minimal trace", "KL, effective rank", key) for key in ACCURACIES]
    pairs += [("effective rank", "KL, minimal trace", key) for key in ACCURACIES]
    pairs += [("trace", given, "int4-rise") for given in ("KL", "KL, effective rank")]
    yield ("measure", "given", "outcome", "correlation", "95 % over grammars", "95 % over optimizers")
    for predictor, given, outcome in pairs:
        cells = []
        for name in OPTIMIZERS:
            named = {
                "KL": by_optimizer(name, "kl"),
                "effective rank": by_optimizer(name, "effective-rank"),
                **{word: np.log(by_optimizer(name, key)) for word, key in logs.items()},
            }
            x, y, others = named[predictor], by_optimizer(name, outcome), [named[each] for each in given.split(", ")]
            over = [jackknifed(x, y, others, axis) for axis in (0, 1)]
            ends = [f"{signed(low, 2)} to {signed(high, 2)}" for _, _, (low, high) in over]
            cells.append((signed(over[0][0], 2), *ends))
        what = ACCURACIES.get(outcome, "rise at 4 bits")
        yield (predictor, given, what, *("<br>".join(both) for both in zip(*cells, strict=True)))


def baseline_table():
    """Return accuracies in %, and how far each is above one-hot tokens, in points; both draws."""
    probed = ("one-hot tokens", "majority class", "untrained model")
    arms = {"AdamW": "adamw", "Muon": "muon", "SOAP": "soap", "helper": "helper"}
    columns = []
    for key in list(ACCURACIES)[:2]:
        draws = []
        for name in OPTIMIZERS:
            kept = pl.read_parquet(RESULTS / name / "baselines.parquet").filter(pl.col("estimate") == key)
            found = {row: kept.filter(pl.col("probed") == row).sort("grammar")["value"].to_numpy() for row in probed}
            found |= {row: by_optimizer(name, key, [arm])[:, 0] for row, arm in arms.items()}
            draws.append(found)
        columns.append({row: "<br>".join(f"{100 * draw[row].mean():.1f}" for draw in draws) for row in draws[0]})
        above = {row: [mean(draw[row] - draw[probed[0]], 100) for draw in draws] for row in (*probed[1:], *arms)}
        columns.append({row: "<br>".join(with_error(*each) for each in both) for row, both in above.items()})
    yield (
        "probe of",
        *(f"{task} {unit}" for task in ("prefix-4", "root") for unit in ("(%)", "minus one-hot (points)")),
    )
    for row in (*probed, *arms):
        yield (row, *(column.get(row, "") for column in columns))


def rise_table(draws=OPTIMIZERS):
    """Return the rise of the loss at 4 bits of each optimizer, in nats and in % of its loss; all draws."""
    yield ("optimizer", "rise at 4 bits (nats/token)", "of the loss (%)")
    for arm, title in ARMS.items():
        rises = [by_optimizer(name, "int4-rise", [arm]) for name in draws]
        losses = [by_optimizer(name, "loss", [arm]) for name in draws]
        shares = [f"{100 * rise.mean() / loss.mean():.3f}" for rise, loss in zip(rises, losses, strict=True)]
        yield title, "<br>".join(with_error(*mean(rise[:, 0])) for rise in rises), "<br>".join(shares)


# --- all studies: which way flatness, rank and transfer go -----------------------------------------------------------

BRACKETS = ("brackets", "brackets-repeated")
# what is compared: the draws, how their runs are named, the control, the arms, and what is measured of them: the trace,
# the rank, and the accuracies (or R^2) whose mean is the transfer
SIGNS = {
    "brackets, the paper's model": (
        BRACKETS,
        r"^attention-6-s(?<grammar>\d+)(?<seed>)-(?<arm>.*)$",
        "sham",
        {
            **{f"penalty-{weight}": f"penalty {weight} on its neurons" for weight in ("0.0003", "0.001", "0.003")},
            **{f"reward-{weight}": f"reward {weight}" for weight in ("0.0003", "0.001", "0.003")},
            "sam": "SAM",
            "label-noise": "label noise",
        },
        ("parts-minimal-trace", "effective-rank", ("r2-abs-g-8",)),
    ),
    "grammars, first design": (
        DOSE_RESPONSE,
        GRAMMARS,
        "sham",
        {
            **dict(zip(DOSES[4:], ("penalty 0.0001", "penalty 0.0003", "penalty 0.001"), strict=True)),
            **dict(zip(DOSES[2::-1], ("reward 0.00001", "reward 0.00003", "reward 0.0001"), strict=True)),
            "sam": "SAM",
            **{f"noise-{i}": f"label noise, {steps} steps" for i, steps in enumerate(("500", "1,500", "4,000"), 1)},
            "helper": "helper (trained with prefix-2)",
        },
        ("minimal-trace", "effective-rank", PROBES),
    ),
    "grammars": (
        SLOPES,
        GRAMMARS,
        "sham",
        {
            **dict(zip(DOSES[4:], ("penalty 0.0005", "penalty 0.0015", "penalty 0.004"), strict=True)),
            **dict(zip(DOSES[2::-1], ("reward 0.0002", "reward 0.0005", "reward 0.001"), strict=True)),
            "narrower": "features of lower entropy",
            "wider": "features of higher entropy",
            "helper": "helper (trained with prefix-2)",
        },
        ("minimal-trace", "effective-rank", PROBES),
    ),
    "optimizers, first design": (
        OPTIMIZERS,
        GRAMMARS,
        "adamw",
        {
            **{arm: title for arm, title in ARMS.items() if arm != "adamw"},
            "helper": "helper (trained with prefix-4)",
            "adversary": "adversary of prefix-4",
        },
        ("minimal-trace", "effective-rank", ("few-shot-prefix-4-30",)),
    ),
    "optimizers": (
        RATES,
        GRAMMARS,
        "adamw",
        {
            **{arm: title for arm, title in ARMS.items() if arm != "adamw"},
            "muon-sgd": "SGD after Muon",
            "helper": "helper (trained with prefix-4)",
            "adversary": "adversary of prefix-4",
        },
        ("minimal-trace", "effective-rank", ("few-shot-prefix-4-100",)),
    ),
}


def sign_table():
    """Return how arms with one target differ from their controls, not adjusted to one loss; both draws together."""
    yield (
        "study",
        "arm",
        "minimal trace, times",
        "effective rank",
        "transfer (points)",
        "flatness and transfer",
        "rank and transfer",
    )
    for study, (draws, pattern, control, arms, keys) in SIGNS.items():
        rows = pl.concat([values(name, pattern) for name in draws], how="diagonal")
        rows = without_diverged(rows) if draws == SLOPES else rows
        rows = rows.with_columns(transfer=pl.mean_horizontal(keys[2]))
        for arm, title in arms.items():
            trace, rank, transfer = (paired(rows, control, arm, key) for key in (*keys[:2], "transfer"))
            times = math.exp(trace[0])
            factor = f"{times:.{digits(times * trace[1])}f} ± {times * trace[1]:.{digits(times * trace[1])}f}"
            flatter = (-trace[0], trace[1], trace[2])
            cells = (factor, with_error(*rank[:2]), with_error(*transfer[:2]))
            yield (study, title, *cells, together(flatter, transfer), together(rank, transfer))


def without_diverged(rows):
    """Leave out the grammars of which an arm has diverged, as the study does: it ends above 2.7 times the target."""
    diverged = rows.filter(pl.col("arm") != "base", pl.col("kl") > 8e-4)["grammar"].unique()
    return rows.filter(~pl.col("grammar").is_in(diverged.to_list()))


def sign_counts():
    """Return in how many arms of each study flatness, and rank, have the sign of transfer, or the opposite one."""
    _, *rows = sign_table()
    yield ("study", "arms", *(f"{what}: {sign}" for what in ("flatter", "higher rank") for sign in ("better", "worse")))
    for study in SIGNS:
        pairs = [row[-2:] for row in rows if row[0] == study]
        counts = [str(sum(pair[i] == sign for pair in pairs)) for i in (0, 1) for sign in ("same sign", "**opposite**")]
        yield (study, str(len(pairs)), *counts)


def paired(rows, control, arm, key):
    """Return the mean difference over grammars, its error and half of its 95 % interval; of traces in logarithms."""
    both = rows.filter(pl.col("arm") == arm).join(
        rows.filter(pl.col("arm") == control), on=["grammar", "seed"], suffix="-control"
    )
    first, second = both[f"{key}-control"], both[key]
    change = (
        (second / first).log() if "trace" in key else 100 * (second - first) if "rank" not in key else second - first
    )
    each = both.with_columns(change=change).group_by("grammar").agg(pl.col("change").mean())["change"].to_numpy()
    value, error = mean(each)
    return value, error, t.ppf(0.975, len(each) - 1) * error


def together(first, second):
    """Return whether two changes have one sign, if both 95 % intervals exclude 0."""
    if abs(first[0]) <= first[2] or abs(second[0]) <= second[2]:
        return ""
    return "same sign" if first[0] * second[0] > 0 else "**opposite**"


# --- the paper's study: all claims of two draws -----------------------------------------------------------------------

# a heading alone, or a comparison with its claims about transfer and about flatness, and the case of these
PAPER_ROWS = (
    ("*grammars* (tasks A; B; C)",),
    ("SGD on sampled labels after AdamW − AdamW", "sgd-transfer", "sgd-flatter", ""),
    ("SGD on sampled − on exact labels", "noise-transfer", "noise-flatter", ""),
    ("AdamW, longer − shorter training", "longer-transfer", "longer-flatter", ""),
    ("width 32 − width 16", "larger-transfer", "larger-flatter", "d16 to d32"),
    ("width 64 − width 32", "larger-transfer", "larger-flatter", "d32 to d64"),
    ("adversary − AdamW", "adversary-transfer", "adversary-sharper", ""),
    ("helper − AdamW", "helper-transfer", "helper-flatter", ""),
    ("AdamW − look-up table (probabilities)", "lookup-transfer", "", "probabilities"),
    ("AdamW − look-up table (logarithms)", "lookup-transfer", "", "logarithms"),
    ("*hidden Markov models* (state-2; state-3)",),
    ("SGD on sampled labels after AdamW − AdamW", "hmm-sgd-transfer", "hmm-sgd-flatter", ""),
    ("longer − shorter training", "hmm-longer-transfer", "", ""),
    ("width 32 − width 16", "hmm-larger-transfer", "", "h16 to h32"),
    ("*text that a model wrote* (sentence-order; sentence-source)",),
    ("longer − shorter training", "generated-longer-transfer", "", ""),
    ("width 32 − width 16", "generated-larger-transfer", "generated-larger-flatter", "d16 to d32"),
    ("width 64 − width 32", "generated-larger-transfer", "generated-larger-flatter", "d32 to d64"),
    ("*text* (sentence-source; docstring-module; docstring-kind), fine-tuned",),
    ("longer − shorter training", "web-longer-transfer", "web-longer-flatter", ""),
    ("no dropout or weight decay − both", "text-unregularized-transfer", "text-unregularized-sharper", ""),
    ("SAM − AdamW, without dropout or weight decay", "text-sam-transfer", "text-sam-flatter", ""),
)
PAPER = ("paper-laptop", "paper-laptop-repeated")


def paper_table(draws=PAPER):
    """Return the difference of every claim of the study `paper`, bold where it has a decided verdict; all draws."""
    claims = [
        {each["claim"]: each["answers"] for each in json.loads((RESULTS / name / "summary.json").read_text())["claims"]}
        for name in draws
    ]

    def cell(claim, *, of=lambda case: True):
        each = [[text(answer) for answer in draw.get(claim, ()) if of(answer["case"])] for draw in claims]
        return "<br>".join("; ".join(some) for some in each) if any(each) else ""

    def text(answer):
        found = answer["difference"]
        if found is None:
            return "–"
        shown = with_error(found["value"], found["stderr"]) if found["stderr"] else signed(found["value"], 2)
        return f"**{shown}**" if answer["verdict"] in ("shown", "contradicted") else shown

    yield ("difference", "transfer", "100 examples", "trace", "minimal trace")
    for label, *rest in PAPER_ROWS:
        if not rest:
            yield (label, "", "", "", "")
            continue
        better, flatter, only = rest
        yield (
            label,
            cell(better, of=lambda case, only=only: "100 examples" not in case and only in case),
            cell(better, of=lambda case, only=only: "100 examples" in case and only in case),
            *(
                cell(flatter, of=lambda case, only=only, t=trace: case.startswith(t) and only in case)
                for trace in ("trace", "minimal-trace")
            ),
        )


# --- all claims of two draws of a study -------------------------------------------------------------------------------


def claim_table(draws):
    """Return every difference or slope that the claims of a study are about, and its verdicts; all draws."""
    claims = [json.loads((RESULTS / name / "summary.json").read_text())["claims"] for name in draws]
    yield ("claim", "of", "difference or slope", "verdict")
    for same in zip(*claims, strict=True):
        statement = same[0]["statement"]
        for answers in zip(*(each["answers"] for each in same), strict=True):
            # the one that is judged: with a slope on the loss, the other is beside it
            judged = "adjusted" if same[0].get("loss_rule") == "adjusted" else "difference"
            found = [answer[judged] for answer in answers]
            sizes = "<br>".join(with_error(each["value"], each["stderr"]) if each else "–" for each in found)
            unit = next((each["unit"] for each in found if each), "")
            # why a claim is not tested, and what else was shown, the page says
            verdicts = [a["verdict"] if a["verdict"].startswith("not ") else a["words"] for a in answers]
            yield (statement, answers[0]["case"], f"{sizes} {unit}", "<br>".join(f"*{each}*" for each in verdicts))
            statement = ""


def dose_response_table():
    """Return the claims of the study dose-response."""
    return claim_table(SLOPES)


def optimizers_table():
    """Return the claims of the study optimizers."""
    return claim_table(RATES)


def kept_table(draws, table):
    """Return a row for each row of a kept table of a study: its labels and its estimates, of each draw."""
    rows = [json.loads((RESULTS / name / "summary.json").read_text())[table] for name in draws]
    for same in zip(*rows, strict=True):
        labels = [{key: value for key, value in row.items() if key != "estimates"} for row in same]
        yield labels, [row["estimates"] for row in same]


def rates_associations():
    """Return how two measures go with the outcomes of the study optimizers, with both errors; all draws."""
    yield ("measure", "outcome", "correlation, ± over grammars", "± over optimizers", "given the other", "verdict")
    for labels, estimates in kept_table(RATES, "associations"):
        if labels[0]["measure"] in ("minimal trace", "effective rank"):
            cells = [
                "<br>".join(with_error(each[name]["value"], each[name]["stderr"]) for each in estimates)
                for name in ("over grammars", "over optimizers", "given the other")
            ]
            verdicts = "<br>".join(f"*{each['verdict']}*" for each in labels)
            yield (labels[0]["measure"], labels[0]["outcome"], *cells, verdicts)


def rates_room():
    """Return what probes find with and without training, and how far that is above one-hot tokens; all draws."""
    shown = ("Majority class", "Tokens, one-hot", "Untrained model", "AdamW", "Muon", "SOAP", "Helper", "Adversary")
    head = ("probe of",)
    for labels, estimates in kept_table(RATES, "room"):
        if len(head) == 1:
            head += tuple(f"{key} ({'points' if 'above' in key else '%'})" for key in estimates[0])
            yield head
        if labels[0]["probe of"] in shown:
            cells = [
                "<br>".join(
                    with_error(*(scale * each[key][part] for part in ("value", "stderr")))
                    if each[key]["stderr"]
                    else "0"
                    for each in estimates
                )
                for key in estimates[0]
                for scale in (1 if "above" in key else 100,)
            ]
            yield (labels[0]["probe of"], *cells)


def without_muon_and_soap():
    """Return slopes over the 24 arms of the study optimizers, and over the 18 of the other optimizers; all draws."""
    predictors = {"halving of the minimal trace": ("minimal-trace", -1), "doubling of the rank": ("effective-rank", 1)}
    outcomes = {"few-shot-prefix-4-100": "prefix-4", "few-shot-level-1-100": "level-1", "layer-2": "spans"}
    outcomes = {**{key: (title, 100) for key, title in outcomes.items()}, "int4-rise": ("rise at 4 bits (nats)", 1)}
    yield ("change of", "with each", "24 arms", "95 % interval", "without Muon and SOAP", "95 % interval")
    for with_each, (predictor, sign) in predictors.items():
        for outcome, (title, scale) in outcomes.items():
            cells = []
            for optimizers in (ARMS, [arm for arm in ARMS if arm not in ("muon", "soap")]):
                arms = [f"{arm}{rate}" for arm in optimizers for rate in ("", "-half", "-double")]
                slopes = [
                    [
                        scale * np.polyfit(sign * np.log2(x), y, 1)[0]
                        for x, y in zip(*(by_optimizer(name, key, arms) for key in (predictor, outcome)), strict=True)
                    ]
                    for name in RATES
                ]
                cells += ["<br>".join(with_error(*mean(each)) for each in slopes), "<br>".join(map(interval, slopes))]
            yield (title, with_each, *cells)


def rates_rises():
    """Return the rises at 4 bits in the study optimizers, at each optimizer's usual rate; all draws."""
    return rise_table(RATES)


TABLES = (
    dose_response_table,
    optimizers_table,
    rates_associations,
    rates_room,
    without_muon_and_soap,
    rates_rises,
    paper_table,
    sign_table,
    sign_counts,
    trend_table,
    rank_and_transfer,
    baseline_table,
    association_table,
    rise_table,
)


def markdown(rows):
    """Return rows of cells as a Markdown table, the first as its head."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])


if __name__ == "__main__":
    for table in TABLES:
        print(markdown(table()), end="\n\n")
