"""Predicted against reported cached tokens, without and with KV events: ``kv_events.py [--json]``.

    python benchmarks/kv_events.py                          # an emulated server
    python -m tests.vllm.serve_events FOLDER                # a real vLLM server; prints the options
    python benchmarks/kv_events.py -b URL --kv-events tcp://... --kv-replay tcp://...

A router sends conversations to a server whose prefix cache is too small for all of them, while
another client uses the same server directly. Of every request the router predicts how many tokens
of its prompt are cached there, and the server reports how many were. First the router estimates,
then it reads the server's events; the conversations are the same. Each run begins with an empty
cache if the server allows that (``/reset_prefix_cache``).
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tailrace.config import Cluster, Replica, parse
from tailrace.emulate.emulator import Emulator
from tailrace.emulate.tokenizer import WORDS
from tailrace.net.client import Pool
from tailrace.net.origin import Origin
from tailrace.router.app import Router
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.exact_caches import EXACT

HEADERS = {"content-type": "application/json"}
TIMEOUT_S = 120.0
#: Size of the emulated server's cache, in blocks of 16 tokens.
EMULATED_BLOCKS = 400


def words(rng: random.Random, count: int) -> str:
    """Return a text of common words."""
    return " ".join(rng.choices(WORDS, k=count))


class Conversations:
    """Conversations that grow until they are long, and then begin anew."""

    def __init__(self, seed: int, count: int, longest: int) -> None:
        """``longest``: words."""
        self._rng = random.Random(seed)
        self._longest = longest
        self._talks: list[list[dict[str, str]]] = [[] for _ in range(count)]

    def draw(self) -> list[dict[str, str]]:
        """Return one of them with another question."""
        rng = self._rng
        talk = rng.choice(self._talks)
        if sum(len(m["content"].split()) for m in talk) > self._longest:
            talk.clear()
        said = rng.randrange(150, 400) if not talk else rng.randrange(30, 120)
        talk.append({"role": "user", "content": words(rng, said)})
        return talk


async def ask(pool: Pool, path: str, model: str, messages: list[dict[str, str]]) -> bool:
    """Send a conversation and append the answer to it; return whether that went well."""
    body = orjson.dumps({"model": model, "messages": messages, "max_tokens": 16})
    response = await pool.fetch("POST", path, HEADERS, body, TIMEOUT_S)
    if response.status != 200:
        messages.clear()
        return False
    answer = orjson.loads(response.body)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": answer or "yes"})
    return True


async def run(server: dict[str, str], options: argparse.Namespace, events: bool) -> dict[str, Any]:
    """Serve the conversations once; return how good the predictions were."""
    direct = Pool(Origin.parse(server["url"]), connect_s=5.0)
    with contextlib.suppress(OSError):
        await direct.fetch("POST", "/reset_prefix_cache", HEADERS, b"", 10.0)
    models = orjson.loads((await direct.fetch("GET", "/v1/models", {}, b"", 10.0)).body)
    model = models["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        backend = dict(server) if events else {"url": server["url"]}
        data = {
            "backends": [backend], "listen": "127.0.0.1:0", "admin": {"listen": "off"},
            "decisions": {"folder": folder},
        }  # fmt: skip
        router = Router(parse(ServeSettings, data))
        await router.start()
        try:
            host, port = router.listen_at
            through = Pool(Origin(host, port), connect_s=5.0)
            if events:
                await _until_exact(router)
            own = Conversations(options.seed, options.conversations, options.longest)
            others = Conversations(options.seed + 1, options.conversations, options.longest)
            failed = 0
            rng = random.Random(options.seed + 2)
            began = time.perf_counter()
            for _ in range(options.requests):
                if rng.random() < options.others:
                    talk = others.draw()
                    failed += not await ask(direct, "/v1/chat/completions", model, talk)
                failed += not await ask(through, "/v1/chat/completions", model, own.draw())
                await asyncio.sleep(options.pause_s)
            took_s = time.perf_counter() - began
            streams = router.kv_streams
            stream = streams.streams[0] if streams is not None else None
            learner = router.intake.context.prompt_learner
            found: dict[str, Any] = {"failed": failed, "took_s": took_s}
            if streams is not None and stream is not None and learner is not None:
                found["events"] = {
                    "trust": streams.caches.trust_of(0), "messages": stream.messages,
                    "gaps": stream.gaps, "lost": stream.lost, "unreadable": stream.bad,
                    "lag_s": stream.lag.seconds, "prompts_learned": streams.caches.learned,
                    "prompts_failed": learner.failed, "prompts_skipped": learner.skipped,
                }  # fmt: skip
        finally:
            await router.stop()
        found |= _errors(Path(folder), int(options.requests * options.warm_up))
    return found


async def _until_exact(router: Router) -> None:
    assert router.kv_streams is not None
    async with asyncio.timeout(30):
        while router.kv_streams.caches.trust_of(0) != EXACT:
            await asyncio.sleep(0.05)


def _errors(folder: Path, skip: int) -> dict[str, Any]:
    """Compare predictions with reports, in tokens, in the decision log of a folder."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("decisions-*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()[1:]]
    lines = sorted((x for x in lines if x["cached_reported"] is not None), key=lambda x: x["sent"])
    lines = lines[skip:]
    believed = np.array([line["cached_believed"] for line in lines], float)
    reported = np.array([line["cached_reported"] for line in lines], float)
    off = np.abs(believed - reported)
    return {
        "requests": len(lines),
        "mean_prompt_tokens": float(np.mean([line["prompt_tokens"] for line in lines])),
        "mean_reported": float(reported.mean()),
        "mean_believed": float(believed.mean()),
        "mean_absolute_error": float(off.mean()),
        "p90_absolute_error": float(np.percentile(off, 90)),
        "largest_error": float(off.max()),
        "share_within_96": float(np.mean(off <= 96)),
        "believed_too_much": float(np.mean(believed > reported + 96)),
    }


