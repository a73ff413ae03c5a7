"""Vidur's own settings: its command line, its requests and its predictor, as a world."""

import json
import random

import gymnasium
import numpy as np
import pytest
import vidur.config as vidur_config
from click.testing import CliRunner
from gymnasium.utils.env_checker import check_env
from vidur.config.config import (
    FixedRequestLengthGeneratorConfig,
    PoissonRequestIntervalGeneratorConfig,
    SyntheticRequestGeneratorConfig,
)

import tailrace.env
from tailrace.cli import cli
from tailrace.config import Scenario, VidurSettings, Workload
from tailrace.errors import TailraceError
from tailrace.integrations.vidur import interface, own
from tailrace.integrations.vidur.setup import setup_of
from tailrace.integrations.vidur.world import VidurWorld
from tailrace.policy import registry
from tailrace.policy.base import decide

pytestmark = pytest.mark.vidur

#: A predictor that is not Tailrace's formula: twice as slow for every second token.
PREDICTOR = """
from dataclasses import dataclass
from typing import NamedTuple

from vidur.config.config import BaseExecutionTimePredictorConfig
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.types import BaseIntEnum

MADE = []


class MyType(BaseIntEnum):
    MINE = 99


@dataclass
class MyPredictorConfig(BaseExecutionTimePredictorConfig):
    per_token_ms: float = 0.05

    @staticmethod
    def get_type():
        return MyType.MINE


class Time(NamedTuple):
    total_time: float
    model_time: float


class MyPredictor:
    def __init__(self, predictor_config, **settings):
        MADE.append(1)
        self._per_token_s = predictor_config.per_token_ms * 1e-3

    def get_execution_time(self, batch, stage):
        tokens = sum(getattr(batch, "num_q_tokens", None) or batch.num_tokens)
        seconds = 0.01 + self._per_token_s * tokens
        return Time(seconds, seconds)


ExecutionTimePredictorRegistry.register(MyType.MINE, MyPredictor)
"""
ARGUMENTS = (
    "--cluster_config_num_replicas 3 --replica_config_num_pipeline_stages 1 "
    "--replica_config_tensor_parallel_size 1 --replica_scheduler_config_type sarathi "
    "--sarathi_scheduler_config_chunk_size 256 --interval_generator_config_type poisson "
    "--poisson_request_interval_generator_config_qps 12 --length_generator_config_type fixed "
    "--fixed_request_length_generator_config_prefill_tokens 300 "
    "--fixed_request_length_generator_config_decode_tokens 20 "
    "--execution_time_predictor_config_type mine --my_predictor_config_per_token_ms 0.2"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predictor")
    (folder / "my_vidur_predictor.py").write_text(PREDICTOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield VidurSettings(arguments=tuple(ARGUMENTS.split()), imports=("my_vidur_predictor",))


def test_the_command_line_and_the_config_are_the_same(settings):
    config = own.load(settings)
    assert config.cluster_config.num_replicas == 3
    assert config.execution_time_predictor_config.per_token_ms == 0.2
    again = own.settings_of(config)
    loaded = own.load(VidurSettings(arguments=again.arguments))
    for part in ("cluster_config", "request_generator_config", "execution_time_predictor_config"):
        assert getattr(loaded, part) == getattr(config, part)
    assert "--poisson_request_interval_generator_config_qps" in again.arguments


def test_replicas_are_described_by_asking_the_predictor(settings):
    found = own.described(settings)
    assert len(found.replicas) == 3
    replica = found.replicas[0]
    assert (replica.scheduler, replica.chunk_size) == ("sarathi", 256)
    assert replica.num_blocks > 1000
    assert replica.cost.base_ms == pytest.approx(10, rel=0.05)
    assert replica.cost.per_token_ms == pytest.approx(0.2, rel=0.05)
    assert found.mean_error < 0.01


def test_requests_are_vidurs_and_follow_from_the_seed(settings):
    state = random.getstate()
    workload = Workload(ttft_slo_s=6.0)
    table = own.requests(settings, 400, 7, workload)
    assert random.getstate() == state
    assert (table.rows["prompt_tokens"] == 300).all()
    assert (table.rows["output_tokens"] == 20).all()
    assert (table.rows["ttft_slo_s"] == 6.0).all()
    # Vidur cuts gaps at 3/qps, so its rate is a little higher than it says.
    assert 400 / table.rows["arrival_s"][-1] == pytest.approx(12 * 1.0524, rel=0.15)
    same = own.requests(settings, 400, 7, workload)
    np.testing.assert_array_equal(table.rows, same.rows)
    other = own.requests(settings, 400, 8, workload)
    assert (table.rows["arrival_s"] != other.rows["arrival_s"]).all()
    twice = own.requests(settings, 400, 7, workload, speed=2.0)
    np.testing.assert_allclose(twice.rows["arrival_s"], table.rows["arrival_s"] / 2)


def test_a_run_is_vidurs_own(settings, tmp_path):
    """Times of a plain Vidur run with the same requests, policy and predictor."""
    setup, _ = setup_of(Scenario(), settings)
    table = setup.requests(60, 3)
    simulator = setup.simulator(table, 3)
    simulator.use(registry.get("round_robin"), 0)
    simulator.play()
    result = simulator.result()
    assert (result.requests["replica"] == np.arange(60) % 3).all()
    assert np.isfinite(result.requests["finished_s"]).all()
    # A request alone: two chunks of 256 and 44 tokens, then 19 decodes.
    first = result.requests[0]
    alone_s = (0.01 + 256 * 2e-4) + (0.01 + 44 * 2e-4)
    assert first["first_token_s"] - first["arrived_s"] == pytest.approx(alone_s, rel=1e-9)
    assert result.replicas["busy_s"].sum() > 0


def test_the_predictor_is_made_once(settings):
    import my_vidur_predictor

    setup, _ = setup_of(Scenario(), settings)
    before = len(my_vidur_predictor.MADE)
    for seed in (1, 2):
        setup.simulator(setup.requests(5, seed), seed)
    assert len(my_vidur_predictor.MADE) == before


def test_as_an_environment(settings):
    env = gymnasium.make(tailrace.env.VIDUR_ENV_ID, vidur=own.load(settings), decisions=20)
    assert env.action_space.n == 3
    check_env(env.unwrapped)


def test_as_a_world(tmp_path):
    config = vidur_config.SimulationConfig(
        cluster_config=vidur_config.ClusterConfig(
            num_replicas=2,
            replica_config=vidur_config.ReplicaConfig(
                num_pipeline_stages=1, tensor_parallel_size=1
            ),
            replica_scheduler_config=vidur_config.VllmSchedulerConfig(),
        ),
        request_generator_config=SyntheticRequestGeneratorConfig(
            interval_generator_config=PoissonRequestIntervalGeneratorConfig(qps=20.0),
            length_generator_config=FixedRequestLengthGeneratorConfig(
                prefill_tokens=100, decode_tokens=4
            ),
        ),
        execution_time_predictor_config=formula(),
        metrics_config=vidur_config.MetricsConfig(write_metrics=False, output_dir=str(tmp_path)),
    )
    world = VidurWorld(vidur=config, requests=30)
    policy = registry.get("least_outstanding")
    view, done, total = world.reset(1), False, 0.0
    while not done:
        view, cost_s, done = world.step(decide(policy, view))
        total += cost_s
    assert total > 0
    assert np.isfinite(world.result().requests["finished_s"]).all()


def formula():
    from tailrace.integrations.vidur.predictor import TailraceExecutionTimePredictorConfig

    return TailraceExecutionTimePredictorConfig()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--nonsense 1", "unrecognized arguments: --nonsense 1"),
        ("--cluster_config_num_replicas many", "invalid int value"),
        ("", "one pipeline stage, not of 2"),
        ("--replica_config_model_name gpt-9 --replica_config_num_pipeline_stages 1", "gpt-9"),
    ],
)
def test_arguments_that_vidur_does_not_take(arguments, complaint):
    with pytest.raises(TailraceError, match=complaint):
        own.load(VidurSettings(arguments=tuple(arguments.split())))


