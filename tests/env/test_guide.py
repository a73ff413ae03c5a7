"""The examples of docs/environments.md run, and its tables name every option."""

import re
from pathlib import Path

import pytest

from tailrace.env.core import EnvSettings
from tailrace.env.reward import RewardSettings

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_examples_run():
    pytest.importorskip("gymnasium")
    pytest.importorskip("stable_baselines3")
    names: dict[str, object] = {}
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        exec(example, names)
    assert names["over"]
    assert names["envs"].num_envs == 64
    assert names["model"].num_timesteps == 1024


def test_every_option_is_named():
    for model in (EnvSettings, RewardSettings):
        missing = [name for name in model.model_fields if f"`{name}`" not in TEXT]
        assert missing == []
