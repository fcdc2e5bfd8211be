"""The report: JSON with the promised keys, and a page that needs nothing but itself."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from verify import report

VOID = {"meta", "br", "img", "link", "input", "hr", "path", "use", "rect", "line", "circle", "polygon", "polyline"}


def row(name="a-case", verdict="pass", ratio=0.5, **more):
    return {
        "name": name, "list": "smoke", "family": "normal", "seed": 0, "device": "cpu", "kernel": "readable",
        "schedule": "uniform", "dtype": "float16",
        "case": f"Case(name={name!r})", "reproduce": f"python -m verify --case {name} --seed 0 --device cpu", "verdict": verdict,
        "tiers": {"T1": {"verdict": verdict, "ratio": ratio}, "T7": {"verdict": "pass", "ratio": 0.0}},
        "worst": {"index": (0, 1, 2), "got": 1.0, "want": 1.1, "budget": {"out_round": 0.1, "ex2": 0.06, "pv_acc": 0.04}},
        "errors": {"max_abs": 0.1, "roundoffs": 0.5, "of_sum_p_v": 0.1, "lse": 1e-7, "non_finite": 0, "elements": 512},
        "text": f"the comparator on {name}", "seconds": 0.1, **more,
    }  # fmt: skip


def pool(**more):
    return {
        "name": "normal: float16", "family": "normal", "dtype": "float16", "elements": 512, "cases": 1, "verdict": "pass",
        "measures": {"inexact": 0.01, "ratio": 0.5}, "tiers": {"T3": {"verdict": "n/a", "ratio": 0.0}}, "worst": None, "text": "",
        **more,
    }  # fmt: skip


def mutant(name, killed_by, **more):
    return {"name": name, "killed_by": killed_by, "allclose_1e2_on_randn": "missed", **more}


ENVIRONMENT = dict.fromkeys(("device", "driver", "cuda", "cupy", "numpy", "python", "compiler", "commit", "date"), "x")
KILLED = [["T1", "ramp_up"], ["T5", "offset_plus"]]


def assembled(cases=None, pools=None, mutants=(), sections=(), **more):
    return report.assemble(ENVIRONMENT, [row()] if cases is None else cases, pools or [pool()], list(mutants), sections, **more)


@pytest.fixture
def figure():
    pictures = pytest.importorskip("verify.pictures")
    made, axes = pictures.figure(4, 2)
    axes.plot([1, 2], [3, 4], label="a line")
    axes.legend()
    return pictures.to_svg(made, "line")


@pytest.fixture
def page(figure):
    section = report.Section("Storage <of> o", "What & why", ["dtype", "rho"], [["fp16", "1.41"]], figure, notes=["A note."])
    mutants = [mutant("healthy", [], healthy=True), mutant("no <max>", KILLED, classic="merge without the maximum", fault="<m>")]
    cases = [row(), row("b-case", "fail", 3.0), row("c-case", "fail", math.inf, worst=None, tiers={}, errors={"exception": "x"})]
    return report.render(assembled(cases, mutants=mutants, sections=[section]), [section])


class Tags(html.parser.HTMLParser):
    """Every element closed, in order; every reference; every id."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.ids = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.references += [attrs[name] for name in ("src", "href", "xlink:href", "srcset", "action", "data") if name in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_keys():
    made = assembled(mutants=[mutant("m", KILLED)], sections=[report.Section("s", "text")], depth="quick")
    assert list(made)[:5] == list(report.KEYS) == ["verdict", "environment", "cases", "mutants", "experiments"]
    assert made["verdict"] == "pass"
    case = made["cases"][0]
    assert {"name", "family", "seed", "device", "schedule", "dtype", "verdict", "tiers", "worst"} <= set(case)
    assert set(case["worst"]) == {"index", "got", "want", "budget"}
    assert set(case["tiers"]["T1"]) == {"verdict", "ratio"}
    assert made["experiments"][0]["title"] == "s"


