"""A real Redis or Valkey on a port of its own, which can be killed, stopped and started again."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from router.processes import free_ports

#: The first of these that is installed.
PROGRAMS = ("valkey-server", "redis-server")


class StoreServer:
    """A store that keeps nothing on disk."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for the settings."""
        return f"redis://127.0.0.1:{self.port}/0"

    @staticmethod
    def program() -> str | None:
        """Return where it is installed, if it is."""
        return next((path for name in PROGRAMS if (path := shutil.which(name))), None)

    def start(self, limit_s: float = 20.0) -> None:
        """Start it and wait until it answers."""
        program = self.program()
        assert program is not None, "there is neither valkey-server nor redis-server"
        with (self._folder / "store.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                    "--appendonly", "no",
                ],
                stdout=log, stderr=log, cwd=self._folder,
            )  # fmt: skip
        end = time.monotonic() + limit_s
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0):
                    return
            except OSError:
                assert time.monotonic() < end, "the store does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self, frozen: bool) -> None:
        """Stop it so that connections stay open but nothing answers, or let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)
