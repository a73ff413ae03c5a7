import asyncio
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.observed import Clock, Observed
from tailrace.router.observe import prometheus
from tailrace.router.observe.rolling_window import (
    SLOT_S,
    SLOTS,
    RollingWindow,
    bucket_of,
    percentile,
)
from tailrace.router.observe.snapshot import StoreSnapshot, WaitingSnapshot
from tailrace.router.observe.status import describe, describe_worker
from tailrace.router.observe.telemetry import TTFT_BUCKETS
from tailrace.router.state.server_speeds import ServerSpeed
from tailrace.router.workers import aggregate

ROOT = Path(__file__).parents[3]


def text(observed):
    return prometheus.render(observed.telemetry.metrics, observed.snapshot()).decode()


def samples(observed):
    """All samples as {(name, (label value, ...)): value}; fails on what Prometheus would refuse."""
    found = {}
    for family in text_string_to_metric_families(text(observed)):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice: Prometheus refuses the whole answer"
            found[key] = sample.value
    return {(name, tuple(v for _, v in labels)): value for (name, labels), value in found.items()}


@pytest.fixture
def observed():
    return Observed()


@pytest.fixture
def telemetry(observed):
    return observed.telemetry


def test_requests_of_clients_are_counted_by_their_names(observed, telemetry):
    telemetry.request_done(observed.attempt(1), 200, "done", "chat", "team-a")
    telemetry.request_done(None, 429, "shed", "chat", "team-a")
    telemetry.request_done(None, 400, "unheard of", "chat", "team-b")
    found = samples(observed)
    assert found["tailrace_client_requests_total", ("team-a", "done")] == 1
    assert found["tailrace_client_requests_total", ("team-a", "shed")] == 1
    assert found["tailrace_client_requests_total", ("team-b", "other")] == 1
    assert found["tailrace_client_tokens_total", ("team-a",)] == 601
    assert ("tailrace_client_tokens_total", ("team-b",)) not in found
    one = describe(telemetry, observed.snapshot())["by_client"]
    assert one == {
        "team-a": {"requests": 2, "rejected": 1, "tokens": 601},
        "team-b": {"requests": 1, "rejected": 0, "tokens": 0},
    }
    parts = [describe_worker(telemetry, observed.snapshot()) for _ in range(2)]
    merged = aggregate.status([(0, parts[0]), (1, {**parts[1], "by_client": one | {"c": {}}})])
    assert merged["by_client"] == {
        "team-a": {"requests": 4, "rejected": 2, "tokens": 1202},
        "team-b": {"requests": 2, "rejected": 0, "tokens": 0},
        "c": {"requests": 0, "rejected": 0, "tokens": 0},
    }


def test_a_request_is_counted_with_its_times_and_tokens(observed, telemetry):
    attempt = observed.attempt(1, ttft_s=0.3, e2e_s=2.3, wait_s=0.02, reported_cached=48)
    telemetry.request_done(attempt, 200, "done", "chat")
    found = samples(observed)
    assert found["tailrace_requests_total", ("chat", "done", "b", "200")] == 1
    assert found["tailrace_prompt_tokens_total", ("b",)] == 500
    assert found["tailrace_output_tokens_total", ("b",)] == 101
    assert found["tailrace_prefix_believed_tokens_total", ("b",)] == 64
    assert found["tailrace_prefix_checked_tokens_total", ("b",)] == 64
    assert found["tailrace_prefix_reported_tokens_total", ("b",)] == 48
    assert found["tailrace_ttft_seconds_sum", ("b",)] == pytest.approx(0.3)
    assert found["tailrace_ttft_seconds_bucket", ("0.2", "b")] == 0
    assert found["tailrace_ttft_seconds_bucket", ("0.35", "b")] == 1
    assert found["tailrace_ttft_seconds_bucket", ("+Inf", "b")] == 1
    assert found["tailrace_ttft_seconds_count", ("b",)] == 1
    assert found["tailrace_ttft_seconds_count", ("a",)] == 0
    assert found["tailrace_tpot_seconds_sum", ("b",)] == pytest.approx(2.0 / 100)
    assert found["tailrace_e2e_seconds_sum", ()] == pytest.approx(2.3)
    assert found["tailrace_queue_wait_seconds_sum", ()] == pytest.approx(0.02)


def test_a_bound_belongs_to_its_bucket(observed, telemetry):
    """Prometheus' ``le`` is less or equal."""
    observed.clock.now = 1.0
    bound = TTFT_BUCKETS[6]
    attempt = observed.attempt(0, e2e_s=1.0, ttft_s=bound)
    telemetry.request_done(attempt, 200, "done", "chat")
    assert samples(observed)["tailrace_ttft_seconds_bucket", (str(bound), "a")] == 1


