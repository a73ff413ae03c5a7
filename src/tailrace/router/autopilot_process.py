"""Starts the autopilot beside the router, and starts it again if it ends.

Requests do not depend on it: turns that it has set up end by themselves (``routing.canary_until``).
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time

from tailrace.router.serve_settings import ServeSettings

#: Pause before it is started again, s; doubles each time, up to this, until it has run that long.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
#: Time it has to end by itself, s.
STOP_S = 2.0

_log = logging.getLogger("tailrace.router")


class AutopilotProcess:
    """The autopilot of a router; nothing if the settings say so."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._admin = ""
        self._start_at = 0.0
        self._began = 0.0
        self._pause_s = FIRST_PAUSE_S

    def start(self, admin: tuple[str, int] | None) -> None:
        """Begin, with the address of the admin listener."""
        if self._settings.autopilot_file is None or admin is None:
            return
        host, port = admin
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if self._settings.admin.tls.certificate is None else "https"
        self._admin = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._spawn()

    def watch(self) -> None:
        """Start it again if it has ended; called at least every second."""
        process = self._process
        if process is not None and process.poll() is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            self._process = None
            if time.monotonic() - self._began > LONGEST_PAUSE_S:
                self._pause_s = FIRST_PAUSE_S
            self._start_at = time.monotonic() + self._pause_s
            _log.error(
                "the autopilot has ended and is started again",
                extra={"code": process.returncode, "pause_s": self._pause_s},
            )
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif process is None and self._admin and time.monotonic() >= self._start_at:
            self._spawn()

    def stop(self) -> None:
        """End it."""
        process, self._process, self._admin = self._process, None, ""
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()

    def _spawn(self) -> None:
        self._began = time.monotonic()
        settings, single = self._settings, ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tailrace.autopilot"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | dict.fromkeys((*single, "NUMBA_NUM_THREADS"), "1"),
        )
        orders = {
            "admin": self._admin,
            "token_env": settings.admin.token_env,
            "certificate": str(settings.admin.tls.certificate or ""),
            "log_level": settings.log.level,
            "folder": str(settings.decisions.folder),
            "file": str(settings.autopilot_file),
            "settings": settings.autopilot.model_dump(mode="json"),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already; `watch` will notice
            self._process.stdin.write(json.dumps(orders).encode() + b"\n")
            self._process.stdin.flush()
