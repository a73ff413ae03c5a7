"""The fault and abuse suite: each attack beside innocent clients, with limits on what they notice.

``make test-soak`` runs it and prints a table. By hand, with the folder ``tests`` on PYTHONPATH:

    python -m router.abuse.soak [NAME ...] [--size 0.1] [--seed 1] [--json FILE]

Each case has a router of its own, with servers and innocent clients in other processes. These run
alone for a few seconds, then beside the attack. The attacker's process has a low priority: an
attacker would use another machine's cores. Limits, of which any that is exceeded fails the suite:

- the largest lag of an innocent stream: 100 ms, or twice the largest before the attack
- the router's memory afterwards: at most 20 MB more than before
- the memory of its autopilot, if it has one: at most 1 GB at any time
- its counters afterwards: all zero
- innocent requests that were lost: none, unless the fault itself explains it
- no exception in its log
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from router.abuse import (
    cluster_cases,
    fault_cases,
    flight_cases,
    http_attacks,
    picker_cases,
    sharing_cases,
)
from router.abuse.case import Case, Target
from router.abuse.stage import Stage, wait_for_memory
from router.processes import until

#: How long the innocent clients are alone before and after an attack, s.
ALONE_S = 3.0
MOST_LAG_S = 0.1
MOST_MB = 20.0
MOST_AUTOPILOT_MB = 1024.0
CASES: tuple[Case, ...] = (
    *http_attacks.CASES,
    *fault_cases.CASES,
    *cluster_cases.CASES,
    *sharing_cases.CASES,
    *picker_cases.CASES,
    *flight_cases.CASES,
)


@dataclass
class Row:
    """What became of an attack, and of the innocent clients meanwhile."""

    case: str
    outcome: str = ""
    alone_lag_s: float | None = None
    """Largest lag of an innocent stream before the attack."""
    lag_s: float | None = None
    """The same during and after it; None: there were no innocent clients."""
    wait_s: float | None = None
    """Longest time that a short innocent request took meanwhile."""
    before_mb: float = 0.0
    most_mb: float = 0.0
    after_mb: float = 0.0
    autopilot_mb: float = 0.0
    """Most memory of the autopilot; 0: there was none."""
    asked: int = 0
    """Innocent requests."""
    lost: int = 0
    """Those that failed for no reason of their own."""
    excused: int = 0
    """Those that the fault itself explains: they were with a process that was killed."""
    took_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add what exceeds a limit to the problems."""
        if self.lag_s is not None:
            limit_s = max(MOST_LAG_S, 2 * (self.alone_lag_s or 0.0))
            if self.lag_s > limit_s:
                self.problems.append(f"lag above {limit_s * 1e3:.0f} ms")
        if self.after_mb > self.before_mb + MOST_MB:
            self.problems.append(f"memory grew by more than {MOST_MB:.0f} MB")
        if self.autopilot_mb > MOST_AUTOPILOT_MB:
            self.problems.append(f"the autopilot had more than {MOST_AUTOPILOT_MB:.0f} MB")
        if self.lost:
            self.problems.append("innocent requests were lost")

    def line(self) -> str:
        """One line of the table."""
        lag = alone = wait = "-"
        if self.lag_s is not None:
            lag, alone = f"{self.lag_s * 1e3:.0f} ms", f"{(self.alone_lag_s or 0) * 1e3:.0f} ms"
            wait = f"{(self.wait_s or 0) * 1e3:.0f} ms"
        outcome = self.outcome + (f" **{'; '.join(self.problems)}**" if self.problems else "")
        return (
            f"| {self.case} | {outcome} | {lag} | {alone} | {wait} | {self.before_mb:.0f} | "
            f"{self.most_mb:.0f} | {self.after_mb:.0f} | {self.lost} of {self.asked} | "
            f"{self.excused} |"
        )


HEADINGS = (
    "| case | outcome | largest lag | without attack | longest short request | MB before | at most "
    "| after | requests lost | with what was killed |\n|---|---|---|---|---|---|---|---|---|---|"
)


def largest(pairs: list[tuple[float, float]], start: float, end: float) -> float:
    """Return the largest value in a time."""
    return max((value for at, value in pairs if start <= at < end), default=0.0)