@pytest.mark.parametrize(
    ("more", "ttft", "tpot", "e2e"),
    [
        ({"estimated": True}, 0, 0, 1),  # a reply in one piece: its first token was not seen
        ({"output_tokens": 1}, 1, 0, 1),
        ({"ttft_s": float("nan"), "outcome": "backend_failed"}, 0, 0, 0),
        ({"outcome": "client_gone"}, 1, 0, 0),
    ],
)
def test_only_what_was_seen_is_timed(observed, telemetry, more, ttft, tpot, e2e):
    outcome = more.pop("outcome", "done")
    telemetry.request_done(observed.attempt(0, **more), 200, outcome, "chat")
    found = samples(observed)
    assert found["tailrace_ttft_seconds_count", ("a",)] == ttft
    assert found["tailrace_tpot_seconds_count", ("a",)] == tpot
    assert found["tailrace_e2e_seconds_count", ()] == e2e


def test_a_clock_that_went_back_harms_nothing(observed, telemetry):
    attempt = observed.attempt(0, ttft_s=-1.0, e2e_s=-5.0, wait_s=-1.0)
    telemetry.request_done(attempt, 200, "done", "chat")
    assert samples(observed)["tailrace_e2e_seconds_sum", ()] == 0


def test_no_label_comes_from_a_client(observed, telemetry):
    """Whatever is given, only names from closed lists come out."""
    rng = random.Random(1)
    for _ in range(2000):
        odd = f"/v1/{rng.random()}"
        telemetry.request_done(None, rng.randrange(100, 1000), odd, odd)
        telemetry.retried(0, odd)
        telemetry.shed(odd)
        observed.decide(0, fell_back=odd)
    exported = text(observed)
    assert "/v1/" not in exported
    assert len(re.findall("^tailrace_requests_total", exported, re.MULTILINE)) < 80
    found = samples(observed)
    assert found["tailrace_retries_total", ("other", "a")] == 2000
    assert found["tailrace_shed_total", ("other",)] == 2000
    assert found["tailrace_fallbacks_total", ("other",)] == 2000
    assert found["tailrace_requests_total", ("other", "other", "none", "9xx")] > 0


def test_decisions_fallbacks_shadow_and_canary():
    observed = Observed(canary="lmetric", canary_share=0.1, shadow="round_robin")
    for cause in (None, "guard", "error", "time", "range", "nan", "range"):
        observed.decide(1, fell_back=cause, shadow=1 if cause is None else 0)
    observed.decide(0, policy="lmetric")
    observed.state["canary_decisions"] = 1
    found = samples(observed)
    assert found["tailrace_decisions_total", ("tailrace", "b")] == 7
    assert found["tailrace_decisions_total", ("lmetric", "a")] == 1
    causes = {labels[0]: n for (name, labels), n in found.items() if "fallbacks_total" in name}
    assert causes == {"guard": 1, "error": 1, "slow": 1, "out_of_range": 2, "nan": 1}
    assert found["tailrace_shadow_decisions_total", ()] == 7
    assert found["tailrace_shadow_disagreements_total", ()] == 6
    assert found["tailrace_canary_decisions_total", ()] == 1
    assert found["tailrace_canary_share", ()] == 0.1
    assert found["tailrace_decision_seconds_count", ()] == 8


def test_the_state_of_the_router_is_exported(observed):
    observed.set(
        0, in_flight=7, queued=3, running=4, waiting=2, kv_used=0.5, metrics_age_s=4.0,
        cached_tokens=2000, caches="exact", event_lag_s=0.25, event_gaps=3, event_gaps_lost=1,
    )  # fmt: skip
    observed.set(1, scrape_failures=5)
    observed.breaks(1)
    oldest = WaitingSnapshot(client="a", priority=0, waited_s=2.5, overtaken=1)
    observed.state |= {"waiting": 3, "oldest": (oldest,), "clients": 1, "log_lines_dropped": 11}
    found = samples(observed)
    for name, value in {
        "in_flight": 7, "queued": 3, "available": 1, "server_running": 4, "server_waiting": 2,
        "server_kv_used": 0.5, "metrics_age_seconds": 4.0, "index_tokens": 2000,
        "event_lag_seconds": 0.25, "event_gaps_total": 3, "event_gaps_lost_total": 1,
    }.items():  # fmt: skip
        assert found[f"tailrace_replica_{name}", ("a",)] == value, name
    assert found["tailrace_replica_available", ("b",)] == 0
    assert found["tailrace_replica_caches", ("a", "exact")] == 1
    assert found["tailrace_replica_caches", ("a", "stale")] == 0
    assert found["tailrace_replica_caches", ("b", "estimated")] == 1
    assert found["tailrace_replica_breaker", ("b", "open")] == 1
    assert found["tailrace_replica_breaker", ("b", "closed")] == 0
    assert found["tailrace_replica_breaker_opened_total", ("b",)] == 1
    assert found["tailrace_replica_scrape_failures_total", ("b",)] == 5
    assert found["tailrace_waiting_requests", ()] == 3
    assert found["tailrace_longest_wait_seconds", ()] == 2.5
    assert found["tailrace_client_connections", ()] == 1
    assert found["tailrace_decision_log_dropped_total", ()] == 11


