import json
import re
from html.parser import HTMLParser

import jinja2
import polars as pl
import pytest

from isoloss.errors import IsolossError
from isoloss.report import charts, html
from isoloss.report.data import KL, TRACE, accuracy

HOSTILE = '"><script>alert(1)</script>'


class Reader(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, document):
        super().__init__()
        self.elements, self.texts, self._open = [], [], None
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        self.texts.append((self._open, data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag):
        return [text for name, text in self.texts if name == tag]


def make_page(table, text="plain", name="a b"):
    verdicts = ("shown", "not shown", "contradicted", "no verdict at this scale")
    several = html.ClaimSection(
        id="flatter",
        statement=text,
        paper=text,
        verdict="; ".join(f"{verdict} for {text}" for verdict in verdicts),
        columns=("case", "verdict", f"{text} (nats per token)"),
        rows=tuple((text, verdict, "-40.0 ± 2.0") for verdict in verdicts),
        explanations=(text, "They were compared."),
    )
    untested = html.ClaimSection(
        id="other", statement=text, paper=text, verdict="not tested", columns=(), rows=(), explanations=(text,)
    )
    figure = html.Figure(
        name=name,
        title=text,
        chart=charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root")))),
        caption=text,
    )
    return html.Page(
        title=text,
        lead=(text,),
        findings=(html.Finding(headline=text, detail=text),),
        claims=(several, untested),
        rule=("An interval decides.", text),
        warning=text,
        answer=(text, "And so on."),
        figures=(figure, figure),
        checkpoints=html.checkpoint_table(table),
        command=text,
        settings={text: text},
        tables={text: html.Table(caption=text, columns=(text,), rows=((html.Cell(text=text, sort=1.5),),))},
    )


@pytest.fixture(scope="module")
def document(table):
    return html.render(make_page(table))


def test_nothing_is_loaded_from_the_network(document):
    reader = Reader(document)
    assert not reader.all("link")
    assert not reader.all("iframe")
    assert not [a for a in reader.all("script") if "src" in a]
    assert [a["src"] for a in reader.all("img")] == ["figures/a%20b.png"] * 2
    for _, attributes in reader.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert not re.match(r"\s*([a-z][a-z0-9+.-]*:|//)", attributes.get(name) or "", re.IGNORECASE)
    for style in reader.text("style"):
        assert "@import" not in style
        assert "url(" not in style
    policy = next(a["content"] for a in reader.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_links_lead_to_configs_and_downloads(document, table):
    links = [a["href"] for a in Reader(document).all("a")]
    assert links[:4] == ["figures/a%20b.pdf", "figures/a%20b.png"] * 2
    assert sorted(links[4:]) == sorted(table["path"])


def test_the_specs_in_the_page_are_the_charts(document, table):
    reader = Reader(document)
    specs = [a for a in reader.all("script") if a.get("type") == "application/json"]
    assert [a["data-chart"] for a in specs] == ["chart-1", "chart-2"]
    assert [a["id"] for a in reader.all("div") if a.get("class") == "chart"] == ["chart-1", "chart-2"]
    texts = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', document)
    assert json.loads(texts[0]) == charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root")))).to_dict()


def test_every_claim_has_its_numbers_and_a_verdict_in_words(document):
    section = document[document.index('id="claims"') : document.index('id="table-1"')]
    body = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))
    for verdict in ("✓ shown", "○ not shown", "✗ contradicted", "– no verdict at this scale"):
        assert f"plain {verdict} -40.0 ± 2.0" in body
    assert "– not tested" in body
    assert body.count("plain (nats per token)") == 1  # the unit is said once
    assert "They were compared." in body
    assert "An interval decides." in body
    assert section.count("<table") == 1


def test_the_warning_comes_first_and_the_answer_before_all_numbers(document):
    places = [document.index(mark) for mark in ('class="warning"', 'id="answer"', 'id="about"', 'id="findings"')]
    assert places == sorted(places)
    assert "And so on." in document[places[1] : places[2]]


def test_every_checkpoint_is_in_the_table(document, table):
    body = document[document.index('id="checkpoints"') : document.index('id="made"')]
    assert body.count("<tr>") == table.height + 1
    assert "0.0480 ± 0.0012" in body
    assert 'data-sort="64.4"' in body


def test_hostile_names_stay_text(table):
    run = pl.when(pl.col("run") == "sgd-d64").then(pl.lit(HOSTILE)).otherwise(pl.col("run")).alias("run")
    hostile = table.with_columns(
        run, pl.lit(HOSTILE).alias("group"), pl.lit(HOSTILE).alias("size"), pl.lit(HOSTILE).alias("path")
    )
    plain = Reader(html.render(make_page(table)))
    document = html.render(make_page(hostile, text=HOSTILE, name=HOSTILE))
    reader = Reader(document)
    assert "<script>alert" not in document
    assert [tag for tag, _ in reader.elements] == [tag for tag, _ in plain.elements]
    assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)
    spec = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', document)[1])
    assert HOSTILE in {row["run"] for rows in spec["datasets"].values() for row in rows}
    assert reader.all("a")[0]["href"] == "figures/%22%3E%3Cscript%3Ealert%281%29%3C/script%3E.pdf"


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "\u2028&amp;", "a'b\"c"])
def test_json_in_a_script_cannot_end_it_and_is_unchanged(text):
    written = html.script_json({text: [text]})
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == {text: [text]}


def test_bad_pages_are_refused(table):
    odd = make_page(table, name="https://example.org/a")
    assert "figures/https%3A//example.org/a.pdf" in html.render(odd)  # a relative path, however odd
    ragged = html.Table(caption="", columns=("a", "b"), rows=((html.Cell(text="x"),),))
    with pytest.raises(IsolossError, match="2 columns has a row of 1 cells: 'x'"):
        html.render(html.Page(**{**vars(make_page(table)), "checkpoints": ragged}))


def test_a_name_that_the_template_does_not_know_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        html._environment().from_string("{{ nothing }}").render()


def test_checkpoint_table_sorts_by_numbers(table):
    shown = html.checkpoint_table(table, (KL, TRACE))
    assert shown.columns[:5] == ("Run", "Group", "Size", "Parameters", "Step")
    assert shown.columns[5:] == ("KL to the truth (nats per token)", "Trace of the Fisher (nats per token)")
    first = shown.rows[0]
    assert (first[0].text, first[0].path) == ("adamw-d16", "runs/adamw-d16/run.json")
    assert [cell.sort for cell in first] == [None, None, 21_344, 21_344, 500, 0.14, 420.0]


def test_the_page_is_the_same_every_time(table, document):
    assert html.render(make_page(table)) == document
