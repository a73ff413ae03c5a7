"""Command-line options made from the settings, so that no setting is described twice.

Every plain field of Workload, Replica, RouterSettings and Engine becomes an option: its name, type,
choices, default and help come from the field. Options win over ``--config``, which wins over
``--scenario``.
"""

import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import reduce, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tailrace import scenario as scenarios
from tailrace.cli import names
from tailrace.cli.console import remember
from tailrace.config import (
    Cluster,
    Engine,
    Replica,
    RouterSettings,
    Scenario,
    VidurSettings,
    Workload,
    assign,
    load_toml,
    parse,
)
from tailrace.errors import TailraceError
from tailrace.files import check_target

F = TypeVar("F", bound=Callable[..., Any])

TRAFFIC = "Traffic"
#: Title on the help page, key in the scenario, settings.
SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (TRAFFIC, "workload", Workload),
    ("Replicas (of every kind; --set cluster.replicas.0.speed=2 for one)", "replica", Replica),
    ("Router", "router", RouterSettings),
    ("Engine", "engine", Engine),
)
INSIDE = "Inside a replica"
VIDUR = "For comparison with Vidur"
#: Settings that stand under a heading of their own, after the others.
_ELSEWHERE = {
    **dict.fromkeys(
        ("scheduler", "num_blocks", "block_size", "batch_cap", "chunk_size", "prefix_caching"),
        INSIDE,
    ),
    **dict.fromkeys(("watermark", "max_batch_tokens", "preallocate_tokens", "num_stages"), VIDUR),
    **dict.fromkeys(("max_request_tokens", "max_waiting_iters", "exact", "vidur_compat"), VIDUR),
}
GENERAL = "General"
OUTPUT = "Output"
#: Settings of a scenario that `--help` shows; `--help-all` shows the others too.
_BASIC = frozenset(
    {"name", "requests", "rate", "load", "ttft_slo_s", "tpot_slo_s", "count", "device", "speed"}
)
_HELP_ALL = "help_all"


#: What a seed may be, everywhere; the largest is tailrace.seeds.MAX_SEED.
SEED = click.IntRange(0, 2**63 - 1)

#: Fields whose option is not simply called like the field.
_NAMES = {("workload", "name"): "workload", ("replica", "count"): "replicas"}
_COMPLETIONS = {("workload", "name"): names.workloads, ("replica", "device"): names.devices}
_SCALARS: "dict[Any, click.ParamType[Any]]" = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    bool: click.BOOL,
}


