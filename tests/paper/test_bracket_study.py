"""The study brackets: its plan, its verdicts on known numbers, its tables and its figures."""

import dataclasses
import functools
import math

import pytest

from isoloss import config as configs
from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.paper.brackets import BASE, SCALES, SHAM, STUDY, TARGET_KL, answer, compared, parts, tables
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Verdict, judge_claims
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import check
from isoloss.studies.results import CheckpointEstimate, Results

LAPTOP = SCALES["laptop"]
FEW = dataclasses.replace(LAPTOP, seeds=LAPTOP.seeds[:5])
PARTS = ("attention-trace", "neurons-trace", "neurons-minimal-trace", "parts-trace", "parts-minimal-trace")
PRIMARY = ("noise-imbalance", "|g|, 8 strings (T = 6)")


def keys_of(measure, length):
    """The names of the estimates of a measure."""
    shots = [n for n in (4, 8, 16, 32, 64) if n < 2**length]
    probes = [f"r2-{task}-{n}" for n in shots for task in ("g", "abs-g", "zero", "parity")]
    return {
        "loss": ["entropy", "kl", "loss"],
        "bracket-parts": [*PARTS, "cancellation", "bound-ratio"],
        "bracket-probes": probes,
        "bracket-tokens": [f"tokens-{name}" for name in probes],
        "features": ["effective-dimension", "effective-rank", "cka-truth"],
    }.get(measure, [measure])


@functools.cache
def settings(measure, seed):
    return settings_of(measure, {"loss_sentences": "all", "feature_sentences": "all", "seed": seed})


def known_results(folder, scale=FEW, changes=None):
    """Results in which arms differ by `changes` alone: by the end of an arm's name and key, what is added."""
    checkpoints = {}
    for number, (name, experiment) in enumerate(scale.experiments.items()):
        arm, length = name.split("-", 3)[3], experiment.config.language.length
        for part in experiment.measurements:
            for step in experiment.steps(part):
                at = checkpoints.setdefault((name, step), {})
                for measure in part.measures:
                    for key in keys_of(measure, length):
                        value = (5e-6 if key == "kl" else 0.5) * (1 + 0.01 * math.sin(7 * number + len(key)))
                        at[key] = CheckpointEstimate.of(
                            Estimate(
                                value=value + (changes or {}).get((arm, key), 0.0),
                                stderr=0.0,
                                samples=0,
                                unit="R²" if "r2-" in key else "nats per predicted token",
                                num_predictions=10,
                                method="known",
                            ),
                            inputs="the same",
                            settings=settings(measure, part.settings["seed"]),
                            examples={},
                        )
    return Results(scale, checkpoints, folder)


def judged(results, scale="laptop"):
    return judge_claims(STUDY.claims, results, loss_margin=STUDY.loss_margin, has_verdicts=STUDY.has_verdicts(scale))


def verdicts(results, scale="laptop"):
    return {(result.claim.id, one.case): one.verdict for result in judged(results, scale) for one in result.answers}


FLATTER = {("label-noise", "parts-minimal-trace"): -0.2}
PENALTY = {("penalty-0.003", "r2-abs-g-8"): 0.3}


@pytest.mark.parametrize("name", list(SCALES))
def test_every_run_can_be_trained_and_is_planned_after_what_it_goes_on_from(tmp_path, name):
    scale = SCALES[name]
    check(StudyFolder(STUDY, tmp_path, name).plan())
    for run, experiment in scale.experiments.items():
        configs.check(experiment.config)
        assert experiment.config.stages[-1].target_kl == TARGET_KL
        assert all(start in scale.experiments for start in experiment.after), run
    fingerprints = [experiment.fingerprint for experiment in scale.experiments.values()]
    assert len({*fingerprints}) == len(fingerprints)


def test_arms_of_a_seed_share_it_and_repetitions_share_none():
    def seeds(scale):
        return {experiment.config.seed for experiment in scale.experiments.values()}

    own = seeds(LAPTOP)
    # a base and what goes on from it, for each of the three models
    assert len(own) == 2 * 3 * len(LAPTOP.seeds)
    assert not own & seeds(LAPTOP.with_seed_offset(1))
    measured = {part.settings["seed"] for e in LAPTOP.experiments.values() for part in e.measurements}
    assert not measured & own


def test_the_sham_differs_from_a_penalty_by_its_weight_alone():
    unit = LAPTOP.units_of("attention", 6)[0]
    penalty, sham = (LAPTOP.experiments[unit.run(arm)].config.stages[0] for arm in ("penalty-0.001", SHAM))
    assert (penalty.algorithm.weight, sham.algorithm.weight) == (0.001, 0.0)
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


