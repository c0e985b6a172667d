"""The study brackets: its plan, its verdicts on known numbers, its tables and its figures."""

import dataclasses
import math

import pytest
from known_study import judged, known_results, verdicts

from isoloss import config as configs
from isoloss.paper.brackets import BASE, SCALES, SHAM, STUDY, TARGET_KL, answer, compared, parts, tables
from isoloss.studies.claims import Verdict

LAPTOP = SCALES["laptop"]
FEW = dataclasses.replace(LAPTOP, seeds=LAPTOP.seeds[:5])
PRIMARY = ("noise-imbalance", "|g|, 8 strings (T = 6)")


def results_of(changes=(), scale=FEW):
    """Results in which arms differ by `changes` alone: by arm and key, what is added."""

    def value(unit, arm, key):
        base = 5e-6 if key == "kl" else 0.5
        return base * (1 + 0.01 * math.sin(unit.seed * len(arm) + len(key))) + dict(changes).get((arm, key), 0.0)

    return known_results(scale, value)


FLATTER = {("label-noise", "parts-minimal-trace"): -0.2}
PENALTY = {("penalty-0.003", "r2-abs-g-8"): 0.3}
NOISE = {("label-noise", "r2-abs-g-8"): 0.2}


def test_the_sham_differs_from_a_penalty_by_its_weight_alone():
    unit = LAPTOP.units_of("attention", 6)[0]
    penalty, sham = (LAPTOP.experiments[unit.run(arm)].config.stages[0] for arm in ("penalty-0.001", SHAM))
    assert (penalty.algorithm.weight, sham.algorithm.weight) == (0.001, 0.0)
    assert {run.config.stages[-1].target_kl for run in LAPTOP.experiments.values()} == {TARGET_KL}
    # the base is measured untrained, too
    assert [part.steps for part in LAPTOP.experiments[unit.run(BASE)].measurements] == [("last",), (0,)]
    assert configs.to_dict(penalty) == {
        **configs.to_dict(sham),
        "algorithm": configs.to_dict(penalty)["algorithm"],
    }
    assert penalty.algorithm.parameters == sham.algorithm.parameters == ("*.value.*", "answers.*")
    noise, exact = (LAPTOP.experiments[unit.run(arm)].config.stages[0] for arm in ("label-noise", "no-noise"))
    assert (noise.labels, exact.labels, noise.steps, noise.optimizer) == (
        "sampled",
        "exact",
        exact.steps,
        exact.optimizer,
    )


def test_gates_are_tested_in_order():
    found = verdicts(STUDY, results_of(FLATTER | PENALTY | NOISE))
    shown = [
        ("noise-flatter", "minimal-trace (T = 6)"),
        ("penalty-imbalance", "|g|, 8 strings (T = 6)"),
        PRIMARY,
        ("sham-imbalance", "|g|, 16 strings (T = 8)"),
        ("transformer-noise-imbalance", "|g|, 8 strings (T = 6)"),
    ]
    assert {found[each] for each in shown} == {Verdict.SHOWN}
    assert found["noise-count", "g, 16 strings (T = 6)"] is Verdict.NOT_SHOWN
    # without an effect of noise, that is the result; without the positive control nothing is
    assert verdicts(STUDY, results_of(FLATTER | PENALTY))[PRIMARY] is Verdict.NO_EFFECT
    assert verdicts(STUDY, results_of(FLATTER | NOISE))[PRIMARY] is Verdict.NOT_TESTED
    assert verdicts(STUDY, results_of(PENALTY | NOISE))[PRIMARY] is Verdict.NOT_TESTED


def with_missed(results, arm, seeds):
    """The results with these seeds' runs of an arm at T = 6 far from the target."""
    for seed in seeds:
        end = results.at(f"attention-6-s{seed}-{arm}")
        end["kl"] = dataclasses.replace(end["kl"], value=0.3)
    return results


