"""Compiles the rules, for the helper processes of ``simulate`` and ``serve``."""

from typing import Any

import numba
import numpy as np

from tailrace.policy import rules
from tailrace.view.records import COST, REPLICA_VIEW, REQUEST_VIEW, ROUTER, View


def compile_rules() -> None:
    """Compile what scores replicas by a rule."""
    typeof: Any = numba.typeof
    replicas, costs, numbers = np.zeros(2, REPLICA_VIEW), np.zeros(2, COST), np.zeros(2)
    view = View(np.zeros(1, REQUEST_VIEW)[0], replicas, costs, np.zeros(1, ROUTER)[0])
    rules.score.compile((typeof(0), typeof(view), typeof(numbers), typeof(numbers)))
