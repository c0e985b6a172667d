import math

import polars as pl
import pytest

from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.data import KL, TRACE, Column, Style, accuracy


def changed(table, column, value, row=0):
    values = table[column].to_list()
    values[row] = value
    return table.with_columns(pl.Series(column, values, strict=False))


def test_intervals_and_texts_are_those_of_the_numbers(table):
    row = data.prepare(table, (KL, TRACE, accuracy("root"))).row(0, named=True)
    assert (row["run"], row["step"]) == ("adamw-d16", 500)
    assert row["kl_low"] == pytest.approx(0.14 - 1.959964 * 0.0012)
    assert row["kl_high"] == pytest.approx(0.14 + 1.959964 * 0.0012)
    assert row["kl_text"] == "0.1400 ± 0.0012"
    assert row["probe_root"] == pytest.approx(50.0)
    assert row["probe_root_text"] == "50.00 ± 0.60"


def test_intervals_of_rows_with_degrees_of_freedom_are_students(table):
    freedom = pl.Series("kl_freedom", [2.0] + [None] * (table.height - 1))
    # an exact value has no degrees of freedom, whatever other measures have
    exact = changed(table, "trace_stderr", 0.0).with_columns(
        freedom, trace_freedom=pl.when(pl.col("trace_stderr") == 0).then(-1.0)
    )
    rows = data.prepare(exact, (KL, TRACE)).rows(named=True)
    few, many = rows[0], rows[1]
    assert few["kl_high"] - few["kl"] == pytest.approx(4.302653 * 0.0012)
    assert few["trace_low"] == few["trace"] == few["trace_high"]
    kl, stderr = table.row(1, named=True)["kl"], table.row(1, named=True)["kl_stderr"]
    assert many["kl_high"] == pytest.approx(kl + 1.959964 * stderr)


def test_rows_go_by_run_in_the_tables_order_and_by_step(table):
    frame = data.prepare(table.reverse(), (KL,))
    assert frame["run"].unique(maintain_order=True).to_list() == ["sgd-d64", "adamw-d64", "adamw-d16"]
    assert frame.filter(pl.col("run") == "adamw-d64")["step"].to_list() == [500, 2000, 8000]


def test_a_measure_that_a_checkpoint_lacks_is_left_out_of_its_panel(table):
    lacking = changed(changed(table, "trace", None), "trace_stderr", None)
    frame = data.prepare(lacking, (KL, TRACE))
    assert frame.row(0, named=True)["trace_text"] == "–"
    assert data.panel(frame, TRACE)[0].height == table.height - 1
    assert data.panel(frame, KL)[0].height == table.height


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kl", math.nan, r"kl of run 'adamw-d16' at step 500 is nan"),
        ("kl", math.inf, "is inf"),
        ("kl", None, "is None with standard error 0.0012"),
        ("kl_stderr", None, "with standard error None"),
        ("kl_stderr", -0.1, "with standard error -0.1"),
        ("kl_stderr", math.nan, "with standard error nan"),
        ("trace", 0.0, "trace of run 'adamw-d16' at step 500 is 0.0: it cannot be drawn on a logarithmic axis"),
        ("step", 2000, "step 2000 of run 'adamw-d16' twice"),
        ("group", None, "a row without its group"),
    ],
)
def test_bad_rows_are_refused_by_name(table, column, value, message):
    with pytest.raises(IsolossError, match=message):
        data.prepare(changed(table, column, value), (KL, TRACE))


def test_missing_columns_no_rows_and_empty_panels_are_refused(table):
    with pytest.raises(IsolossError, match=r"no column step, trace_stderr; its columns: run, group"):
        data.prepare(table.drop("step", "trace_stderr"), (TRACE,))
    with pytest.raises(IsolossError, match="no row"):
        data.prepare(table.clear(), (KL,))
    empty = table.with_columns(pl.lit(None, pl.Float64).alias("trace"), pl.lit(None, pl.Float64).alias("trace_stderr"))
    with pytest.raises(IsolossError, match="no checkpoint has trace"):
        data.panel(data.prepare(empty, (TRACE,)), TRACE)
    with pytest.raises(IsolossError, match="no column group, size, parameters"):
        Style.of(pl.DataFrame({"run": ["a"]}))


