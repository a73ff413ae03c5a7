"""Faults of what is around a router in a cluster: endpoints that come and go without end."""

import asyncio
import time

from router.abuse.case import Case, Target
from router.abuse.fault_cases import decision_us, wait
from router.processes import HOST

#: Found servers at once, and time between two changes, s: 500 a minute.
FOUND, EVERY_S = 10, 0.12


async def changing_endpoints(target: Target) -> str:
    """Each change brings a new server and takes the oldest: streams there must go on."""
    stage = target.stage
    file, port = stage.folder / str(stage.settings["discovery__file"]), stage.spare[0]

    def name(number: int) -> str:
        return f"found-{number}"

    def write(first: int, count: int = FOUND) -> None:
        new = file.with_suffix(".new")
        new.write_text(
            "".join(
                f'[[backends]]\nurl = "http://{HOST}:{port}/p{k}"\nname = "{name(k)}"\n'
                for k in range(first, first + count)
            )
        )
        new.replace(file)

    def names() -> set[str]:
        return {str(backend["name"]) for backend in stage.backends()}

    own = names()
    before_us = await decision_us(stage)
    changes = target.count(500, 30)
    began = time.monotonic()
    for number in range(changes):
        write(number)
        await asyncio.sleep(max(0.0, began + (number + 1) * EVERY_S - time.monotonic()))
    took_s = time.monotonic() - began
    wanted = own | {name(k) for k in range(changes - 1, changes - 1 + FOUND)}
    await wait("the last ones are there", lambda: names() == wanted)
    write(0, 0)
    await wait("all found ones are gone", lambda: names() == own)
    await asyncio.sleep(1.0)
    after_us = await decision_us(stage)
    paths = stage.counts()["paths"]
    used = sum(n for path, n in paths.items() if path.startswith("/p") and "/v1/co" in path)
    target.figures |= {
        "changes_per_minute": changes / took_s * 60, "decision_us_before": before_us,
        "decision_us_after": after_us, "requests_at_found": used,
    }  # fmt: skip
    assert used, "no found server got a request"
    assert after_us < 1.5 * before_us + 10, f"decisions: {before_us:.0f} to {after_us:.0f} us"
    return f"{changes} changes, {changes / took_s * 60:.0f} a minute; all that is left is as before"


SETTINGS = {"discovery__file": "found.toml", "discovery__interval_s": 0.05}
CASES = (
    Case("500 endpoint changes a minute", changing_endpoints, SETTINGS),
    Case("500 endpoint changes a minute, two processes", changing_endpoints,
         {**SETTINGS, "processes": 2}),
)  # fmt: skip
