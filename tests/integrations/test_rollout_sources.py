"""Rollout sources by the setting env, and what is refused before a run has done anything."""

from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from learn.tiny import SETTINGS, Noted, scenario_file
from tailrace.cli.train import command
from tailrace.config import Cluster, Event, Replica, Scenario
from tailrace.errors import TailraceError
from tailrace.integrations.rollout_sources import ROLLOUT_SOURCES
from tailrace.integrations.vidur import rollout_source as vidur_source
from tailrace.learn import settings as s
from tailrace.learn.trainer import Trainer
from tailrace.learn.world_schedule import WorldSchedule
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.network import Network
from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES

pytestmark = pytest.mark.usefixtures("short_sketches")


def test_every_env_but_the_simulator_has_a_source():
    annotation = s.TrainSettings.model_fields["env"].annotation
    assert set(get_args(annotation)) == {"sim", *ROLLOUT_SOURCES}


def test_a_trainer_without_the_source_says_so(tmp_path):
    settings, _ = planned(env="vidur")
    with pytest.raises(TailraceError, match=r"env = 'vidur' is played by a rollout source"):
        Trainer(tmp_path / "run", settings, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.compiled
def test_200_ppo_steps_in_the_simulator(tmp_path):
    over = {
        "start": "tailrace", "env": "sim", "updates": 2,
        "advantage": "gae", "objective": "clipped",
        "scenarios": [scenario_file(tmp_path, "chat", 12.0)],
        "demonstrations": {"rounds": 0},
        "ppo": {"clusters": 4, "decisions": 32, "minibatch": 64},
    }  # fmt: skip
    watcher = Noted()
    Trainer(tmp_path / "run", s.build(SETTINGS, over), 1, watcher).run()
    assert sum(metrics["samples"] for metrics in watcher.metrics) == 256
    shipped = checkpoint.shipped().tensors
    trained = checkpoint.read(tmp_path / "run" / "last.tailrace")[1]
    assert (shipped["scorer.hidden.weight"] != trained["scorer.hidden.weight"]).any()
    assert all(np.isfinite(tensor).all() for tensor in trained.values())


def planned(**over):
    scenario = Scenario(
        name="mine",
        cluster=Cluster(replicas=(Replica(count=2),)),
        workload={"name": "chat", "rate": 5.0},
        **over.pop("scenario", {}),
    )
    ppo = {"advantage": "gae", "objective": "clipped"}
    settings = s.build(SETTINGS, {"scenarios": [scenario], **ppo, **over})
    return settings, WorldSchedule(settings)


def check(settings, schedule):
    """Make the source of a run, which raises if the run cannot be played there."""
    network = Network(settings.network, len(REPLICA_FEATURES), len(REQUEST_FEATURES))
    ROLLOUT_SOURCES[settings.env](network, schedule, 0)


def test_what_vidur_cannot_play_is_told_at_once(monkeypatch):
    monkeypatch.setattr(vidur_source, "require", lambda: None)
    check(*planned(env="vidur"))
    dies = {"events": (Event(at_s=1.0, replica=0, kind="die"),)}
    with pytest.raises(TailraceError, match="vidur has no failures or drains"):
        check(*planned(env="vidur", scenario=dies))


def test_what_a_live_router_needs_is_told_at_once(tmp_path, monkeypatch):
    path = tmp_path / "router.toml"
    with pytest.raises(TailraceError, match="cannot read"):
        check(*planned(env="live", serve=str(path)))
    path.write_text('backends = [{url = "http://127.0.0.1:1"}]')
    with pytest.raises(TailraceError, match="with one backend there is no choice"):
        check(*planned(env="live", serve=str(path)))
    path.write_text('backends = [{url = "http://127.0.0.1:1"}, {url = "http://127.0.0.1:2"}]')
    check(*planned(env="live", serve=str(path)))
    monkeypatch.setattr("tailrace.integrations.live_training.router.find_spec", lambda name: None)
    with pytest.raises(TailraceError, match=r"needs httptools: pip install 'tailrace\[serve\]'"):
        check(*planned(env="live", serve=str(path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--env", "live"), "env = 'live' needs serve"),
        (
            ("--env", "live", "--set", "advantage=branching", "--serve", "x"),
            "needs advantage = 'gae'",
        ),
        (("--serve", "x.toml"), "but env = 'sim'"),
        (("--resume", "runs/x", "--env", "vidur"), "takes no other settings"),
    ],
)
def test_the_commands_options_become_settings(tmp_path, options, message):
    """PPO is what these worlds need, so it need not be asked for; whoever asks for another errs."""
    given = [] if "--resume" in options else ["--scenario", scenario_file(tmp_path)]
    result = CliRunner().invoke(command, [*given, *options])
    assert isinstance(result.exception, TailraceError)
    assert message in str(result.exception)