def test_two_columns_that_become_one_field_are_refused(table):
    twice = table.with_columns(
        pl.col("probe-prefix-4").alias("probe-prefix.4"), pl.lit(0.1).alias("probe-prefix.4_stderr")
    )
    with pytest.raises(IsolossError, match="two measures share the field probe_prefix_4"):
        data.prepare(twice, (accuracy("prefix-4"), accuracy("prefix.4")))


def test_axes_hold_every_bar(table):
    rows, ends = data.panel(data.prepare(table, (KL, TRACE)), KL, TRACE)
    for measure in (KL, TRACE):
        assert ends[measure][0] < rows[f"{measure.field}_low"].min()
        assert ends[measure][1] > rows[f"{measure.field}_high"].max()
    single, ends = data.panel(data.prepare(changed(table[:1], "kl_stderr", 0.0), (KL,)), KL)
    assert ends[KL][0] < single["kl"][0] < ends[KL][1]


def test_an_interval_that_reaches_0_goes_down_a_logarithmic_axis_to_a_tenth_of_the_value(table):
    for stderr, low in ((21.0, 420 - 1.959964 * 21), (1e4, 42)):
        drawn = data.prepare(changed(table, "trace_stderr", stderr), (TRACE,))
        ends = drawn["trace_low"][0], drawn["trace_high"][0]
        assert ends == pytest.approx((low, 420 + 1.959964 * stderr))
    linear = Column("trace", "Trace", "nats", log=False)
    wide = changed(table, "trace_stderr", 1e4)
    assert data.prepare(wide, (linear,))["trace_low"][0] == pytest.approx(420 - 1.959964e4)


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((7.6, 550), [10, 20, 50, 100, 200, 500]),
        ((0.5, 6e5), [1, 10, 100, 1e3, 1e4, 1e5]),
        ((55, 280), [70, 100, 150, 200]),  # not 60, 70, 80, 90, 100, whose labels would run together
        ((33, 62), [40, 50, 60]),
        ((21, 36), [25, 30, 35]),
        ((31, 56), [35, 40, 45, 50, 55]),
        ((31, 33), [31, 32, 33]),
    ],
)
def test_logarithmic_ticks(ends, ticks):
    assert data.log_ticks(ends) == pytest.approx(ticks)


def test_size_means_average_over_runs(table):
    rows, _ = data.panel(data.prepare(table, (KL,)), KL)
    means = data.size_means(rows, KL).filter(pl.col("group") == "AdamW")
    assert means["parameters"].to_list() == [21_344, 182_944]
    assert means["kl"].to_list() == pytest.approx([(0.14 + 0.1075 + 0.075) / 3, (0.11 + 0.0775 + 0.045) / 3])


def test_groups_keep_their_colors_which_come_again_and_too_many_sizes_are_refused(table):
    style = Style.of(table)
    assert list(style.colors) == ["AdamW", "SGD continuation"]
    assert list(style.markers) == ["d16", "d64"]
    assert len(set(data.COLORS)) == len(data.COLORS)
    many = pl.DataFrame({"group": [f"g{i}" for i in range(31)], "size": "d16", "parameters": 1})
    assert Style.of(many).colors["g30"] == data.COLORS[0]
    sizes = pl.DataFrame({"group": "g", "size": [f"d{i}" for i in range(7)], "parameters": range(7)})
    with pytest.raises(IsolossError, match="7 values of size, but only 6 markers"):
        Style.of(sizes)


def test_bars_and_axes_of_accuracies_stay_within_0_and_100_percent(table):
    root = accuracy("root")
    rows = table.with_columns(
        pl.Series("probe-root", [0.99] * table.height), pl.Series("probe-root_stderr", [0.02] * table.height)
    )
    frame, ends = data.panel(data.prepare(rows, (root,)), root)
    assert set(frame["probe_root_high"]) == {100.0}
    assert frame["probe_root_low"][0] == pytest.approx(99 - 1.959964 * 2)
    assert ends[root][1] == 100.0
    assert 90 < ends[root][0] < frame["probe_root_low"][0]
