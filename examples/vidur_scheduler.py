"""A policy of Tailrace as the global scheduler of real Vidur, and what it decided as a file.

    pip install '.[vidur]'            # in a clone
    python examples/vidur_scheduler.py [POLICY] [-o demonstrations.npz]

POLICY is any policy of Tailrace: `tailrace` (the trained one), a rule such as `least_outstanding`,
or a file (see examples/policies). Vidur's own settings are used as they are. Vidur ships no
profiling data, so iterations take the time of Tailrace's reference device; leave
`execution_time_predictor_config` out to use Vidur's own predictor.
"""

import argparse
import logging
import tempfile
from pathlib import Path

import vidur.config as config
from vidur.config.config import (
    FixedRequestLengthGeneratorConfig,
    PoissonRequestIntervalGeneratorConfig,
    SyntheticRequestGeneratorConfig,
)
from vidur.simulator import Simulator
from vidur.utils.random import set_seeds

import tailrace.integrations.vidur
from tailrace.integrations.vidur.demonstrations import Demonstrations
from tailrace.integrations.vidur.predictor import TailraceExecutionTimePredictorConfig

TailraceConfig = tailrace.integrations.vidur.register()  # the one call


def settings(policy: str, folder: str) -> config.SimulationConfig:
    """Four replicas with sarathi, 300 requests of 512 + 128 tokens at 20 requests/s."""
    return config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            num_replicas=4,
            replica_config=config.ReplicaConfig(
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a100",
                network_device="a100_dgx",
            ),
            global_scheduler_config=TailraceConfig(policy=policy),
            replica_scheduler_config=config.SarathiSchedulerConfig(),
        ),
        request_generator_config=SyntheticRequestGeneratorConfig(
            num_requests=300,
            interval_generator_config=PoissonRequestIntervalGeneratorConfig(qps=20.0),
            length_generator_config=FixedRequestLengthGeneratorConfig(
                prefill_tokens=512, decode_tokens=128
            ),
        ),
        execution_time_predictor_config=TailraceExecutionTimePredictorConfig(),
        metrics_config=config.MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir=folder
        ),
    )


def main() -> None:
    """Run Vidur, print the mean latencies, keep the decisions."""
    parser = argparse.ArgumentParser(description="Run a policy of Tailrace in Vidur.")
    parser.add_argument("policy", nargs="?", default="tailrace")
    parser.add_argument("-o", "--output", type=Path, help="NumPy file for the decisions")
    arguments = parser.parse_args()
    logging.getLogger("vidur").setLevel(logging.WARNING)
    set_seeds(42)
    seen = Demonstrations()
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(settings(arguments.policy, folder))
        requests = [event._request for _, event in simulator._event_queue]
        simulator.scheduler.router.watchers.append(seen)
        simulator.run()
    ttft = sum(r.prefill_completed_at - r.arrived_at for r in requests) / len(requests)
    e2e = sum(r.e2e_time for r in requests) / len(requests)
    print(f"{arguments.policy}: {len(seen)} decisions, mean TTFT {ttft:.3f} s, E2E {e2e:.3f} s")
    if arguments.output is not None:
        seen.save(arguments.output)
        print(f"decisions written to {arguments.output}")


if __name__ == "__main__":
    main()
