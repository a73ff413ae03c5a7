"""Nothing is compiled while requests are served: a compilation would hold up every client."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from router.conftest import run
from router.emulated import emulated

pytestmark = pytest.mark.compiled
TESTS = Path(__file__).parents[1]


def compiled() -> dict[str, int]:
    """How many versions there are of each compiled function of the router."""
    return {
        f"{name}.{key}": len(value.overloads)
        for name, module in tuple(sys.modules.items())
        if name.startswith("tailrace.") and not name.startswith("tailrace.sim")
        for key, value in tuple(vars(module).items())
        if hasattr(value, "overloads") and value.py_func.__module__ == name
    }


def chats() -> list[dict[str, Any]]:
    """Requests that are read, counted and answered in different ways."""
    hello = [{"role": "user", "content": "hello"}]
    return [
        {"messages": hello, "stream": True, "max_tokens": 4},
        {"messages": hello, "stream": False, "max_tokens": 4},
        {"messages": [*hello, {"role": "assistant", "content": "x" * 9000}, *hello]},
        {"messages": [{"role": "user", "content": "y" * 300_000}], "max_tokens": 4},
    ]


async def serve() -> dict[str, int]:
    """Serve a few requests; return the functions that were compiled or loaded meanwhile."""
    client = {"name": "a", "key_env": "KEY_A", "requests_per_s": 1000, "tokens_per_minute": 10**9}
    async with emulated(
        replicas=2, clients=[client], decisions={"folder": os.environ["DECISIONS"]},
        routing={"policy": "tailrace", "limit_ms": 10_000},
    ) as made:  # fmt: skip
        before = compiled()
        for body in chats():
            answer = await made.ask("/v1/chat/completions", {"model": "emulated", **body}, "key-a")
            assert answer.status == 200, answer.body
        ids = {"model": "emulated", "prompt": list(range(2000)), "max_tokens": 2}
        assert (await made.ask("/v1/completions", ids, "key-a")).status == 200
        await made.quiet()
        made.router.sweep(time.monotonic())
        made.router.decision_log.flush()
        await asyncio.sleep(0.3)
        after = compiled()
    return {name: count for name, count in after.items() if count != before.get(name, 0)}


def test_nothing_is_compiled_while_requests_are_served(tmp_path: Path) -> None:
    # In a process of its own: here other tests have compiled everything already.
    found = subprocess.run(
        [sys.executable, "-c", "from router import test_warmup; test_warmup.main()"],
        cwd=TESTS, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"KEY_A": "key-a", "DECISIONS": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


def main() -> None:
    """Print the functions that were compiled too late."""
    sys.stdout.write("\n".join(run(serve())))
