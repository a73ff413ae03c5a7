"""What must hold for every rule, on random views."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.views import CALLABLE, METRICS, copy_view, make_view, pick, random_view, scores_of
from tailrace.policy import rules
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.rules import Rule
from tailrace.view.records import NEVER, View
from tailrace.view.selection import choose

#: Depend on the numbering of replicas by design: turns, draws by position, and hashes of numbers.
ORDER_DEPENDENT = {
    *("round_robin", "power_of_two", "prefix_hash", "dual_map"),
    *("smg_power_of_two", "smg_prefix_hash", "rendezvous_hash"),
}

seeds = st.integers(0, 2**32)
each_rule = pytest.mark.parametrize("rule", CALLABLE, ids=lambda rule: rule.name)
many = settings(deadline=None, max_examples=60)


def equal(a: np.ndarray, b: np.ndarray) -> None:
    """Equal up to the order of additions; infinities and NaN exactly."""
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-9)


@each_rule
@many
@given(seed=seeds)
def test_scores_are_numbers_and_the_choice_is_available(rule: Rule, seed: int) -> None:
    view = random_view(seed)
    scores = BuiltinPolicy(rule).scores(view)
    assert not np.isnan(scores).any()
    chosen = choose(scores, view.replicas, view.router, rule.lowest_id_wins)
    assert view.replicas[chosen]["available"] == 1
    assert scores[chosen] < np.inf


@pytest.mark.parametrize(
    "rule", [r for r in CALLABLE if r.name not in ORDER_DEPENDENT], ids=lambda rule: rule.name
)
@many
@given(seed=seeds, data=st.data())
def test_renaming_replicas_renames_the_choice(rule: Rule, seed: int, data: st.DataObject) -> None:
    view = random_view(seed)
    order = np.array(data.draw(st.permutations(range(len(view.replicas)))))
    request = view.request.copy()
    if request["last_replica"] >= 0:
        request["last_replica"] = np.flatnonzero(order == request["last_replica"])[0]
    renamed = View(request, view.replicas[order], view.costs[order], view.router)
    equal(scores_of(rule, renamed), scores_of(rule, view)[order])


@each_rule
@many
@given(seed=seeds)
def test_an_unavailable_replica_has_no_influence(rule: Rule, seed: int) -> None:
    view = random_view(seed)
    gone = view.replicas["available"] == 0
    other = copy_view(view)
    for name in (
        "in_flight",
        "queued",
        "queued_tokens",
        "queued_uncached",
        "index_tokens",
        "waiting",
        "active_blocks",
    ):
        other.replicas[name][gone] += 1000
    other.replicas["cached_tokens"][gone] = view.request["prompt_tokens"] - 1
    equal(scores_of(rule, other)[~gone], scores_of(rule, view)[~gone])


@each_rule
@many
@given(seed=seeds)
def test_reads_what_it_says_and_no_metrics_before_there_are_any(rule: Rule, seed: int) -> None:
    view = random_view(seed)
    before = scores_of(rule, view)
    other = copy_view(view)
    unknown = view.replicas["metrics_at"] == NEVER
    for name in METRICS:
        other.replicas[name][unknown | (not rule.uses_metrics)] += 7
    if not rule.uses_metrics:  # the simulator takes no snapshots for it then
        other.replicas["metrics_at"] = NEVER
        other.replicas["sent_tokens"] += 1
        other.replicas["sent_requests"] += 1
    if not rule.uses_prefix:
        other.replicas["cached_tokens"] = 0
        other.replicas["index_tokens"] += 1
    if not rule.uses_context:
        other.replicas["context_tokens"] = 0
    if not rule.uses_active:
        other.replicas["active_blocks"] += 5
        other.replicas["new_blocks"] += 5
    equal(scores_of(rule, other), before)


@each_rule
def test_the_flags_promise_nothing_that_is_not_read(rule: Rule) -> None:
    """A rule that says it reads metrics, the index or contexts must do so on some view."""
    reads_metrics = reads_prefix = reads_context = False
    for seed in range(60):
        view = random_view(seed)
        before = scores_of(rule, view)
        other = copy_view(view)
        other.replicas["waiting"] += 7
        other.replicas["kv_used"] *= 0.5
        reads_metrics |= not np.array_equal(scores_of(rule, other), before)
        other = copy_view(view)
        other.replicas["cached_tokens"] = view.request["prompt_tokens"] - 1
        reads_prefix |= not np.array_equal(scores_of(rule, other), before)
        other = copy_view(view)
        other.replicas["context_tokens"] += 50_000
        reads_context |= not np.array_equal(scores_of(rule, other), before)
    assert reads_context == rule.uses_context
    assert reads_metrics == rule.uses_metrics
    assert reads_prefix == rule.uses_prefix


@each_rule
def test_every_parameter_matters(rule: Rule) -> None:
    for name, value in rule.params.items():
        changed = any(
            not np.array_equal(
                scores_of(rule, view), scores_of(rule, view, **{name: value * factor})
            )
            for view in map(random_view, range(400))
            for factor in (0.02, 30.0)
        )
        assert changed, f"{name} has no effect"


@each_rule
@settings(deadline=None, max_examples=30)
@given(seed=seeds)
def test_compiled_equals_interpreted(rule: Rule, seed: int) -> None:
    function = getattr(rules, rule.name)
    view, again = random_view(seed), random_view(seed)
    scores = np.full(len(view.replicas), np.nan)
    getattr(function, "py_func", function)(view, rule.vector(), scores)
    equal(BuiltinPolicy(rule).scores(again), scores)
    assert view.router == again.router


def test_equals_a_run_without_the_compiler() -> None:
    """The same, with all helpers interpreted too: they are compiled in the test above."""
    program = (
        "import numpy as np; np.seterr(over='ignore')\n"
        "from policy.views import CALLABLE, random_view, scores_of\n"
        "for seed in range(40):\n"
        "    for rule in CALLABLE: print(*scores_of(rule, random_view(seed)))\n"
    )
    folder = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    lines = iter(run.stdout.splitlines())
    for seed in range(40):
        for rule in CALLABLE:
            expected = np.array(next(lines).split(), float)
            equal(scores_of(rule, random_view(seed)), expected)


@pytest.mark.parametrize("rule", [rule.name for rule in CALLABLE])
def test_ties_are_broken_at_random(rule: str) -> None:
    """Equal replicas all get their share, unless the lowest number wins or a hash decides."""
    view = make_view(3, request={"prefix_hash": 1})
    chosen = {pick(rule, view) for _ in range(60)}
    expected = {"vidur_lor": {0}, "sglang_cache_aware": {0}}
    for hashing in ("prefix_hash", "smg_prefix_hash", "rendezvous_hash"):
        expected[hashing] = {pick(hashing, view)}
    if rule == "dual_map":
        assert len(chosen) == 2
    else:
        assert chosen == expected.get(rule, {0, 1, 2})
