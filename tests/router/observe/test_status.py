import asyncio
import json
import re

import numpy as np
import orjson
import pytest

from router.conftest import Backend, Client, post, run, settings_for, world
from router.observed import Observed
from tailrace.router.app import Router
from tailrace.router.observe import prometheus
from tailrace.router.observe.scrape import ScrapeSettings
from tailrace.router.observe.snapshot import WaitingSnapshot
from tailrace.router.observe.status import (
    PAGE,
    PAGE_HEADERS,
    SHOWN_SCORES,
    describe,
    history,
    plain_url,
    shown_scores,
)
from tailrace.router.workers import aggregate


def body(observed):
    """The body of /status, of a router or of a state that was set."""
    return orjson.dumps(describe(observed.telemetry, observed.snapshot()))


def status_of(observed):
    """/status as a client reads it."""
    return orjson.loads(body(observed))


def test_replicas_are_told_with_what_is_known_of_them():
    observed = Observed(("fast", "slow"))
    observed.set(
        0, in_flight=9, queued=4, running=5, waiting=4, kv_used=0.7, metrics_age_s=1.5,
        cached_tokens=1000,
    )  # fmt: skip
    observed.set(1, speed=0.6)
    for replica in (0, 0, 0, 1):
        observed.decide(replica)
    observed.passes(1.5)
    first, second = status_of(observed)["replicas"]
    assert first["name"] == "fast"
    assert first["url"] == "http://10.0.0.1:8000"
    assert (first["state"], first["available"]) == ("closed", True)
    assert (first["in_flight"], first["queued"], first["limit"]) == (9, 4, None)
    assert (first["running"], first["waiting"], first["kv_used"]) == (5, 4, 0.7)
    assert first["metrics_age_s"] == pytest.approx(1.5)
    assert first["cached_tokens"] == 1000
    assert first["share_1m"] == 0.75
    assert second["speed"] == 0.6
    for unknown in ("running", "waiting", "kv_used", "metrics_age_s"):
        assert second[unknown] is None


def test_the_queue_at_the_router():
    waiting = [
        WaitingSnapshot(client="a", priority=0, waited_s=3.0, overtaken=2),
        WaitingSnapshot(client="", priority=-1, waited_s=1.0, overtaken=0),
    ]
    observed = Observed(waiting=9, oldest=tuple(waiting))
    observed.decide(0, waited_s=0.5, overtook=2, overtook_why="fair_share", overtaken=1)
    found = status_of(observed)
    assert found["waiting"] == 9
    assert found["queue"] == {
        "longest_wait_s": 3.0, "waited": 1, "overtakes": {"fair_share": 1},
        "oldest": [
            {"client": "a", "priority": 0, "waited_s": 3.0, "overtaken": 2},
            {"client": "", "priority": -1, "waited_s": 1.0, "overtaken": 0},
        ],
    }  # fmt: skip
    (latest,) = found["recent"]
    assert (latest["waited_s"], latest["overtook"], latest["overtaken"]) == (0.5, 2, 1)
    assert latest["overtook_why"] == "fair_share"
    waits = {"client": "b", "priority": 0, "waited_s": 5.0, "overtaken": 0}
    overtakes = {"fair_share": 2, "order": 1}
    other = {"longest_wait_s": 5.0, "waited": 4, "overtakes": overtakes, "oldest": [waits]}
    both = aggregate._queue([found["queue"], other])
    assert (both["longest_wait_s"], both["waited"]) == (5.0, 5)
    assert both["overtakes"] == {"fair_share": 3, "order": 1}
    assert [one["client"] for one in both["oldest"]] == ["b", "a", ""]
    assert status_of(Observed())["queue"]["longest_wait_s"] == 0


def test_states_of_replicas():
    observed = Observed(("fine", "broken", "drained", "gone"))
    observed.breaks(1, "connection refused")
    observed.set(2, state="draining", available=False, draining=True)
    observed.removed(3)
    found = status_of(observed)["replicas"]
    assert [(r["name"], r["state"], r["available"]) for r in found] == [
        ("fine", "closed", True), ("broken", "open", False), ("drained", "draining", False),
    ]  # fmt: skip
    assert found[1]["why"] == "connection refused"


def test_decisions_are_told_the_latest_first():
    observed = Observed(("a", "b", "c"), shadow="round_robin")
    observed.decide(0, 1, [0.1, 0.2, 0.3], "shorter queue (1 against 2 tokens)")
    observed.clock.now += 3
    observed.decide(2, -1, [5.0, np.nan, 1.0], fell_back="range", shadow=1, ttft_s=float("inf"))
    latest, first = status_of(observed)["recent"]
    assert (first["replica"], first["runner_up"], first["age_s"]) == ("a", "b", 3.0)
    assert first["reason"] == "shorter queue (1 against 2 tokens)"
    assert [s["replica"] for s in first["scores"]] == ["a", "b", "c"]
    assert first["fell_back"] is None
    assert (latest["replica"], latest["runner_up"], latest["shadow"]) == ("c", None, "b")
    assert latest["fell_back"] == "out_of_range"
    assert latest["predicted_ttft_s"] is None  # infinity is no number in JSON
    assert latest["number"] == first["number"] + 1