async def attack(case: Case, target: Target, row: Row) -> None:
    """Run an attack to its end, and watch the router's memory."""
    task = asyncio.ensure_future(case.attack(target))
    limit = time.monotonic() + case.most_s
    while not task.done() and time.monotonic() < limit:
        await asyncio.wait([task], timeout=0.25)
        row.most_mb = max(row.most_mb, target.stage.anonymous_mb)
        row.autopilot_mb = max(row.autopilot_mb, target.stage.autopilot_mb)
    if not task.done():
        task.cancel()
        row.problems.append(f"it did not end within {case.most_s:.0f} s")
        return
    try:
        row.outcome = task.result()
        if "tolerated" in row.outcome and not case.tolerated:
            row.problems.append("it was not cut off")
    except AssertionError as error:
        row.problems.append(str(error) or "assertion")


def run_case(case: Case, folder: Path, size: float, seed: int) -> Row:
    """Attack a router; afterwards it must be as it was."""
    row, stage = (
        Row(case.name),
        Stage(
            folder,
            files=case.files,
            file_bytes=case.file_bytes,
            prefix=case.prefix,
            clients=case.clients,
        ),
    )
    start = time.monotonic()
    try:
        os.environ |= fault_cases.KEYS
        stage.start_servers(case.servers, separate=case.separate)
        local = ("__folder", "__file")
        folders = {k: str(folder / v) for k, v in case.settings.items() if k.endswith(local)}
        stage.start_router(**{**case.settings, **folders})
        if case.innocents:
            stage.start_innocents(case.streams, case.every_ms, case.headers)
            time.sleep(ALONE_S + case.streams * 0.005)
        os.nice(10)
        row.before_mb = row.most_mb = stage.anonymous_mb
        attacked = time.monotonic()
        target = Target(stage, size, seed)
        asyncio.run(attack(case, target, row))
        row.figures = {name: round(value, 3) for name, value in target.figures.items()}
        if case.innocents:
            time.sleep(ALONE_S)
            _note_innocents(row, case, stage.stop_innocents(), attacked)
        if stage.processes["router"].poll() is None:
            try:
                until("the counters are zero", stage.is_quiet, 60)
            except AssertionError as error:
                row.problems.append(str(error))
            row.after_mb = wait_for_memory(stage, row.before_mb + MOST_MB / 2, 15)
        elif not case.ends:
            row.problems.append("the router has ended")
        if "Traceback" in stage.log_text():
            row.problems.append("an exception is in the log")
    finally:
        stage.stop()
    row.took_s = round(time.monotonic() - start, 1)
    row.judge()
    return row


def _note_innocents(row: Row, case: Case, seen: dict[str, Any], attacked: float) -> None:
    # The first second is left out: connections are being made.
    first = min((at for at, _ in seen["lags"]), default=attacked) + 1.0
    row.alone_lag_s = largest(seen["lags"], first, attacked)
    row.lag_s = largest(seen["lags"], attacked, float("inf"))
    row.wait_s = largest(seen["waits"], attacked, float("inf"))
    row.asked = seen["asked"]
    failed: dict[str, int] = seen["failed"]
    row.excused = sum(count for why, count in failed.items() if why in case.may_fail)
    row.lost = sum(failed.values()) - row.excused
    if row.lost:
        row.problems.append(f"failures: {failed}")


def run_apart(case: Case, size: float, seed: int) -> Row:
    """Run a case in a process of its own: its priority is lowered, and it may hang."""
    process = subprocess.Popen(
        [sys.executable, "-m", "router.abuse.soak", "--one", f"--size={size}", f"--seed={seed}",
         case.name],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=case.most_s + 400)
    except subprocess.TimeoutExpired:
        _end(process)
        return Row(case.name, problems=["it hangs"])
    if process.returncode:
        _end(process)
        return Row(case.name, problems=["the case itself failed, see above"])
    return Row(**json.loads(out))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a case's process and all it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run the named cases, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--size", type=float, default=1.0, help="share of each attack's full size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--update", action="store_true", help="keep what that has of other cases")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (case,) = (case for case in CASES if case.name == options.names[0])
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(run_case(case, Path(folder), options.size, options.seed))))
        return 0
    rows = []
    print(HEADINGS, flush=True)
    for case in CASES:
        if not options.names or any(name in case.name for name in options.names):
            rows.append(run_apart(case, options.size, options.seed))
            print(rows[-1].line(), flush=True)
    failed = [row.case for row in rows if row.problems]
    if options.json is not None:
        made = {row.case: asdict(row) for row in rows}
        if options.update:
            earlier = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
            made = {**{row["case"]: row for row in earlier}, **made}
        result = {"size": options.size, "seed": options.seed, "cases": list(made.values())}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    took_s = sum(row.took_s for row in rows)
    print(f"\n{len(rows)} cases in {took_s:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
