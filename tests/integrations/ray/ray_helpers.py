"""What workers on Ray run in these tests; they import it by name."""

import os
import signal
import time
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.integrations.ray.pool import RayPool


def dying(marker, work, task):
    """Do a task; the first time, the worker is killed instead."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return work(task)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


class DyingPool(RayPool):
    """Kills the workers of some tasks, by their number, half way through a run."""

    def __init__(self, folder, numbers):
        super().__init__()
        self.folder, self.numbers, self.count = folder, numbers, 0

    def submit(self, work, task):
        self.count += 1
        if self.count in self.numbers:
            return super().submit(dying, str(self.folder / f"died-{self.count}"), work, task)
        return super().submit(work, task)


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def complain(task):
    raise TailraceError(f"{task} is wrong")


def touch_and_wait(path):
    Path(path).touch()
    time.sleep(600)
