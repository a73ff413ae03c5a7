"""The figures of a rollout, as tables for people."""

from rich.console import Console
from rich.text import Text

from tailrace.assess.processes import Json
from tailrace.assess.rollout import APART
from tailrace.terminal.tables import Column, number, print_columns


def print_rollout(console: Console, found: Json) -> None:
    """Print the figures of the steps that were done."""
    if "replay" in found:
        _replay(console, found["replay"])
    if "prove" in found:
        _proof(console, found["prove"])
    if "shadow" in found:
        _shadow(console, found["shadow"])
    if "take_over" in found:
        _take_over(console, found["take_over"])


def _replay(console: Console, replay: Json) -> None:
    """Print how far the simulation is off, and whether it ranks rules as the servers do."""
    rows = [
        (load, name.upper(), replay[load][name])
        for load in ("recorded", "held_out")
        for name in ("ttft", "e2e")
        if name in replay[load]
    ]
    columns = [
        Column(("", "load"), [load.replace("_", "-") for load, _, _ in rows], left=True),
        Column(("", "latency"), [name for _, name, _ in rows], left=True),
    ]
    for at in ("mean", "p50", "p99"):
        columns += [
            Column((at, "rec. s"), [number(r[f"recorded_{at}_s"]) for _, _, r in rows]),
            Column(("", "sim. s"), [number(r[f"simulated_{at}_s"]) for _, _, r in rows]),
            Column(("", "error"), [_signed(r[f"{at}_error"]) for _, _, r in rows]),
        ]
    _heading(console, "Replay: simulated against recorded")
    print_columns(console, columns)
    rules = replay["rules"]
    _heading(console, "Rules on the held-out load: predicted from one log, then measured")
    print_columns(
        console,
        [
            Column(("", "rule"), [row["policy"] for row in rules], left=True),
            *(
                Column((name, what), [number(row[f"{what}_{key}"]) for row in rules])
                for name, key in (("cost s", "cost_s"), ("E2E s", "e2e_s"), ("TTFT s", "ttft_s"))
                for what in ("predicted", "measured")
            ),
        ],
    )
    order = replay["ranks"]
    console.print(
        Text(
            f"Pairs predicted to differ by more than {100 * (APART - 1):.0f} %: {order['apart']}, "
            f"in the same order when measured: {order['same_order']}"
        )
    )


def _proof(console: Console, proof: Json) -> None:
    """Print the costs on requests nobody was trained on."""
    _heading(console, f"Proof: cost on unseen requests, {proof['seeds']} seeds")
    shown = proof["policies"][:8]
    print_columns(
        console,
        [
            Column(("", "policy"), [row["policy"] for row in shown], left=True),
            Column(("cost, of", proof["best_rule"]), [f"{row['cost_ratio']:.3f}" for row in shown]),
            Column(
                ("95 %", "interval"),
                ["{:.3f}-{:.3f}".format(*row["interval"]) for row in shown],
            ),
        ],
    )


def _shadow(console: Console, shadow: Json) -> None:
    """Print what the shadow policy would have done."""
    _heading(console, "Shadow")
    change_s = shadow["predicted_ttft_change_s"] or 0.0
    when = "sooner" if change_s < 0 else "later"
    console.print(
        Text(
            f"asked {shadow['asked']} times, would have chosen another replica "
            f"{shadow['differing']} times ({100 * (shadow['share'] or 0):.0f} %), with a predicted "
            f"first token {number(abs(change_s))} s {when} on average; replayed cost under it "
            f"{_signed(shadow['replayed_cost_s']['change'])}"
        )
    )


def _take_over(console: Console, taken: Json) -> None:
    """Print the same arrivals before, during and after."""
    _heading(console, "Take over: the same arrivals, live")
    phases = taken["phases"]
    names = (("cost s", "cost_s"), ("TTFT s", "ttft_s_mean"), ("P99 s", "ttft_s_p99"),
             ("E2E s", "e2e_s_mean"), ("P99 s", "e2e_s_p99"))  # fmt: skip
    print_columns(
        console,
        [
            Column(("", "phase"), list(phases), left=True),
            *(
                Column(("", title), [number(phase["live"][key]) for phase in phases.values()])
                for title, key in names
            ),
            Column(
                ("decided", "by"),
                [
                    ", ".join(f"{who} {count}" for who, count in phase["decided_by"].items())
                    for phase in phases.values()
                ],
                left=True,
            ),
            Column(
                ("fell", "back"),
                [str(sum(phase["fell_back"].values())) for phase in phases.values()],
            ),
        ],
    )
    left = "nothing" if not any(taken["left_over"].values()) else str(taken["left_over"])
    console.print(
        Text(f"Cost after against before: {_signed(taken['cost_change'])}. Left under way: {left}")
    )


def _heading(console: Console, title: str) -> None:
    """Print a heading."""
    console.print(Text(f"\n{title}", style="bold"))


def _signed(share: float) -> str:
    """Return a change as a percentage with its sign."""
    return f"{100 * share:+.1f}%"
