"""What learning the servers' speeds costs per request: ``bench_learn.py [--json]``.

The state of a router is led through the same requests with and without learning, in turns, by a
clock of its own: sent, first token, some tokens, usage, end. CPU time of the thread, in
microseconds per request; the figure is the median difference of neighbouring batches. At a low
rate most requests teach, at a high one few do (``lesson_interval_s``).
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import orjson

from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake.request_body import read_request
from tailrace.router.settings import BackendSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState

SERVERS, IN_FLIGHT, BATCH = 4, 32, 200
#: Requests/s of the whole cluster.
RATES = (10.0, 100.0, 1000.0, 5000.0)


class Course:
    """A router's state that is led through requests."""

    def __init__(self, learn: bool, rate: float) -> None:
        self.now, self.rate, self.sent = 0.0, rate, 0
        backends = [BackendSettings(url=f"http://h:{i + 1}") for i in range(SERVERS)]
        self.cluster = ClusterState(backends, lambda: self.now, learn_speeds=learn)
        self.chooser = Chooser(self.cluster, ChooserSettings(policy="round_robin"))
        self.attempts: list[Attempt] = []

    def lead(self, count: int) -> float:
        """Route ``count`` requests; return the mean CPU time per request, us."""
        bodies = [self._body() for _ in range(count)]
        begun = time.thread_time()
        for body in bodies:
            self.now += 1.0 / self.rate
            arrival = self.cluster.arrive(read_request("/v1/chat/completions", {}, body))
            decision = self.chooser.choose(arrival)
            assert decision is not None
            self.attempts.append(Attempt(self.cluster, arrival, decision.replica, decision))
            if len(self.attempts) > IN_FLIGHT // 2:
                self.attempts[-IN_FLIGHT // 2].tokens(1)
            if len(self.attempts) > IN_FLIGHT:
                attempt = self.attempts.pop(0)
                attempt.tokens(20)
                attempt.usage(250, 21, 0)
                attempt.close("done")
        return (time.thread_time() - begun) / count * 1e6

    def _body(self) -> bytes:
        self.sent += 1
        text = f"{self.sent} " + "What is the longest river of the world? " * 20
        return orjson.dumps({"stream": True, "messages": [{"role": "user", "content": text}]})


def measure(rate: float, batches: int) -> dict[str, Any]:
    """Return CPU time per request with and without learning at one rate."""
    courses = {"learning": Course(True, rate), "without": Course(False, rate)}
    times: dict[str, list[float]] = {name: [] for name in courses}
    for number in range(batches + 5):
        for name, course in courses.items():
            took = course.lead(BATCH)
            if number >= 5:
                times[name].append(took)
    found = {name: round(float(np.median(values)), 2) for name, values in times.items()}
    added = np.subtract(times["learning"], times["without"])
    spread = np.percentile(added, 75) - np.percentile(added, 25)
    error = 1.82 * spread / np.sqrt(batches)  # half a 95 % interval of a median
    return {"rate": rate, **found, "costs": round(float(np.median(added)), 2),
            "give_or_take": round(float(error), 2)}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=100, help=f"of {BATCH} requests each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    found = [measure(rate, given.batches) for rate in RATES]
    if given.json:
        print(json.dumps({"servers": SERVERS, "us_per_request": found}, indent=1))
        return
    for row in found:
        print(f"{row['rate']:6.0f} requests/s: {row['without']:.1f} us, learning adds "
              f"{row['costs']:+.1f} us, give or take {row['give_or_take']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
