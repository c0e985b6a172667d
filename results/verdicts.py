"""Judge the claims of a study from its exported table alone: nothing here is isoloss's own code.

    python results/verdicts.py EXPORT [--family N]

EXPORT is a folder that `isoloss study export` wrote. From each difference with its standard error and number of samples
in EXPORT/summary.json, every p-value and verdict is computed again, by the rule that the study's page prints. If the
export has verdicts by that rule, they are compared, and any that differs is an error. An earlier export is judged anew:
its own verdicts are printed beside, as the old ones. Exports whose summary does not say what is claimed are judged by
claims.json, beside this script.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from scipy.stats import t

LEVEL = 0.05
GATES = ("manipulation check", "positive control", "primary")
COMPARED = ("verdict", "p_value", "p_no_effect", "p_adjusted", "p_no_effect_adjusted")


def freedom(estimate):
    """The degrees of freedom of an estimate's error."""
    return max(1.0, (estimate.get("effective_samples") or estimate["samples"]) - 1)


def one_sided(distance, estimate):
    """The p-value of a distance from a null hypothesis: small if it is many standard errors above 0."""
    if estimate["stderr"] == 0:
        return float(distance <= 0)
    return float(t.sf(distance / estimate["stderr"], freedom(estimate)))


def side(claim, value):
    """How far a difference is on the claimed side of the margin."""
    margin = claim.get("margin", 0.0)
    if claim["direction"] == "no change within":
        return margin - abs(value)
    return (value if claim["direction"] == "increase" else -value) - margin


def p_of_difference(claim, estimate):
    """The two-sided p-value against the edge of the margin."""
    beyond = side(claim, estimate["value"])
    if estimate["stderr"] == 0:
        edge_counts = claim["direction"] == "no change within"
        return 0.0 if beyond != 0 or edge_counts else 1.0
    return 2 * one_sided(abs(beyond), estimate)


def tested(claim, answer, margin):
    """The row of an answer: the difference that is judged and its p-values, which are None if it is not tested."""
    adjusts = claim.get("loss_rule") == "adjusted"
    difference = answer["adjusted"] if adjusts else answer["difference"]
    loss = None if adjusts else answer["same_loss"]
    row = {"case": answer["case"], "difference": difference, "old": answer["verdict"], "verdict": "not tested"}
    row |= dict.fromkeys([*COMPARED[1:], "why"])
    in_case = claim.get("case", "") in ("", answer["case"])
    row["role"] = claim.get("role", "secondary") if in_case else "secondary"
    margin = claim.get("loss_margin", margin)
    same = loss is None or one_sided(margin - abs(loss["difference"]["value"]), loss["difference"]) < LEVEL
    if difference is None or not same or answer.get("withheld") == "the weights are identical":
        row["why"] = "no pair" if difference is None else "identical weights" if same else "the losses may differ"
        return row
    row["p_value"] = p_of_difference(claim, difference)
    if "no_effect_within" in claim:
        row["p_no_effect"] = one_sided(claim["no_effect_within"] - abs(difference["value"]), difference)
    return row


def decide(claim, row):
    """Set the verdict by the adjusted p-values."""
    row["verdict"] = "not shown"
    if row["p_adjusted"] < LEVEL:
        beyond = side(claim, row["difference"]["value"])
        at_edge = beyond == 0 and claim["direction"] == "no change within"
        row["verdict"] = "shown" if beyond > 0 or at_edge else "contradicted"
    elif row["p_no_effect_adjusted"] is not None and row["p_no_effect_adjusted"] < LEVEL:
        row["verdict"] = "no effect of interest"


def judge(claims, rows, family):
    """Set the verdicts of all rows: of the gates in their order, then of the secondary tests."""
    factor, ended = 1, None
    for role in GATES:
        for claim in (each for each in claims if each.get("role") == role):
            gate = [row for row in rows[claim["id"]] if row["role"] == role]
            both = "no_effect_within" in claim
            factor *= 2 if both else 1
            for row in gate:
                if ended:
                    withhold(row, ended)
                elif row["p_value"] is not None:
                    # all cases are shown if the one with the largest p is
                    for p, adjusted in (("p_value", "p_adjusted"), ("p_no_effect", "p_no_effect_adjusted")):
                        largest = max(1.0 if one[p] is None else one[p] for one in gate)
                        row[adjusted] = None if row[p] is None else min(1.0, factor * largest)
                    decide(claim, row)
            passing = {"shown"} | ({"contradicted", "no effect of interest"} if role == "primary" else set())
            if not ended and (not gate or any(row["verdict"] not in passing for row in gate)):
                ended = f"{role} not shown"
    secondary = [
        (claim, row)
        for claim in claims
        for row in rows[claim["id"]]
        if row["role"] == "secondary" and row["p_value"] is not None
    ]
    if ended:
        for _, row in secondary:
            withhold(row, ended)
        return
    # Holm's method. "No effect" and "an effect of interest" exclude each other: one test, until both are rejected
    tests = [(row[p], i, p) for i, (_, row) in enumerate(secondary) for p in ("p_value", "p_no_effect")]
    tests = sorted(test for test in tests if test[0] is not None)
    largest = 0.0
    for place, (p, i, kind) in enumerate(tests):
        exhausted = {j for j in range(len(secondary)) if all(j != other for _, other, _ in tests[place:])}
        largest = max(largest, min(1.0, (family - len(exhausted)) * p))
        secondary[i][1][kind.replace("p_value", "p") + "_adjusted"] = min(1.0, factor * largest)
    for claim, row in secondary:
        decide(claim, row)


