"""A router in front of servers, with a decision log, for as long as a block lasts."""

import json
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.assess.processes import Json, awaited, started, tell

IDLE_S = 60.0
CONNECT_S = 5.0
LOCAL = "127.0.0.1:0"


@dataclass(frozen=True)
class RouterProcess:
    """A running router."""

    url: str
    admin: str
    log: Path
    """Folder of its decisions."""

    def get(self, path: str) -> Any:
        """Read a page of the admin listener."""
        with urllib.request.urlopen(self.admin + path, timeout=10) as answer:
            return json.load(answer)

    def reload(self) -> None:
        """Let it read its settings again."""
        tell(f"$ curl -X POST {self.admin}/reload")
        request = urllib.request.Request(self.admin + "/reload", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def left_over(self) -> Json:
        """Return what is in flight by every count there is; all 0 once the router is idle."""
        status, backends = self.get("/status"), self.get("/backends")
        return {
            "in_flight": status["in_flight"],
            "waiting": status["waiting"],
            "at_replicas": sum(backend["in_flight"] for backend in backends),
            "in_ledger": sum(backend["ledger_in_flight"] for backend in backends),
        }

    def wait_until_idle(self) -> Json:
        """Wait for the last requests; return what is left over, if anything."""
        end = time.monotonic() + IDLE_S
        while any((left := self.left_over()).values()) and time.monotonic() < end:
            time.sleep(0.2)
        return left


def is_reachable(url: str) -> bool:
    """Whether something accepts connections at the address of a server."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def router(
    urls: Sequence[str],
    log: Path,
    *options: str,
    listen: str = LOCAL,
    say: Callable[[str], None] = tell,
) -> Iterator[RouterProcess]:
    """Run the router with a decision log in front of some servers."""
    backends = [text for url in urls for text in ("-b", url)]
    with started(
        "serve", *backends, *options, "--listen", listen, "--admin", LOCAL,
        "--set", f"decisions.folder={log}", "--log-level", "error", say=say,
    ) as process:  # fmt: skip
        url = awaited(process, r"listening on (http://[^/]+)")
        admin = awaited(process, r"status page on (http://[^/]+)")
        yield RouterProcess(url, admin, log)


@contextmanager
def servers(urls: Sequence[str], speeds: str) -> Iterator[tuple[str, ...]]:
    """Give the addresses of servers; if there are none, emulated ones run during this block."""
    if urls:
        yield tuple(urls)
        return
    with started("emulate", "--speeds", speeds, "--port", "0", "--json") as emulator:
        yield tuple(json.loads(awaited(emulator, r"(\{.*\})"))["urls"])
