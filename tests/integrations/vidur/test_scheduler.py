"""The scheduler inside a plain Vidur run: registered by one call, with Vidur's own settings."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import vidur.config as vidur_config
from vidur.config.config import (
    FixedRequestLengthGeneratorConfig,
    PoissonRequestIntervalGeneratorConfig,
    SyntheticRequestGeneratorConfig,
)
from vidur.simulator import Simulator
from vidur_helpers import SEED, chat, cluster

import tailrace.integrations.vidur
from tailrace.calibrate.iteration_fit import predicted_ms
from tailrace.config import Replica
from tailrace.errors import TailraceError
from tailrace.integrations.vidur.demonstrations import Demonstrations, load
from tailrace.integrations.vidur.measure import measured_cost
from tailrace.integrations.vidur.predictor import (
    FormulaPredictor,
    TailraceExecutionTimePredictorConfig,
)
from tailrace.integrations.vidur.simulation import simulate
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.view.devices import cost_of

pytestmark = pytest.mark.vidur

EXAMPLE = Path(__file__).parents[3] / "examples" / "vidur_scheduler.py"


@pytest.fixture
def simulator(tmp_path):
    """Make a plain simulator of Vidur with a policy of Tailrace and 120 equal requests."""

    def make(policy, replica_scheduler=None, **settings):
        config_class = tailrace.integrations.vidur.register()
        return Simulator(
            vidur_config.SimulationConfig(
                cluster_config=vidur_config.ClusterConfig(
                    num_replicas=3,
                    replica_config=vidur_config.ReplicaConfig(
                        num_pipeline_stages=1, tensor_parallel_size=1
                    ),
                    global_scheduler_config=config_class(policy=policy, **settings),
                    replica_scheduler_config=replica_scheduler
                    or vidur_config.SarathiSchedulerConfig(chunk_size=256),
                ),
                request_generator_config=SyntheticRequestGeneratorConfig(
                    num_requests=120,
                    interval_generator_config=PoissonRequestIntervalGeneratorConfig(qps=20.0),
                    length_generator_config=FixedRequestLengthGeneratorConfig(
                        prefill_tokens=300, decode_tokens=20
                    ),
                ),
                execution_time_predictor_config=TailraceExecutionTimePredictorConfig(),
                metrics_config=vidur_config.MetricsConfig(
                    write_metrics=False, enable_chrome_trace=False, output_dir=str(tmp_path)
                ),
            )
        )

    return make


def test_vidur_runs_with_a_policy_of_tailrace(simulator):
    vidur = simulator("round_robin")
    requests = [event._request for _, event in sorted(vidur._event_queue)]
    seen = Demonstrations()
    vidur.scheduler.router.watchers.append(seen)
    vidur.run()
    assert all(request.completed for request in requests)
    assert len(seen) == 120
    assert (seen.samples().costs.argmin(axis=1) == np.arange(120) % 3).all()


def test_the_ledger_is_empty_at_the_end(simulator):
    vidur = simulator("tailrace")
    vidur.run()
    replicas, router = vidur.scheduler.router.view.replicas, vidur.scheduler.router.view.router
    assert not any(replicas[f].any() for f in ("in_flight", "queued", "answering_prompts"))
    assert replicas["finished"].sum() == router["finished"] == router["decisions"] == 120
    assert router["finished_tokens"] == 120 * 20


def test_the_view_shows_vidurs_settings(simulator):
    replica = simulator("random").scheduler.router.view.replicas[0]
    assert replica["token_budget"] == 256
    assert replica["batch_cap"] == 128
    assert replica["block_size"] == 16
    assert replica["capacity_tokens"] > 100_000


def test_a_second_run_in_one_process(simulator):
    """Vidur goes on counting its replicas; its own round robin fails here."""
    for _ in range(2):
        simulator("least_outstanding").run()


def test_a_policy_file_hears_what_happens(simulator, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def scores(view):\n    return [2.0, 0.0, 1.0]\n")
    vidur = simulator(str(file))
    heard = Counter()

    class Hearing(Policy):
        def scores(self, view):
            return np.arange(3.0)

        def sent(self, replica, request_id, now):
            heard["sent", replica] += 1

        def first_token(self, replica, request_id, now):
            heard["first_token", replica] += 1

        def finished(self, replica, request_id, now):
            heard["finished", replica] += 1

    vidur.scheduler.use(Hearing())
    vidur.run()
    assert heard == {("sent", 0): 120, ("first_token", 0): 120, ("finished", 0): 120}
    other = simulator(str(file))
    other.run()
    assert other.scheduler.router.view.replicas["finished"].tolist() == [0, 120, 0]


def test_rules_of_the_simulator_alone_are_refused(simulator):
    with pytest.raises(TailraceError, match="inside Tailrace's simulator"):
        simulator("lookahead")


def test_other_replica_schedulers_are_refused(simulator):
    with pytest.raises(TailraceError, match="not over mnemosyne_fcfs_fixed_chunk"):
        simulator("random", vidur_config.MnemosyneFCFSFixedChunkSchedulerConfig())


@pytest.mark.parametrize("device", ["a100-llama3-8b", "h100-llama2-7b"])
def test_the_cost_model_is_found_by_asking_the_predictor(device):
    predictor = FormulaPredictor(TailraceExecutionTimePredictorConfig(cluster=device))
    found, truth = measured_cost(predictor, 512, 0).model, cost_of(Replica(device=device))
    for batch in ((1, 64, 0), (64, 64 * 700, 0), (512, 0, 512 * 256), (300, 9000, 200 * 900)):
        assert predicted_ms(found, *batch) == pytest.approx(predicted_ms(truth, *batch), rel=0.01)


def test_demonstrations_in_a_file(tmp_path):
    student = registry.get("tailrace")
    seen = Demonstrations(student)
    policy = registry.get("least_outstanding")
    result = simulate(cluster(), chat(80), policy, seed=SEED, watchers=[seen])
    path = tmp_path / "seen.npz"
    seen.save(path, world=3)
    samples = load(path)
    assert len(samples) == 80
    assert (samples.costs.argmin(axis=1) == result.requests["replica"]).all()
    assert (samples.costs.sum(axis=1) == samples.replicas - 1).all()
    assert samples.tried.all()
    assert (samples.world == 3).all()
    assert samples.memory.shape == (80, student.config.memory)
    with pytest.raises(TailraceError, match=r"cannot read .*none\.npz"):
        load(tmp_path / "none.npz")


def test_the_example(tmp_path):
    target = tmp_path / "seen.npz"
    command = [sys.executable, str(EXAMPLE), "least_outstanding", "-o", str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "least_outstanding: 300 decisions, mean TTFT 0.0" in done.stdout
    assert len(load(target)) == 300


def test_vidurs_own_command_line_takes_the_policy(tmp_path):
    code = (
        "import tailrace.integrations.vidur as t; t.register(); from vidur.main import main; main()"
    )
    options = (
        "--global_scheduler_config_type tailrace "
        "--tailrace_global_scheduler_config_policy least_outstanding "
        "--replica_scheduler_config_type sarathi --execution_time_predictor_config_type tailrace "
        "--replica_config_num_pipeline_stages 1 --replica_config_tensor_parallel_size 1 "
        "--synthetic_request_generator_config_num_requests 20 --cluster_config_num_replicas 2 "
        "--no-metrics_config_write_metrics"
    )
    command = [sys.executable, "-c", code, *options.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "Simulation ended at" in done.stdout
