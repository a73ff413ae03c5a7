from pathlib import Path

import pytest

from policy.networks import random_policy
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES
from tailrace.seeds import Purpose, purpose_of

STATE = Path(__file__).parents[2] / "examples" / "states" / "hot-prefix.toml"
QUICK = ("--requests", "80", "--states", "20")


@pytest.fixture
def file(tmp_path):
    policy = random_policy()
    path = tmp_path / "mine.tailrace"
    checkpoint.save(
        path,
        policy.config,
        policy.tensors,
        training={"preset": "quick", "reward": {"late": 2.0}},
        seeds=[5, 6, 7, 8, 9, 10],
        scores={"suite": 0.71},
    )
    return path


@pytest.mark.compiled
def test_tables(run, file):
    text = run("inspect", file, *QUICK).stdout
    assert text.startswith("mine\n")
    assert "\nlooks most at " in text
    assert "preset = quick" not in text
    assert "demo: 80 requests of seed 2000000000, 20 states" in text
    for words in ("longest cached prefix", "lookahead_oracle", "prefix index", "attention"):
        assert words in text
    assert "Constant here:" in text
    shown = [f for f in (*REPLICA_FEATURES, *REQUEST_FEATURES) if f"\n{f.name} " in text]
    assert len(shown) == 20
    everything = run("inspect", file, *QUICK, "--all").stdout
    for words in ("preset = quick, reward = late = 2", "5, 6, 7, 8 and 2 more", "suite = 0.71"):
        assert words in everything
    shown = [f for f in (*REPLICA_FEATURES, *REQUEST_FEATURES) if f"\n{f.name} " in everything]
    assert len(shown) == len(REPLICA_FEATURES) + len(REQUEST_FEATURES)


@pytest.mark.compiled
def test_json(run_json, file):
    args = ("--scenario", "mixed-speed", "--scenario", "scale-2", "--state", STATE)
    found = run_json("inspect", file, *QUICK, *args)
    inspection = found["inspection"]
    assert [b["scenario"] for b in inspection["behaviours"]] == ["mixed-speed", "scale-2"]
    assert all(purpose_of(b["seed"]) is Purpose.TUNING for b in inspection["behaviours"])
    assert len(inspection["audit"]["features"]) == len(REPLICA_FEATURES) + len(REQUEST_FEATURES)
    assert inspection["about"]["seeds"] == [5, 6, 7, 8, 9, 10]
    assert [s["name"] for s in found["states"]] == ["hot-prefix"]
    assert run_json("inspect", file, *QUICK, *args) == found


def test_a_state_alone_plays_nothing(run, run_json, file):
    found = run_json("inspect", file, "--state", STATE)
    assert found["inspection"] is None
    assert len(found["states"][0]["options"]) == 4
    text = run("inspect", file, "--state", STATE).stdout
    assert f"hot-prefix: mine takes replica {found['states'][0]['chosen']}" in text
    assert "unavailable" in text
    assert "elsewhere" in text
    assert "least_outstanding" in text
    assert "demo" not in text


@pytest.mark.compiled
def test_pictures(run, file, tmp_path):
    pytest.importorskip("matplotlib")
    args = ("inspect", file, *QUICK, "--scenario", "demo", "--state", STATE)
    run(*args, "--plot", "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    run(*args, "--plot", "pictures")
    names = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert names == {
        *("importance", "ranges", "attention", "shares-demo", "habits-demo", "state-hot-prefix")
    }


def test_mistakes(refuse, file, tmp_path):
    assert "lmetric is a built-in rule without weights" in refuse("inspect", "lmetric")
    assert "there is no policy file" in refuse("inspect", "absent.tailrace")
    assert "unknown policy 'lmetrik'" in refuse("inspect", "lmetrik")
    assert "unknown scenario 'demos'" in refuse("inspect", file, "--scenario", "demos")
    assert "cannot read absent.toml" in refuse("inspect", file, "--state", "absent.toml")
    assert ".png or .svg or .pdf" in refuse("inspect", file, "--plot", "all.bmp")
    assert "no folder nowhere" in refuse("inspect", file, "--plot", "nowhere/pictures")
    (tmp_path / "taken").write_text("")
    assert "it is a file and no folder" in refuse("inspect", file, "--plot", "taken")
