"""Speed of the real `vidur` package on a list of requests: the peer of our simulator's speed.

Run it with an interpreter that has `vidur==0.0.26` installed; nothing of tailrace is imported.

    PYTHON benchmarks/vidur_peer.py --requests requests.csv --json

Vidur ships no profiling data, so two things are put in from outside: the request list and the time
of an iteration (the formula of docs/cost-model.md, reference device). Everything else is Vidur's
own code. The settings are those that make Vidur fastest: no metrics, plots, traces or log lines,
and a time formula that touches the prefilling requests only. What is timed is the event loop;
imports, configuration and the filling of the event queue are reported as `construction_s`.
"""

import argparse
import csv
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

VIDUR = "0.0.26"
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")

#: Chat-like lengths as a mixture of lognormals: share, then mu and sigma of prompt and of output.
CHAT_MIX = (
    (0.30, 6.97, 0.10, 6.00, 0.10),
    (0.25, 5.99, 0.10, 4.54, 0.25),
    (0.20, 7.50, 0.50, 4.40, 0.40),
    (0.15, 5.00, 0.80, 4.70, 0.60),
    (0.10, 8.20, 0.10, 4.04, 0.50),
)
PROMPT_RANGE = (2, 14_050)
OUTPUT_RANGE = (2, 1_000)


class Job(NamedTuple):
    """One request as it is handed to Vidur."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class IterationTime(NamedTuple):
    """What Vidur reads from a prediction, seconds."""

    total_time: float
    model_time: float


class Formula:
    """Takes the place of Vidur's execution-time predictor.

    The arithmetic and its order are those of the reference cost model, so that times can be
    compared to the last bit.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.replica_of: dict[int, int] = {}  # request id -> replica

    def get_execution_time(self, batch: Any, _stage: int) -> IterationTime:
        """Return the time of one iteration of a batch."""
        self.iterations += 1
        tokens = batch.total_num_q_tokens
        context = batch.total_num_kv_tokens
        decodes = len(batch.requests)
        work = 0.0
        if batch.num_prefill_tokens:
            replica = batch.replica_id.id
            # decodes come first in a sarathi batch: walk back over the prefills only
            for i in range(decodes - 1, -1, -1):
                request = batch.requests[i]
                if request.is_prefill_complete:
                    break
                chunk = batch.num_q_tokens[i]
                total = batch.num_kv_tokens[i]
                work += chunk * ((total - chunk) + chunk / 2)
                context -= total
                decodes -= 1
                self.replica_of[request.id] = replica
        context -= decodes  # Vidur counts the token being made, the formula what came before it
        ms = 10.3 + 0.042 * tokens
        if tokens > 128:
            ms += 0.023 * (tokens - 128)
        if tokens > 512:
            ms += 0.047 * (tokens - 512)
        ms += 8.8e-5 * context
        ms += 4.0e-6 * work
        seconds = ms * 1e-3
        return IterationTime(seconds, seconds)


def read_requests(path: Path) -> list[Job]:
    """Read the requests of a CSV file with the columns arrival_s, prompt_tokens, output_tokens."""
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            sys.exit(f"{path}: column {missing[0]} is missing; columns are {', '.join(COLUMNS)}")
        jobs = []
        for row in reader:
            try:
                job = Job(
                    *(
                        kind(row[name])
                        for kind, name in zip((float, int, int), COLUMNS, strict=True)
                    )
                )
            except (TypeError, ValueError) as error:
                sys.exit(f"{path}, line {reader.line_num}: {error}")
            if not (
                math.isfinite(job.arrival_s) and job.prompt_tokens >= 1 and job.output_tokens >= 1
            ):
                sys.exit(f"{path}, line {reader.line_num}: times are finite, lengths at least 1")
            jobs.append(job)
    if not jobs:
        sys.exit(f"{path}: no requests")
    return sorted(jobs, key=lambda job: job.arrival_s)


def make_requests(count: int, rate_rps: float, seed: int) -> list[Job]:
    """Return chat-like requests with Poisson arrivals."""
    rng = random.Random(seed)
    shares = [part[0] for part in CHAT_MIX]
    now = 0.0
    jobs = []
    for _ in range(count):
        now += rng.expovariate(rate_rps)
        _, mu_p, sigma_p, mu_o, sigma_o = rng.choices(CHAT_MIX, shares)[0]
        prompt = min(
            max(round(rng.lognormvariate(mu_p, sigma_p)), PROMPT_RANGE[0]), PROMPT_RANGE[1]
        )
        output = min(
            max(round(rng.lognormvariate(mu_o, sigma_o)), OUTPUT_RANGE[0]), OUTPUT_RANGE[1]
        )
        jobs.append(Job(now, prompt, output))
    return jobs


