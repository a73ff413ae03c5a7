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

from tailrace.autopilot.admin_client import AdminAccess, AdminClient
from tailrace.autopilot.pilot import Orders, Pilot
from tailrace.config import parse
from tailrace.net.tls import TlsFiles
from tailrace.router.observe import logs
from tailrace.router.process import return_memory
from tailrace.router.settings import AutopilotSettings

#: Share of a core that rounds may take, but for the first that simulates.
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
    logs.to_stderr(told["log_level"])
    settings = parse(AutopilotSettings, told["settings"])
    orders = Orders(Path(told["folder"]), Path(told["file"]), settings)
    trusted = Path(told["certificate"]) if told["certificate"] else None
    tls = TlsFiles(settings.certificate, settings.key, trusted)
    pilot = Pilot(orders, AdminClient(AdminAccess(told["admin"], told["token_env"], tls)))
    pause_s, has_begun = FIRST_PAUSE_S, False
    while not _ended(pause_s):
        began, used_s = time.monotonic(), time.process_time()
        has_simulated = pilot.round()
        return_memory()
        took_s, used_s = time.monotonic() - began, time.process_time() - used_s
        # On a busy machine a round takes long without taking much. The first one that simulates
        # compiles and fits.
        least_s = used_s / MOST_LOAD if has_begun else 0.0
        pause_s = max(settings.every_s - took_s, least_s - took_s, 0.0)
        has_begun = has_begun or has_simulated


def _ended(pause_s: float) -> bool:
    """Wait; return whether the router is gone."""
    return bool(select.select([sys.stdin], [], [], pause_s)[0])


if __name__ == "__main__":
    main()