@contextlib.asynccontextmanager
async def server_of(options: argparse.Namespace) -> AsyncIterator[dict[str, str]]:
    """The server that the options name, else an emulated one."""
    if options.backend:
        yield {
            "url": options.backend, "kv_events": options.kv_events,
            "kv_replay": options.kv_replay,
        }  # fmt: skip
        return
    kind = Replica(num_blocks=EMULATED_BLOCKS, scheduler="vllm_v1", prefix_caching=True)
    async with Emulator(Cluster(replicas=(kind,)), time_scale=0.01, kv_events_port=0) as emulator:
        publisher = emulator.publishers[0]
        yield {
            "url": emulator.urls[0], "kv_events": publisher.endpoint, "kv_replay": publisher.replay,
        }  # fmt: skip


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure without and with events."""
    async with server_of(options) as server:
        version = ""
        with contextlib.suppress(OSError, ValueError):
            pool = Pool(Origin.parse(server["url"]), connect_s=5.0)
            response = await pool.fetch("GET", "/version", {}, b"", 10.0)
            version = orjson.loads(response.body)["version"]
        return {
            "server": version, "seed": options.seed, "conversations": options.conversations,
            "share_of_other_client": options.others,
            "estimated": await run(server, options, events=False),
            "exact": await run(server, options, events=True),
        }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("-b", "--backend", default="", help="URL of a server; default: emulated")
    parser.add_argument("--kv-events", default="", help="where it publishes KV events")
    parser.add_argument("--kv-replay", default="", help="where it replays them")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--longest", type=int, default=900, help="words of a conversation")
    parser.add_argument("--others", type=float, default=0.5, help="requests of another client each")
    parser.add_argument("--pause-s", type=float, default=0.02, help="between two requests")
    parser.add_argument("--warm-up", type=float, default=0.2, help="share that is not counted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"server {found['server']}; tokens per request")
    for name in ("estimated", "exact"):
        f = found[name]
        print(
            f"{name:10} reported {f['mean_reported']:7.1f}  predicted {f['mean_believed']:7.1f}  "
            f"mean error {f['mean_absolute_error']:6.1f}  P90 {f['p90_absolute_error']:6.1f}  "
            f"within a run and a block {f['share_within_96']:.0%}"
        )


if __name__ == "__main__":
    main()