def test_who_waited_and_who_overtook_is_counted(observed):
    observed.decide(0)
    observed.decide(0, waited_s=0.2, overtaken=2)
    observed.decide(1, waited_s=0.1, overtook=3, overtook_why="order")
    observed.decide(1, waited_s=0.1, overtook=1, overtook_why="priority")
    found = samples(observed)
    assert found["tailrace_waited_total", ()] == 3
    causes = {
        labels: n for (name, labels), n in found.items() if name == "tailrace_overtakes_total"
    }
    assert causes == {("order",): 1, ("priority",): 1}


def test_unknown_is_absent_and_never_zero(observed):
    observed.set(0, running=4, metrics_age_s=0.0)
    found = samples(observed)
    assert ("tailrace_replica_server_waiting", ("a",)) not in found
    assert ("tailrace_replica_server_running", ("a",)) in found
    assert ("tailrace_replica_metrics_age_seconds", ("b",)) not in found


def test_a_name_that_was_given_twice_is_one_series():
    """Taken out, and another server added under the same name."""
    observed = Observed(("a", "a"))
    observed.removed(0)
    for replica in (0, 1):
        observed.decide(replica)
        observed.telemetry.request_done(observed.attempt(replica), 200, "done", "chat")
    found = samples(observed)
    assert found["tailrace_decisions_total", ("tailrace", "a")] == 2
    assert found["tailrace_prompt_tokens_total", ("a",)] == 1000
    assert found["tailrace_ttft_seconds_count", ("a",)] == 2
    assert ("tailrace_replica_in_flight", ("a",)) in found


def test_hostile_names_cannot_break_the_format():
    observed = Observed(('"} 1\nforged{x="', "\\", "ünï", "\\n"))
    for replica in range(4):
        observed.decide(replica)
        observed.telemetry.request_done(observed.attempt(replica), 200, "done", "chat")
    found = samples(observed)
    assert found["tailrace_decisions_total", ("tailrace", "ünï")] == 1
    labels = {labels[0] for name, labels in found if name == "tailrace_ttft_seconds_count"}
    assert labels == {b.name for b in observed.backends}
    assert not re.search("^forged", text(observed), re.MULTILINE)


def test_run_measures_the_loops_lag_until_cancelled(observed, telemetry, monkeypatch):
    monkeypatch.setattr("tailrace.router.observe.telemetry.LAG_EVERY_S", 0.0)

    async def go():
        task = asyncio.create_task(telemetry.run(observed.snapshot))
        while sum(telemetry.lag.counts[0]) < 3:
            await asyncio.sleep(0)
        observed.set(0, in_flight=5)
        observed.clock.now += SLOT_S
        while not telemetry.window.past:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(asyncio.wait_for(go(), 10))
    assert telemetry.window.past[0].in_flight == [5, 0]


# ---- the last minutes -------------------------------------------------------------------------


def test_percentiles_are_right_to_within_three_percent():
    rng = np.random.default_rng(0)
    times = np.exp(rng.normal(-1, 1.2, 5000))
    counts = np.bincount([bucket_of(s) for s in times], minlength=320)
    for percent in (50, 95, 99):
        exact = np.percentile(times, percent, method="inverted_cdf")
        assert percentile(counts, percent) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-9, 1e-4, 0.1, 1.0, 10.0, 1e4, 1e9])
def test_every_time_has_a_bucket(seconds):
    assert 0 <= bucket_of(seconds) < 320


def test_no_requests_have_no_percentile():
    assert percentile(np.zeros(320, np.int64), 99) is None


def test_a_window_forgets(observed, telemetry):
    window = telemetry.window
    for _ in range(10):
        telemetry.request_done(observed.attempt(ttft_s=0.1, e2e_s=1.0), 200, "done", "chat")
    observed.passes(58)
    assert window.percentiles("ttft", 60)["count"] == 10
    observed.passes(4)
    assert window.percentiles("ttft", 60)["count"] == 0
    assert window.percentiles("ttft", 300)["count"] == 10
    assert window.percentiles("ttft", 300)["p99_s"] == pytest.approx(0.1, rel=0.03)
    observed.passes(240)
    assert window.percentiles("e2e", 300)["count"] == 0


