from pathlib import Path

import pytest

from tailrace import scenario as scenarios

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_loads_and_says_how_to_run_it(path):
    scenario = scenarios.load(path)
    assert scenario.workload.name
    assert f"--config examples/{path.name}" in path.read_text()
