"""Whether our rule `dynamo` chooses what Dynamo's own selection service chooses.

    VENV/bin/python benchmarks/same_choice_dynamo.py record FILE [--decisions 600]
    python benchmarks/same_choice_dynamo.py compare FILE [--json]

`record` runs where ai-dynamo-runtime, pyzmq and msgpack are installed and needs nothing else of
Tailrace. It asks the service (dynamo._core.SelectionService, in this process) for one worker after
another, publishes the KV events of vLLM that follow, and writes down every request, choice and
load. `compare` works the state of our rule out from the same sequence: uncached tokens without a
first token, distinct prompt blocks in flight, and the blocks that events have announced. Ties count
as the same.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

WORKERS = 4
BLOCK = 16
MODEL = "m"


# ---- the service ---------------------------------------------------------------------------------


def traffic(seed: int, decisions: int) -> list[dict[str, Any]]:
    """Return operations: requests with their tokens, first tokens and ends."""
    rng = random.Random(seed)
    fresh = iter(range(1000, 10**9))

    def text(tokens: int) -> list[int]:
        return [next(fresh) for _ in range(tokens)]

    systems = [text(16 * rng.randrange(5, 40)) for _ in range(5)]
    talks: list[list[int]] = []
    queued: list[int] = []
    answering: list[int] = []
    operations: list[dict[str, Any]] = []
    for number in range(decisions):
        hot = 0.5 <= number / decisions < 0.7
        level = 60 if hot else rng.randrange(4, 24)
        while len(queued) > 4 or (queued and rng.random() < 0.5):
            one = queued.pop(rng.randrange(len(queued)))
            operations.append({"op": "first_token", "number": one})
            answering.append(one)
        while len(queued) + len(answering) > level and answering:
            one = answering.pop(rng.randrange(len(answering)))
            operations.append({"op": "end", "number": one})
        if hot and rng.random() < 0.8:
            tokens = systems[0] + text(rng.randrange(10, 60))
        elif talks and rng.random() < 0.6:
            k = rng.randrange(max(0, len(talks) - 10), len(talks))
            talks[k] = talks[k] + text(rng.randrange(20, 400))
            tokens = talks[k]
        else:
            tokens = (rng.choice(systems) if rng.random() < 0.7 else []) + text(
                rng.randrange(30, 900)
            )
            talks.append(tokens)
        operations.append({"op": "request", "number": number, "tokens": tokens})
        queued.append(number)
    return operations


async def record(file: Path, seed: int, decisions: int) -> None:
    """Ask the service, and write down what it chose."""
    os.environ.setdefault("DYN_LOG", "error")
    import msgpack
    import zmq
    from dynamo._core import SelectionService

    context = zmq.Context()
    service = SelectionService(indexer_threads=1)
    sockets = []
    for worker in range(WORKERS):
        socket = context.socket(zmq.PUB)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sockets.append(socket)
        about = {"worker_id": worker, "model_name": MODEL, "block_size": BLOCK}
        about["endpoint"] = "http://127.0.0.1:9"
        about["kv_events_endpoint"] = f"tcp://127.0.0.1:{port}"
        await service.upsert_worker(about)
    await asyncio.sleep(1.0)
    sequence = [0] * WORKERS
    done: list[dict[str, Any]] = []
    placed: dict[int, tuple[int, list[int]]] = {}
    stored: list[dict[tuple[int, ...], int]] = [{} for _ in range(WORKERS)]
    names = iter(range(1, 10**9))
    for operation in traffic(seed, decisions):
        number = operation["number"]
        if operation["op"] == "request":
            tokens = operation["tokens"]
            ask = {"model_name": MODEL, "token_ids": tokens}
            loads = await service.potential_loads(ask)
            found = await service.select_and_reserve(ask | {"selection_id": str(number)})
            placed[number] = found["worker_id"], tokens
            operation = operation | {"worker": found["worker_id"], "loads": loads}
        elif operation["op"] == "first_token":
            await service.prefill_complete(str(number))
            worker, tokens = placed[number]
            message = msgpack.packb([0.0, [_stored(tokens, stored[worker], names)], 0])
            mark = sequence[worker].to_bytes(8, "big")
            sockets[worker].send_multipart([b"", mark, message])
            sequence[worker] += 1
            await _until_indexed(service, worker, tokens)
        else:
            await service.free_reservation(str(number))
        done.append(operation)
    service.shutdown()
    version = __import__("importlib.metadata", fromlist=["version"]).version("ai-dynamo-runtime")
    file.write_text(json.dumps({"version": version, "seed": seed, "operations": done}))


def _stored(tokens: list[int], known: dict[tuple[int, ...], int], names: Any) -> list[Any]:
    """Return the event that announces the blocks of a prompt.

    All of them, from the first on: of events that continue a chain in its middle, 1.6.1 lost some.
    """
    full = len(tokens) // BLOCK
    ends = [tuple(tokens[: (block + 1) * BLOCK]) for block in range(full)]
    hashes = [known[end] if end in known else known.setdefault(end, next(names)) for end in ends]
    return ["BlockStored", hashes, None, tokens[: full * BLOCK], BLOCK, None, "GPU"]


async def _until_indexed(service: Any, worker: int, tokens: list[int]) -> None:
    """Wait until the service has taken the event in: then the state is known."""
    for _ in range(400):
        scores = await service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
        found = {about["worker_id"]: about["device_blocks"] for about in scores["workers"]}
        if found[worker] >= len(tokens) // BLOCK:
            return
        await asyncio.sleep(0.01)
    raise SystemExit(f"an event did not reach the service: {found[worker]} of its blocks are known")


# ---- our rule ------------------------------------------------------------------------------------


def compare(file: Path) -> dict[str, Any]:
    """Return how often our rule chooses the same worker in the same state."""
    import numpy as np

    from tailrace.config import Replica
    from tailrace.policy import registry
    from tailrace.view.records import REQUEST_VIEW, ROUTER, View
    from tailrace.view.replicas import idle_views, replica_costs

    recorded = json.loads(file.read_text())
    servers = [Replica(block_size=BLOCK)] * WORKERS
    views, costs = idle_views(servers), replica_costs(servers)
    request, router = np.zeros(1, REQUEST_VIEW), np.zeros(1, ROUTER)
    policy = registry.get("dynamo")
    cached: list[set[tuple[int, ...]]] = [set() for _ in range(WORKERS)]
    flying: dict[int, tuple[int, list[int], int]] = {}  # worker, tokens, uncached while queued
    same = ties = asked = loads_differ = 0
    different = []
    for operation in recorded["operations"]:
        number = operation["number"]
        if operation["op"] == "first_token":
            worker, tokens, uncached = flying[number]
            views[worker]["queued_uncached"] -= uncached
            flying[number] = worker, tokens, 0
            cached[worker].update(_blocks(tokens))
            continue
        if operation["op"] == "end":
            del flying[number]
            continue
        tokens = operation["tokens"]
        request["prompt_tokens"] = len(tokens)
        own = _blocks(tokens)
        for worker, view in enumerate(views):
            active = {b for w, t, _ in flying.values() if w == worker for b in _blocks(t)}
            view["active_blocks"] = len(active)
            view["new_blocks"] = sum(block not in active for block in own)
            view["cached_tokens"] = BLOCK * sum(block in cached[worker] for block in own)
            said = next(load for load in operation["loads"] if load["worker_id"] == worker)
            prefill = int(view["queued_uncached"]) + len(tokens) - int(view["cached_tokens"])
            blocks = int(view["active_blocks"] + view["new_blocks"])
            loads_differ += (prefill, blocks) != (
                said["potential_prefill_tokens"],
                said["potential_decode_blocks"],
            )
        scores = policy.scores(View(request[0], views, costs, router[0]))
        best = np.flatnonzero(scores == scores.min())
        took = operation["worker"]
        asked += 1
        ties += len(best) > 1
        same += took in best
        if took not in best:
            different.append({"number": number, "took": took, "scores": scores.tolist()})
        uncached = len(tokens) - int(views[took]["cached_tokens"])
        views[took]["queued_uncached"] += uncached
        flying[number] = took, tokens, uncached
    return {
        "rule": "dynamo",
        "version": recorded["version"],
        "decisions": asked,
        "same": same,
        "ties": ties,
        "share": same / max(1, asked),
        "loads": asked * WORKERS,
        "loads_that_differ": loads_differ,
        "different": different[:20],
    }


def _blocks(tokens: list[int]) -> list[tuple[int, ...]]:
    """Return names of the full blocks of a prompt, from the first on."""
    # Tokens of a text occur nowhere else, so a block's last token and place name it.
    return [(end, tokens[end - 1]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--decisions", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "record":
        asyncio.run(record(given.file, given.seed, given.decisions))
        return
    found = compare(given.file)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"dynamo {found['version']}: {found['same']} of {found['decisions']} decisions the same "
        f"({found['share']:.1%}), {found['ties']} of them ties; loads that differ: "
        f"{found['loads_that_differ']} of {found['loads']}"
    )
    for state in found["different"]:
        print(state, file=sys.stderr)


if __name__ == "__main__":
    main()
