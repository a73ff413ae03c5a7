"""Compiles the rules in a helper process, while ``tailrace simulate`` compiles the servers."""

import contextlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from tailrace import compiled
from tailrace.policy import rules
from tailrace.view.records import COST, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View


def helper() -> contextlib.AbstractContextManager[Callable[[], int | None]]:
    """Let a helper process compile the rules (see :func:`tailrace.compiled.helper`)."""
    return compiled.helper(__name__)


def compile_rules() -> None:
    """Compile what scores replicas by a rule, and note it in the cache."""
    typeof: Any = numba.typeof
    replicas, costs, numbers = np.zeros(2, REPLICA_VIEW), np.zeros(2, COST), np.zeros(2)
    view = View(np.zeros(1, REQUEST_VIEW)[0], replicas, costs, np.zeros(1, ROUTER)[0])
    rules.score.compile((typeof(0), typeof(view), typeof(numbers), typeof(numbers)))
    compiled.mark(__spec__.name)


if __name__ == "__main__":
    compile_rules()
