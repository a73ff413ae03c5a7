"""Candidates of the autopilot's own making: a policy trained further on the traffic of the moment.

``python -m tailrace.autopilot.fine_tuning`` is the training, in a process of its own at the lowest
priority, with a limit of CPU time and the autopilot's own of memory. Its standard input has one
line of JSON and ends when the autopilot ends. Training needs PyTorch; the autopilot does not.
"""

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tailrace.autopilot.twin import Twin, Window
from tailrace.files import dumps
from tailrace.policy.learned import checkpoint
from tailrace.workload import traces

PRESET = "finetune"
#: Best policies that are kept, the latest.
MOST_KEPT = 3
COMMAND = (sys.executable, "-m", "tailrace.autopilot.fine_tuning")
_TRAFFIC, _RUN = "traffic.parquet", "run"


def is_possible() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


class FineTuning:
    """The trainings of an autopilot, one at a time, and the policies that came of them."""

    def __init__(self, folder: Path, cpu_s: int, settings: dict[str, Any] | None = None) -> None:
        """``folder``: of its files. ``cpu_s``: CPU time of a training, s; then it is ended.

        ``settings``: of the training, put over the preset's.
        """
        self._folder, self._cpu_s, self._settings = folder, cpu_s, settings or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._name = ""

    @property
    def is_running(self) -> bool:
        """Whether a training is under way."""
        return self._process is not None

    def policies(self) -> list[str]:
        """Return the policies that came of trainings, the latest last."""
        return [str(path) for path in self._made()]

    def _made(self) -> list[Path]:
        return sorted(self._folder.glob(f"tuned-*{checkpoint.SUFFIX}"))

    def begin(self, twin: Twin, window: Window, start: str, now: float) -> None:
        """Start to train the policy ``start`` on a window and on the servers as fitted to it."""
        shutil.rmtree(self._folder / _RUN, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        traces.write(window.recorded.table, self._folder / _TRAFFIC)
        span = window.recorded.outcomes["arrived_s"]
        self._name = f"tuned-{int(now)}{checkpoint.SUFFIX}"
        told = {
            "folder": str(self._folder / _RUN),
            "start": start,
            "cpu_s": self._cpu_s,
            "settings": self._settings,
            "scenario": {
                "name": "live",
                "cluster": twin.model.cluster.model_dump(mode="json"),
                "workload": {
                    "name": str((self._folder / _TRAFFIC).resolve()),
                    "arrivals": "resampled",
                    "rate": len(span) / max(float(span[-1] - span[0]), 1.0),
                },
            },
        }
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.write(dumps(told).replace("\n", " ").encode() + b"\n")
            self._process.stdin.flush()

    def collect(self, in_use: set[str]) -> str | None:
        """Return the policy of a training that has ended, "" if it made none; None: none has ended.

        Older policies are deleted unless they are ``in_use``.
        """
        if self._process is None or self._process.poll() is None:
            return None
        self._close()
        best = self._folder / _RUN / f"best{checkpoint.SUFFIX}"
        made = ""
        if best.exists():
            made = str(best.replace(self._folder / self._name))
        shutil.rmtree(self._folder / _RUN, ignore_errors=True)
        (self._folder / _TRAFFIC).unlink(missing_ok=True)
        for path in self._made()[:-MOST_KEPT]:
            if str(path) not in in_use:
                path.unlink(missing_ok=True)
        return made

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def train(told: dict[str, Any]) -> None:
    """Train as told, within the limits."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    cpu_s = int(told["cpu_s"])
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    from tailrace.learn import settings
    from tailrace.learn.trainer import Trainer

    preset = settings.read(PRESET)
    own = {"start": told["start"], "scenarios": [told["scenario"]], "randomise": None}
    over = told["settings"] | own
    Trainer(Path(told["folder"]), settings.build(preset, over), 1).run()


def _end_with_the_autopilot() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Read what to do, and do it."""
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_autopilot, daemon=True).start()
    train(told)


if __name__ == "__main__":
    main()
