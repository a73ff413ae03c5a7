"""``python -m tailrace.autopilot``: the process that ``tailrace serve --autopilot`` starts.

Its standard input has one line of JSON, its orders, and ends when the router ends.
"""

import contextlib
import json
import os
import resource
import select
import sys
import time
from pathlib import Path

from tailrace.autopilot.pilot import AdminClient, Orders, Pilot
from tailrace.config import parse
from tailrace.router.process import return_memory
from tailrace.router.settings import AutopilotSettings

#: Share of a core that rounds may take.
MOST_LOAD = 0.2
#: Most memory, bytes of address space; compiled code and libraries take most of what it uses.
MOST_MEMORY = 6 << 30
FIRST_PAUSE_S = 5.0


def main() -> None:
    """Do rounds until the router ends."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    told = json.loads(sys.stdin.readline())
    orders = Orders(
        told["admin"], told["token_env"], Path(told["folder"]), Path(told["file"]),
        parse(AutopilotSettings, told["settings"]),
    )  # fmt: skip
    pilot = Pilot(orders, AdminClient(orders))
    pause_s = FIRST_PAUSE_S
    while not _ended(pause_s):
        began = time.monotonic()
        pilot.round()
        return_memory()
        took_s = time.monotonic() - began
        pause_s = max(orders.settings.every_s - took_s, took_s * (1 / MOST_LOAD - 1))


def _ended(pause_s: float) -> bool:
    """Wait; return whether the router is gone."""
    return bool(select.select([sys.stdin], [], [], pause_s)[0])


if __name__ == "__main__":
    main()
