"""Scenarios by name or file: reading them, and storing a measured capacity in a file.

A scenario is a TOML file of the settings in :class:`tailrace.config.Scenario`, or a JSON file, as
``tailrace evaluate`` writes them. The shipped ones stand in ``tailrace/scenarios``.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

from tailrace import config
from tailrace.config import Scenario, load_toml
from tailrace.errors import TailraceError, unknown_name
from tailrace.files import write_text

SHIPPED = Path(__file__).parent / "scenarios"
#: Settings that came after 0.1.0. At their defaults they are no part of a scenario's digest, so
#: that runs begun before can be resumed.
_NEWER = {
    *("assumed_speed", "scheduling_policy", "prefix_learns", "events_lag_s"),
    *("prompt_scale", "think_scale", "session_ids"),
}

_CAPACITY_LINE = re.compile(r"^capacity_rps\s*=.*$", re.MULTILINE)
_FIRST_TABLE = re.compile(r"^\[", re.MULTILINE)


def names() -> list[str]:
    """Return the names of the shipped scenarios, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def find(name_or_file: str | Path) -> Path:
    """Return the file of a scenario, given its name or a path that ends in .toml or .json."""
    text = str(name_or_file)
    if text.endswith((".toml", ".json")):
        return Path(text)
    if text not in names():
        raise unknown_name("scenario", text, names())
    return SHIPPED / f"{text}.toml"


def read(name_or_file: str | Path) -> dict[str, Any]:
    """Return the settings of a scenario as plain data; its name defaults to the file's."""
    path = find(name_or_file)
    data = _load_json(path) if path.suffix == ".json" else load_toml(path)
    data.setdefault("name", path.stem)
    return data


def _load_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TailraceError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise TailraceError(f"{path} must hold an object of settings")
    return data


def load(name_or_file: str | Path) -> Scenario:
    """Return a scenario by name or file."""
    return build(read(name_or_file))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the settings of ``over`` put over it; lists are replaced whole."""
    data = deepcopy(dict(base))
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(data.get(key), Mapping):
            data[key] = merged(data[key], value)
        else:
            data[key] = deepcopy(value)
    return data


def build(data: Mapping[str, Any]) -> Scenario:
    """Validate plain data into a scenario.

    A file of requests for which neither rate nor load is given is replayed at its own pace.
    """
    data = dict(data)
    workload = data.get("workload", {})
    unpaced = isinstance(workload, Mapping) and not {"rate", "load"} & set(workload)
    if unpaced and is_request_file(str(workload.get("name", ""))):
        data["workload"] = {**workload, "load": None}
    return config.parse(Scenario, data)


def is_request_file(name: str) -> bool:
    """Whether a workload is a file of requests rather than a built-in name."""
    return "/" in name or bool(Path(name).suffix)


def same_capacity(a: Scenario, b: Scenario) -> bool:
    """Whether a capacity measured for one scenario holds for the other."""
    return (a.cluster, a.engine, a.workload.name) == (b.cluster, b.engine, b.workload.name)


def write_capacity(path: Path, capacity: float) -> None:
    """Store a measured capacity in a scenario file, leaving every other line as it is."""
    load(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TailraceError(f"cannot read {path}: {error.strerror or error}") from None
    line = f"capacity_rps = {capacity:.6g}"
    first_table = _FIRST_TABLE.search(text)
    split = first_table.start() if first_table else len(text)
    head, tail = text[:split], text[split:]
    if _CAPACITY_LINE.search(head):
        head = _CAPACITY_LINE.sub(line, head)
    else:
        head = f"{head.rstrip()}\n{line}\n" + ("\n" if tail else "")
    write_text(path, head.lstrip("\n") + tail)


def digest(scenario: Scenario) -> str:
    """Return a hash of everything that a scenario says."""

    def unset(part: config.Settings) -> set[str]:
        fields = type(part).model_fields
        return {
            name for name in _NEWER & set(fields) if getattr(part, name) == fields[name].default
        }

    left_out: Any = {
        "cluster": {"replicas": {i: unset(r) for i, r in enumerate(scenario.cluster.replicas)}},
        "workload": unset(scenario.workload),
        "router": unset(scenario.router),
    }
    return sha256(scenario.model_dump_json(exclude=left_out).encode()).hexdigest()
