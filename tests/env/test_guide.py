"""The examples of docs/environments.md run, and what the page claims is true."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tailrace.cli import cli
from tailrace.env.core import EnvSettings
from tailrace.env.reward import RewardSettings
from tailrace.policy.learned.observation import COLUMN, REQUEST_COLUMN

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "environments.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.findall(r"```\n\$ tailrace (.*?)\n(.*?)```", TEXT, re.DOTALL)
#: ``in_flight = observation["replicas"][:, COLUMN.in_flight]``, wherever a page writes such a line.
NAMED_COLUMN = re.compile(r'(\w+) = observations?\["(replicas|request)"\]\[([^\]]+)\]')


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_examples_run():
    pytest.importorskip("gymnasium")
    pytest.importorskip("stable_baselines3")
    names: dict[str, object] = {}
    assert len(EXAMPLES) == 3
    exec(EXAMPLES[0], names)
    assert names["over"]
    env = names["env"].unwrapped
    assert env.core.decisions[0] == 500
    # The quantity the first example routes by is the requests in flight, in the scaling claimed.
    shown = names["observation"]["replicas"][:, COLUMN.in_flight]
    rows = env.core.fleet.requests[0]
    sent = rows[(rows["replica"] >= 0) & np.isnan(rows["done"])]
    counts = np.bincount(sent["replica"], minlength=len(shown))
    assert counts.any()
    assert shown == pytest.approx(np.log1p(counts), abs=1e-6)
    exec(EXAMPLES[1], names)
    assert names["envs"].num_envs == 64
    assert names["observations"]["replicas"].shape[0] == 64
    exec(EXAMPLES[2], names)
    assert names["model"].num_timesteps == 1024


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_name_the_columns_they_read(page):
    text = page.read_text(encoding="utf-8")
    for name, part, index in NAMED_COLUMN.findall(text):
        column = eval(
            index.rpartition(",")[2], {"COLUMN": COLUMN, "REQUEST_COLUMN": REQUEST_COLUMN}
        )
        assert column == getattr(COLUMN if part == "replicas" else REQUEST_COLUMN, name)


def test_some_page_reads_a_column():
    assert NAMED_COLUMN.search(TEXT)


def test_commands_print_what_the_page_shows():
    assert SHELL
    for arguments, shown in SHELL:
        result = CliRunner().invoke(cli, arguments.split(), prog_name="tailrace")
        assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_every_option_is_named():
    for model in (EnvSettings, RewardSettings):
        missing = [name for name in model.model_fields if f"`{name}`" not in TEXT]
        assert missing == []
