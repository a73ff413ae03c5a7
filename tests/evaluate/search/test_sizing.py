"""Fewest replicas and cheapest mixes."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tailrace.config import Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import Summary
from tailrace.evaluate.search import sizing
from tailrace.evaluate.search.capacity import ServiceObjective
from tailrace.evaluate.search.sizing import Kind, Need, SizingTask, Trial, Wanted, plan, price_of
from tailrace.terminal.plans import verdict

SCENARIO = Scenario(workload=Workload(name="chat", rate=20.0, requests=400))
ONE = (Kind("usual", Replica()),)


def wanted(limit=1.0, most=16, **changes) -> Wanted:
    objectives = (ServiceObjective("ttft_p99_s", limit),)
    return Wanted(SCENARIO.model_copy(update=changes), objectives, (2_000_000_000,), most)


def search(kinds, enough, most=16) -> Need:
    """Search with a stand-in for the simulation: ``enough`` says of counts whether they will do."""
    tried = []

    def attempt(task, counts, target_s):
        assert counts not in tried  # nothing is tried twice
        tried.append(counts)
        return Trial(counts, price_of(counts, task.kinds), enough(counts), None)

    return sizing.search(SizingTask(wanted(most=most), kinds, "any"), attempt)


@pytest.mark.parametrize("needed", range(1, 17))
def test_the_fewest_of_one_kind(needed):
    assert search(ONE, lambda counts: counts[0] >= needed).found.counts == (needed,)


def test_not_even_the_most_will_do():
    need = search(ONE, lambda counts: False)
    assert need.found is None
    assert need.trials[-1].counts == (16,)
    assert "cannot serve 20.0 requests/s of chat" in verdict([need], wanted())


@pytest.mark.parametrize(
    ("power", "price"), [((1, 2), (1, 1.7)), ((1, 3), (1, 3.2)), ((2, 3), (2, 3))]
)
def test_the_cheapest_mix_is_found(power, price):
    """Against trying every mix there is."""
    kinds = tuple(Kind(str(p), Replica(), c) for p, c in zip(power, price, strict=True))

    def enough(counts):
        return sum(p * n for p, n in zip(power, counts, strict=True)) >= 7

    every = [c for c in itertools.product(range(17), repeat=2) if 0 < sum(c) <= 16 and enough(c)]
    cheapest = min(price_of(c, kinds) for c in every)
    assert search(kinds, enough).found.price == pytest.approx(cheapest)


def test_targets_are_tried_in_turn_by_those_that_look_at_them():
    """``enough`` with 6 if it aims at 1 s, with 4 if it aims at half a second; others need 6."""
    tried = {True: [], False: []}

    def attempt_for(heeds):
        def attempt(_, counts, target_s):
            tried[heeds].append((counts[0], target_s))
            aim = target_s if heeds else 1.0
            met = counts[0] >= (4 if aim == 0.5 else 6)
            summary = SimpleNamespace(ttft_s=aim / counts[0])
            return Trial(counts, float(counts[0]), met, summary, target_s)

        return attempt

    asked = replace(wanted(), targets_s=(1.0, 0.5))
    found = {}
    for heeds in (True, False):
        task = SizingTask(asked, ONE, "any")
        found[heeds] = sizing.search(task, attempt_for(heeds)).found
    assert (found[True].counts, found[True].target_s) == ((4,), 0.5)
    assert (found[False].counts, found[False].target_s) == ((6,), 1.0)
    # With one replica there is no choice to differ in; at the second cluster it is clear.
    assert tried[False] == [(1, 1.0), (1, 0.5), (2, 1.0), (2, 0.5), (4, 1.0), (8, 1.0), (6, 1.0),
                            (5, 1.0)]  # fmt: skip


def test_a_rule_that_looks_at_targets_is_told_them():
    asked = replace(wanted(0.5), targets_s=(0.5, 0.1))
    need = plan(asked, ONE, ["dual_map"], jobs=1)[0]
    assert need.found.target_s in (0.5, 0.1)
    assert need.found.summary.ttft_s.p99 <= 0.5


def test_the_plan_is_enough_and_one_less_is_not():
    need = plan(wanted(), ONE, ["least_outstanding"], jobs=1)[0]
    trials = {trial.counts[0]: trial for trial in need.trials}
    n = need.found.counts[0]
    assert 1 < n < 16
    assert trials[n].met
    assert not trials[n - 1].met
    assert trials[n].summary.ttft_s.p99 <= 1.0 < trials[n - 1].summary.ttft_s.p99


def test_policies_come_back_in_order_and_a_stricter_target_needs_no_fewer():
    names = ["round_robin", "lmetric"]
    loose, strict = (plan(wanted(limit), ONE, names, jobs=1) for limit in (2.0, 0.2))
    assert [need.policy for need in loose] == names
    for a, b in zip(loose, strict, strict=True):
        assert b.found is None or a.found.counts <= b.found.counts


def test_the_verdict_names_the_saving():
    def need(policy, n):
        return Need(policy, Trial((n,), float(n), True, Summary), ())

    assert "with 3 replicas, 25% cheaper than b." in verdict([need("a", 3), need("b", 4)], wanted())
    assert "25% dearer than b." in verdict([need("a", 5), need("b", 4)], wanted())
    assert "as many as b needs." in verdict([need("a", 4), need("b", 4), need("c", 9)], wanted())


def test_mistakes():
    with pytest.raises(TailraceError, match="at least one kind"):
        plan(wanted(), (), ["random"])
    with pytest.raises(TailraceError, match="unknown policy"):
        plan(wanted(), ONE, ["rnadom"])
    with pytest.raises(TailraceError, match="1 to 1024 replicas"):
        wanted(most=0)
