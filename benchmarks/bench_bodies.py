"""Readers of request bodies on whole requests: the compiled scanner against orjson and msgspec.

    python benchmarks/bench_bodies.py [--rounds N] > FILE

Each reader runs in a router of its own, with everything on, in front of trivial backends, as in
``bench_router.py``: ``added_p50_ms`` is the median latency on one connection less that of the
direct way, ``rps`` the requests per second on 32 connections, ``cpu_us`` the router's CPU time per
request; medians over rounds in which all take turns. ``read_us`` is the reader alone. msgspec is
no dependency of Tailrace: it takes part if it is installed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from bench_router import BODIES, SIZES_KB, measure
from bench_sim import machine
from router_rig import chat_body, rig
from tailrace.router.intake import fast_body
from tailrace.router.intake.request_body import (
    CONTENT,
    HEADERS,
    ROLE,
    RequestBody,
    read_body,
    read_headers,
)

Reader = Callable[[str, Mapping[bytes, bytes], bytes], RequestBody | None]


def msgspec_reader() -> Reader:
    """A reader whose parser makes objects of the needed fields only; the rest goes to orjson."""
    import msgspec  # type: ignore[import-not-found, unused-ignore]

    unset: Any = msgspec.UNSET
    message = msgspec.defstruct(
        "Message", [("role", str, ""), ("content", str, ""), ("tool_calls", Any, unset)]
    )
    rare = ("tools", "session_id", "conversation", "user", "priority", "cache_salt")
    most = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    chat = msgspec.defstruct(
        "Chat",
        [("messages", list[message]), ("model", str, ""), ("stream", bool, False)]  # type: ignore[valid-type]
        + [(name, int | None, None) for name in most]
        + [(name, Any, unset) for name in rare],
    )
    decoder = msgspec.json.Decoder(chat)

    def read(kind: str, headers: Mapping[bytes, bytes], body: bytes) -> RequestBody:
        if kind != "chat":
            return read_body(kind, headers, body)
        try:
            found = decoder.decode(body)
        except msgspec.DecodeError:
            return read_body(kind, headers, body)
        if any(getattr(found, name) is not unset for name in rare):
            return read_body(kind, headers, body)
        request = RequestBody(kind, found.model, streams=found.stream)
        request.max_tokens = next((n for name in most if (n := getattr(found, name))), None)
        parts, length = [], 0
        for one in found.messages:
            if one.tool_calls is not unset:
                return read_body(kind, headers, body)
            parts.append(f"{ROLE}{one.role}{CONTENT}{one.content}")
            if one.role == "assistant":
                request.answer = (length, length + len(parts[-1]))
            length += len(parts[-1])
        request.text = "".join(parts)
        if not HEADERS.isdisjoint(headers):
            read_headers(request, headers)
        return request

    return read


def readers() -> dict[str, Callable[[], Reader]]:
    """Every reader by its name."""
    found: dict[str, Callable[[], Reader]] = {
        "scanner": lambda: fast_body.BodyReader().read,
        "orjson": lambda: read_body,
    }
    return found | ({"msgspec": msgspec_reader} if find_spec("msgspec") else {})


def serve(name: str, arguments: list[str]) -> None:
    """Run ``tailrace serve`` with a reader."""
    from tailrace.cli.serve import command

    if name != "scanner":
        read = readers()[name]()
        fast_body.BodyReader.read = lambda _, *request: read(*request)  # type: ignore[method-assign]
    sys.exit(command(arguments, standalone_mode=False))


def read_us(read: Reader, body: bytes) -> float:
    """Return the time of one call, us: the least of five rounds."""
    count = max(20, 2_000_000 // len(body))
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            read("chat", {}, body)
        rounds.append((time.perf_counter() - began) / count * 1e6)
    return min(rounds)


def main() -> None:
    """Measure and print JSON."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every reader")
    parser.add_argument("--requests", type=int, default=900, help="per reader, one connection")
    parser.add_argument("--seconds", type=int, default=1, help="of load per turn")
    options = parser.parse_args()
    options.ids = False
    result: dict[str, Any] = {"machine": machine(), "bodies": {}}
    with rig() as made:
        made.start_backends()
        made.contenders = [made.direct]
        for name in readers():
            router = made.start_router(program=(__file__, "serve", name))
            made.contenders.append(router._replace(name=name))
        for size_kb in SIZES_KB:
            found = measure(made, size_kb, options)
            bodies = [chat_body(size_kb * 1024, i) for i in range(BODIES)]
            for name, make in readers().items():
                times = [read_us(make(), body) for body in bodies[:3]]
                found["peers"][name]["read_us"] = statistics.median(times)
            result["bodies"][f"{size_kb}_kb"] = {"direct": found["direct"], **found["peers"]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