def build(
    jobs: Sequence[Job], args: argparse.Namespace, folder: str
) -> tuple[Any, Formula, list[Any]]:
    """Return Vidur's simulator with its event queue filled, the formula, and the requests in it."""
    from vidur import config
    from vidur.entities import Request
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.request_generator import RequestGeneratorRegistry
    from vidur.simulator import Simulator
    from vidur.types import ExecutionTimePredictorType, RequestGeneratorType

    logging.getLogger("vidur").setLevel(logging.WARNING)
    formula = Formula()
    requests = [Request(job.arrival_s, job.prompt_tokens, job.output_tokens) for job in jobs]

    class Requests:
        def __init__(self, *_: Any) -> None: ...

        def generate(self) -> list[Any]:
            return requests

    forest = ExecutionTimePredictorType.RANDOM_FORREST
    ExecutionTimePredictorRegistry.unregister(forest)
    ExecutionTimePredictorRegistry.register(forest, lambda **_: formula)
    synthetic = RequestGeneratorType.SYNTHETIC
    RequestGeneratorRegistry.unregister(synthetic)
    RequestGeneratorRegistry.register(synthetic, Requests)

    settings = config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            num_replicas=args.replicas,
            replica_config=config.ReplicaConfig(
                model_name="meta-llama/Llama-3-8B",
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a100",
                network_device="a100_dgx",
            ),
            cache_config=config.CacheConfig(block_size=16, num_blocks=args.num_blocks),
            global_scheduler_config=config.RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=config.SarathiSchedulerConfig(
                chunk_size=args.chunk_size, batch_size_cap=args.batch_cap
            ),
        ),
        metrics_config=config.MetricsConfig(
            write_metrics=False,
            enable_chrome_trace=False,
            write_json_trace=False,
            store_plots=False,
            output_dir=folder,  # Vidur insists on writing its configuration somewhere
        ),
    )
    return Simulator(settings), formula, requests


def write_times(path: Path, requests: Sequence[Any], replica_of: dict[int, int]) -> None:
    """Write one row per request in order of arrival; times in seconds, to the last bit."""
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(("arrived_at", "scheduled_at", "first_token_at", "completed_at", "replica"))
        for request in requests:
            times = (
                request.arrived_at,
                request.scheduled_at,
                request.prefill_completed_at,
                request.completed_at,
            )
            writer.writerow((*map(repr, times), replica_of[request.id]))


def measure(jobs: Sequence[Job], args: argparse.Namespace) -> dict[str, Any]:
    """Run the simulation once and return the figures of the run."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        simulator, formula, requests = build(jobs, args, folder)
        construction_s = time.perf_counter() - started
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            simulator.run()
        except AssertionError:
            # 0.0.26 forgets to reset a counter when it evicts a request and stops at its own check
            if not any(request.num_restarts for request in requests):
                raise
            sys.exit("vidur 0.0.26 cannot go on after an eviction: give it more --num-blocks")
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    unfinished = sum(not request.completed for request in requests)
    if unfinished:
        sys.exit(f"vidur left {unfinished} of {len(requests)} requests unfinished")
    if args.out is not None:
        write_times(args.out, requests, formula.replica_of)
    return {
        "requests": len(requests),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": len(requests) / cpu_s,
        "iterations": formula.iterations,
        "iterations_per_cpu_s": formula.iterations / cpu_s,
        "construction_s": construction_s,
        "simulated_s": max(request.completed_at for request in requests),
        "mean_first_token_s": sum(r.prefill_completed_at - r.arrived_at for r in requests)
        / len(requests),
        "mean_completion_s": sum(r.e2e_time for r in requests) / len(requests),
        "restarts": sum(request.num_restarts for request in requests),
        "vidur_version": version("vidur"),
        "settings": {
            "replicas": args.replicas,
            "replica_scheduler": "sarathi",
            "global_scheduler": "round_robin",
            "chunk_size": args.chunk_size,
            "batch_cap": args.batch_cap,
            "block_size": 16,
            "num_blocks": args.num_blocks,
            "metrics": False,
        },
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Measure the speed of the vidur package.")
    parser.add_argument("--requests", type=Path, help=f"CSV file with {', '.join(COLUMNS)}")
    parser.add_argument("--count", type=int, default=2_000, help="requests to make without a file")
    parser.add_argument("--rate", type=float, default=23.5, help="their arrivals per second")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests that are made")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--chunk-size", type=int, default=512, help="tokens per iteration")
    parser.add_argument("--batch-cap", type=int, default=128, help="most requests in a batch")
    parser.add_argument("--num-blocks", type=int, default=30_208, help="KV blocks of 16 tokens")
    parser.add_argument("--out", type=Path, help="write the times of every request to this CSV")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    try:
        installed = version("vidur")
    except PackageNotFoundError:
        sys.exit(f"vidur is not installed here: pip install vidur=={VIDUR}")
    if installed != VIDUR:
        sys.exit(f"vidur {installed} is installed, but the figures are defined for {VIDUR}")
    if args.requests is not None:
        jobs = read_requests(args.requests)
    else:
        jobs = make_requests(args.count, args.rate, args.seed)
    figures = measure(jobs, args)
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:>22}  {value:.6g}" if isinstance(value, float) else f"{name:>22}  {value}")


if __name__ == "__main__":
    main()
