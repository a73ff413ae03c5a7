"""``tailrace warmup``, and the helper processes that compile."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.processes import until
from tailrace import compiled

pytestmark = pytest.mark.compiled


def test_the_second_time_everything_is_compiled_already(run, run_json):
    first = run_json("warmup", "simulate")
    assert first["folder"] == str(compiled.CACHE)
    assert run_json("warmup", "simulate")["compiled"] == 0
    said = run("warmup", "simulate").stdout
    assert said == f"everything was compiled already; kept in {compiled.CACHE}\n"


def test_without_a_place_for_compiled_code_it_says_why(refuse, monkeypatch):
    monkeypatch.setattr(compiled, "CACHE", None)
    monkeypatch.setattr(compiled, "NO_CACHE_REASON", "/nowhere: Permission denied")
    said = refuse("warmup")
    assert said == "compiled code can be kept nowhere: /nowhere: Permission denied"


def states(pid: int) -> list[str]:
    """State of every child of a process; Z is a zombie."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{n}/stat").read_text().rpartition(") ")[2][0] for n in numbers]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_serve_leaves_no_zombie_when_its_helper_has_ended(processes, tmp_path):
    mark = compiled.CACHE / "tailrace.router.warmup"
    mark.unlink(missing_ok=True)
    serve = (sys.executable, "-m", "tailrace.cli", "serve", "--listen", "127.0.0.1:0")
    options = ("-b", "http://127.0.0.1:9", "--admin", "off", "--processes", processes)
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([*serve, *options], stdout=out, stderr=out)
    try:
        until("it listens", lambda: "listening on" in (tmp_path / "out").read_text())
        until("the helper is done", mark.exists)
        workers = 0 if processes == "1" else int(processes)
        until("only workers are left", lambda: len(states(process.pid)) == workers)
        assert "Z" not in states(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
