"""Renders a report as one self-contained HTML file, or as Markdown."""

import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tailrace import __version__
from tailrace.evaluate.judge.baselines import members
from tailrace.evaluate.judge.replays import Replays
from tailrace.evaluate.judge.results import scenario_file
from tailrace.evaluate.judge.results_folder import Results
from tailrace.evaluate.judge.suite import load_suite, suite_names
from tailrace.evaluate.measure.cells import source_digest
from tailrace.evaluate.measure.contender import Role
from tailrace.report.blocks import ReportContent
from tailrace.report.content import content, method

TEMPLATES = Path(__file__).parent / "templates"
_GROUPS = {Role.TUNED: "tuned", Role.LEARNED: "learned", Role.ORACLE: "look-ahead"}


def render(
    results: Results, replays: Replays | None, command: str, *, markdown: bool = False
) -> str:
    """Return the report; ``command`` is what made it."""
    commands = (evaluate_command(results), command)
    report = content(results, replays, method(results, replays, commands, made(results)))
    return render_page(report, markdown=markdown)


def render_page(report: ReportContent, *, markdown: bool = False) -> str:
    """Return a report as one file."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=not markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = markdown_cell
    name = "report.md.j2" if markdown else "report.html.j2"
    # Both files are ours, so they go into the page as they are.
    css, script = (
        Markup((TEMPLATES / file).read_text(encoding="utf-8"))
        for file in ("style.css", "script.js")
    )
    return environment.get_template(name).render(report=report, css=css, script=script)


def markdown_cell(text: str) -> str:
    """Return a text that stays within its cell of a Markdown table, character by character."""
    for mark in ("\\", "|", "_", "*", "`", "<", "["):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def evaluate_command(results: Results) -> str:
    """Return the command that reproduces these results, as far as the file records it."""
    data = results.data
    words = ["tailrace", "evaluate"]
    if data.suite == "custom":
        for name in results.grid.scenarios:
            file = scenario_file(results.folder, name)
            words += ["--scenario", str(file) if file.is_file() else name]
    else:
        words += ["--suite", data.suite]
        if data.suite in suite_names() and load_suite(data.suite).is_recorded:
            words += ["--traces", "FOLDER"]
    subjects = [s.spec for s in data.policies if s.role is Role.SUBJECT or s.policy == data.subject]
    words += [w for spec in subjects for w in ("-p", spec)]
    words += [w for group in _against(results) for w in ("--against", group)]
    words += ["--seeds", str(len(data.seeds)), "--selection-seeds", str(len(data.selection_seeds))]
    if data.purpose != "evaluation":
        words += ["--purpose", data.purpose]
    if len(set(data.requests.values())) == 1:
        words += ["--requests", str(next(iter(data.requests.values())))]
    return shlex.join([*words, "-o", str(results.folder)])


def _against(results: Results) -> Sequence[str]:
    """Return the baselines as groups, where a group is complete, and names."""
    rules = [s.policy for s in results.data.policies if s.role is Role.RULE]
    roles = {s.role for s in results.data.policies}
    groups = [group for role, group in _GROUPS.items() if role in roles]
    if set(members("rules")) <= set(rules):
        return ["all"] if len(groups) == len(_GROUPS) else ["rules", *groups]
    others = [n for n in rules if n not in (results.data.reference, results.subject)]
    return [*others, *groups] or ["none"]


def made(results: Results) -> list[tuple[str, str]]:
    """Return versions and machine, as (what, text)."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "scipy"))
    sources = f"digest {results.data.sources}"
    if source_digest() != results.data.sources:
        sources += f", now {source_digest()}"
    return [
        ("results", f"Tailrace {results.data.tailrace}, sources of simulator and rules {sources}"),
        ("report", f"Tailrace {__version__}, Python {platform.python_version()}, {libraries}"),
        ("machine of the report", f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"),
        ("figures", "simulated time: they do not depend on the machine"),
    ]


def _processor() -> str:
    """Name of the processor, where Linux reports it."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
