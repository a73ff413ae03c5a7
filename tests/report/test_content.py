import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.results_folder import load
from tailrace.report.content import FEW_SEEDS, judged, spans
from tailrace.report.render import evaluate_command, markdown_cell, render
from tailrace.report.tables import p_text, share_text
from tailrace.report.timelines import Stretch, queues

pytestmark = pytest.mark.compiled
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What is in a page; raises if a tag is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.words = [], Counter(), [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids += [given[k] for k in ("id",) if k in given]
        self.links += [given[k] for k in ("href", "src") if k in given]
        if tag == "th":
            assert given.get("scope") in ("col", "row"), given
        if tag == "svg":
            assert "aria-label" in given or "aria-hidden" in given, given
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html(loaded, played):
    return render(loaded, played, "tailrace report it")


def test_the_page_is_whole_and_loads_nothing(html):
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not [n for n, k in Counter(page.ids).items() if k > 1]
    inside = {f"#{name}" for name in page.ids}
    assert set(page.links) <= inside | {"data:,"}
    assert not re.search(r"https?:|url\(|@import|<iframe|<object", html)
    assert "default-src 'none'" in html
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.text)


def test_every_part_is_there(html):
    for name in (
        "headline", "scenarios", "policies", "latencies", "load", "time", "sizes", "differently",
        "fairness", "details", "method",
    ):  # fmt: skip
        assert f'<section id="{name}"' in html
    # A distribution of both latencies per scenario, at least.
    assert Page(html).tags["figure"] >= 2 * 3


def test_figures_are_those_of_the_results(html, made):
    data = json.loads((made / "results.json").read_text())
    text = Page(html).text
    versus = data["vs_best_single"]
    for name in ("cost", "p99_ttft", "mean_e2e", "throughput"):
        low, high = versus["intervals"][name]
        assert f"{versus[name]:.3f} {low:.3f}\u2013{high:.3f}" in text
    each = data["vs_best_per_scenario"]
    better = sum(s["cost"] < 1 for s in each["scenarios"].values())
    assert f"{better} of {len(each['scenarios'])}" in text
    assert f"{each['worst_ratio']:.3f}\u00d7 of" in text
    for cell in data["cells"]:
        assert cell["policy"] in text


def test_what_it_does_differently(html, played):
    found = np.concatenate([d.differs for d in played.decisions])
    text = Page(html).text
    assert f"another replica in {share_text(found.mean())} of them" in text
    assert "Reasons are gradients" in text


def test_method_tells_seeds_commands_and_checks(html, loaded):
    text = Page(html).text
    assert "2000030000 to 2000030002" in text
    assert "chosen on the tuning seeds 2000020000." in text
    assert "tailrace report it" in text
    assert loaded.data.sources in text
    assert re.search(r"(\d+) of \1 runs gave the very cost", text)
    assert "Holm" in text
    assert "with 3 seeds" in text.lower()


def test_warnings(html, loaded, changed, played):
    text = Page(html).text
    assert "Measured on tuning seeds: for exploration" in text
    assert "3 seeds are few" in text
    proof = changed(purpose="evaluation", seeds=loaded.data.seeds * FEW_SEEDS)
    assert "warning" not in render(proof, None, "x").split("</style>")[1]
    unlike = dataclasses.replace(played, unlike=("mine on scale-2",), left_out=("own",))
    text = Page(render(loaded, unlike, "x")).text
    assert "did not give the cost of the results file (mine on scale-2)" in text
    assert "as the settings are not in the results: own." in text


def test_intervals_of_a_fixed_trace_are_no_intervals(loaded):
    assert "do not cover other traffic" not in render(loaded, None, "x")
    rows = [list(row) for row in loaded.grid.cells]
    rows[1][0] = (rows[1][0][0],) * 3
    grid = dataclasses.replace(loaded.grid, cells=tuple(map(tuple, rows)))
    fixed = dataclasses.replace(loaded, grid=grid)
    assert "do not cover other traffic: scale-2." in Page(render(fixed, None, "x")).text


def test_without_replays(loaded):
    html = render(loaded, None, "tailrace report it --quick")
    page = Page(html)
    assert {"latencies", "load", "time", "differently"}.isdisjoint(page.ids)
    assert {"headline", "sizes", "fairness"} <= set(page.ids)
    assert "were left out (--quick)" in page.text


def test_a_rule_as_the_subject(made):
    results = load(made, "round_robin")
    assert "round_robin" in Page(render(results, None, "x")).text
    # The best single rule itself: it is compared with nobody, and has no examples.
    best = load(made, results.data.best_single)
    text = Page(render(best, None, "x")).text
    assert "is itself the best single rule" in text


def test_names_cannot_break_the_page(loaded, changed):
    evil = '<script>alert("x")</script>'
    html = render(changed(suite=evil), None, f"tailrace {evil}")
    assert evil not in html
    assert "&lt;script&gt;" in html
    Page(html)


def test_markdown(loaded, played):
    text = render(loaded, played, "tailrace report it", markdown=True)
    assert text.startswith("# mine on 3 scenarios\n")
    assert "<svg" not in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) > 8
    for table in tables:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1, table
        assert re.fullmatch(r"\|(-+:?\|)+", table.splitlines()[1])
    # A table without a blank line before it is none.
    assert not re.search(r"^[^|\n].*\n\|", text, re.MULTILINE)
    assert r"least\_outstanding" in text


def test_markdown_cells():
    assert markdown_cell("a|b_c*d\ne") == r"a\|b\_c\*d e"


def test_verdicts():
    assert judged(Interval(0.9, 0.8, 0.99)) == "better"
    assert judged(Interval(0.9, 0.8, 0.99), more_is_better=True) == "worse"
    assert judged(Interval(1.1, 1.05, 1.2)) == "worse"
    assert judged(Interval(0.9, 0.8, 1.0)) == "even"
    assert judged(Interval(0.9, None, None)) == "even"


def test_texts():
    assert share_text(1) == "100.0%"
    assert share_text(0.99999) == "99.9%"
    assert share_text(0.1234, 0) == "12%"
    assert p_text(0.0004) == "<0.001"
    assert p_text(0.5) == "0.500"


def test_the_command_of_the_evaluation(loaded):
    words = evaluate_command(loaded).split()
    assert words[:2] == ["tailrace", "evaluate"]
    assert [words[k + 1] for k, w in enumerate(words) if w == "--scenario"] == [
        "uniform-chat-80", "scale-2", "scale-8",
    ]  # fmt: skip
    against = [words[k + 1] for k, w in enumerate(words) if w == "--against"]
    assert set(against) == {"lmetric", "round_robin", "look-ahead"}
    assert "--purpose tuning --requests 240" in " ".join(words)


def test_a_reference_with_endless_queues_is_named_not_drawn(changed, played):
    results = changed(reference="round_robin", best_single="lmetric")
    calm = next(r for r in played.runs if r.scenario == "scale-2")
    flood = dataclasses.replace(calm.time, queue=calm.time.queue + 1000)
    runs = (
        dataclasses.replace(calm, policy="mine"),
        dataclasses.replace(calm, policy="round_robin", time=flood),
    )
    found = dataclasses.replace(played, runs=runs)
    queue, _ = queues(results, found, Stretch("scale-2", 0.0, float(calm.time.edges_s[-1])))
    assert re.match(r"Not drawn: round_robin, up to 10\d\d waiting", queue.note)
    assert "round_robin" not in queue.svg


def test_spans():
    assert spans([5, 1, 2, 3, 9]) == "1 to 3, 5, 9"
