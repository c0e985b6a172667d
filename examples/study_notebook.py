"""Read a study's results: its values, the claims with intervals, flatness against transfer, and its tables.

    marimo edit examples/study_notebook.py -- --study results/same-loss-27-grammars-repeated

`--study` is a folder that `isoloss study export` wrote, or the folder of a registered study. With `python` instead of
`marimo edit`, it runs without a browser.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")

with app.setup:
    from pathlib import Path

    import altair as alt
    import marimo as mo
    import polars as pl

    import isoloss


@app.cell
def _():
    kept = Path(__file__).resolve().parent.parent / "results" / "same-loss-27-grammars-repeated"
    folder = mo.ui.text(value=str(mo.cli_args().get("study") or kept), label="Folder of the results", full_width=True)
    folder
    return (folder,)


@app.cell
def _(folder):
    study = isoloss.read_study(folder.value)
    made = study.provenance
    heading = mo.md(f"# {made['study']} at scale {made['scale']}, seed offset {made['seed_offset']}")
    mo.vstack([heading, mo.md("Accuracies are fractions from 0 to 1."), mo.ui.table(study.values, selection=None)])
    return (study,)


@app.cell
def _(study):
    tested = study.claims.drop_nulls("difference").with_columns(test=pl.concat_str("claim", "case", separator=" "))
    base = alt.Chart().encode(y=alt.Y("test:N", sort=None, title=None), color=alt.Color("verdict:N"))
    ends = base.mark_rule().encode(x=alt.X("low:Q", title="difference, with its 95 % interval"), x2="high:Q")
    points = base.mark_point(filled=True).encode(x="difference:Q", tooltip=["test:N", "difference:Q", "adjusted p:Q"])
    claims = (
        alt.layer(ends, points, data=tested).facet("unit:N", columns=1).resolve_scale(x="independent", y="independent")
    )
    mo.vstack([mo.md("## Claims"), mo.ui.table(study.claims, selection=None), claims])
    return (claims,)


@app.cell
def _(study):
    units = dict(study.values.select("estimate", "unit").iter_rows())
    first = next((name for name in units if "trace" in name), next(iter(units)))
    second = next((name for name in units if name.startswith("probe")), next(reversed(units)))
    x = mo.ui.dropdown(list(units), value=first, label="x")
    y = mo.ui.dropdown(list(units), value=second, label="y")
    mo.vstack([mo.md("## Flatness against transfer"), mo.hstack([x, y], justify="start")])
    return units, x, y


@app.cell
def _(study, units, x, y):
    both = {"x": x.value, "x error": f"{x.value}_stderr", "y": y.value, "y error": f"{y.value}_stderr"}
    checkpoints = study.wide().select("run", "group", "step", **both).drop_nulls()
    horizontal, vertical = (
        axis(name, title=f"{each.value} ({units[each.value]})").scale(zero=False)
        for axis, name, each in ((alt.X, "x:Q", x), (alt.Y, "y:Q", y))
    )
    encoding = {"x": horizontal, "y": vertical, "color": "group:N", "tooltip": checkpoints.columns}
    scatter = alt.Chart(checkpoints).mark_point().encode(**encoding).interactive()
    scatter
    return checkpoints, scatter


@app.cell
def _(study):
    table = mo.ui.dropdown(list(study.tables), value=next(iter(study.tables), None), label="Table")
    table
    return (table,)


@app.cell
def _(study, table):
    mo.stop(table.value is None)
    rows = study.tables[table.value]
    mo.vstack([mo.ui.table(rows, selection=None), mo.download(rows.write_csv().encode(), f"{table.value}.csv")])
    return (rows,)


if __name__ == "__main__":
    app.run()
