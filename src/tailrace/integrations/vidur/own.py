"""A cluster and traffic that Vidur's own settings describe, with its own predictor. Imports Vidur.

The settings come as a ``SimulationConfig`` or as Vidur's command line, and are kept as the latter
(config.VidurSettings): that can be written into the file of a training run, and a process that
plays a part of it makes everything anew. Of Vidur's settings only the global scheduler is not used:
that place is Tailrace's.
"""

import importlib
import io
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import vidur.config as vidur_config
from vidur.config.base_poly_config import BasePolyConfig
from vidur.config.utils import to_snake_case
from vidur.request_generator import RequestGeneratorRegistry

from tailrace.config import Replica, RouterSettings, VidurSettings, Workload
from tailrace.errors import TailraceError
from tailrace.integrations.vidur import register
from tailrace.integrations.vidur.predictor import KeptPredictorConfig
from tailrace.integrations.vidur.simulation import SILENT, TableSimulator, quieten
from tailrace.learn import other_names
from tailrace.seeds import generator
from tailrace.sim.feasibility import check_requests
from tailrace.workload.table import RequestTable

#: A request in an otherwise empty cluster: what it takes to make one.
_ONE_REQUEST = RequestTable.build(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))


class Described(NamedTuple):
    """Vidur's replicas in Tailrace's terms."""

    replicas: list[Replica]
    mean_error: float  #: mean relative error of the cost model against Vidur's predictor


def settings_of(given: Any) -> VidurSettings:
    """Return settings for a ``SimulationConfig``, Vidur's command line (text or words), or such."""
    if isinstance(given, VidurSettings):
        return given
    if isinstance(given, str):
        return VidurSettings(arguments=tuple(shlex.split(given)))
    if is_dataclass(given) and not isinstance(given, type):
        return VidurSettings(arguments=tuple(arguments_of(given)))
    return VidurSettings(arguments=tuple(given))


def arguments_of(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield Vidur's command line for a ``SimulationConfig``, without what has its default."""
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if is_dataclass(value):
            if isinstance(value, BasePolyConfig):
                yield from (f"--{field.name}_type", str(value.get_type()))
            if type(value).__name__ != "MetricsConfig":  # Tailrace's, see load()
                yield from arguments_of(value, f"{to_snake_case(type(value).__name__)}_")
        elif value is None or value == default:
            continue
        elif isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{prefix}{field.name}"
        elif isinstance(value, list | tuple):
            yield from (f"--{prefix}{field.name}", *map(str, value))
        else:
            # Vidur's memory planner leaves whole numbers as floats where its parser wants integers.
            whole = isinstance(value, float) and value.is_integer()
            yield from (f"--{prefix}{field.name}", str(int(value) if whole else value))


def load(settings: VidurSettings) -> Any:
    """Return the ``SimulationConfig`` that the settings describe; it may be changed."""
    return deepcopy(_loaded(settings))


@lru_cache(maxsize=4)
def _loaded(settings: VidurSettings) -> Any:
    register()
    quieten()
    for module in settings.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise TailraceError(
                f"cannot import {module}, named by vidur.imports: {error}"
            ) from None
    _refuse_other_schedulers(settings.arguments)
    with tempfile.TemporaryDirectory() as folder:
        last = ["--metrics_config_output_dir", folder]
        last += [f"--no-metrics_config_{name}" for name in SILENT]
        with _command_line([*settings.arguments, *last]) as said:
            try:
                config = vidur_config.SimulationConfig.create_from_cli_args()
            except SystemExit:
                lines = said.getvalue().strip().splitlines() or ["it gave no reason"]
                reason = lines[-1].partition("error: ")[2] or lines[-1]
                raise TailraceError(f"Vidur does not take these arguments: {reason}") from None
            except (AssertionError, KeyError, ValueError) as error:
                raise TailraceError(f"Vidur does not take these arguments: {error!r}") from None
    stages = config.cluster_config.replica_config.num_pipeline_stages
    if stages != 1:
        raise TailraceError(
            f"Tailrace plays replicas of one pipeline stage, not of {stages}: add "
            "--replica_config_num_pipeline_stages 1"
        )
    return config


def _refuse_other_schedulers(arguments: Sequence[str]) -> None:
    """Raise if there are settings of a PPO scheduler, which Vidur itself does not know."""
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0]
        if name.startswith(other_names.PREFIX):
            other = other_names.find(name)
            ours = (" and ".join(other.targets) or other.note) if other else "what does the same"
            raise TailraceError(
                f"{argument} belongs to a PPO scheduler; leave it out and --set {ours} "
                "(docs/from-vidur.md)"
            )


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[io.StringIO]:
    """Let a program in this process read other arguments; yields what it says."""
    before, said = sys.argv, io.StringIO()
    sys.argv = ["vidur", *arguments]
    try:
        with redirect_stderr(said), redirect_stdout(said):
            yield said
    finally:
        sys.argv = before