def test_compare_plays_them(settings):
    arguments = ["compare", "--vidur-args", ARGUMENTS, "--vidur-import", "my_vidur_predictor"]
    arguments += ["--requests", "60", "--seeds", "2", "-p", "random", "-j", "1", "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {entry["policy"] for entry in found["entries"]} == {"random", "least_outstanding"}
    assert all(entry["mean"]["finished"] == 120 for entry in found["entries"])


def test_train_plays_and_evaluates_in_them(settings, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--from", "tailrace", "--updates", "1", "-j", "1", "-o", "run",
        "--vidur-args", ARGUMENTS, "--vidur-import", "my_vidur_predictor", "--json"]  # fmt: skip
    for text in (
        "ppo.clusters=2", "ppo.decisions=32", "ppo.warmup=8", "ppo.minibatch=64",
        "demonstrations.rounds=0", "evaluation.requests=60", "evaluation.worlds=1",
        "evaluation.average_checkpoints=0",
        "evaluation.baselines=['least_outstanding','round_robin']",
        "stopping.collapse_share=1.0",
    ):  # fmt: skip
        arguments += ["--set", text]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "adapted scenario" in result.stderr
    assert "evaluation: in Vidur, 1 x 60 requests" in result.stderr
    assert (tmp_path / "run" / "best.tailrace").is_file()
    assert (tmp_path / "run.requests.csv").is_file()


def test_what_the_installed_vidur_has():
    interface.check()
    assert set(interface.schedulers()) >= {"sarathi", "vllm", "orca"}
    assert interface.branch() == "pypi"


def test_a_vidur_without_what_is_needed_is_refused(monkeypatch):
    monkeypatch.setattr(interface, "_NEEDED", ("vidur.simulator: Simulator.dream",))
    interface.check.cache_clear()
    with pytest.raises(TailraceError, match=r"has no Simulator\.dream in vidur\.simulator"):
        interface.check()
    monkeypatch.undo()
    interface.check.cache_clear()


def test_arguments_of_a_ppo_scheduler_are_explained():
    arguments = ("--p_p_o_global_scheduler_modular_config_entropy_coef", "0.25")
    with pytest.raises(TailraceError, match=r"exploration\.entropy_start"):
        own.load(VidurSettings(arguments=arguments))
