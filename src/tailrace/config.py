"""Every setting, in one tree of frozen, validated models.

A TOML file and the command line fill the same models. The sentence under a field is its help text.
An unknown key is an error that names the nearest known one.
"""

import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tailrace.errors import RenamedSettingWarning, TailraceError, unknown_name

Tokens = Annotated[int, Field(ge=1, le=2**30)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
SlopeChange = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
#: Outside of these a run would take for ever, or its times would lose all digits.
MIN_RATE, MAX_RATE = 1e-6, 1e7
SpeedFactor = Annotated[float, Field(ge=1e-3, le=1000, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE, allow_inf_nan=False)]
#: Metrics that are fresher than this are as good as always fresh, which is 0.
MIN_STALENESS_S = 1e-3

MAX_REPLICAS = 1024

M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused, docstrings kept as help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    #: Former names of settings, which go on working with a warning, and the names they have now.
    RENAMED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _accept_former_names(cls, data: Any) -> Any:
        if not cls.RENAMED or not isinstance(data, Mapping):
            return data
        return {_current_name(cls, name, data): value for name, value in data.items()}


class CostModel(Settings):
    """Time of one iteration, which never falls as the batch grows; see docs/cost-model.md."""

    base_ms: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    """Time of an iteration that does nothing, in ms."""
    per_token_ms: Milliseconds
    """Time per token in the batch, in ms."""
    knots: tuple[tuple[Positive, SlopeChange], ...] = Field(default=(), max_length=4)
    """Pairs (tokens, ms): from that many tokens in the batch on, each token costs so much more;
    negative: less, as with a mixture of experts, but never less than nothing."""
    per_context_ms: Milliseconds = 0.0
    """Time per token of context of the decoding requests, in ms."""
    per_prefill_ms: Milliseconds = 0.0
    """Time per unit of chunk*(context + chunk/2) of the prefilling requests, in ms."""

    @model_validator(mode="after")
    def _never_falls(self) -> Self:
        slope, rounding = self.per_token_ms, 1e-9 * self.per_token_ms
        for tokens, change in sorted(self.knots):
            slope += change
            if slope < -rounding:
                raise ValueError(
                    f"knots: from {tokens:g} tokens on a token would cost {slope:g} ms; slopes may "
                    "fall, but per_token_ms and the changes up to a knot must add up to 0 or more"
                )
        return self


SchedulerName = Literal["sarathi", "vllm", "vllm_v1", "orca", "faster_transformer", "lightllm"]
SchedulingPolicyName = Literal["auto", "fcfs", "priority"]


class Replica(Settings):
    """One server, or several equal ones."""

    count: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """How many replicas of this kind."""
    device: str = "a100-llama3-8b"
    """Device and model preset that gives cost model and KV memory (see `tailrace devices`)."""
    cost: CostModel | None = None
    """Cost model of its own instead of the preset's."""
    speed: SpeedFactor = 1.0
    """Relative speed: iteration times are divided by it."""
    assumed_speed: SpeedFactor | None = None
    """Speed that the router assumes; default: the true one. Look-aheads know the true one."""
    scheduler: SchedulerName = "vllm_v1"
    """How the server forms batches."""
    scheduling_policy: SchedulingPolicyName = "auto"
    """Which request goes first (vllm_v1): fcfs, the one that came first; priority, the one with the
    lowest priority value, as vLLM with --scheduling-policy priority; auto: priority if an order was
    asked for (+order), else fcfs. Live, only priority has the router send priorities."""
    num_blocks: int | None = Field(default=None, ge=1, le=2**26)
    """KV cache size in blocks; default: the preset's."""
    block_size: int = Field(default=16, ge=1, le=4096)
    """Tokens per KV block."""
    batch_cap: int = Field(default=128, ge=1, le=4096)
    """Most requests that run at once."""
    chunk_size: int = Field(default=512, ge=1, le=2**20)
    """Tokens per iteration (sarathi, vllm_v1)."""
    max_batch_tokens: int = Field(default=16384, ge=1, le=2**26)
    """Padded tokens of a prefill batch (vllm), or its sum (lightllm)."""
    watermark: float = Field(default=0.01, ge=0, lt=1, allow_inf_nan=False)
    """Share of blocks kept free when a request is admitted (sarathi, vllm)."""
    prefix_caching: bool = True
    """Reuse cached blocks of equal prefixes (vllm_v1 only)."""
    preallocate_tokens: int = Field(default=0, ge=0, le=2**20)
    """Tokens' worth of extra blocks taken with each new block (vllm_v1)."""
    num_stages: int = Field(default=1, ge=1, le=64)
    """Pipeline stages; more than one runs on the reference engine."""
    max_request_tokens: int = Field(default=16384, ge=1, le=2**26)
    """Tokens reserved per request (orca, faster_transformer)."""
    max_waiting_iters: int = Field(default=10, ge=1, le=2**20)
    """Decode iterations between two attempts to admit (lightllm)."""

    @model_validator(mode="after")
    def _can_order(self) -> Self:
        if self.scheduling_policy == "priority" and self.scheduler != "vllm_v1":
            raise ValueError(
                f"scheduling_policy = priority needs scheduler = vllm_v1, got {self.scheduler}"
            )
        return self


class Event(Settings):
    """Something that happens to a replica during a run."""

    at_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
    """When, in seconds from the start."""
    replica: int = Field(ge=0, lt=MAX_REPLICAS)
    """Which replica, counted from 0."""
    kind: Literal["slow", "die", "return", "drain"]
    """slow: its speed is multiplied by `factor` from its next iteration on; die: all it holds is
    lost; return: it is back, empty after a death; drain: it gets no new requests."""
    factor: SpeedFactor = 1.0
    """Multiple of the configured speed (slow)."""


class Cluster(Settings):
    """The servers behind the router."""

    replicas: tuple[Replica, ...] = Field(default=(Replica(count=4),), min_length=1)
    """The replicas, in order; each entry may stand for several."""

    @model_validator(mode="after")
    def _size(self) -> Self:
        if self.size > MAX_REPLICAS:
            raise ValueError(f"a cluster has at most {MAX_REPLICAS} replicas, got {self.size}")
        return self

    @property
    def size(self) -> int:
        """Number of replicas."""
        return sum(r.count for r in self.replicas)

    def served_by(self, *, order: bool) -> "Cluster":
        """Return the cluster with every scheduling policy settled; ``order``: the router orders."""

        def settled(replica: Replica) -> Replica:
            if replica.scheduling_policy != "auto":
                return replica
            name = "priority" if order and replica.scheduler == "vllm_v1" else "fcfs"
            return replica.model_copy(update={"scheduling_policy": name})

        return self.model_copy(update={"replicas": tuple(map(settled, self.replicas))})

    def expanded(self) -> tuple[Replica, ...]:
        """One entry per replica, each with count 1."""
        return tuple(
            r.model_copy(update={"count": 1}) for r in self.replicas for _ in range(r.count)
        )


PredictorName = Literal["mean", "exact", "bucket", "noisy"]
PrefixLearns = Literal["sent", "first_token", "events"]


class RouterSettings(Settings):
    """What the router knows and how old it is."""

    staleness_s: float = Field(default=0.5, ge=0, le=1e6, allow_inf_nan=False)
    """Seconds between two metrics snapshots of a replica; 0: always fresh."""
    predictor: PredictorName = "mean"
    """Predicted output length: mean of finished outputs, exact, bucket (upper power of two), or
    noisy (exact times lognormal noise)."""
    predictor_sigma: float = Field(default=0.5, ge=0, le=5, allow_inf_nan=False)
    """Sigma of the noisy predictor."""
    prior_output_tokens: Positive = 256.0
    """Predicted output before any request has finished."""
    index_entries: int = Field(default=4096, ge=16, le=2**20)
    """Prefixes the router remembers per replica."""
    prefix_learns: PrefixLearns = "sent"
    """When the router's prefix index learns that a replica has a prompt: sent, first_token, or
    events (the server's KV events: at the first token and the end, events_lag_s later)."""
    events_lag_s: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Seconds until a KV event has reached the router, for prefix_learns = events."""

    @field_validator("staleness_s")
    @classmethod
    def _fresh_or_not(cls, value: float) -> float:
        if 0 < value < MIN_STALENESS_S:
            raise ValueError(f"must be 0 (always fresh) or at least {MIN_STALENESS_S:g}")
        return value


ArrivalsName = Literal[
    "native", "poisson", "gamma", "mmpp", "diurnal", "onoff", "trace", "resampled"
]


class Workload(Settings):
    """Which traffic, how much of it and how fast."""

    name: str = "chat"
    """Built-in workload (see `tailrace workload list`), or a file of requests."""
    requests: int = Field(default=10_000, ge=1, le=50_000_000)
    """How many requests."""
    rate: Rate | None = None
    """Requests per second; takes precedence over load."""
    load: float | None = Field(default=0.8, gt=0, le=100, allow_inf_nan=False)
    """Fraction of the cluster's measured capacity."""
    arrivals: ArrivalsName = "native"
    """Arrival process instead of the workload's own; trace: a file's times as recorded; resampled:
    conversations of a file, drawn anew for every seed."""
    arrival_cv: float = Field(default=2.0, ge=0.01, le=1000, allow_inf_nan=False)
    """Coefficient of variation of gaps (gamma arrivals, and inside mmpp states)."""
    time_scale: float = Field(default=1.0, ge=1e-6, le=1e6, allow_inf_nan=False)
    """Stretch of a trace's arrival times: 0.5 plays it twice as fast."""
    prompt_scale: float = Field(default=1.0, ge=1e-3, le=1e3, allow_inf_nan=False)
    """Multiple of all prompt lengths; shared prefixes stay shared."""
    think_scale: float = Field(default=1.0, ge=1e-3, le=1e3, allow_inf_nan=False)
    """Multiple of the pauses between the requests of a session."""
    session_ids: bool = True
    """Whether requests say which session they belong to; they follow each other either way."""
    ttft_slo_s: Positive = 1.0
    """Target for the time to first token."""
    tpot_slo_s: Positive = 0.05
    """Target for the time per output token."""


class Engine(Settings):
    """How the simulation is computed."""

    engine: Literal["auto", "compiled", "reference"] = "auto"
    """auto takes the compiled engine where it covers the cluster, else the reference engine."""
    exact: bool = False
    """Iteration by iteration in Vidur's order of arithmetic, without fast-forward."""
    vidur_compat: bool = False
    """Reproduce Vidur's known defects instead of the right behaviour."""


class Scenario(Settings):
    """A named experiment: cluster, traffic, router and events."""

    name: str = "custom"
    """Name of the scenario."""
    description: str = ""
    """What it is meant to show."""
    cluster: Cluster = Cluster()
    workload: Workload = Workload()
    router: RouterSettings = RouterSettings()
    engine: Engine = Engine()
    events: tuple[Event, ...] = ()
    """Failures, slow-downs and drains during the run."""
    capacity_rps: Positive | None = None
    """Measured capacity in requests/s (`tailrace capacity --saturation`); measured when absent."""

    def with_workload(self, **changes: Any) -> "Scenario":
        """Return the scenario with other settings of its workload, taken as they are."""
        return self.model_copy(update={"workload": self.workload.model_copy(update=changes)})

    @model_validator(mode="after")
    def _events_name_replicas(self) -> Self:
        for event in self.events:
            if event.replica >= self.cluster.size:
                raise ValueError(
                    f"an event names replica {event.replica}, but the cluster has only "
                    f"{self.cluster.size}, counted from 0"
                )
        return self


class VidurSettings(Settings):
    """A cluster and its traffic in the words of real Vidur; see docs/vidur.md."""

    arguments: tuple[str, ...] = ()
    """Vidur's own command line, split into words; empty: a scenario's cluster and traffic."""
    imports: tuple[str, ...] = ()
    """Modules to import first, such as one that registers an execution-time predictor."""


def explain(error: ValidationError, model: type[BaseModel]) -> TailraceError:
    """Turn a validation error into one sentence that names the setting and what to do."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_name("setting", where, _known_keys(model, first["loc"]))
    given = "" if isinstance(first.get("input"), dict | list) else f", got {first.get('input')!r}"
    message = first["msg"].removeprefix("Value error, ")
    return TailraceError(f"{where}: {message}{given}" if where else f"{message}{given}")


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Dotted names of the fields that could stand at a location."""
    fields: type[BaseModel] | None = model
    for part in loc[:-1]:
        if isinstance(part, str):
            fields = fields and _inner_model(fields, part)
    if fields is None:
        return []
    return [".".join([*map(str, loc[:-1]), name]) for name in fields.model_fields]


def _inner_model(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The model that a field holds one or several of, if it does."""
    if field not in model.model_fields:
        return None
    annotation: Any = model.model_fields[field].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def _current_name(model: type[BaseModel], name: str, given: Mapping[str, Any]) -> str:
    """Return a setting's name, for a former one the name it has now; warns of a former one.

    Raises ValueError if both are ``given``.
    """
    renamed: Mapping[str, str] = getattr(model, "RENAMED", {})
    now = renamed.get(name)
    if now is None:
        return name
    if now in given:
        raise ValueError(f"{name} is now called {now}: give only that one")
    # Python shows a warning once per text and line, so all of them come from this line.
    text = f"setting {name} is now called {now}; the old name still works"
    warnings.warn(text, RenamedSettingWarning, stacklevel=1)
    return now


def with_current_names(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data for a model with current names for former ones, at any depth.

    To be done before data is merged over other data, which may use the other name.
    """

    def renamed(inner: type[BaseModel] | None, value: Any) -> Any:
        if inner is None:
            return value
        if isinstance(value, list | tuple):
            return [renamed(inner, part) for part in value]
        return with_current_names(inner, value) if isinstance(value, Mapping) else value

    found = {}
    for name, value in data.items():
        try:
            now = _current_name(model, name, data)
        except ValueError as error:
            raise TailraceError(str(error)) from None
        found[now] = renamed(_inner_model(model, now), value)
    return found


def current_key(model: type[BaseModel], key: str) -> str:
    """Return a setting's dotted path with current names for former ones."""
    path: list[str] = []
    inner: type[BaseModel] | None = model
    for part in key.split("."):
        if inner is None or part.isdecimal():
            path.append(part)
        else:
            path.append(_current_name(inner, part, {}))
            inner = _inner_model(inner, path[-1])
    return ".".join(path)


def is_setting(model: type[BaseModel], key: str) -> bool:
    """Return whether a dotted path names a setting, or a part of one that is no model."""
    inner: type[BaseModel] | None = model
    for part in key.split("."):
        if inner is None:
            return True
        if part.isdecimal():
            continue
        if part not in inner.model_fields:
            return False
        inner = _inner_model(inner, part)
    return True


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or raise an error that names the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TailraceError(f"{path} is not valid TOML: {error}") from None


def parse(model: type[M], data: dict[str, Any]) -> M:
    """Validate plain data into a model, with errors a user can act on."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise explain(error, model) from None


def assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one value by its dotted path; validation later tells whether there is such a setting."""
    *path, last = key.split(".")
    target: Any = data
    for part in path:
        if isinstance(target, list):
            target = target[_index(target, part, key)]
        else:
            if not isinstance(target.get(part), dict | list):
                target[part] = {}
            target = target[part]
    if isinstance(target, list):
        target[_index(target, last, key)] = value
    else:
        target[last] = value


def _index(target: list[Any], part: str, key: str) -> int:
    if part.isdecimal() and int(part) < len(target):
        return int(part)
    raise TailraceError(f"--set {key}: '{part}' must be a number below {len(target)}")
