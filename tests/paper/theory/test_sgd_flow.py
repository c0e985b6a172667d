"""SGD against the flow: what the rows are, what is extrapolated, and what the verdicts let through."""

import dataclasses
import math
import re

import numpy as np
import pytest

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.sgd_flow import extrapolated, judge, masked_lm, simulate, steps_until, study, two_parameters
from isoloss.statistics.estimate import Estimate

SMALL = two_parameters(trajectories=2048, batch_sizes=(1, 2), step_sizes=(0.1, 0.05, 0.025), times=(0.5, 2.0), seed=1)
FEW = dataclasses.replace(SMALL, trajectories=16, step_sizes=(0.2, 0.1), times=(0.5,))
MASKED = masked_lm(trajectories=128, batch_sizes=(1, 2), times=(0.5, 1.0), seed=0)


@pytest.fixture(scope="module")
def found():
    return study(SMALL)


@pytest.fixture(scope="module")
def found_masked():
    return study(MASKED)


def verdicts(statements):
    return [statement.shown for statement in statements]


def statements_of(found, settings=SMALL, start=None, **more):
    start = start or settings.flow_trace(0.0, 1)
    return judge(
        "model", found.rows, found.limits, found.control, coefficient=settings.coefficient, start=start, **more
    )


def judged(found, settings=SMALL, **changes):
    return verdicts(statements_of(dataclasses.replace(found, **changes), settings))


def estimate(value, stderr=0.01):
    return Estimate(value=value, stderr=stderr, samples=9, unit="", num_predictions=9, method="m")


def test_everything_is_shown(found):
    assert verdicts(found.statements) == [True] * 5
    assert (len(found.rows), len(found.limits)) == (2 * 3 * 2, 2 * 2)
    assert all(statement.text.startswith("two parameters: ") for statement in found.statements)


def test_everything_is_shown_of_the_masked_language_model(found_masked):
    assert verdicts(found_masked.statements) == [True] * 5
    last = found_masked.limits[1]  # B = 1, K = 1
    assert last.coefficient.stderr < 0.02
    assert last.trace.value < 0.75 * found_masked.control[0]
    single = [row.distance.value for row in found_masked.rows if row.batch_size == 1 and row.time == pytest.approx(1)]
    assert single[0] > 1.5 * single[1] > 2.2 * single[2]  # as the step size


@pytest.mark.parametrize("coefficient", [0.125, 0.5])
def test_a_wrong_coefficient_is_not_shown_of_the_masked_language_model(found_masked, coefficient):
    settings = dataclasses.replace(MASKED, coefficient=coefficient)
    again = study(dataclasses.replace(settings, trajectories=64, batch_sizes=(1,), step_sizes=(0.05, 0.025)))
    assert not any(verdicts(again.statements)[:4])
    # what is fitted does not depend on what is checked
    assert judged(found_masked, settings)[1:3] == [False, False]


@pytest.mark.parametrize("settings", [SMALL, MASKED], ids=["two parameters", "masked LM"])
def test_without_label_noise_only_what_is_off_the_minimizers_moves(settings):
    model, generator = settings.model, np.random.default_rng(0)
    starts = np.stack([model.minimizer, model.flow(0.3)])
    (end,) = simulate(model, starts, step_size=0.05, times=[1.0], generator=generator, exact=True)
    assert end == pytest.approx(starts, abs=1e-6)
    beside = model.beside
    (moved,) = simulate(model, beside, step_size=0.05, times=[0.1], generator=generator, exact=True)
    assert np.linalg.norm(moved - beside, axis=1).min() > 1e-3


def test_a_row_by_hand():
    """The only block's trajectories, simulated again, with the flow's point and all shares."""
    row = study(FEW).rows[3]  # B = 2, the smaller step size
    model, n, size = FEW.model, FEW.trajectories, {"step_size": 0.1, "batch_size": 2}
    generator = np.random.default_rng(seeds.derive(1, "sgd-flow", 2, "0.1", 0))
    (theta,) = simulate(model, np.tile(model.minimizer, (n, 1)), **size, times=[0.5], generator=generator)
    assert row.time == pytest.approx(0.5)
    assert row.trace.value == pytest.approx(np.mean(model.trace(theta)))
    assert row.trace.stderr == pytest.approx(np.std(model.trace(theta), ddof=1) / math.sqrt(n))
    point = model.flow(0.5 / (4 * 2))
    assert row.flow_trace == pytest.approx(model.trace(point[None])[0], rel=1e-12)
    squares = [math.dist(one, point) ** 2 / math.dist(point, model.minimizer) ** 2 for one in theta]
    assert row.distance.value == pytest.approx(np.mean(squares))
    assert row.coefficient.value == pytest.approx(2 * model.reached(theta).value / 0.5)
    assert row.error == pytest.approx(row.trace.value / row.flow_trace - 1)
    assert row.error_percent.endswith(" %")
    assert float(row.error_percent.split()[0]) == pytest.approx(100 * row.error, abs=0.5)