def test_numbers_of_decisions_go_on_when_old_ones_are_forgotten():
    observed = Observed()
    for _ in range(130):
        observed.decide(0)
    numbers = [d["number"] for d in status_of(observed)["recent"]]
    assert numbers == list(range(130, 80, -1))


def test_scores_shown_are_few_and_of_replicas_that_could_be_chosen():
    observed = Observed([str(i) for i in range(100)])
    scores = np.arange(100.0)
    decision = observed.decide(40, 60, scores)
    shown = shown_scores(decision)
    assert shown[:2] == [40, 60]
    assert len(shown) == SHOWN_SCORES
    assert all(scores[r] >= scores[40] for r in shown)
    assert shown[2:] == [41, 42, 43, 44, 45, 46]


def test_percentiles_pace_and_counts():
    observed = Observed()
    t = observed.telemetry
    for _ in range(20):
        observed.decide(0)
        t.request_done(observed.attempt(ttft_s=0.5, e2e_s=3.0), 200, "done", "chat")
    t.request_done(None, 429, "shed", "chat")
    t.shed("queue")
    t.retried(0, "connect")
    t.retried(1, "connect")
    observed.passes(2.0)
    found = status_of(observed)
    assert found["latency"]["ttft"]["1m"]["p99_s"] == pytest.approx(0.5, rel=0.03)
    assert found["latency"]["e2e"]["5m"]["p50_s"] == pytest.approx(3.0, rel=0.03)
    assert found["latency"]["e2e"]["5m"]["count"] == 20
    assert found["decisions"]["per_s"] == pytest.approx(10)
    assert found["decisions"]["mean_s"] == pytest.approx(3e-5)
    assert found["requests"] == {"done": 20, "shed": 1}
    assert (found["retries"], found["shed"]) == ({"connect": 2}, {"queue": 1})


def test_shadow_and_canary():
    assert status_of(Observed())["shadow"] is None
    assert status_of(Observed())["canary"] is None
    observed = Observed(shadow="round_robin", canary="lmetric", canary_share=0.1)
    assert status_of(observed)["canary"]["share_of_decisions"] is None
    for shadow in (0, 1, 1, 1):
        observed.decide(0, shadow=shadow)
    observed.state |= {"decisions": 4, "canary_decisions": 1}
    found = status_of(observed)
    assert found["shadow"] == {
        "policy": "round_robin", "decisions": 4, "disagreements": 3, "share_of_disagreements": 0.75,
    }  # fmt: skip
    assert found["canary"] == {
        "policy": "lmetric", "share": 0.1, "block_s": 0.0, "decisions": 1,
        "share_of_decisions": 0.25,
    }  # fmt: skip


def test_history_is_of_the_last_five_minutes():
    observed = Observed()
    for step in range(200):
        observed.set(0, in_flight=step, queued=step // 2)
        observed.decide(0)
        observed.passes(2.0)
    found = history(observed.telemetry, observed.snapshot())
    assert len(found["age_s"]) == 150
    assert found["in_flight"][-1] == [199, 0]
    assert found["queued"][-1] == [99, 0]
    assert found["decisions_per_s"][-1] == 0.5
    assert found["age_s"][-1] == pytest.approx(0.0, abs=2.0)
    assert found["age_s"][0] == pytest.approx(298.0, abs=2.0)


def test_it_is_strict_json_whatever_the_names():
    observed = Observed(("\udcff", "</script>", '"'))
    observed.decide(0, 1, [np.inf, np.nan, -np.inf], "\udc80")
    text = body(observed)
    assert b"</script>" in text  # served as JSON, and put in as text
    json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://u:secret@h:1/v?key=secret#secret", "http://h:1/v"),
        ("https://[::1]:8000", "https://[::1]:8000"),
        ("http://a@b@h", "http://h"),
    ],
)
def test_an_address_has_nothing_secret(url, plain):
    assert plain_url(url) == plain


# ---- the page as a file -------------------------------------------------------------------------


def test_the_page_loads_nothing_and_allows_nothing_else():
    text = PAGE.decode()
    assert re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", text) == []
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text
    assert not re.search(r"\son\w+=", text.split("<script>")[0])
    assert not re.search(r"\sstyle=", text)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert policy.encode() in PAGE_HEADERS
    assert b"frame-ancestors 'none'" in PAGE_HEADERS
    assert PAGE_HEADERS.endswith(b"\r\n")


# ---- behind the real router ---------------------------------------------------------------------