@lru_cache(maxsize=4)
def described(settings: VidurSettings) -> Described:
    """Return the replicas in Tailrace's terms; the cost model is fitted to Vidur's predictor."""
    alike = [Replica()] * load(settings).cluster_config.num_replicas
    scheduler = _simulator(settings, alike, _ONE_REQUEST, RouterSettings(), 0)._scheduler
    nominal = scheduler.replicas[0]
    fit = scheduler.fitted_cost(nominal.chunk_size)
    errors = list(fit.errors.values())
    mean = sum(e.mean * e.count for e in errors) / sum(e.count for e in errors)
    replica = nominal.model_copy(update={"cost": fit.model})
    return Described([replica] * len(alike), mean)


def prepare(
    settings: VidurSettings, table: RequestTable, *, router: RouterSettings, seed: int
) -> TableSimulator:
    """Return a table on the cluster that Vidur's settings describe, without a policy."""
    replicas = described(settings).replicas
    check_requests(replicas, table)
    return _simulator(settings, replicas, table, router, seed)


def _simulator(
    settings: VidurSettings, replicas: list[Replica], table: RequestTable, router: RouterSettings,
    seed: int,
) -> TableSimulator:  # fmt: skip
    config = load(settings)
    config.cluster_config.global_scheduler_config = register()(policy="", device=Replica().device)
    own = config.execution_time_predictor_config
    config.execution_time_predictor_config = KeptPredictorConfig(settings, len(replicas), own)
    return TableSimulator(config, replicas, table, router, seed)


def requests(
    settings: VidurSettings, count: int, seed: int, workload: Workload, speed: float = 1.0
) -> RequestTable:
    """Return ``count`` requests of Vidur's own generator, as a seed draws them.

    Of a recorded trace a stretch is taken that begins where the seed says. ``workload`` gives the
    targets for latencies; arrivals come ``speed`` times as fast.
    """
    made = load(settings).request_generator_config
    own = getattr(made, "num_requests", None) is not None or hasattr(made, "duration")
    if own:
        made.num_requests, made.duration = count, None
    parts = (made, *(getattr(made, f"{p}_generator_config", None) for p in ("length", "interval")))
    for part in parts:
        if hasattr(part, "seed"):
            part.seed = int(generator(seed, "vidur").integers(2**32))  # most that NumPy takes
    with _own_randomness():
        try:
            found = RequestGeneratorRegistry.get(made.get_type(), made).generate()
        except FileNotFoundError as error:
            raise TailraceError(f"Vidur's request generator cannot read {error.filename}") from None
        except AttributeError:  # it makes None when its trace has ended
            raise TailraceError(
                f"Vidur's trace has fewer than the {count} requests that an episode takes"
            ) from None
    if len(found) < count:
        raise TailraceError(
            f"Vidur's generator makes {len(found)} requests, and an episode takes {count}"
        )
    first = 0 if own else int(generator(seed, "vidur trace").integers(len(found) - count + 1))
    found = found[first : first + count]
    arrival_s = np.array([request.arrived_at for request in found], np.float64)
    return RequestTable.build(
        (arrival_s - (0.0 if own else arrival_s[0])) / speed,
        np.array([request.num_prefill_tokens for request in found], np.int64),
        np.array([request.num_decode_tokens for request in found], np.int64),
        ttft_slo_s=workload.ttft_slo_s,
        tpot_slo_s=workload.tpot_slo_s,
    )


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Keep Vidur's seeding of the global generators from everybody else's."""
    python, legacy = random.getstate(), np.random.get_state()
    hashing = os.environ.get("PYTHONHASHSEED")
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        if hashing is None:
            os.environ.pop("PYTHONHASHSEED", None)
        else:
            os.environ["PYTHONHASHSEED"] = hashing
