"""The whole loop on one cluster: record, calibrate, replay, fine-tune, prove, shadow, take over.

    python examples/loop.py -o build/loop                       # four emulated servers
    python examples/loop.py -o build/loop -b http://127.0.0.1:8000 -b http://127.0.0.1:8001 \
        --shrink 8 --rate 8                                     # two small servers of your own

The steps are in tailrace/assess/rollout.py. They print the commands they run and keep what these
print in FOLDER. The load is made up; in front of your own servers your clients take its place.
Needs `pip install '.[serve,train]'` in a clone. Everything started listens on 127.0.0.1 and is
stopped in the end, also by Ctrl-C. docs/loop.md has the figures of such runs.
"""

import argparse
import shlex
import signal
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from tailrace.assess.rollout import STEPS, RolloutPlan, roll_out
from tailrace.errors import TailraceError
from tailrace.files import dumps
from tailrace.terminal.rollouts import print_rollout


def arguments() -> tuple[RolloutPlan, tuple[str, ...], bool]:
    """Read the arguments: what to do, which steps, and whether to print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-b", "--backend", action="append", default=[], metavar="URL",
        help="a server; may be repeated (default: emulated ones)")  # fmt: skip
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for everything made")
    add("--requests", type=int, help="of each load (default: 900, quick: 120)")
    add("--rate", type=float, help="requests/s of the recorded load (default: 32, quick: 12)")
    add("--shrink", type=float, default=1.0, help="factor by which prompts and answers are shorter")
    add("--speeds", help="of the emulated servers (default: 1.5,1,1,0.6, quick: 1.3,0.7)")
    add("--calibrate", choices=("live", "together", "log"), default="live",
        help="measure one server after the other, all at once, or learn from the log")  # fmt: skip
    add("--budget", type=float, help="seconds of measuring per server (default: 20, quick: 10)")
    add("--known", default="", metavar="OPTIONS",
        help="what you know of the servers: options of `tailrace calibrate`, e.g. "
        "'--batch-cap 8 --chunk-size 2048'")  # fmt: skip
    add("--updates", type=int, help="of the fine-tuning (default: 10, quick: 1)")
    add("--seeds", type=int, help="of the proof (default: 10, quick: 2)")
    add("--steps", default=",".join(STEPS), help=f"of these, in this order: {','.join(STEPS)}")
    add("--quick", action="store_true", help="the shortest run that does everything")
    add("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    steps = tuple(given.steps.split(","))
    if not set(steps) <= set(STEPS) or list(steps) != sorted(steps, key=STEPS.index):
        parser.error(f"--steps must be some of {','.join(STEPS)}, in this order")
    quick = given.quick
    plan = RolloutPlan(
        folder=given.output,
        backends=tuple(given.backend),
        requests=given.requests or (120 if quick else 900),
        rate=given.rate or (12.0 if quick else 32.0),
        shrink=given.shrink,
        speeds=given.speeds or ("1.3,0.7" if quick else "1.5,1,1,0.6"),
        probe=given.calibrate,
        budget_s=given.budget or (10.0 if quick else 20.0),
        known=tuple(shlex.split(given.known)),
        updates=given.updates if given.updates is not None else (1 if quick else 10),
        seeds=given.seeds or (2 if quick else 10),
        quick=quick,
    )
    return plan, steps, given.json


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


def main() -> None:
    """Do the steps and print what came out."""
    plan, steps, as_json = arguments()
    signal.signal(signal.SIGTERM, _leave)  # so that everything started is stopped
    try:
        found = roll_out(plan, steps)
    except TailraceError as error:
        raise SystemExit(f"error: {error}") from None
    if as_json:
        print(dumps(found))
    else:
        print_rollout(Console(), found)


if __name__ == "__main__":
    main()