def test_a_real_router_is_observed():
    """Two backends, one of which is dead: what happened is in /status and in /metrics."""

    async def go():
        backend, dead = Backend(), Backend()
        for b in (backend, dead):
            await b.start()
        await dead.kill()
        router = Router(settings_for([backend, dead]))
        await router.start()
        try:
            for _ in range(6):
                client = Client(*await asyncio.open_connection(*router.listen_at))
                client.send(post(body=b'{"prompt":"a secret","user":"somebody"}'))
                assert (await client.answer()).status == 200
                client.writer.close()
            return body(router), prometheus.render(router.telemetry.metrics, router.snapshot())
        finally:
            await router.stop()
            await backend.kill()

    status, metrics = asyncio.run(asyncio.wait_for(go(), 60))
    found = orjson.loads(status)
    alive, dead = found["replicas"]
    assert (alive["name"], alive["state"], dead["state"]) == ("b0", "closed", "open")
    assert alive["in_flight"] == dead["in_flight"] == 0
    assert found["requests"] == {"done": 6}
    assert found["retries"] == {"connect": 3}
    assert found["policy"] == "round_robin"
    assert found["latency"]["e2e"]["1m"]["count"] == 6
    assert len(found["recent"]) == found["decisions"]["total"] == 9
    text = metrics.decode()
    wanted = (
        'tailrace_requests_total{kind="completion",outcome="done",replica="b0",status="200"} 6.0'
    )
    assert wanted in text
    assert 'tailrace_replica_breaker{replica="b1",state="open"} 1.0' in text
    for secret in ("a secret", "somebody"):
        assert secret not in text + status.decode()


def test_the_snapshot_of_a_router():
    """What gauges and /status show comes from the parts that know it."""

    async def go():
        async with world(4, admission={"max_in_flight": 1}) as w:
            fine, broken, drained = w.router.backends.all[:3]
            w.backends[0].metrics = b"vllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"
            w.backends[1].metrics = b"nothing"
            w.router.scraper.settings = ScrapeSettings()
            await w.router.scraper.scrape()
            w.clock.ahead_s += 7.0
            for _ in range(3):
                broken.health.failure(w.clock(), "connection refused")
            drained.health.drain(True)
            w.backends[0].default = never
            busy, waiting = await w.client(), await w.client()
            busy.send(post(body=b'{"prompt":"hello"}'))
            w.router.backends.all[3].health.remove(True)
            while not fine.active:
                await asyncio.sleep(0)
            waiting.send(post())
            while not len(w.router.dispatcher.queue):
                await asyncio.sleep(0)
            return w.router.snapshot()

    async def never(seen, reader, writer):
        await reader.read()

    found = run(go(), limit_s=60)
    fine, broken, drained, removed = found.backends
    assert (found.policy, found.waiting, found.clients, found.decisions) == ("round_robin", 1, 2, 1)
    assert (fine.name, fine.state, fine.available, fine.limit) == ("b0", "closed", True, 1)
    assert (fine.in_flight, fine.ledger_in_flight, fine.queued) == (1, 1, 1)
    assert fine.connections >= 1
    assert (fine.running, fine.waiting, fine.kv_used) == (3, None, 0.5)
    assert fine.metrics_age_s == pytest.approx(7.0, abs=1.0)
    assert (fine.capacity_tokens > 0, fine.speed) == (True, 1.0)
    assert (broken.state, broken.breaker, broken.why) == ("open", "open", "connection refused")
    assert (broken.available, broken.opened, broken.metrics_age_s) == (False, 1, None)
    assert broken.scrape_failures >= 1
    assert (drained.state, drained.draining, drained.breaker) == ("draining", True, "closed")
    assert (removed.state, removed.removed) == ("removed", True)
    assert found.present == [fine, broken, drained]


def ask_admin(path, *headers):
    """Ask the admin listener of a real router whose token is "sesame"."""

    async def go():
        backend = Backend()
        await backend.start()
        admin = {"listen": "127.0.0.1:0", "token_env": "ADMIN_TOKEN"}
        router = Router(settings_for([backend], admin=admin))
        await router.start()
        try:
            client = Client(*await asyncio.open_connection(*router.admin_at))
            lines = "".join(f"{line}\r\n" for line in ("host: 127.0.0.1", *headers))
            client.send(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
            answer = await client.answer()
            client.writer.close()
            return answer
        finally:
            await router.stop()
            await backend.kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADMIN_TOKEN", "sesame")
        return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/status", b'"name":"b0"'),
        ("/status/history", b'"every_s"'),
        ("/metrics", b"tailrace_info{"),
        ("/", b"<!doctype html>"),
    ],
)
def test_the_admin_listener_serves_everything_for_its_token(path, part):
    answer = ask_admin(path, "authorization: Bearer sesame")
    assert answer.status == 200
    assert part in answer.body
    assert b"sesame" not in answer.body
    if path == "/":
        assert answer.body == PAGE
        assert answer.headers["content-security-policy"].endswith("frame-ancestors 'none'")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", ["/status", "/status/history", "/metrics"])
def test_data_are_only_for_the_token(path):
    answer = ask_admin(path)
    assert answer.status == 401
    assert "www-authenticate" not in answer.headers  # a browser would ask for a password


def test_the_page_comes_without_a_token():
    assert ask_admin("/").body == PAGE
