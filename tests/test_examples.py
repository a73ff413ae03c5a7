import json
import re
from pathlib import Path

import pytest

from tailrace import scenario as scenarios

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_loads_and_says_how_to_run_it(path):
    scenario = scenarios.load(path)
    assert scenario.workload.name
    assert f"--config examples/{path.name}" in path.read_text()


@pytest.mark.compiled
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_runs_with_the_public_interface_alone(path, monkeypatch, capsys):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    imported = re.findall(r"^(?:import|from) .*", "\n".join(cells), re.MULTILINE)
    assert imported == ["import tailrace as tr"]
    # No output is kept in the file: it would go stale.
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(FOLDER)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{path.name}:{number}", "exec"), names)
    assert "<- chosen" in capsys.readouterr().out