def test_memory_is_bounded(observed, telemetry):
    for _ in range(3 * SLOTS):
        observed.decide(0)
        observed.passes(SLOT_S)
    assert len(telemetry.window.past) == SLOTS
    assert len(telemetry.recent) == 50


def test_pace_counts_from_the_start_if_that_is_later(observed, telemetry):
    for _ in range(4):
        for _ in range(6):
            observed.decide(0)
        observed.passes(1.0)
    assert telemetry.window.decisions_per_s(observed.clock.now, 10) == pytest.approx(6, rel=0.01)
    assert telemetry.window.decisions_per_s(observed.clock.now, 60) == pytest.approx(6, rel=0.01)


def test_pace_over_a_window(observed, telemetry):
    for _ in range(60):
        for _ in range(5):
            observed.decide(0)
        observed.passes(1.0)
    for now_s in (0.0, 0.9, 1.1):
        observed.passes(now_s)
        pace = telemetry.window.decisions_per_s(observed.clock.now, 10)
        assert 3.5 < pace <= 5.01
    observed.passes(20)
    assert telemetry.window.decisions_per_s(observed.clock.now, 10) == 0


def test_lag_is_kept_as_the_worst(observed, telemetry):
    telemetry.lagged(0.2)
    telemetry.lagged(-0.1)
    observed.passes(10)
    telemetry.lagged(0.05)
    assert telemetry.window.worst_lag_s(60) == 0.2
    assert telemetry.window.worst_lag_s(4) == 0.05
    assert samples(observed)["tailrace_event_loop_lag_seconds_count", ()] == 3


def test_a_pause_of_the_process_leaves_a_hole_and_no_more():
    clock = Clock()
    window = RollingWindow(clock.now)
    window.present.ttft[bucket_of(0.1)] += 1
    window.next(clock.now + 3600, (), (), 0)
    assert window.percentiles("ttft", 300)["count"] == 0
    assert len(window.last(300)) == 1


# ---- files for Prometheus and Grafana ----------------------------------------------------------


def exported_names():
    observed = Observed(canary="lmetric", canary_share=0.1, shadow="round_robin")
    observed.decide(0, fell_back="guard")
    observed.decide(0, waited_s=1.0, overtook=1, overtook_why="order")
    observed.telemetry.request_done(observed.attempt(), 200, "done", "chat")
    observed.telemetry.retried(0, "connect")
    observed.telemetry.shed("queue")
    observed.state["autopilot"] = {"wanted": {"replicas": 3, "low": 2, "high": 4}}
    known = ServerSpeed("learned", 0.01, 5e3, uncertainty=0.1, error=0.1, unexplained=False)
    observed.set(
        0, running=1, waiting=1, kv_used=0.1, metrics_age_s=0.0, known=known, event_lag_s=0.0
    )
    observed.state["store"] = StoreSnapshot(connected=True, members=1, lost=0, missed=0, refused=0)
    return {name for name, _ in samples(observed)}


def test_the_dashboard_names_only_metrics_that_there_are():
    dashboard = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text())
    panels = [p for p in dashboard["panels"] if p["type"] != "row"]
    asked = {}
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(r"\b(?:tailrace|process)_\w+", target["expr"]):
                asked.setdefault(name, panel["title"])
    names = exported_names()
    assert {n: title for n, title in asked.items() if n not in names} == {}
    families = {re.sub("_(bucket|sum|count)$", "", n) for n in asked}
    ours = {re.sub("_(bucket|sum|count)$", "", n) for n in names if n.startswith("tailrace_")}
    assert ours - families == set(), "metrics that no panel shows"


def test_the_dashboard_can_be_imported():
    dashboard = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text())
    assert dashboard["schemaVersion"] >= 38  # Grafana 10
    assert dashboard["id"] is None
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")
    assert {v["name"] for v in dashboard["templating"]["list"]} >= {"datasource", "replica"}


def test_every_metric_is_documented():
    text = (ROOT / "docs/observability.md").read_text()
    names = {re.sub("_(bucket|sum|count)$", "", n) for n in exported_names()}
    missing = {n for n in names if n.startswith("tailrace_") and f"`{n}`" not in text}
    assert missing == set()


def test_every_query_says_rate_of_counters_only():
    """The rate of a gauge, or a counter without one, is a mistake in a dashboard."""
    dashboard = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            for name, window in re.findall(r"(tailrace_\w+)(?:\{[^}]*\})?(\[?)", target["expr"]):
                is_counter = bool(re.search("_(total|bucket|sum|count)$", name))
                assert is_counter == bool(window), f"{panel['title']}: {name}"
