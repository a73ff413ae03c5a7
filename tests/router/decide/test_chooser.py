"""The chooser: right choices, and a guard that holds whatever a policy does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.clusters import Clock, backends, chat, new_chooser, new_cluster, send
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.architecture import FEATURE_NAMES
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.policy.rules import RULES
from tailrace.router.decide import chooser as decide
from tailrace.router.decide.chooser import Chooser, ChooserSettings, training_range
from tailrace.router.state import kernels
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState


def _policy_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import time\nimport numpy as np\n\n\ndef scores(view):\n    {body}\n")
    return str(path)


# ---- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [rule.name for rule in RULES if not rule.in_engine] + ["tailrace"])
def test_every_policy_chooses_available_replicas_only(name: str) -> None:
    cluster = new_cluster(5)
    cluster.set_available(0, False)
    chooser = new_chooser(cluster, name)
    for i in range(25):
        decision = chooser.choose(cluster.arrive(chat(f"{i % 3} " * 300, user=f"u{i % 4}")), [3])
        assert decision is not None
        assert decision.replica in (1, 2, 4)
        assert decision.runner_up in (1, 2, 4)
        assert decision.runner_up != decision.replica
        assert decision.fell_back is None, chooser.last_error
        assert decision.scores.shape == (5,)
        assert decision.reason
        Attempt(cluster, cluster.arrive(chat("x")), decision.replica, decision)
    assert [cluster.available(r) for r in range(5)] == [False, True, True, True, True]


def test_nobody_available() -> None:
    cluster = new_cluster(2)
    cluster.set_available(0, False)
    chooser = new_chooser(cluster)
    assert chooser.choose(cluster.arrive(chat("x")), [1]) is None
    assert cluster.available(1)
    assert chooser.choose(cluster.arrive(chat("x")), [7, -1]) is not None
    cluster.set_available(1, False)
    assert chooser.choose(cluster.arrive(chat("x"))) is None


@pytest.mark.parametrize("name", ["lookahead", "lookahead_oracle"])
def test_look_aheads_are_refused(name: str) -> None:
    for field in ("policy", "shadow", "canary", "fallback"):
        with pytest.raises(TailraceError, match="cannot route live traffic"):
            Chooser(new_cluster(1), ChooserSettings(**{field: name}), warm_up=False)


@pytest.mark.parametrize("name", ["tailrace", "nonsense"])
def test_the_fallback_must_be_a_rule(name: str) -> None:
    with pytest.raises(TailraceError):
        new_chooser(new_cluster(1), fallback=name)


def test_the_scores_are_the_policys_own() -> None:
    cluster = new_cluster(3)
    send(cluster, chat("x"), 1)
    decision = new_chooser(cluster).choose(cluster.arrive(chat("y")), [])
    assert decision is not None
    assert list(decision.scores) == [0.0, 1.0, 0.0]


def test_warming_up_leaves_the_cluster_untouched() -> None:
    cluster = new_cluster(2)
    before = [a.copy() for a in (cluster.replicas, cluster.routers, *cluster.index)]
    Chooser(cluster, ChooserSettings(policy="round_robin", shadow="tailrace"))
    for old, new in zip(before, (cluster.replicas, cluster.routers, *cluster.index), strict=True):
        np.testing.assert_array_equal(new, old)


# ---- guard --------------------------------------------------------------------------------------


def _overloaded() -> ClusterState:
    """Replica 0 has a long queue, replica 1 nothing."""
    cluster = new_cluster(2)
    for i in range(12):
        send(cluster, chat(f"{i}" + "x" * 40_000), 0)
    return cluster


@pytest.mark.parametrize(("guard", "expected"), [(True, 1), (False, 0)])
def test_a_policy_of_ones_own_is_kept_from_an_overloaded_replica(
    tmp_path: Path, guard: bool, expected: int
) -> None:
    cluster = _overloaded()
    policy = _policy_file(tmp_path, "return np.arange(len(view.replicas))")
    chooser = new_chooser(cluster, policy, guard=guard)
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert decision.replica == expected
    assert decision.fell_back == ("guard" if guard else None)
    assert chooser.counts["fallback_guard"] == int(guard)
    assert decision.policy == "mine"


def test_small_differences_are_the_policys_business(tmp_path: Path) -> None:
    cluster = new_cluster(2)
    send(cluster, chat("x" * 4000), 0)
    chooser = new_chooser(cluster, _policy_file(tmp_path, "return np.array([0.0, 1.0])"))
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert (decision.replica, decision.fell_back) == (0, None)


def test_built_in_rules_are_not_guarded() -> None:
    cluster = _overloaded()
    chooser = new_chooser(cluster, "round_robin")
    found = {chooser.choose(cluster.arrive(chat("y"))).replica for _ in range(2)}  # type: ignore[union-attr]
    assert found == {0, 1}


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise RuntimeError('no')", "error"),
        ("return None", "error"),
        ("return [1.0]", "error"),
        ("return 'abc'", "error"),
        ("raise SystemExit(3)", "error"),
        ("return np.full(len(view.replicas), np.nan)", "error"),
        ("return np.array([1.0, np.nan])", "nan"),
        ("time.sleep(0.02); return np.zeros(len(view.replicas))", "time"),
    ],
)
def test_whatever_a_policy_does_the_rule_decides_instead(
    tmp_path: Path, body: str, cause: str
) -> None:
    cluster = _overloaded()
    limit_ms = 5.0 if cause == "time" else 1e6
    chooser = new_chooser(cluster, _policy_file(tmp_path, body), limit_ms=limit_ms)
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert (decision.replica, decision.fell_back) == (1, cause)
    assert chooser.counts[f"fallback_{cause}"] == 1


def test_a_policy_that_keeps_failing_is_left_alone_for_a_while(tmp_path: Path) -> None:
    cluster = new_cluster(2)
    calls = tmp_path / "calls"
    calls.write_text("")
    body = (
        f"from pathlib import Path; p = Path({str(calls)!r}); p.write_text(p.read_text() + 'x'); "
        "raise RuntimeError"
    )
    chooser = new_chooser(cluster, _policy_file(tmp_path, body))
    for _ in range(10):
        assert chooser.choose(cluster.arrive(chat("y"))) is not None
    assert calls.read_text() == "xxx"
    chooser._resting_until.clear()
    chooser.choose(cluster.arrive(chat("y")))
    assert calls.read_text() == "xxxx"


def test_a_policy_cannot_change_what_the_router_knows(tmp_path: Path) -> None:
    cluster = new_cluster(2)
    body = "view.replicas['in_flight'] = 99; view.request['now'] = -1.0; return np.zeros(2)"
    decision = new_chooser(cluster, _policy_file(tmp_path, body)).choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert not cluster.replicas["in_flight"].any()


def test_a_compiled_decision_over_its_time_is_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _overloaded()
    chooser = new_chooser(cluster, "round_robin", limit_ms=5.0)
    clocks = {name: iter([0.0, 1.0, 2.0]) for name in ("perf_counter", "thread_time")}
    for name, times in clocks.items():
        monkeypatch.setattr(decide.time, name, lambda times=times: next(times))
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert (decision.replica, decision.fell_back) == (1, "time")


def test_a_bug_of_ours_does_not_stop_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = new_cluster(3)
    send(cluster, chat("x"), 0)
    chooser = new_chooser(cluster)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(kernels, "decide", broken)
    decision = chooser.choose(cluster.arrive(chat("y")), [1])
    assert decision is not None
    assert (decision.replica, decision.fell_back) == (2, "error")
    assert chooser.last_error == "bug"
    Attempt(cluster, cluster.arrive(chat("y")), 2, decision).close("done")


# ---- what a learned policy was trained on -------------------------------------------------------


def test_ordinary_traffic_is_within_the_range() -> None:
    cluster = new_cluster(4)
    chooser = new_chooser(cluster, "tailrace")
    for i in range(30):
        cluster.scraped(i % 4, 2.0, 3.0, 0.5)
        decision = chooser.choose(cluster.arrive(chat("word " * (50 + i))))
        assert decision is not None
        assert decision.fell_back is None
        Attempt(cluster, cluster.arrive(chat("word")), decision.replica, decision)


def test_metrics_gone_mad_are_out_of_range() -> None:
    cluster = new_cluster(4)
    chooser = new_chooser(cluster, "tailrace")
    cluster.scraped(2, 1.0, 1.0, 90.0)  # per cent instead of a share
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert decision.fell_back == "range"
    assert chooser.counts["fallback_range"] == 1
    assert all(name.startswith("kv_used") for name in chooser.out_of_range)
    cluster.set_available(2, False)  # one that gets no requests does not matter
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert decision.fell_back is None


def test_the_range_is_that_of_the_policys_file() -> None:
    policy = registry.get("tailrace")
    assert isinstance(policy, LearnedPolicy)
    low, high = training_range(policy, 2.0)
    mean = np.concatenate(
        [policy.tensors["replica_norm.mean"], policy.tensors["request_norm.mean"]]
    )
    hidden = np.isin(FEATURE_NAMES, policy.config.ignore)
    np.testing.assert_allclose((low[~hidden] + high[~hidden]) / 2, mean[~hidden], atol=1e-4)
    assert (high - low >= 4 * 0.1 - 1e-5).all()
    assert hidden.any(), "nobody looks at these, so no value of theirs is out of range"
    assert (low[hidden] == -np.inf).all()
    assert (high[hidden] == np.inf).all()


def test_a_policy_that_listens_does_so_until_its_chooser_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\nfrom tailrace.policy.base import Policy\n\n\n"
        "class Mine(Policy):\n    heard = 0\n\n"
        "    def scores(self, view):\n        return np.zeros(len(view.replicas))\n\n"
        "    def finished(self, replica, request_id, now):\n        self.heard += 1\n"
    )
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, str(path))
    send(cluster, chat("x")).close("done")
    assert chooser.policy.heard == 1  # type: ignore[attr-defined]
    chooser.close()
    send(cluster, chat("x")).close("done")
    assert chooser.policy.heard == 1  # type: ignore[attr-defined]


# ---- canary and shadow --------------------------------------------------------------------------


def test_a_canary_gets_its_share_of_sessions_and_keeps_them() -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, canary="random", canary_share=0.25)
    by_session = {}
    for _ in range(2):
        for i in range(400):
            decision = chooser.choose(cluster.arrive(chat("y", user=f"user {i}")))
            assert decision is not None
            assert by_session.setdefault(i, decision.policy) == decision.policy
    share = sum(name == "random" for name in by_session.values()) / 400
    assert 0.15 < share < 0.35
    assert chooser.counts["canary"] == 2 * share * 400


def test_a_canary_share_needs_a_canary() -> None:
    with pytest.raises(ValueError, match="no canary"):
        ChooserSettings(canary_share=0.5)


@pytest.mark.parametrize("shadow", ["round_robin", "tailrace", "file"])
def test_a_shadow_is_asked_but_not_obeyed(tmp_path: Path, shadow: str) -> None:
    def choices(**settings: Any) -> tuple[list[int], Chooser]:
        cluster = new_cluster(4)
        chooser = new_chooser(cluster, "least_outstanding", **settings)
        found = []
        for i in range(30):
            arrival = cluster.arrive(chat(f"{i}" * 50))
            decision = chooser.choose(arrival)
            assert decision is not None
            if settings:
                assert decision.shadow in range(4)
                assert decision.shadow_ttft_s is not None
                if decision.shadow == decision.replica:
                    assert decision.shadow_ttft_s == 0.0
            Attempt(cluster, arrival, decision.replica, decision)
            found.append(decision.replica)
        return found, chooser

    if shadow == "file":
        shadow = _policy_file(tmp_path, "return -np.arange(len(view.replicas))")
    plain, _ = choices()
    shadowed, chooser = choices(shadow=shadow)
    assert plain == shadowed  # not even its random numbers
    assert chooser.counts["shadow"] == 30
    assert 0 < chooser.counts["shadow_differs"] <= 30


def test_a_shadow_that_fails_is_counted(tmp_path: Path) -> None:
    cluster = new_cluster(2)
    chooser = new_chooser(cluster, shadow=_policy_file(tmp_path, "return 1 / 0"))
    decision = chooser.choose(cluster.arrive(chat("y")))
    assert decision is not None
    assert (decision.shadow, decision.fell_back) == (None, None)
    assert chooser.counts["shadow_failed"] == 1


# ---- reasons ------------------------------------------------------------------------------------


def _cached(cluster: ClusterState) -> None:
    send(cluster, chat("x" * 9000), 1).close("client_gone")


def _queued(cluster: ClusterState) -> None:
    send(cluster, chat("z" * 20_000), 0)


def _answering(cluster: ClusterState) -> None:
    for i in range(9):
        send(cluster, chat(f"{i}"), 0).tokens(1)


def _nothing(cluster: ClusterState) -> None:
    pass


@pytest.mark.parametrize(
    ("policy", "servers", "prepare", "reason"),
    [
        ("least_predicted_ttft", (Replica(), Replica()), _cached, "more of the prompt cached"),
        ("least_predicted_ttft", (Replica(), Replica()), _queued, "shorter queue"),
        ("least_predicted_ttft", (Replica(), Replica(speed=2)), _nothing, "faster replica"),
        ("least_outstanding", (Replica(), Replica()), _answering, "fewer requests in flight"),
        ("load_aware", (Replica(), Replica()), _nothing, "chosen at random"),
    ],
)
def test_the_main_reason_is_said(
    policy: str,
    servers: tuple[Replica, ...],
    prepare: Callable[[ClusterState], None],
    reason: str,
) -> None:
    cluster = ClusterState(backends(*servers), Clock())
    prepare(cluster)
    decision = new_chooser(cluster, policy).choose(cluster.arrive(chat("x" * 9000)))
    assert decision is not None
    assert reason in decision.reason
    if prepare is not _nothing:
        assert (decision.replica, decision.runner_up) == (1, 0)
    assert decision.took_s > 0
    assert decision.ttft_s > 0


def test_full_memory_is_a_reason() -> None:
    cluster = new_cluster(2)
    cluster.scraped(0, 0.0, 0.0, 0.99)
    cluster.scraped(1, 0.0, 0.0, 0.10)
    decision = new_chooser(cluster, "least_load").choose(cluster.arrive(chat("x")))
    assert decision is not None
    assert decision.reason == "more KV memory free (90% against 1%)"


def test_a_single_replica_needs_no_reason() -> None:
    cluster = new_cluster(2)
    decision = new_chooser(cluster).choose(cluster.arrive(chat("x")), [0])
    assert decision is not None
    assert (decision.runner_up, decision.reason) == (-1, "the only replica available")


def test_rules_decide_as_the_registry_has_them() -> None:
    """The compiled path gives the scores of the policy object itself."""
    cluster = new_cluster(3)
    send(cluster, chat("x" * 5000), 0)
    send(cluster, chat("y" * 500), 2).tokens(3)
    arrival = cluster.arrive(chat("x" * 6000))
    for name in ("load_aware", "dynamo", "lmetric", "tailrace"):
        chooser = new_chooser(cluster, name, guard=False)
        decision = chooser.choose(arrival)
        assert decision is not None
        policy = registry.get(name)
        assert isinstance(policy, BuiltinPolicy)
        np.testing.assert_array_equal(
            policy.scores(chooser._copy_of_view(kernels.MAIN)), decision.scores
        )
