import dataclasses
import json
import re
import tomllib
from html.parser import HTMLParser

import jinja2
import polars as pl
import pytest

from isoloss.report import charts, data
from isoloss.report import study_page as html
from isoloss.report.data import KL, TRACE, accuracy
from isoloss.report.html import environment, script_json
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, Claim, ClaimResult, Verdict

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


def make_page(table, text="plain", name="a b", **changed):
    """The arguments of `render`; every text is `text`."""
    verdicts = (Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.CONTRADICTED, Verdict.NO_VERDICT)
    claim = Claim(id="flatter", statement=text, paper=text, direction="decrease")
    about = {"numbers": {"difference": estimate(-40.0)}, "difference": estimate(-40.0), "explanation": text}
    answers = tuple(Answer(case=f"{text} {i}", verdict=each, **about) for i, each in enumerate(verdicts))
    several = {
        "result": ClaimResult(claim=claim, answers=answers),
        "columns": ("case", "verdict", f"{text} (nats per token)"),
        "rows": tuple((text, verdict.value, "-40.0 ± 2.0") for verdict in verdicts),
        "explanations": (text, "They were compared."),
        "figures": (small(text),),
    }
    not_tested = Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=text)
    other = ClaimResult(claim=dataclasses.replace(claim, id="other"), answers=(not_tested,))
    untested = {"result": other, "columns": (), "rows": (), "explanations": (text,), "figures": ()}
    figure = html.Figure(
        name=name,
        title=text,
        chart=charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root")))),
        caption=text,
    )
    return {
        "title": text,
        "lead": (text,),
        "findings": (html.Finding(headline=text, detail=text),),
        "claims": (several, untested),
        "rule": ("An interval decides.", text),
        "warning": text,
        "answer": (text, "And so on."),
        "figures": (figure, figure),
        "table": table,
        "shown": data.measures(table),
        "command": text,
        "settings": {text: text},
        "tables": {text: {"caption": text, "columns": (text, text), "rows": (((text, None, None),) * 2,)}},
        "configs": dict.fromkeys(dict.fromkeys(table["run"]), f'steps = 100\nname = """{text}"""\n'),
        **changed,
    }


def estimate(value):
    return Estimate(value=value, stderr=2.0, samples=9, unit="nats", num_predictions=9, method="known")


def small(text):
    drawn = [Interval(row=text, series="", value=0.5, low=0.25, high=0.75, text=text)]
    return intervals([IntervalPanel(title=text, intervals=drawn)], [text], note="", size=(300, 34)), text


def block(document, name):
    """The JSON in the script element of this id."""
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', document)[1])


@pytest.fixture(scope="module")
def document(table):
    return html.render(**make_page(table))


def test_nothing_is_loaded_from_the_network(document):
    reader = Reader(document)
    assert not reader.all("link")
    assert not reader.all("iframe")
    assert not [a for a in reader.all("script") if "src" in a]
    for _, attributes in reader.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster", "formaction", "xlink:href"):
            assert re.match(r"#|$", attributes.get(name) or ""), attributes
    for style in reader.text("style"):
        assert "@import" not in style
        assert "url(" not in style
    policy = next(a["content"] for a in reader.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_every_link_and_label_has_its_target_in_the_page(document):
    elements = [attributes for _, attributes in Reader(document).elements]
    ids = [attributes["id"] for attributes in elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {a["href"].removeprefix("#") for a in elements if "href" in a} <= set(ids)
    labels = {a[name] for a in elements for name in ("aria-labelledby", "aria-describedby", "data-chart") if name in a}
    assert labels <= set(ids)


def test_the_page_can_be_read_by_its_landmarks_and_captions(document):
    reader = Reader(document)
    assert [len(reader.all(tag)) for tag in ("h1", "main", "nav")] == [1, 1, 1]
    assert len(reader.all("caption")) == len(reader.all("table")) == 3
    assert {a.get("scope") for a in reader.all("th")} == {"row", "col"}
    assert all(a.get("alt") for a in reader.all("img"))
    assert all(a.keys() & {"aria-label", "aria-labelledby"} for a in reader.all("section"))
    drawn = [a for a in reader.all("div") if a.get("role") == "img"]
    assert [a["aria-label"] for a in drawn] == ["plain"]
    assert next(a for a in reader.all("p") if a.get("id") == "count")["aria-live"] == "polite"


def test_files_stand_in_for_the_charts_where_scripts_are_off(document):
    named = re.findall(r"<noscript><p>.* see (.+)\.pdf or (.+)\.png beside this page", document)
    assert len(named) == 2
    assert all(one == other and one.startswith("figures/") for one, other in named)


def test_every_run_has_its_config_and_lines_in_common_are_there_once(table):
    texts = {run: f"steps = 100\n\n[model]\nseed = {run[-1]}\n\n[optimizer]\nname = '{run}'\n" for run in table["run"]}
    document = html.render(**make_page(table, configs=texts))
    configs = block(document, "configs")
    for run, text in texts.items():
        read = "\n".join(configs["lines"][line] for line in configs["runs"][run]) + "\n"
        assert read == text
        assert tomllib.loads(read)["optimizer"]["name"] == run
    assert configs["lines"].count("steps = 100") == 1
    names = [text for tag, text in Reader(document).texts if tag == "button" and text in texts]
    assert sorted(names) == sorted(table["run"])


def test_the_specs_in_the_page_are_the_charts(document, table):
    reader = Reader(document)
    specs = [a for a in reader.all("script") if a.get("class") == "spec"]
    assert [a["data-chart"] for a in specs] == ["chart-1", "chart-2"]
    assert [a["id"] for a in reader.all("div") if a.get("class") == "chart"] == ["chart-1", "chart-2"]
    chart = charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root"))))
    datasets = chart["datasets"]
    spec = json.loads(re.search(r'<script type="application/json" class="spec"[^>]*>(.*?)</script>', document)[1])
    assert spec == chart | {"datasets": list(datasets)}
    held = block(document, "datasets")
    for name, rows in datasets.items():  # each once, though two figures have it
        for row, *values in zip(rows, *held[name].values(), strict=True):
            shown = dict(zip(held[name], values, strict=True))
            assert {k: v if isinstance(v, str) else pytest.approx(v, rel=1e-6) for k, v in shown.items()} == row


def test_every_claim_has_its_numbers_and_a_verdict_in_words(document):
    section = document[document.index('id="claims"') : document.index('id="findings"')]
    body = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))
    for verdict in ("✓ shown", "○ not shown", "✗ contradicted", "– no verdict at this scale"):
        assert f"plain {verdict} -40.0 ± 2.0" in body
    assert "– not tested" in body
    assert "✓ shown × 1 ○ not shown × 1 ✗ contradicted × 1 – not tested × 1" in body  # of all claims
    assert body.count("plain (nats per token)") == 1  # the unit is said once
    assert "They were compared." in body
    assert "An interval decides." in body
    assert section.count("<table") == section.count("<svg") == 1


