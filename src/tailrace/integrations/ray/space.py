"""What a sweep varies: settings, each with the values it may take, and the trials drawn from them.

    branching.learning_rate=log(1e-4,1e-2)   between two numbers, evenly in the logarithm
    branching.kl_limit=uniform(0.01,0.05)    between two numbers, evenly
    branching.epochs=int(4,16)               a whole number, both ends included
    branching.replay_updates=choice(6,12,20) one of some values
    updates=20                               always the same

A trial's values follow from the sweep's seed and the trial's number alone.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.errors import TailraceError
from tailrace.seeds import generator

_CALL = re.compile(r"\s*(log|uniform|int|choice)\((.*)\)\s*", re.DOTALL)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Varied:
    """The values a setting may take."""

    kind: str  #: log, uniform, int or choice
    values: tuple[Any, ...]  #: the ends of the range, or the choices

    def draw(self, rng: np.random.Generator) -> Any:
        """Return one of them at random."""
        if self.kind == "choice":
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.values
        if self.kind == "int":
            return int(rng.integers(low, high + 1))
        if self.kind == "log":
            drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            drawn = rng.uniform(low, high)
        return min(max(_rounded(drawn), low), high)


def _rounded(value: float) -> float:
    """Four digits: more only look as if they mattered."""
    return float(f"{value:.4g}")


def read(text: str) -> tuple[str, Varied] | None:
    """Read KEY=log(a,b) and the like; None: the value is a plain one."""
    key, _, value = text.partition("=")
    found = _CALL.fullmatch(value)
    if found is None:
        return None
    kind, inside = found.groups()
    key = key.strip()
    if not all(_BARE.fullmatch(part) and not part.isdecimal() for part in key.split(".")):
        raise TailraceError(f"--set {text}: only settings that have a name can be varied")
    try:
        values = tuple(tomllib.loads(f"values = [{inside}]")["values"])
    except tomllib.TOMLDecodeError:
        raise TailraceError(
            f"--set {text}: cannot read what is in the brackets; words need quotation marks"
        ) from None
    _check(text, kind, values)
    return key, Varied(kind, values)


def _check(text: str, kind: str, values: Sequence[Any]) -> None:
    if kind == "choice":
        if not values:
            raise TailraceError(f"--set {text}: there is nothing to choose from")
        return
    wanted = (int,) if kind == "int" else (int, float)
    if len(values) != 2 or not all(type(v) in wanted and math.isfinite(v) for v in values):
        what = "two whole numbers" if kind == "int" else "two numbers"
        raise TailraceError(f"--set {text}: {kind} needs {what}, the lowest and the highest")
    if values[0] > values[1] or (kind == "log" and values[0] <= 0):
        raise TailraceError(f"--set {text}: the numbers must rise, and be above 0 for log")


def draw(space: Mapping[str, Varied], samples: int, seed: int) -> list[dict[str, Any]]:
    """Return the values of ``samples`` trials; more of them leave the first ones as they are."""
    return [
        {
            key: varied.draw(generator(seed, f"sweep-{number}-{key}"))
            for key, varied in space.items()
        }
        for number in range(samples)
    ]


def toml(settings: Mapping[str, Any]) -> str:
    """Return settings as the text of a TOML file, one per line; TOML has no None: left out.

    tomli-w would save a dozen lines here and nowhere else, since the other TOML files that we write
    have comments.
    """
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in _leaves(settings, ""))


def _leaves(settings: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = before + (name if _BARE.fullmatch(name) else _toml_value(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        elif value is not None:
            yield key, value


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        inside = (f"{_toml_value(name)} = {_toml_value(v)}" for name, v in value.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, float):
        return repr(value)  # inf and nan are not JSON
    # JSON's strings, integers and booleans are TOML too, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
