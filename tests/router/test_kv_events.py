"""A router in front of emulated servers that publish KV events."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.conftest import Counts, quiet_settings, serving
from router.emulated import Emulated
from tailrace.config import Cluster, Replica
from tailrace.emulate import tokenizer
from tailrace.emulate.emulator import Emulator
from tailrace.emulate.faults import Fault
from tailrace.errors import TailraceError
from tailrace.router.app import Router
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.exact_caches import EXACT, STALE


@asynccontextmanager
async def published(
    blocks: int = 512, replicas: int = 1, events: bool = True, **over: Any
) -> AsyncIterator[Emulated]:
    """A router before servers with a small cache."""
    server = Replica(
        count=replicas, num_blocks=blocks, scheduler="vllm_v1", prefix_caching=True, block_size=16
    )
    emulator = Emulator(Cluster(replicas=(server,)), time_scale=0.001, kv_events_port=0)
    async with emulator:
        backends = [
            {
                "url": url,
                "server": {"num_blocks": blocks, "prefix_caching": True, "scheduler": "vllm_v1"},
                **({"kv_events": p.endpoint, "kv_replay": p.replay} if events else {}),
            }
            for url, p in zip(emulator.urls, emulator.publishers, strict=True)
        ]
        settings = quiet_settings(backends, **{"admin": {"listen": "off"}, "models": {}, **over})
        router = Router(settings, events=Counts())
        made = Emulated(router, [emulator], Counts())
        async with serving(router, made.opened):
            if events:
                await until_trust(router, EXACT)
            yield made


async def until_trust(router: Router, trust: str) -> None:
    assert router.kv_streams is not None
    async with asyncio.timeout(20):
        while router.kv_streams.caches.trust_of(0) != trust:
            await asyncio.sleep(0.01)


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(f"{rng.randrange(1000):03d} " for _ in range(words))


async def misses(made: Emulated, prompts: int, learn: bool) -> list[int]:
    """Ask again and again for one of a few prompts while another client uses the server as well.

    Return by how many tokens the predictions of what is cached were off.
    """
    rng, router = random.Random(1), made.router
    cluster, client, off = router.backends.cluster, await made.client(), []
    replica, other = made.emulators[0].replicas[0], random.Random(2)
    for _ in range(prompts):
        for _ in range(other.randrange(3)):
            done = asyncio.Event()
            prompt = text(100 + other.randrange(8), other.randrange(300, 1500))
            replica.submit(
                tokenizer.text_tokens(prompt), b" yes", lambda _, last, d=done: last and d.set()
            )
            await done.wait()
        if learn:
            await settled(made)
        prompt = text(rng.randrange(8), rng.randrange(300, 1500))
        body = {"model": "emulated", "prompt": prompt, "max_tokens": 32}
        before = _attempts(router)
        answer = await made.ask("/v1/completions", body, client=client)
        assert answer.status == 200
        attempt = before[-1]
        off.append(abs(attempt.cached - attempt.reported_cached))
        if learn:
            await settled(made)
    assert cluster.index.totals["held_tokens"][0] > 0
    return off


async def settled(made: Emulated) -> None:
    """Wait until all tokens are learned and all events are read."""
    streams, learner = made.router.kv_streams, made.router.intake.context.prompt_learner
    assert streams is not None
    assert learner is not None
    await made.quiet()
    while learner._tasks or streams.streams[0].next_number < made.emulators[0].publishers[0]._next:
        await asyncio.sleep(0.002)


def _attempts(router: Router) -> list[Any]:
    """Collect the attempts that end from now on."""
    found: list[Any] = []
    cluster = router.backends.cluster
    ended = type(cluster).ended

    def note(entry: Any, now: float, output: int) -> float:
        found.append(entry)
        return ended(cluster, entry, now, output)

    cluster.ended = note  # type: ignore[method-assign]
    return found


def test_predictions_become_exact() -> None:
    """Of what another client does to the caches, a router without events knows nothing."""

    async def measure(events: bool) -> list[int]:
        async with published(blocks=280, events=events) as made:
            return (await misses(made, 40, events))[10:]

    estimated, exact = asyncio.run(measure(False)), asyncio.run(measure(True))
    assert sum(estimated) > 30 * 100
    # A run of text is 64 tokens long, and a run counts only as a whole.
    assert max(exact) <= 64 + 16
    assert sum(exact) < sum(estimated) / 5


def test_chats_and_token_ids_are_learned() -> None:
    async def check() -> None:
        async with published() as made:
            chat = {"model": "emulated", "max_tokens": 8,
                    "messages": [{"role": "user", "content": text(1, 600)}]}  # fmt: skip
            ids = {"model": "emulated", "max_tokens": 8, "prompt": list(range(800))}
            assert (await made.ask("/v1/chat/completions", chat)).status == 200
            assert (await made.ask("/v1/completions", ids)).status == 200
            streams, learner = made.router.kv_streams, made.router.intake.context.prompt_learner
            assert streams is not None
            assert learner is not None
            async with asyncio.timeout(10):
                while streams.caches.learned < 2:
                    await asyncio.sleep(0.01)
            assert (learner.failed, learner.skipped) == (0, 0)

    asyncio.run(check())


def test_a_server_that_dies_and_returns_is_empty_and_exact_again() -> None:
    async def check() -> None:
        async with published() as made:
            body = {"model": "emulated", "prompt": text(1, 800), "max_tokens": 4}
            assert (await made.ask("/v1/completions", body)).status == 200
            router, emulator = made.router, made.emulators[0]
            assert router.kv_streams is not None
            await emulator.fault(0, Fault(kind="die"))
            await until_trust(router, STALE)
            await emulator.fault(0, Fault(kind="return"))
            await until_trust(router, EXACT)
            assert not router.kv_streams.caches.mirrors[0].ours
            assert router.backends.cluster.index.totals["held_tokens"][0] == 0

    asyncio.run(check())


def test_a_server_without_tokenize_leaves_estimates() -> None:
    async def check() -> None:
        async with published(events=True) as made:
            learner = made.router.intake.context.prompt_learner
            assert learner is not None
            pool = made.router.backends.all[0].pool
            fetch = pool.fetch

            async def fails(method: str, path: str, *args: Any) -> Any:
                if path == "/tokenize":
                    raise OSError("not here")
                return await fetch(method, path, *args)

            pool.fetch = fails  # type: ignore[method-assign, assignment]
            body = {"model": "emulated", "prompt": text(1, 800), "max_tokens": 4}
            assert (await made.ask("/v1/completions", body)).status == 200
            while learner._tasks:
                await asyncio.sleep(0.005)
            assert learner.failed == 1
            cluster = made.router.backends.cluster
            assert cluster.index.totals["held_tokens"][0] > 700

    asyncio.run(check())


@pytest.mark.parametrize("prompt", [["one text"], [list(range(40))], [[1, 2], [3]], [2**63]])
def test_a_prompt_in_a_form_of_its_own_is_no_fault_of_the_server(prompt: list[Any]) -> None:
    async def check() -> None:
        async with published() as made:
            streams, learner = made.router.kv_streams, made.router.intake.context.prompt_learner
            assert streams is not None
            assert learner is not None
            client = await made.client()
            await made.ask(
                "/v1/completions", {"model": "emulated", "prompt": prompt}, client=client
            )
            await settled(made)
            assert learner.failed == 0
            body = {"model": "emulated", "prompt": text(1, 800), "max_tokens": 4}
            assert (await made.ask("/v1/completions", body, client=client)).status == 200
            await settled(made)
            body = {"model": "emulated", "prompt": text(2, 800), "max_tokens": 4}
            learned = streams.caches.learned
            assert (await made.ask("/v1/completions", body, client=client)).status == 200
            await settled(made)
            assert streams.caches.learned == learned + 1

    asyncio.run(check())


@pytest.mark.parametrize(("status", "asked"), [(400, 2), (404, 1)])
def test_a_server_that_refuses_one_prompt_is_asked_for_others(status: int, asked: int) -> None:
    async def check() -> None:
        async with published() as made:
            learner = made.router.intake.context.prompt_learner
            assert learner is not None
            pool = made.router.backends.all[0].pool
            fetch = pool.fetch

            async def refuses(method: str, path: str, *args: Any) -> Any:
                found = await fetch(method, path, *args)
                return dataclasses.replace(found, status=status) if path == "/tokenize" else found

            pool.fetch = refuses  # type: ignore[method-assign, assignment]
            for seed in range(2):
                body = {"model": "emulated", "prompt": text(seed, 800), "max_tokens": 4}
                assert (await made.ask("/v1/completions", body)).status == 200
                while learner._tasks:
                    await asyncio.sleep(0.005)
            assert learner.failed == asked

    asyncio.run(check())


def test_tokens_that_were_forgotten_are_learned_again() -> None:
    async def check() -> None:
        async with published() as made:
            streams = made.router.kv_streams
            assert streams is not None
            body = {"model": "emulated", "prompt": text(1, 800), "max_tokens": 4}
            for learned in (0, 1, 1):  # the first one tells how long blocks are
                assert (await made.ask("/v1/completions", body)).status == 200
                await settled(made)
                assert streams.caches.learned >= learned
            before = streams.caches.learned
            streams.caches.runs._runs.clear()
            assert (await made.ask("/v1/completions", body)).status == 200
            await settled(made)
            assert streams.caches.learned == before + 1

    asyncio.run(check())


def test_the_state_shows_trust_and_lag() -> None:
    async def check() -> None:
        async with published() as made:
            snapshot = made.router.snapshot().backends[0]
            assert snapshot.caches == EXACT
            assert snapshot.event_lag_s == 0.0
        async with published(events=False) as made:
            snapshot = made.router.snapshot().backends[0]
            assert snapshot.caches == "estimated"
            assert snapshot.event_lag_s is None

    asyncio.run(check())


def test_learning_by_events_needs_publishers() -> None:
    with pytest.raises(ValueError, match="publishes none"):
        ServeSettings.model_validate(
            {"backends": [{"url": "http://h:1"}], "routing": {"prefix_learns": "events"}}
        )
    settings = ServeSettings.model_validate(
        {"backends": [{"url": "http://[::1]:1"}], "routing": {"prefix_learns": "events"},
         "events": {"port": 5557, "replay_port": 5558}}
    )  # fmt: skip
    endpoints = settings.events.endpoints(settings.backends[0])
    assert endpoints == ("tcp://[::1]:5557", "tcp://[::1]:5558")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from tailrace.router.observe import kv_streams

    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.raises(TailraceError, match="pip install"):
        kv_streams.KvStreams(None, None)  # type: ignore[arg-type]
