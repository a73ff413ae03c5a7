from pathlib import Path

import pytest

from policy.networks import random_policy
from tailrace.env.reward import RewardSettings
from tailrace.policy import registry
from tailrace.policy.learned import checkpoint
from tailrace.seeds import Purpose, purpose_of

QUICK = ("--requests", "40", "--seeds", "2")


@pytest.fixture
def file(tmp_path):
    policy = random_policy()
    checkpoint.save(tmp_path / "mine.tailrace", policy.config, policy.tensors)
    return "mine.tailrace"


@pytest.mark.compiled
def test_ranked_table(run, file):
    lines = run("headroom", file, *QUICK).stdout.splitlines()
    rules = {rule.name for rule in registry.rules()}
    rows = lines[2 : 3 + len(rules)]
    assert {row.split()[0] for row in rows} == rules | {file}
    rewards = [float(row.split()[1]) for row in rows]
    assert rewards == sorted(rewards, reverse=True)
    assert sum("best rule" in row for row in rows) == 1
    text = " ".join(lines)
    assert "demo: 40 requests, 2 training seeds, the same for all." in text
    assert "Reward: the default" in text
    assert "soft_late" not in text


@pytest.mark.compiled
def test_json_of_several_scenarios(run_json):
    args = ("--scenario", "mixed-speed", "--scenario", "scale-2", "--reward-balance", 0.5)
    found = run_json("headroom", *QUICK, *args)
    assert [one["scenario"]["name"] for one in found] == ["mixed-speed", "scale-2"]
    for one in found:
        assert one["reward"]["balance"] == 0.5
        assert all(purpose_of(seed) is Purpose.TRAINING for seed in one["seeds"])
        assert all(len(p["rewards"]) == 2 for p in one["played"])
        assert one["verdicts"]
    assert run_json("headroom", *QUICK, *args) == found


@pytest.mark.compiled
def test_options_win_over_the_file(run_json):
    Path("reward.toml").write_text("late = 0.0\nearly = 0.5\n")
    args = ("--requests", 5, "--seeds", 1)
    (found,) = run_json("headroom", *args, "--reward", "reward.toml", "--reward-early", 1)
    assert found["reward"] == RewardSettings(late=0, early=1).model_dump()
    Path("run.toml").write_text("[reward]\nbound = 4.0\n")
    (found,) = run_json("headroom", *args, "--reward", "run.toml")
    assert found["reward"]["bound"] == 4


def test_every_setting_of_the_reward_has_an_option(run):
    text = " ".join(run("headroom", "--help").stdout.split())
    for field, info in RewardSettings.model_fields.items():
        assert f"--reward-{field.replace('_', '-')}" in text
        assert " ".join(info.description.split()) in text


@pytest.mark.compiled
def test_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("headroom", "--requests", 10, "--seeds", 1, "--plot", "room.png")
    assert (tmp_path / "room.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes(refuse):
    assert "set aside for evaluation" in refuse("headroom", "--seed", 6_000_000_000)
    assert "set aside for tuning" in refuse("headroom", "--seed", 2_000_000_000)
    assert "unknown scenario" in refuse("headroom", "--scenario", "demos")
    assert "there is no policy file" in refuse("headroom", "absent.tailrace")
    assert "nothing to learn from" in refuse(
        "headroom", "--reward-e2e", 0, "--reward-ttft", 0, "--reward-late", 0
    )
    assert "bound" in refuse("headroom", "--reward-bound", 0)
    assert ".png or .svg or .pdf" in refuse("headroom", "--plot", "room.bmp")
    assert "cannot read absent.toml" in refuse("headroom", "--reward", "absent.toml")


def test_mistakes_in_a_file_of_settings(refuse):
    Path("reward.toml").write_text("laet = 1.0\n")
    assert "did you mean late" in refuse("headroom", "--reward", "reward.toml")
    Path("reward.toml").write_text("reward = 1.0\n")
    assert "must be a table of settings" in refuse("headroom", "--reward", "reward.toml")