def test_gates_are_tested_in_order(tmp_path):
    noise = {("label-noise", "r2-abs-g-8"): 0.2}
    found = verdicts(known_results(tmp_path, changes=FLATTER | PENALTY | noise))
    assert found["noise-flatter", "minimal-trace (T = 6)"] is Verdict.SHOWN
    assert found["penalty-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.SHOWN
    assert found[PRIMARY] is Verdict.SHOWN
    assert found["sham-imbalance", "|g|, 16 strings (T = 8)"] is Verdict.SHOWN
    assert found["noise-count", "g, 16 strings (T = 6)"] is Verdict.NOT_SHOWN
    assert found["transformer-noise-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.SHOWN
    # without an effect of noise, that is the result; without the positive control nothing is
    assert verdicts(known_results(tmp_path, changes=FLATTER | PENALTY))[PRIMARY] is Verdict.NO_EFFECT
    assert verdicts(known_results(tmp_path, changes=FLATTER | noise))[PRIMARY] is Verdict.NOT_TESTED
    assert verdicts(known_results(tmp_path, changes=PENALTY | noise))[PRIMARY] is Verdict.NOT_TESTED


def with_missed(results, arm, seeds):
    """The results with these seeds' runs of an arm at T = 6 far from the target."""
    for seed in seeds:
        end = results.at(f"attention-6-s{seed}-{arm}")
        end["kl"] = dataclasses.replace(end["kl"], value=0.3)
    return results


def test_pairs_that_are_not_at_one_loss_are_left_out_and_counted(tmp_path):
    first, second, third, *_ = FEW.seeds
    noise = {("label-noise", "r2-abs-g-8"): 0.2}
    results = with_missed(known_results(tmp_path, changes=FLATTER | PENALTY | noise), "label-noise", [first])
    cases = {contrast.case: contrast for contrast in compared(results, name="label noise")}
    assert [len(cases[case].pairs) for case in ("T = 6", "T = 8")] == [4, 5]
    assert f"seed {first}" not in cases["T = 6"].clusters
    assert cases["T = 6"].where == "Left out at T = 6: 1 of 5 pairs, as a run missed the target."
    assert verdicts(results)[PRIMARY] is Verdict.SHOWN
    helps, _, _ = answer(judged(results), results)
    assert helps.detail.endswith(". Left out at T = 6: 1 of 5 pairs, as a run missed the target.")
    label_noise = next(row for row in tables(results)[0].rows if row[0][0] == "SGD (sampled labels)")
    assert label_noise[0][1] == 1
    assert label_noise[1]["r2-abs-g-8"].samples == 4
    # too few are no basis for a verdict
    with_missed(results, "label-noise", [second, third])
    found = verdicts(results)
    assert found["noise-flatter", "T = 6"] is Verdict.NOT_TESTED
    assert found["penalty-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.NOT_TESTED  # what comes after it
    parts(results)
    # nor is there anything to draw where no base is at the loss
    for (name, _), end in results.checkpoints.items():
        if name.endswith("-base") and "kl" in end:
            end["kl"] = dataclasses.replace(end["kl"], value=0.3)
    assert not parts(results).figures
    assert all(card.value.startswith("Not tested") for card in answer(judged(results), results))


def test_the_demo_tests_what_it_has(tmp_path):
    noise = {("label-noise", "r2-abs-g-8"): 0.2}
    found = verdicts(known_results(tmp_path, SCALES["demo"], FLATTER | PENALTY | noise), "demo")
    assert found[PRIMARY] is Verdict.SHOWN
    assert found["transformer-noise-imbalance", ""] is Verdict.NOT_TESTED
    assert found["sam-imbalance", ""] is Verdict.NOT_TESTED
    assert found["first-phase-imbalance", "|g|, 8 strings (T = 6)"] is Verdict.SHOWN


@pytest.mark.parametrize("name", ["laptop", "demo"])
def test_tables_and_figures_show_the_means(tmp_path, name):
    scale = dataclasses.replace(SCALES[name], seeds=(0, 1, 2))
    results = known_results(tmp_path, scale, {("label-noise", "cancellation"): 1.0})
    by_name = {table.name: table for table in tables(results)}
    arms = {labels[0]: cells for labels, cells in by_name["arms-attention-6"].rows}
    assert arms["SGD (sampled labels)"]["cancellation"].value == pytest.approx(1.5, abs=0.01)
    assert arms["SGD (sampled labels)"]["cancellation"].samples == len(scale.seeds)
    assert ("AdamW (sampled labels)" in arms) == (name == "laptop")
    probes = [labels for labels, _ in by_name["probes-attention-6"].rows]
    assert probes[:3] == [("g", "Tokens"), ("g", "Untrained model"), ("g", "Base")]
    cards = answer(judged(results, name), results)
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


def test_the_base_is_measured_untrained_too():
    unit = LAPTOP.units_of("attention", 8)[0]
    parts = LAPTOP.experiments[unit.run(BASE)].measurements
    assert [part.steps for part in parts] == [("last",), (0,)]