def withhold(row, why):
    """Take a row's test away, as a gate before it was not passed."""
    if row["p_value"] is not None:
        row |= {**dict.fromkeys(COMPARED[1:]), "verdict": "not tested", "why": why}


def interval(estimate):
    """The 95 % interval in words."""
    if estimate["stderr"] == 0:
        return "exact"
    half = t.ppf(0.975, freedom(estimate)) * estimate["stderr"]
    digits = max(0, 1 - math.floor(math.log10(estimate["stderr"])))
    return f"{estimate['value'] - half:.{digits}f} to {estimate['value'] + half:.{digits}f}"


def short(unit):
    """A unit as the page has it."""
    return {"percentage points": "points", "nats per predicted token": "nats/token"}.get(unit, unit)


def words(claim, row):
    """The verdict in words."""
    within = claim.get("no_effect_within")
    unit = short(row["difference"]["unit"]) if within else ""
    size = f"{within:g} {'point' if (within, unit) == (1, 'points') else unit}" if within else ""
    if row["verdict"] == "shown" and claim["direction"] == "no change within":
        return f"shown: within ± {claim['margin']:g} {short(row['difference']['unit'])}"
    if row["verdict"] == "no effect of interest":
        return f"no effect of {size} or more: shown"
    if row["p_no_effect_adjusted"] is not None and row["p_no_effect_adjusted"] < LEVEL:
        return f"{row['verdict']}, and smaller than {size}"
    return f"{row['verdict']}: {row['why']}" if row["why"] else row["verdict"]


def differing(row, answer):
    """What an export's own answer says otherwise."""
    for key in COMPARED:
        ours, theirs = row[key], answer[key]
        if isinstance(ours, str) or None in (ours, theirs):
            same = ours == theirs
        else:
            same = math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-300)
        if not same:
            yield f"{answer['case']}: {key} is {theirs} in the export, {ours} here"


def stated(summary):
    """The claims of an export, the margin of the loss, and the number of secondary tests; None: it does not say."""
    claims = [{"id": each["claim"], **each} for each in summary["claims"]]
    if all("direction" in each for each in claims):
        margin, family = summary["family"]["loss_margin"], summary["family"]["secondary_tests"]
    else:
        document = json.loads(Path(__file__).with_name("claims.json").read_text())[summary["study"]]
        claims, margin = document["claims"], document.get("same_loss_nats", 0.01)
        family = (summary.get("claims_file") or {}).get("secondary_tests")
    names = {"same_loss_nats": "loss_margin", "at_same_loss": "loss_rule"}
    known = [{names.get(key, key): value for key, value in each.items() if value is not None} for each in claims]
    return known, margin, family


def main(arguments=None):
    """Print a row for each claim and case; return 1 if the export has another verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--family", type=int, help="number of secondary tests, of an export that does not say it")
    options = parser.parse_args(arguments)
    try:
        summary = json.loads((options.export / "summary.json").read_text())
        claims, margin, family = stated(summary)
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}")
    answers = {each["claim"]: each["answers"] for each in summary["claims"]}
    if any(one["verdict"] == "no verdict at this scale" for some in answers.values() for one in some):
        parser.error(f"{options.export} is of a scale at which no verdict is given")
    rows = {each["id"]: [tested(each, answer, margin) for answer in answers[each["id"]]] for each in claims}
    judge(claims, rows, options.family or family)
    wrong = []
    has_old = any("role" not in answer for some in answers.values() for answer in some)
    print(f"| results | claim | case | difference | 95 % interval | unit |{' old verdict |' * has_old} verdict |")
    print(f"|---|---|---|--:|---|---|{'---|' * has_old}---|")
    for claim in claims:
        for row, answer in zip(rows[claim["id"]], answers[claim["id"]], strict=True):
            one = row["difference"]
            effect = ("", "", "") if one is None else (f"{one['value']:.4g}", interval(one), short(one["unit"]))
            old = [row["old"]] * has_old
            cells = (options.export.name, claim["id"], row["case"], *effect, *old, words(claim, row))
            print("|", " | ".join(cell.replace("|", r"\|") for cell in cells), "|")
            wrong += differing(row, answer) if "role" in answer else ()
    for line in wrong:
        print(line, file=sys.stderr)
    if not has_old and not wrong:
        print(f"all {sum(map(len, rows.values()))} verdicts and their p agree with the export", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