def test_pairs_that_are_not_at_one_loss_are_left_out_and_counted():
    first, second, third, *_ = FEW.seeds
    results = with_missed(results_of(FLATTER | PENALTY | NOISE), "label-noise", [first])
    cases = {contrast.case: contrast for contrast in compared(results, name="label noise")}
    assert [len(cases[case].pairs) for case in ("T = 6", "T = 8")] == [4, 5]
    assert f"seed {first}" not in cases["T = 6"].clusters
    assert cases["T = 6"].where == "Left out at T = 6: 1 of 5 pairs, as a run missed the target."
    assert verdicts(STUDY, results)[PRIMARY] is Verdict.SHOWN
    helps, _, _ = answer(judged(STUDY, results), results)
    assert helps.detail.endswith(". Left out at T = 6: 1 of 5 pairs, as a run missed the target.")
    label_noise = next(row for row in tables(results)[0].rows if row[0][0] == "SGD (sampled labels)")
    assert label_noise[0][1] == 1
    assert label_noise[1]["r2-abs-g-8"].samples == 4
    # too few are no basis for a verdict
    with_missed(results, "label-noise", [second, third])
    found = verdicts(STUDY, results)
    assert found["noise-flatter", "T = 6"] is Verdict.NOT_TESTED
    assert found["penalty-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.NOT_TESTED  # what comes after it
    parts(results)
    # nor is there anything to draw where no base is at the loss
    for (name, _), end in results.checkpoints.items():
        if name.endswith("-base") and "kl" in end:
            end["kl"] = dataclasses.replace(end["kl"], value=0.3)
    assert not parts(results).figures
    assert all(card.value.startswith("Not tested") for card in answer(judged(STUDY, results), results))


def test_the_demo_tests_what_it_has():
    found = verdicts(STUDY, results_of(FLATTER | PENALTY | NOISE, SCALES["demo"]), "demo")
    assert found[PRIMARY] is Verdict.SHOWN
    assert found["transformer-noise-imbalance", ""] is Verdict.NOT_TESTED
    assert found["sam-imbalance", ""] is Verdict.NOT_TESTED
    assert found["first-phase-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.SHOWN


@pytest.mark.parametrize("name", ["laptop", "demo"])
def test_tables_and_figures_show_the_means(name):
    scale = dataclasses.replace(SCALES[name], seeds=(0, 1, 2))
    results = results_of({("label-noise", "cancellation"): 1.0}, scale)
    by_name = {table.name: table for table in tables(results)}
    arms = {labels[0]: cells for labels, cells in by_name["arms-attention-6"].rows}
    assert arms["SGD (sampled labels)"]["cancellation"].value == pytest.approx(1.5, abs=0.01)
    assert arms["SGD (sampled labels)"]["cancellation"].samples == len(scale.seeds)
    assert ("AdamW (sampled labels)" in arms) == (name == "laptop")
    probes = [labels for labels, _ in by_name["probes-attention-6"].rows]
    assert probes[:3] == [("g", "Tokens"), ("g", "Untrained model"), ("g", "Base")]
    cards = answer(judged(STUDY, results, name), results)
    assert [card.label for card in cards] == [
        "Does label noise help transfer?",
        "Does a penalty on the trace help?",
        "Does SAM, which flattens too?" if name == "laptop" else "Does label noise flatten?",
    ]
    shown = parts(results)
    first = shown.figures[0]
    assert first.title == "Does transfer follow the parts of the trace? (T = 6)"
    values = [row for rows in first.chart["datasets"].values() for row in rows]
    ends = [row["y"] for row in values if row.get("name") == "cancellation" and row.get("x") == scale.sgd_steps]
    assert ends
    assert ends == pytest.approx([1.5] * len(ends), abs=0.01)
    assert "AdamW, SAM" in shown.settings if name == "laptop" else "AdamW, SAM" not in shown.settings
    assert {figure.name for figure in shown.figures} >= {"phases-6", "doses-attention-6", "arms"}
