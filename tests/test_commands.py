"""The commands of README and pages run: ``make test-docs``.

Each runs in a folder with the files that the pages speak of. What goes on longer than LIMIT_S is
stopped, and has passed: commands refuse what is wrong with them at once.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
from tailrace.policy.learned.checkpoint import SHIPPED

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 20.0
#: Beginnings of commands that are not run, and why.
SKIPPED = {
    "git clone": "fetches this repository",
    "pip install": "changes the environment; `make dist` tries it",
    "make ": "a suite of its own, each run by its target",
    "python examples/loop.py": "`make test-loop` runs it",
    "python -m tests.vllm": "needs real vLLM servers: `make test-vllm`",
    "tailrace sweep": "needs Ray: `make test-ray`",
    "tailrace calibrate http": "needs live servers; the emulator's are tried in tests/calibrate",
    "tailrace calibrate --log": "needs a decision log; tests/calibrate makes one",
    "tailrace assess http": "needs live servers",
    "tailrace replay": "needs a decision log; tests/replay makes one",
    "tailrace evaluate RUN": "RUN stands for a training run",
    "tailrace train --env live": "needs live servers; tests/integrations/live_training has them",
}
#: Anywhere in a command.
SKIPPED_IF = {
    "ray": "needs Ray: `make test-ray`",
    "vidur": "needs the vidur package: `make test-vidur`",
    "--check": "says 1 where the servers are not there; tests/cli/test_front_door.py tries it",
    "--resume": "goes on with a run that is not there",
    "runs/sweep": "needs a sweep, and that needs Ray: `make test-ray`",
}
MINE = """
[workload]
name = "chat"
rate = 10.0
requests = 400
"""


def commands() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Page and text of every command in a block of code, and the lines that it is said to print."""
    start = re.compile(r"(tailrace|make|python|pip|curl|git) ")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"```([a-z]*)\n(.*?)```", text, flags=re.DOTALL):
            if language in ("", "bash", "sh", "console"):
                parts = [(line, "") for line in block.replace("\\\n", " ").splitlines()]
                if any(line.startswith("$ ") for line, _ in parts):
                    found = re.split(r"^\$ (.*)\n?", block.replace("\\\n", " "), flags=re.MULTILINE)
                    parts = list(zip(found[1::2], found[2::2], strict=True))
                for line, printed in parts:
                    command = re.sub(r"\s+#.*", "", line.strip())
                    if start.match(command):
                        yield page.name, " ".join(command.split()), tuple(printed.splitlines())


COMMANDS = list(dict.fromkeys(commands()))


def words_of(text: str) -> str:
    """A text without its numbers and line breaks, which depend on the machine and the terminal."""
    return " ".join(re.sub(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "#", text).split())


def why_not(command: str) -> str:
    """Why a command is not run; empty: it is."""
    reasons = [why for head, why in SKIPPED.items() if command.startswith(head)]
    reasons += [why for word, why in SKIPPED_IF.items() if re.search(rf"(^|\W){word}", command)]
    return reasons[0] if reasons else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the pages has by then."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("examples", "benchmarks"):
        shutil.copytree(ROOT / name, place / name)
    (place / "my_rule.py").write_text('def scores(view):\n    return view.replicas["queued"]\n')
    for name in ("mine", "mine-busy", "my_scenario", "past", "recent"):
        (place / f"{name}.toml").write_text(MINE)
    runs = [f"runs/{name}/best" for name in ("quick-0", "mine", "general", "polish", "wide-0")]
    for name in ("mine", "clone", *runs):
        target = place / f"{name}.tailrace"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED, target)
    (place / "cluster.toml").write_text("[[cluster.replicas]]\ncount = 2\n")
    # Ten minutes, so that either half of a recording has enough requests to be used.
    rows = "".join(
        f"2023-11-16 18:{k // 60:02d}:{k % 60:02d}.0,{100 + k % 7},10\n" for k in range(600)
    )
    files = ("azure.csv", "AzureLLMInferenceTrace_conv.csv")
    for name in (*files, "FOLDER/azure.csv", "TRACES/azure.csv"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    run(place, "tailrace workload write chat --requests 8000 --out mine.parquet", 300)
    run(place, "tailrace workload write chat --requests 200 --out azure.parquet", 300)
    evaluate = "tailrace evaluate --scenario mine.toml -p mine.tailrace --against lmetric"
    run(place, f"{evaluate} --seeds 1 --selection-seeds 1 --requests 40 -o results", 600)
    return place


def run(place: Path, command: str, limit_s: float) -> tuple[int | None, str]:
    """Run a command; returns its exit code, None if it was stopped, and what it wrote."""
    # Pages name servers of the reader's network; here everything stays on this machine.
    words = re.sub(r"\b10\.\d+\.\d+\.(\d+)\b", r"127.0.0.\1", command)
    words = words.replace("0.0.0.0", "127.0.0.1")
    words = re.sub(r"^tailrace ", "python -m tailrace.cli ", words)
    words = re.sub(r"^python ", f"{sys.executable} ", words)
    source = str(Path(tailrace.__file__).parents[1])
    process = subprocess.Popen(
        ["bash", "-c", words], cwd=place, env=os.environ | {"PYTHONPATH": source, "COLUMNS": "120"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


def test_there_are_commands_and_every_exception_is_needed():
    assert len(COMMANDS) > 60
    texts = [command for _, command, _ in COMMANDS]
    for head in SKIPPED:
        assert any(text.startswith(head) for text in texts), head


@pytest.mark.parametrize(("page", "command", "printed"), COMMANDS)
def test_the_command_runs_and_prints_what_the_page_shows(
    folder: Path, tmp_path: Path, page: str, command: str, printed: tuple[str, ...]
) -> None:
    if why := why_not(command):
        pytest.skip(why)
    if command.startswith("curl "):
        body = re.search(r"-d '(.*)'", command)
        assert body is not None
        assert isinstance(json.loads(body[1]), dict)
        return
    if command.startswith(("tailrace train", "tailrace evaluate")):  # their folders must be new
        unnamed = {run.name for run in (folder / "runs").iterdir() if run.name not in command}
        written = shutil.ignore_patterns("results*", *(unnamed if "train" in command else ()))
        folder = shutil.copytree(folder, tmp_path / "reader", ignore=written)
        if out := re.search(r"(?:-o|--out) (\S+)", command):
            shutil.rmtree(folder / out[1], ignore_errors=True)
    code, output = run(folder, command, LIMIT_S)
    assert code in (0, None), output
    assert "Traceback" not in output
    if code == 0:
        said = words_of(output)
        assert [line for line in printed if "..." not in line and words_of(line) not in said] == []
