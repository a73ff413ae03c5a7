"""JSON that any parser reads: what is not a finite number becomes null."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel


def plain(value: Any) -> Any:
    """Turn results and settings into dicts, lists, strings and finite numbers."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="python"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """Return a value as indented JSON; keys keep their order: equal results, equal bytes."""
    return json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