@pytest.mark.parametrize(
    ("made", "failed"),
    [
        (assembled([row(), row("bad", "fail")]), ["bad"]),
        (assembled(pools=[pool(name="pooled", verdict="fail")]), ["pooled"]),
        (assembled(mutants=[mutant("survivor", [["T1", "normal"]])]), ["mutant survivor"]),
        (assembled(mutants=[mutant("nothing", [], healthy=True), mutant("healthy", KILLED, healthy=True)]), ["mutant healthy"]),
        (assembled(mutants=[mutant("said so", KILLED, verdict="survived")]), ["mutant said so"]),
        (assembled(sections=[report.Section("an experiment", "", passed=False)]), ["an experiment"]),
        (assembled([]), []),
    ],
)
def test_what_fails(made, failed):
    assert made["verdict"] == "fail"
    assert made["failed"] == failed
    assert report.last_line(made).startswith("FAIL")
    assert all(name.removeprefix("mutant ") in report.last_line(made) for name in failed)


def test_last_line_says_what_was_not_run():
    line = report.last_line(assembled(no_gpu=True, skipped=["mutants"]))
    assert line == "PASS: 1 cases, 512 outputs, largest error 0.500 of its bound (a-case); on x, no GPU here; not run: mutants"


def test_json_holds_what_is_not_finite(tmp_path):
    odd = {"index": (np.int64(1),), "got": math.nan, "want": -math.inf, "budget": {"out_round": math.inf}}
    made = assembled([row("bad", "fail", np.float32(np.inf), worst=odd)])
    report.save(made, [], tmp_path)
    case = json.loads((tmp_path / "report.json").read_text())["cases"][0]
    assert case["tiers"]["T1"]["ratio"] == "inf"
    assert case["worst"] == {"index": [1], "got": "nan", "want": "-inf", "budget": {"out_round": "inf"}}


def test_without_the_page(tmp_path, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")

    monkeypatch.setattr(report, "render", missing)
    (tmp_path / "report.html").write_text("of another run")
    assert report.save(assembled(), [], tmp_path) == [tmp_path / "report.json"]
    assert not (tmp_path / "report.html").exists()


def test_page_is_whole(page):
    tags = Tags(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    # Within the page only.
    assert tags.references
    assert {reference.removeprefix("#") for reference in tags.references} <= set(tags.ids)
    assert all(reference.startswith("#") for reference in tags.references)


def test_page_needs_no_other(page):
    assert "http" not in page
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    assert "<script" not in page


def test_page_says_what_was_found(page):
    assert page.index("FAIL") < page.index("b-case") < page.index('id="tiers"') < page.index('id="environment"')
    for text in (
        "the comparator on b-case",
        "python -m verify --case a-case --seed 0",
        "Storage &lt;of&gt; o",
        "1.41",
        "A note.",
    ):
        assert text in page
    assert "<strong>no &lt;max&gt;</strong>" in page
    assert "prefers-color-scheme: dark" in page


def test_page_of_nothing():
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    assert "FAIL" in report.render(assembled([], pools=[]), [])


def test_picture_takes_the_ink_of_the_page(figure):
    assert figure.startswith("<svg")
    assert figure.rstrip().endswith("</svg>")
    assert "currentColor" in figure
    assert "#010203" not in figure
    assert "#000000" not in figure
    assert "xmlns" not in figure
    assert ">a line</text>" in figure
    assert set(re.findall(r"url\(#([^)]*)\)", figure)) <= set(Tags(figure).ids)


def test_one_row_per_case():
    rows = [row(ratio=0.1), row(ratio=0.9, seed=1), row("other", ratio=0.2), row("other", "fail", 0.1, seed=1)]
    shown = report.worst_seeds(rows)
    assert [(x["name"], x["seed"], x["seeds"]) for x in shown] == [("a-case", 1, 2), ("other", 1, 2)]


def test_budget_picture_shows_the_closest_of_each_family():
    rows = [row(ratio=0.1), row("b", ratio=0.9), row("c", ratio=0.95, family="other"), row("d", family="exact", ratio=0.0)]
    assert [x["name"] for x in report.worst_of_families(rows)] == ["c", "b"]
