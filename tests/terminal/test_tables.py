import io
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from results import make_result
from tailrace.config import Cluster, Replica, Scenario
from tailrace.evaluate.judge.bootstrap import Interval
from tailrace.evaluate.judge.compare import Comparison, Entry, averaged
from tailrace.evaluate.measure.metrics import summarise
from tailrace.sim.result import FAILED
from tailrace.terminal.tables import (
    Column,
    counted,
    fitted,
    number,
    print_columns,
    print_comparison,
    print_summary,
)


def text(function, *args, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    function(console, *args)
    return console.file.getvalue()


def test_one_of_a_thing_is_not_several():
    assert counted(1, "seed") == "1 seed"
    assert counted(0, "policy", "policies") == "0 policies"
    scenario = Scenario(cluster=Cluster(replicas=(Replica(),)))
    summary = summarise(make_result(np.zeros(9), first=[1.0] * 9, finished=[2.0] * 9))
    entry = Entry("random", Interval(1, 1, 1), summary, (summary,))
    found = Comparison(scenario, 1.0, (3,), "random", (entry,))
    assert "1 seed, 1 replica. Ranked" in " ".join(text(print_comparison, found).split())


@pytest.fixture
def comparison():
    def entry(name, ttft, interval):
        runs = tuple(
            summarise(make_result(np.zeros(90), first=[ttft] * 90, finished=[30.0 + k] * 90))
            for k in range(2)
        )
        return Entry(name, interval, averaged(runs), runs)

    entries = (
        entry("least_pending_uncached", 0.0612, Interval(0.5, 0.48, 0.52)),
        entry("least_outstanding", 12.34, Interval(1.0, None, None)),
    )
    return Comparison(Scenario(), 12.3456, (1, 2), "least_outstanding", entries)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (0.0, "0.000"), (0.0612, "0.061"), (0.99949, "0.999"), (0.9996, "1.00"),
        (1.234, "1.23"), (9.996, "10.0"), (24.68, "24.7"), (99.96, "100"), (1234.5, "1234"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown


def test_eight_columns_and_the_figure_they_are_ranked_by_above_them(comparison):
    lines = text(print_comparison, comparison, width=80).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    top = next(k for k, line in enumerate(lines) if line.startswith("policy"))
    note = " ".join(" ".join(lines[: top - 1]).split())
    assert note.startswith("90 requests at 12.3 requests/s, 2 seeds, 4 replicas.")
    assert "lowest first: the mean over requests of 0.2*E2E + TTFT + 2*max(0, TTFT - SLO)" in note
    assert len(lines[top + 1].split()) == 8
    assert lines[top + 1].split()[:5] == [
        "least_pending_uncached", lines[top + 1].split()[1], "0.50", "0.48-0.52", "0.061",
    ]  # fmt: skip
    assert len(lines) == top + 3


def test_all_columns_if_wide(comparison):
    output = text(partial(print_comparison, wide=True), comparison)
    lines = output.splitlines()
    assert all(len(line.rstrip()) <= 120 for line in lines)
    header = next(line for line in lines if line.startswith("policy")).split()
    assert header.count("mean") == header.count("P99") == 3
    assert {"/mean", "hit"} <= set(header)


def test_narrow_terminals_lose_the_least_important_columns(comparison):
    output = text(partial(print_comparison, wide=True), comparison, width=80)
    lines = output.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    header = next(line for line in lines if line.startswith("policy")).split()
    assert header.count("mean") == header.count("P99") == 3
    assert "P50" not in header
    assert "Left out for lack of width: " in output
    assert "TTFT P50" in output.replace("\n", " ")


def test_failures_get_a_column_when_there_are_any(comparison):
    assert "  unserved" not in text(print_comparison, comparison)
    run = summarise(make_result([0.0, 0.0], [1.0, 1.0], [2.0, 2.0], status=[1, FAILED]))
    entries = (Entry("random", None, averaged([run, run]), (run, run)), *comparison.entries)
    output = text(
        print_comparison,
        Comparison(Scenario(), None, (1, 2), "least_outstanding", entries),
        width=140,
    )
    lines = output.splitlines()
    top = next(k for k, line in enumerate(lines) if line.startswith("policy"))
    assert lines[top].split()[-1] == "unserved"
    assert lines[top + 1].split()[-1] == "2"
    assert "own pace" in output


def test_columns_that_must_stay_do():
    wide = Column(("", "x" * 50), ["1"])
    kept, dropped = fitted([wide, wide, Column(("", "y"), ["2"], keep=1)], 60)
    assert kept == [wide, wide]
    assert [c.heading[1] for c in dropped] == ["y"]
    assert "Left out for lack of width: y." in text(
        print_columns, [wide, Column(("", "y"), ["2"], keep=1)], width=50
    )


def test_summary_of_one_run():
    result = make_result([0.0] * 3, [0.5] * 3, [2.5] * 3, replica=[0, 0, 1], cached_tokens=50)
    output = text(print_summary, summarise(result), width=80)
    assert "time to first token" in output
    assert "3 of 3 finished in 2.5 s" in output
    assert "50.0 % of prompt tokens" in output
    assert "67% 33%" in output
    assert "failures" not in output


def test_summary_of_a_large_cluster_and_of_failures():
    result = make_result([0.0], [0.5], [2.5], status=FAILED, replicas=9)
    output = text(print_summary, summarise(result))
    assert "0% to 100% of requests per replica" in output
    assert "1 failed, 0 rerouted, 0 pending" in output