def test_limit_is_the_parabola_through_three_step_sizes(found):
    rows = [row for row in found.rows if row.batch_size == 1 and row.time == pytest.approx(2)]
    limit = found.limits[1]
    for of in (lambda row: row.coefficient.value, lambda row: row.distance.value, lambda row: row.error):
        at_zero = np.polyval(np.polyfit(SMALL.step_sizes, [of(row) for row in rows], 2), 0)
        assert of(limit) == pytest.approx(at_zero, rel=1e-9, abs=1e-12)
    assert (limit.batch_size, limit.step_size, limit.time) == (1, 0.0, 2.0)
    assert abs(limit.coefficient.value - 0.25) < 4 * limit.coefficient.stderr < 0.02


def test_the_same_seed_gives_the_same_numbers():
    assert study(FEW) == study(FEW)
    assert study(FEW).rows != study(dataclasses.replace(FEW, seed=2)).rows


def test_more_trajectories_than_a_block():
    done = []
    settings = dataclasses.replace(FEW, trajectories=4097, batch_sizes=(1,))
    found = study(settings, progress=done.append)
    assert [row.trace.samples for row in found.rows] == [4097, 4097]
    assert settings.num_steps == 2 * (steps_until(0.5, 0.2) + steps_until(0.5, 0.1))
    assert done == list(range(1, settings.num_steps + 1))
    # a block draws answers of its own: those of the first one again would give the same mean
    one, two = (study(dataclasses.replace(settings, trajectories=n)).rows[0].trace.value for n in (4096, 8192))
    assert abs(two / one - 1) > 1e-9


@pytest.mark.parametrize("coefficient", [0.5, 0.125, 0.26])
def test_a_wrong_coefficient_is_not_shown(coefficient):
    found = study(dataclasses.replace(SMALL, coefficient=coefficient))
    assert verdicts(found.statements)[1:3] == [False, False]
    if coefficient != 0.26:  # which is too near for the traces of so few trajectories to tell
        assert verdicts(found.statements) == [False] * 4 + [True]


def test_the_control_comes_back_to_the_minimizers(found, found_masked):
    for result, settings in ((found, SMALL), (found_masked, MASKED)):
        assert len(result.control) == 1 + len(settings.times)
        off = float(settings.model.trace(settings.model.beside).mean())
        assert abs(result.control[0] - off) > 1e-3
        assert result.control == pytest.approx([result.control[0]] * 3, rel=1e-6)


def test_extrapolation_from_two_step_sizes_is_a_line():
    at_zero = extrapolated([0.2, 0.1], [estimate(3.0, 0.3), estimate(2.5, 0.2)])
    assert at_zero.value == pytest.approx(2.0)
    assert at_zero.stderr == pytest.approx(math.hypot(0.3, 2 * 0.2))


def off_the_flow(limit):
    return dataclasses.replace(limit.trace, value=limit.flow_trace + 4 * limit.trace.stderr)


def in_limit(place, **of):
    """A change of one limit: B = 1 at both times, then B = 2."""

    def change(found):
        limits = list(found.limits)
        limits[place] = dataclasses.replace(limits[place], **{name: make(limits[place]) for name, make in of.items()})
        return dataclasses.replace(found, limits=tuple(limits))

    return change


def in_rows(**of):
    """A change of every row."""

    def change(found):
        rows = [dataclasses.replace(row, **{name: make(row) for name, make in of.items()}) for row in found.rows]
        return dataclasses.replace(found, rows=tuple(rows))

    return change