def test_the_warning_comes_first_and_the_answer_before_all_numbers(document):
    order = ("answer", "about", "figures", "claims", "findings", "more-figures", "table-1", "checkpoints", "made")
    places = [document.index(mark) for mark in ('class="banner"', *(f'id="{name}"' for name in order))]
    assert places == sorted(places)
    assert "And so on." in document[places[1] : places[2]]


def test_every_checkpoint_is_in_the_table(document, table):
    body = document[document.index('id="checkpoints"') : document.index('id="reading"')]
    assert body.count("<tr>") == table.height + 1
    assert "0.0480 ± 0.0012" in body
    assert '<td data-sort="0.644" data-error="0.006">64.40 ± 0.60</td>' in body  # all digits, as in files


def test_hostile_names_stay_text(table):
    run = pl.when(pl.col("run") == "sgd-d64").then(pl.lit(HOSTILE)).otherwise(pl.col("run")).alias("run")
    hostile = table.with_columns(run, pl.lit(HOSTILE).alias("group"), pl.lit(HOSTILE).alias("size"))
    plain = Reader(html.render(**make_page(table)))
    document = html.render(**make_page(hostile, text=HOSTILE, name=HOSTILE))
    reader = Reader(document)
    assert "<script>alert" not in document
    assert [tag for tag, _ in reader.elements] == [tag for tag, _ in plain.elements]
    assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert HOSTILE in {run for columns in block(document, "datasets").values() for run in columns["run"]}
    assert HOSTILE in block(document, "configs")["runs"]
    assert next(a for a in reader.all("script") if a.get("class") == "spec")["data-name"] == HOSTILE


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "\u2028&amp;", "a'b\"c"])
def test_json_in_a_script_cannot_end_it_and_is_unchanged(text):
    written = script_json({text: [text]})
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == {text: [text]}


def test_a_name_that_the_template_does_not_know_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ nothing }}").render()


def test_checkpoints_are_sorted_by_numbers(table, document):
    first, *_ = html.checkpoint_cells(table, (KL, TRACE))
    assert [text for text, _, _ in first] == [
        "adamw-d16",
        "AdamW",
        "d16",
        "21,344",
        "500",
        "0.1400 ± 0.0012",
        "420.0 ± 4.0",
    ]
    assert [number for _, number, _ in first] == [None, None, 21_344, 21_344, 500, 0.14, 420.0]
    assert [error for *_, error in first[-2:]] == [0.0012, 4.0]
    units = block(document, "units")
    assert (units["kl"], units["probe-root"]) == ("nats per token", "fraction")
    heads = re.findall(r'<th scope="col" data-key="([^"]+)"><button type="button">([^<]+)<', document)
    assert heads[:2] + heads[5:6] == [("run", "Run"), ("group", "Group"), ("kl", "KL to the truth (nats per token)")]


def test_the_page_is_the_same_every_time(table, document):
    assert html.render(**make_page(table)) == document