class SectionOption(click.Option):
    """An option that knows under which heading of the help page it stands.

    An ``advanced`` one stands there only with ``--help-all``.
    """

    def __init__(
        self, *args: Any, section: str = GENERAL, advanced: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.advanced = advanced

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and help: INTEGER, not INTEGER RANGE, and no range of a seed."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        names, text = record
        seeds = f"{SEED.min}<=x<={SEED.max}]"
        text = text.replace(f"; {seeds}", "]").replace(f"  [{seeds}", "")
        return names.replace(" RANGE", ""), text


class SectionedCommand(click.Command):
    """A command whose help page groups the options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options, with ``--help-all`` if there is more to show."""
        params = super().get_params(ctx)
        if any(getattr(param, "advanced", False) for param in params):
            params = [*params, self._help_all]
        return params

    @property
    def _help_all(self) -> click.Option:
        return SectionOption(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
            help="Show all options, also those for comparison with Vidur.",
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section, those for experts last."""
        everything = bool(ctx.meta.get(_HELP_ALL))
        basic: dict[str, list[tuple[str, str]]] = {GENERAL: []}
        advanced: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not record[1]:
                continue
            section = getattr(param, "section", GENERAL)
            if not getattr(param, "advanced", False):
                basic.setdefault(section, []).append(record)
            elif everything:
                title = f"{section}, more" if section == TRAFFIC else section
                advanced.setdefault(title, []).append(record)
        if OUTPUT in basic:
            basic[OUTPUT] = basic.pop(OUTPUT)
        for title in (INSIDE, VIDUR):
            for sections in (basic, advanced):
                if title in sections:
                    sections[title] = sections.pop(title)
        for title, records in (*basic.items(), *advanced.items()):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _show_all(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    """Print the whole help page and end."""
    del param
    if given and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def command(name: str) -> Callable[[Callable[..., Any]], SectionedCommand]:
    """Declare a command whose help page groups the options."""
    return click.command(name, cls=SectionedCommand)


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Declare an option, with its ``section`` of the help page; a default is shown there."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*names, cls=SectionOption, **attributes)


class FileType(click.Path):
    """A file as Path. One that will be written is refused at once if it could not be."""

    def __init__(self, *written_suffixes: str) -> None:
        """Accept any file, or one to be written whose name has one of these endings."""
        super().__init__(path_type=Path)
        self.name = "file"
        self._suffixes = written_suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        path = Path(value)
        if self._suffixes:
            check_target(path, self._suffixes)
        return super().convert(path, param, ctx)


FILE = FileType()
PLOT = FileType(".png", ".svg", ".pdf")


def all_of(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return the decorator that applies several, the first on top."""
    return lambda function: reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


def section_options(
    title: str,
    key: str,
    model: type[BaseModel],
    but: tuple[str, ...] = (),
    basic: frozenset[str] | None = None,
) -> Callable[[F], F]:
    """Add one option per setting of a model, named ``key__setting`` among the parameters.

    ``basic``: those that ``--help`` shows; default: all but those for comparison with Vidur.
    """
    return all_of(
        *(
            _setting_option(title, key, field, info, kind, basic)
            for field, info in model.model_fields.items()
            if field not in but and (kind := _scalar(info.annotation)) is not None
        )
    )


def _setting_option(
    title: str,
    key: str,
    field: str,
    info: FieldInfo,
    kind: "click.ParamType[Any]",
    basic: frozenset[str] | None,
) -> Callable[[F], F]:
    name = _NAMES.get((key, field), field).replace("_", "-")
    flag = kind is click.BOOL
    help_text = " ".join((info.description or "").split())
    default = getattr(Cluster().replicas[0], field) if key == "replica" else info.default
    if default is not None:
        shown = ("on" if default else "off") if flag else default
        help_text += f" [default: {shown}]"
    return option(
        f"--{name}/--no-{name}" if flag else f"--{name}",
        f"{key}__{field}",
        type=kind,
        default=None,
        help=help_text,
        section=_ELSEWHERE.get(field, title) if title != GENERAL else title,
        advanced=_ELSEWHERE.get(field) == VIDUR if basic is None else field not in basic,
        shell_complete=_COMPLETIONS.get((key, field)),
    )


def _scalar(annotation: Any) -> "click.ParamType[Any] | None":
    """Return the option type of an annotation, or None for what only a file can express."""
    if get_origin(annotation) is Annotated:
        return _scalar(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        inner = [a for a in get_args(annotation) if a is not NoneType]
        return _scalar(inner[0]) if len(inner) == 1 else None
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return _SCALARS.get(annotation)


#: ``--scenario``, ``--config``, ``--set`` and one option per setting.
scenario_options = all_of(
    option(
        "--scenario", metavar="NAME", shell_complete=names.scenarios,
        help="Start from a shipped scenario (see `tailrace scenarios`).",
    ),
    option("--config", type=FILE, help="Settings from a TOML file, put over the scenario's."),
    option(
        "--set", "assignments", metavar="KEY=VALUE", multiple=True,
        help="Any setting by its path, e.g. cluster.replicas.1.speed=0.5; may be repeated.",
    ),
    *(section_options(*section, basic=_BASIC) for section in SECTIONS),
)  # fmt: skip
#: One option per setting of a workload, but its name and load.
workload_options = section_options(GENERAL, "workload", Workload, but=("name", "load"))
jobs = option(
    "-j", "--jobs", type=click.IntRange(1, 1024), metavar="N",
    help="Processes that work side by side; no result depends on it. [default: one per core]",
)  # fmt: skip
_FLAG: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": remember}
json = option(
    "--json", help="Write JSON to standard output, and nothing else there.", section=OUTPUT, **_FLAG
)
quiet = option("-q", "--quiet", help="Show no progress.", section=OUTPUT, **_FLAG)
warmup = option(
    "--warmup", type=click.FloatRange(0, 1, max_open=True), default=0.0, section=OUTPUT,
    metavar="SHARE", help="Share of the first requests left out of the figures.",
)  # fmt: skip

#: Vidur's own settings instead of a scenario's.
vidur = all_of(
    option(
        "--vidur-args", metavar="ARGS",
        help="Vidur's own command line in one word: its cluster, requests and execution-time "
        "predictor are played instead of a scenario's. Its global scheduler is Tailrace's.",
    ),
    option(
        "--vidur-import", "vidur_imports", metavar="MODULE", multiple=True,
        help="Python module to import first, e.g. one that registers a predictor with Vidur; may "
        "be repeated.",
    ),
)  # fmt: skip


def workers(function: F) -> F:
    """Add ``--workers`` to a command with ``--jobs``: where its worker pools run."""

    @wraps(function)
    def there(*args: Any, workers: str, **params: Any) -> Any:
        from tailrace.integrations.ray.pool import executor_factory
        from tailrace.parallel import running_on

        with running_on(executor_factory(workers, params["jobs"])):
            return function(*args, **params)

    return option(
        "--workers", default="local", show_default=False, metavar="WHERE",
        help="Where they work: local, ray (Ray, started on this machine) or ray:ADDRESS (a Ray "
        "cluster; then one process per CPU of it). [default: local]",
    )(there)  # type: ignore[return-value]  # fmt: skip


def given_besides(*allowed: str) -> bool:
    """Whether any parameter but these was given on the command line."""
    ctx = click.get_current_context()
    others = ctx.params.keys() - set(allowed)
    return any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in others)


def take_vidur(arguments: str | None, imports: tuple[str, ...]) -> VidurSettings:
    """Return what :data:`vidur` was given."""
    if arguments is None:
        if imports:
            raise TailraceError("--vidur-import goes with --vidur-args")
        return VidurSettings()
    try:
        words = tuple(shlex.split(arguments))
    except ValueError as error:
        raise TailraceError(f"cannot read --vidur-args: {error}") from None
    if not words:
        raise TailraceError("--vidur-args is empty; it takes Vidur's own command line")
    return VidurSettings(arguments=words, imports=imports)


def take_scenario(params: dict[str, Any]) -> Scenario:
    """Take what :func:`scenario_options`, or some of it, added out of a command's parameters."""
    layers = [scenarios.read(name) for name in [params.pop("scenario", None)] if name]
    config = params.pop("config", None)
    if config is not None:
        layers.append(load_toml(config))
    flags = take_flags(params)
    assignments = params.pop("assignments", ())
    data: dict[str, Any] = {"cluster": _default_cluster()}
    measured: Scenario | None = None
    for layer in layers:
        data = _overlay(data, layer)
        if "capacity_rps" in layer:
            measured = scenarios.build(data)
    _apply_flags(data, flags)
    for text in assignments:
        key, value = assignment(text)
        assign(data, key, value)
        if key == "capacity_rps":
            measured = None
    result = scenarios.build(data)
    if ("workload", "time_scale") in flags:
        _check_replayed(result.workload)
    if measured is not None and not scenarios.same_capacity(measured, result):
        return result.model_copy(update={"capacity_rps": None})
    return result


def take_workload(name: str, params: dict[str, Any]) -> Workload:
    """Take what :func:`workload_options` added out of a command's parameters."""
    given = {field: value for (_, field), value in take_flags(params).items()}
    workload = parse(Workload, {"name": name, "load": None, **given})
    if "time_scale" in given:
        _check_replayed(workload)
    return workload


def _default_cluster() -> dict[str, Any]:
    return {"replicas": [r.model_dump(exclude_unset=True) for r in Cluster().replicas]}


def _overlay(data: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Put a file over what is there; a load in it overrules a rate from below."""
    workload = layer.get("workload", {})
    if isinstance(workload, Mapping) and "load" in workload and "rate" not in workload:
        data = scenarios.merged(data, {"workload": {"rate": None}})
    return scenarios.merged(data, layer)


def take_flags(params: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Take the generated options out of the parameters; keep those that were given."""
    found = {tuple(name.split("__", 1)): params.pop(name) for name in list(params) if "__" in name}
    return {(key, field): value for (key, field), value in found.items() if value is not None}


def _check_replayed(workload: Workload) -> None:
    """Refuse --time-scale where it would change nothing."""
    if not scenarios.is_request_file(workload.name):
        raise TailraceError(
            f"--time-scale stretches the recorded arrivals of a file of requests, and "
            f"'{workload.name}' is a built-in workload; set its pace with --rate"
        )
    if workload.arrivals not in ("native", "trace"):
        raise TailraceError(
            f"--time-scale stretches recorded arrivals, and --arrivals {workload.arrivals} "
            "replaces them; leave one of the two out"
        )
    load = None if workload.arrivals == "trace" else workload.load
    if workload.rate is not None or load is not None:
        what = "rate" if workload.rate is not None else "load"
        raise TailraceError(
            f"--time-scale and a {what} both set the pace of recorded arrivals; give one of the two"
        )


def _apply_flags(data: dict[str, Any], flags: Mapping[tuple[str, str], Any]) -> None:
    if ("workload", "load") in flags:
        if ("workload", "rate") in flags:
            raise TailraceError("--rate and --load both say how much traffic; give one of the two")
        _section(data, "workload")["rate"] = None
    kinds = _section(data, "cluster").get("replicas", [])
    for (key, field), value in flags.items():
        if key != "replica":
            _section(data, key)[field] = value
            continue
        if field == "count" and len(kinds) != 1:
            raise TailraceError(
                f"--replicas is ambiguous: the cluster has {len(kinds)} kinds of replicas; "
                f"say which, e.g. --set cluster.replicas.0.count={value}"
            )
        if field == "device":
            value = _whole_name(value)
        for kind in kinds:
            kind[field] = value


def _whole_name(device: str) -> str:
    """Return the preset that a device or a model alone stands for, and say which that is."""
    from tailrace.view import devices

    found = devices.get(device).name
    if found != device:
        click.echo(f"note: --device {device} is taken as {found}", err=True)
    return found


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    section: dict[str, Any] = data.setdefault(key, {})
    if not isinstance(section, dict):
        raise TailraceError(f"{key} must be a table of settings, got {section!r}")
    return section


def assignment(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TailraceError(f"--set needs KEY=VALUE, got '{text}'")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


#: Seconds of each unit of a duration.
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration_s(name: str, text: str) -> float:
    """Read the value of an option such as 24h, 90m, 30s or 7d; return it in s."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS_S[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise TailraceError(f"{name} must be a duration such as 24h, 90m or 7d, got '{text}'")
    return seconds
