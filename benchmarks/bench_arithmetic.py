"""Hand-written arithmetic against the library's.

    python benchmarks/bench_arithmetic.py [env_step_us | decide_us] > FILE

Each variant replaces one part of the compiled network in a process of its own, with its own compile
cache: ``library_log`` the logarithm of policy/learned/logarithm.py by NumPy's, ``loops`` the
register tiles of policy/learned/tiles.py by plain loops. ``env_step_us`` is a step of 64
environments, per environment; ``decide_us`` a live decision of the learned policy in front of 8
replicas. ``product_us`` is one matrix product by tiles and by BLAS, which cannot replace them in
the network, since Numba wants memory for it. CPU time; variants take turns, ratios are within one.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np

from bench_sim import machine
from tailrace import compiled, scenario
from tailrace.policy.learned import logarithm, tiles

_numba: Any = numba
#: Variants by what they may change.
FIGURES = {"env_step_us": ("own", "library_log"), "decide_us": ("own", "loops")}


@compiled.vectorised
def _library_log(x):  # type: ignore[no-untyped-def]
    return np.log(x)


@compiled.vectorised
def _loops(f, x, x_stride, rows, inputs, w, w_stride, columns, y, y_stride):  # type: ignore[no-untyped-def]
    for i in range(rows):
        target = f[y + i * y_stride : y + i * y_stride + columns]
        for k in range(inputs):
            value = f[x + i * x_stride + k]
            weights = f[w + k * w_stride : w + k * w_stride + columns]
            for o in range(columns):
                target[o] += value * weights[o]


@_numba.njit
def _by_tiles(f, rows, inputs, outputs, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        tiles.multiply(f, 0, inputs, rows, inputs, 8192, outputs, outputs, 24576, outputs)


@_numba.njit
def _by_blas(x, w, product, y, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        np.dot(x, w, product)
        for i in range(y.shape[0]):
            for k in range(y.shape[1]):
                y[i, k] += product[i, k]


def products() -> dict[str, dict[str, float]]:
    """CPU time of adding one product of the network's usual size, by number of replicas, us."""
    found = {}
    f = np.full(32768, 1e-3, np.float32)
    for rows in (4, 8, 12):
        x, w, y = (np.full(shape, 1e-3, np.float32) for shape in ((rows, 64), (64, 64), (rows, 64)))
        ways: dict[str, Callable[[int], None]] = {
            "tiles": partial(_by_tiles, f, rows, 64, 64),
            "blas": partial(_by_blas, x, w, np.empty_like(y), y),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(12):
            for name, way in ways.items():
                begin = time.process_time()
                way(5000 if turn else 1)
                taken[name].append((time.process_time() - begin) / 5000 * 1e6)
        found[str(rows)] = {name: statistics.median(v[1:]) for name, v in taken.items()}
    return found


def _use(variant: str) -> None:
    """Replace a part before anything that uses it is compiled."""
    module: Any = logarithm if variant == "library_log" else tiles
    if variant == "library_log":
        module.log = _library_log
    elif variant != "own":
        module.multiply = _loops


def _work(figure: str, variant: str) -> None:
    """Measure once per line that comes in."""
    _use(variant)
    for line in sys.stdin:
        if figure == "env_step_us":
            import bench_env

            rates = bench_env.vector_rates(scenario.load("uniform-chat-80"), 64, int(line))
            print(1e6 / rates["decisions_per_s"], flush=True)
        else:
            import bench_decide

            print(bench_decide.live("tailrace", 8, int(line))["decide"]["cpu_p50_us"], flush=True)


def measure(figure: str, folder: str) -> dict[str, dict[str, float]]:
    """Let the variants take turns; return the medians of the figure and of its ratio to ours."""
    taken: dict[str, list[float]] = {name: [] for name in FIGURES[figure]}
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, figure, name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"TAILRACE_CACHE_DIR": f"{folder}/{name}"},
        )
        for name in taken
    }  # fmt: skip
    for turn in range(12):
        for name, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("1000\n" if turn else "20\n")  # the first compiles
            worker.stdin.flush()
            taken[name].append(float(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    own = taken["own"][1:]
    return {
        name: {
            "median": statistics.median(values[1:]),
            "ratio": statistics.median(b / a for a, b in zip(own, values[1:], strict=True)),
        }
        for name, values in taken.items()
    }


def main() -> None:
    """Measure and print."""
    if len(sys.argv) > 2:
        _work(*sys.argv[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {f: measure(f, folder) for f in sys.argv[1:] or FIGURES}
    print(json.dumps({"machine": machine(), "product_us": products(), **report}, indent=1))


if __name__ == "__main__":
    main()
