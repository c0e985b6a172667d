import json
import re
import tomllib
from html.parser import HTMLParser

import jinja2
import polars as pl
import pytest

from isoloss.report import charts, data
from isoloss.report.data import KL, TRACE, accuracy
from isoloss.report.html import Card, IntervalRow, Section, environment, interval_rows, script_json
from isoloss.report.html import table as html_table
from isoloss.report.study_page import Figure, checkpoint_cells, render
from pages import unpacked

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
    figure = Figure(
        name=name,
        title=text,
        chart=charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root")))),
        caption=text,
    )
    row = IntervalRow(label=text, effect=text, interval=text, value=1.0, low=0.0, high=2.0, verdict=text, tone="good")
    return {
        "title": text,
        "lede": text,
        "cards": (Card(label=text, value=text, detail="And so on.", tone="good"),),
        "figures": (figure, figure),
        "sections": (
            Section(title="Claims", body=interval_rows([row])),
            Section(title="Tables", body=html_table([text, text], [[text, text]], caption=text), folded=True),
        ),
        "table": table,
        "shown": data.measures(table),
        "command": text,
        "settings": {text: text},
        "configs": dict.fromkeys(dict.fromkeys(table["run"]), f'steps = 100\nname = """{text}"""\n'),
        "banner": text,
        **changed,
    }


def block(document, name):
    """The JSON in the script element of this id."""
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', document)[1])


@pytest.fixture(scope="module")
def document(table):
    return render(**make_page(table))


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
    assert {a.get("scope") for a in reader.all("th")} == {"row", "col"}
    assert all(a.get("alt") for a in reader.all("img"))
    assert all(a.keys() & {"aria-label", "aria-labelledby"} for a in reader.all("section"))
    drawn = [a for a in reader.all("svg") if a.get("role") == "img"]
    assert [a["aria-label"] for a in drawn] == ["plain: plain, plain"]
    assert next(a for a in reader.all("p") if a.get("id") == "count")["aria-live"] == "polite"


def test_files_stand_in_for_the_charts_where_scripts_are_off(document):
    named = re.findall(r"<noscript><p>.* see (.+)\.pdf or (.+)\.png beside this page", document)
    assert len(named) == 2
    assert all(one == other and one.startswith("figures/") for one, other in named)


def test_every_run_has_its_config_and_lines_in_common_are_there_once(table):
    texts = {run: f"steps = 100\n\n[model]\nseed = {run[-1]}\n\n[optimizer]\nname = '{run}'\n" for run in table["run"]}
    document = render(**make_page(table, configs=texts))
    configs = json.loads(unpacked(document, "configs"))
    for run, text in texts.items():
        read = "\n".join(configs["lines"][line] for line in configs["runs"][run]) + "\n"
        assert read == text
        assert tomllib.loads(read)["optimizer"]["name"] == run
    assert configs["lines"].count("steps = 100") == 1
    names = [text for tag, text in Reader(unpacked(document, "rows")).texts if tag == "button" and text in texts]
    assert sorted(names) == sorted(table["run"])


def test_the_specs_in_the_page_are_the_charts(document, table):
    reader = Reader(document)
    specs = [a for a in reader.all("script") if a.get("class") == "spec"]
    assert [a["data-chart"] for a in specs] == ["chart-0", "chart-1"]
    assert [a["id"] for a in reader.all("div") if a.get("class") == "chart"] == ["chart-0", "chart-1"]
    chart = charts.scatter(table, ((KL, accuracy("root")), (TRACE, accuracy("root"))))
    datasets = chart["datasets"]
    spec = json.loads(re.search(r'<script type="application/json" class="spec"[^>]*>(.*?)</script>', document)[1])
    assert spec == chart | {"datasets": list(datasets)}
    held = block(document, "datasets")
    for name, rows in datasets.items():  # each once, though two figures have it
        for row, *values in zip(rows, *held[name].values(), strict=True):
            shown = dict(zip(held[name], values, strict=True))
            assert {k: v if isinstance(v, str) else pytest.approx(v, rel=1e-6) for k, v in shown.items()} == row


def test_the_answer_and_a_figure_come_first_and_what_few_need_is_folded(document):
    order = ("plain", "claims", "more-figures", "tables", "every-checkpoint", "how-this-was-made")
    places = [document.index('class="banner"'), document.index("And so on.")]
    places += [document.index(f'id="section-{name}"') for name in order]
    assert places == sorted(places)
    reader = Reader(document)
    folded = ["section-tables", "section-every-checkpoint", "section-how-this-was-made"]
    assert [a["id"] for a in reader.all("details")] == folded
    assert {a["href"] for a in reader.all("a")} == {"#top", *(f"#section-{name}" for name in order)}


def test_every_checkpoint_is_in_the_table(document, table):
    body = unpacked(document, "rows")
    assert body.count("<tr>") == table.height
    assert "0.0480 ± 0.0012" in body
    assert '<td data-sort="0.644" data-error="0.006">64.40 ± 0.60</td>' in body  # all digits, as in files


def test_hostile_names_stay_text(table):
    run = pl.when(pl.col("run") == "sgd-d64").then(pl.lit(HOSTILE)).otherwise(pl.col("run")).alias("run")
    hostile = table.with_columns(run, pl.lit(HOSTILE).alias("group"), pl.lit(HOSTILE).alias("size"))
    plain = Reader(render(**make_page(table)))
    document = render(**make_page(hostile, text=HOSTILE, name=HOSTILE))
    reader = Reader(document)
    assert "<script>alert" not in document
    assert [tag for tag, _ in reader.elements] == [tag for tag, _ in plain.elements]
    assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert HOSTILE in {run for columns in block(document, "datasets").values() for run in columns["run"]}
    assert HOSTILE in json.loads(unpacked(document, "configs"))["runs"]
    rows, plain_rows = (Reader(unpacked(each, "rows")) for each in (document, render(**make_page(table))))
    assert [tag for tag, _ in rows.elements] == [tag for tag, _ in plain_rows.elements]
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
    first, *_ = checkpoint_cells(table, (KL, TRACE))
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
    assert render(**make_page(table)) == document