OFF = "off by more than 3 standard errors"
TOO_LARGE = r"step sizes too large to extrapolate from \(take smaller ones\)"
DOES_NOT_FALL = "from eta = 0.1 to 0.025 it does not fall that fast"
IMPRECISE = r"the run is too imprecise to tell: take about [\d,]+ trajectories"


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        # traces: a constant rest, a wrong limit, large errors
        (
            in_rows(trace=lambda row: dataclasses.replace(row.trace, value=row.trace.value - 0.02 * row.flow_trace)),
            {0: DOES_NOT_FALL},
        ),
        (
            in_limit(0, trace=off_the_flow),
            {0: rf"{OFF} at K = 0\.5: another coefficient, or {TOO_LARGE}"},
        ),
        (
            in_rows(trace=lambda row: dataclasses.replace(row.trace, stderr=0.01 * row.flow_trace)),
            {0: IMPRECISE},
        ),
        # the batch size must slow the flow; a coefficient that is off, and one that says nothing
        (in_limit(3, coefficient=lambda _: estimate(0.28, 0.005)), {2: f"{OFF} for B = 2"}),
        (in_limit(1, coefficient=lambda _: estimate(0.28, 0.005)), {1: OFF, 2: f"{OFF} for B = 1"}),
        (in_limit(1, coefficient=lambda _: estimate(0.25, 0.03)), {1: IMPRECISE, 2: IMPRECISE}),
        (
            lambda found: dataclasses.replace(found, rows=found.rows[:6], limits=found.limits[:2]),
            {2: "one batch size alone cannot tell"},
        ),
        # parameters: a constant rest, a wrong limit, large errors
        (
            in_rows(distance=lambda row: dataclasses.replace(row.distance, value=row.distance.value + 1.0)),
            {3: DOES_NOT_FALL},
        ),
        (in_limit(1, distance=lambda _: estimate(0.05, 0.01)), {3: f"{OFF}: another coefficient, or {TOO_LARGE}"}),
        (
            in_limit(1, distance=lambda _: estimate(-0.05, 0.01)),
            {3: f"{OFF}, and no squared distance is below 0: {TOO_LARGE}"},
        ),
        (in_rows(distance=lambda row: dataclasses.replace(row.distance, stderr=row.distance.value)), {3: IMPRECISE}),
        # the control
        (lambda found: dataclasses.replace(found, control=(0.8, 0.8, 0.799)), {4: "it changes by more"}),
    ],
)
def test_what_is_not_shown_says_why(found, spoil, lost):
    statements = statements_of(spoil(found))
    assert {number for number, statement in enumerate(statements) if not statement.shown} == set(lost)
    for number, reason in lost.items():
        assert statements[number].verdict == "not shown"
        assert re.search(f"; {reason}$", statements[number].evidence)
    assert not any(re.search(f"; ({OFF}|{DOES_NOT_FALL}|{IMPRECISE})", one.evidence) for one in statements if one.shown)


def test_an_error_above_its_limit_within_its_sampling_error_does_not_tell(found):
    """Three standard errors further down, it would be below."""

    def trace(row):
        return dataclasses.replace(
            row.trace, value=row.trace.value - 0.02 * row.flow_trace, stderr=0.01 * row.flow_trace
        )

    first = statements_of(in_rows(trace=trace)(found))[0]
    assert first.verdict == "not shown"
    assert re.search(f"; {IMPRECISE}$", first.evidence)
    assert DOES_NOT_FALL not in first.evidence


def test_a_drift_upwards_is_no_control(found):
    last = statements_of(found, start=0.5)[4]
    assert last.verdict == "not shown"
    assert last.evidence.endswith("; sampled answers take nothing off")


def test_an_error_that_passes_through_0_falls(found):
    """Near 0 at the middle step size, it is larger at the smallest."""

    def trace(row):
        error = {0.1: 0.06, 0.05: 0.0, 0.025: -0.01}[row.step_size]
        return dataclasses.replace(row.trace, value=(1 + error) * row.flow_trace)

    assert statements_of(in_rows(trace=trace)(found))[0].shown


def test_more_trajectories_are_not_advised_where_the_error_does_not_fall(found):
    swapped = dataclasses.replace(found, rows=(*found.rows[4:6], *found.rows[2:4], *found.rows[:2], *found.rows[6:]))
    off = tuple(dataclasses.replace(limit, trace=off_the_flow(limit)) for limit in found.limits)
    for limits, told in ((off, True), (found.limits, False)):
        first = statements_of(dataclasses.replace(swapped, limits=limits))[0]
        assert not first.shown
        assert ("which more trajectories do not change" in first.evidence) == told
    # when SGD settles, once, against the end of the run
    spoiled = dataclasses.replace(
        swapped, limits=tuple(dataclasses.replace(one, coefficient=estimate(0.3)) for one in off)
    )
    first, second, *_ = statements_of(spoiled, least_eigenvalue=0.002)
    at = "h = 0.002, at K = 12.5 for eta = 0.025 and 50 for eta = 0.1; the run ends at K = 2. If that is too late, try"
    assert at in first.evidence
    assert second.evidence.endswith("which more trajectories do not change")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_sizes": (0.1,)}, "the step sizes are 0.1; give at least 2"),
        ({"step_sizes": (0.05, 0.1)}, "from large to small"),
        ({"step_sizes": (0.1, math.nan, 0.05)}, "the step sizes are 0.1, nan, 0.05"),
        ({"times": ()}, "the times are none"),
        ({"times": (1.0, 0.5)}, "must be positive and increase"),
        ({"times": (0.001,)}, "less than one step"),
        ({"batch_sizes": (0, 1)}, "the batch sizes are 0, 1"),
        ({"trajectories": 1}, "trajectories is 1"),
        ({"coefficient": -0.25}, "the coefficient is -0.25"),
        ({"start": 10.0}, r"the step size 0\.1 is too large for a Hessian of trace"),
        ({"start": 1e200}, r"the step size 0\.1 is too large for a Hessian of trace inf"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(IsolossError, match=message):
        two_parameters(**wrong)


def test_masked_lm_with_large_steps_is_refused():
    with pytest.raises(IsolossError, match=r"the step size 0\.2 is too large for a Hessian of trace 6\.77"):
        masked_lm(step_sizes=(0.2, 0.1))
