"""Names of other PPO schedulers work, or the error names our setting; the page lists them all."""

import re
from pathlib import Path

import pytest

from tailrace import config
from tailrace.errors import RenamedSettingWarning, TailraceError
from tailrace.learn import settings as s
from tailrace.learn.other_names import OTHER_NAMES, PREFIX, find

PAGE = (Path(__file__).parents[2] / "docs" / "from-vidur.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
ALIASES = [name for name, other in OTHER_NAMES.items() if other.targets]
#: Names that the design documents of such a scheduler use.
REQUIRED = {
    *("entropy_coef", "target_kl", "kl_coef", "entropy_min", "latency_threshold"),
    *("latency_penalty_scale", "load_balance_penalty", "throughput_target", "absolute_weight"),
    *("delta_weight", "alpha", "kappa", "sigma", "pulse_interval", "pulse_magnitude"),
    *("stagnation_threshold", "enable_decoupled_ac", "feature_projection_dim"),
}


def test_the_page_lists_every_name():
    listed = {name: (ours, note) for name, ours, note in ROWS if name in OTHER_NAMES}
    assert set(listed) == set(OTHER_NAMES) >= REQUIRED
    for name, other in OTHER_NAMES.items():
        assert listed[name] == (", ".join(f"`{t}`" for t in other.targets) or "-", other.note)


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_sets_our_setting(name):
    targets = OTHER_NAMES[name].targets
    assert all(config.is_setting(s.TrainSettings, target) for target in targets)
    for key in (name, f"exploration.{name}", f"{PREFIX}{name}", f"ppo.{name}"):
        data = {}
        if config.is_setting(s.TrainSettings, key):
            s.assign(data, key, 0.5)
            continue
        with pytest.warns(RenamedSettingWarning, match=f"{targets[0]}.* here"):
            s.assign(data, key, 0.5)
        for target in targets:
            section, leaf = target.split(".")
            assert data[section][leaf] == 0.5


@pytest.mark.parametrize("name", sorted(set(OTHER_NAMES) - set(ALIASES)))
def test_a_name_without_an_alias_says_what_to_set(name):
    key = next(
        key
        for key in (f"ppo.{name}", f"reward.{name}")
        if not config.is_setting(s.TrainSettings, key)
    )
    with pytest.raises(TailraceError, match="instead: ") as error:
        s.assign({}, key, 1.0)
    # Settings that the sentence names are settings.
    for setting in re.findall(r"\b(?:ppo|exploration|reward|network)\.\w+", str(error.value)):
        assert setting == key or config.is_setting(s.TrainSettings, setting)


def test_a_file_may_use_the_names(tmp_path):
    path = tmp_path / "theirs.toml"
    path.write_text("scenarios = ['demo']\n[ppo]\nclip_ratio = 0.15\nentropy_coef = 0.02\n")
    with pytest.warns(RenamedSettingWarning):
        found = s.build(s.read(path) | {"advantage": "gae", "objective": "clipped"})
    assert found.ppo.clip_range == 0.15
    assert found.exploration.entropy_start == found.exploration.entropy_end == 0.02


def test_other_unknown_names_are_left_to_validation():
    assert find("ppo.nonsense") is None
    data = {}
    s.assign(data, "ppo.nonsense", 1)
    with pytest.raises(TailraceError, match=r"unknown setting 'ppo\.nonsense'"):
        s.build({"scenarios": ["demo"], **data})
