import json

import pytest

from tailrace.evaluate.judge import replays

pytestmark = pytest.mark.compiled


@pytest.fixture
def results(run, tmp_path, monkeypatch):
    """A results folder of a rule of the user's own on a shipped scenario."""
    monkeypatch.setattr(replays, "LOADS", (0.5,))
    (tmp_path / "own.py").write_text("def scores(view):\n    return view.replicas['in_flight']\n")
    run(
        "evaluate", "--scenario", "uniform-chat-80", "--requests", 60, "--seeds", 2,
        "--selection-seeds", 1, "--purpose", "tuning", "--jobs", 1, "-p", "own.py",
        "--against", "lmetric", "-o", "res",
    )  # fmt: skip
    return tmp_path / "res"


def test_both_files(run, results, tmp_path):
    told = run("report", "res", "-o", "r.html", "--markdown", "r.md", "--jobs", 1)
    assert told.stdout == ""
    assert told.stderr == "written to r.html\nwritten to r.md\n"
    html = (tmp_path / "r.html").read_text()
    assert "<h1>own on 1 scenario</h1>" in html
    assert "tailrace report res -o r.html --markdown r.md" in html
    # A policy in Python cannot be asked on the side; the report says so.
    assert "cannot be compared decision by decision" in html
    assert (tmp_path / "r.md").read_text().startswith("# own on 1 scenario\n")


def test_beside_the_results_unless_told_otherwise(run, results):
    run("report", "res", "--quick", "-q")
    assert "<!DOCTYPE html>" in (results / "report.html").read_text()


def test_markdown_alone(run, results, tmp_path):
    run("report", "res", "--quick", "--markdown", "r.md", "-q")
    assert (tmp_path / "r.md").exists()
    assert not (results / "report.html").exists()


def test_the_same_results_give_the_same_bytes(run, results, tmp_path):
    texts = []
    for _ in range(2):
        run("report", "res", "-o", "r.html", "-q", "--jobs", 1)
        texts.append((tmp_path / "r.html").read_bytes())
    assert texts[0] == texts[1]


def test_another_policy(run, results, tmp_path):
    run("report", "res", "-p", "lmetric", "--quick", "-o", "r.html")
    assert "<h1>lmetric on 1 scenario</h1>" in (tmp_path / "r.html").read_text()


def test_changed_since(run, results, tmp_path):
    """The policy under test is another one now: plots are marked, and the command says so."""
    (tmp_path / "own.py").write_text("def scores(view):\n    return -view.replicas['in_flight']\n")
    told = run("report", "res", "-o", "r.html", "--jobs", 1)
    assert "1 of 3 runs played again differ from the results" in told.stderr
    assert "own on uniform-chat-80" in (tmp_path / "r.html").read_text()


def test_a_policy_that_is_gone(refuse, run, results, tmp_path):
    (tmp_path / "own.py").unlink()
    text = refuse("report", "res", "-o", "r.html")
    assert "the plots need own once more" in text
    assert "there is no policy file own.py" in text
    run("report", "res", "-o", "r.html", "--quick")


@pytest.mark.parametrize("args", [["nowhere"], ["nowhere", "-o", "r.html"]])
def test_no_folder(refuse, args):
    assert "there is no results folder nowhere" in refuse("report", *args)


def test_not_results(refuse, tmp_path):
    (tmp_path / "res").mkdir()
    assert "res is no results folder" in refuse("report", "res")
    (tmp_path / "res" / "results.json").write_text("not json")
    assert "res/results.json is damaged" in refuse("report", "res")


def test_targets_are_checked_first(refuse, results):
    assert "must end in .html or .htm" in refuse("report", "res", "-o", "r.pdf")
    assert "must end in .md" in refuse("report", "res", "--markdown", "r.txt")
    assert "there is no folder" in refuse("report", "res", "-o", "no/r.html")


def test_results_without_a_subject(refuse, run, results):
    path = results / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"subject": None}))
    assert "say with --policy which one" in refuse("report", "res", "--quick")
    run("report", "res", "--quick", "-p", "own")


def test_without_jinja(refuse, results, monkeypatch):
    from tailrace.cli import console

    monkeypatch.setattr(console, "find_spec", lambda _: None)
    assert "a report needs jinja2: pip install 'tailrace[report]'" in refuse("report", "res")
