"""What the documentation names exists: files, links, commands with their flags, make targets."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tailrace.cli import COMMANDS, cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
#: Where a path may be found, besides the root of the repository.
FOLDERS = ("src", "src/tailrace", "docs", "tests", "benchmarks")
#: Names of files that users write, or that a command writes, in examples.
EXAMPLES = frozenset(
    {
        *("my_rule.py", "path/to/my_rule.py", "router.toml", "cluster.toml"),
        *("results.json", "settings.json", "health.json", "best.json", "suites/best.json"),
        "baselines.json",
        "assessment.json",
        "autopilot.json",
        "assessment/assessment.html",
        *("past.toml", "recent.toml", "report.html", "requests.csv", "meta.json"),
    }
)
SUFFIXES = "py|md|json|toml|yml|svg|png|html|txt"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(text: str) -> list[str]:
    """Everything between backticks on one line, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def exists(path: str) -> bool:
    return any(list((ROOT / folder).glob(path)) for folder in (".", *FOLDERS))


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = {
        span for span in spans(page.read_text()) if re.fullmatch(rf"[\w./*-]+\.({SUFFIXES})", span)
    }
    folders = {
        span for span in spans(page.read_text()) if re.fullmatch(r"[a-z_]+(/[a-z_]+)*/", span)
    }
    missing = {path for path in named - EXAMPLES if not exists(path)}
    assert missing == set()
    if page.name == "architecture.md":
        assert len(named) > 50
        assert {path for path in folders if not exists(path)} == set()


def test_every_promise_of_security_names_tests_that_exist() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.partition("## Guarantees")[2], re.MULTILINE)[1:]
    assert len(rows) > 20
    for promise, tests in rows:
        file, named = "", re.findall(r"`([^`]+)`", tests)
        assert named, promise
        for test in named:
            path, _, function = test.partition("::")
            file = path or file
            if file.startswith("make "):
                assert re.search(rf"^{file[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                continue
            found = re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(), re.MULTILINE)
            assert function in found if function else found, test


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = {link for link in links if "://" not in link}
    assert {link for link in local if not (page.parent / link).exists()} == set()


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The words after every ``tailrace COMMAND``, in code spans and code blocks."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in (*lines, *spans(text)):
        found = re.match(r"\s*(?:\$ )?tailrace ([a-z]+)((?: .*)?)$", line)
        if found:
            rest = re.split(r"\s[#|>]\s?|\s&&|;", found[2])[0]
            yield found[1], rest.split()


@each_page
def test_every_command_exists_with_its_flags(page: Path) -> None:
    wrong = []
    for name, words in commands(page.read_text()):
        if name not in COMMANDS:
            wrong.append(f"tailrace {name}")
            continue
        context = click.Context(cli)
        command = cli.get_command(context, name)
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not None
        known = {
            opt for p in command.get_params(context) for opt in (*p.opts, *p.secondary_opts)
        } | {"--help"}
        given = [re.split(r"[=\]|,.]", word.strip("[]"))[0] for word in words]
        wrong += [
            f"tailrace {name} {flag}"
            for flag in given
            if re.fullmatch(r"--[a-z][a-z-]*|-[a-zA-Z]", flag) and flag not in known
        ]
    assert wrong == []


def test_the_page_of_the_command_line_lists_every_command():
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)`", row)} >= set(COMMANDS)


def test_the_figure_that_policies_are_ranked_by_has_one_name():
    """The glossary names the other one, which code uses."""
    texts = [page for page in PAGES if page.name != "glossary.md"]
    texts += [
        p
        for name in ("terminal", "report", "cli")
        for p in (ROOT / "src/tailrace" / name).rglob("*.py")
    ]
    assert [p.name for p in texts if "composite cost" in p.read_text().lower()] == []


def test_what_is_installed_is_the_clone():
    """No index has the package, so its name alone installs nothing."""
    examples = [p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".ipynb", ".toml")]
    for page in (*PAGES, *examples):
        assert re.findall(r"pip install [^`\n]*\btailrace\b(?!-)[^`\n]*", page.read_text()) == [], (
            page
        )


@each_page
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named - targets == set()


def test_the_site_has_every_page():
    """``make docs`` builds it, and checks the links."""
    named = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
