"""Fixtures that many tests share."""

import contextlib
import os

import pytest

from tailrace import parallel

# An example's first run may compile code: tests do not time things. Suites with an environment of
# their own do without Hypothesis.
with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("tailrace", deadline=None)
    hypothesis.settings.load_profile("tailrace")

# Tests must not depend on the terminal they run in.
os.environ["COLUMNS"] = "120"
os.environ.pop("FORCE_COLOR", None)
os.environ["NO_COLOR"] = "1"

#: Suites that need more than the ordinary tests do, each with a make target of its own.
OPT_IN = {
    "browser": "needs Chromium and playwright: make test-browser",
    "vllm": "needs real vLLM servers: make test-vllm",
    "vidur": "needs the vidur package: make test-vidur",
    "ray": "needs Ray in a network namespace of its own: make test-ray",
    "loop": "takes minutes of load: make test-loop",
    "docs": "runs the commands of the pages: make test-docs",
    "envoy": "needs a real Envoy: make test-envoy",
    "helm": "needs helm and schemas of Kubernetes: make test-helm",
    "store": "needs redis-server or valkey-server: make test-store",
    "deploy": "runs the steps of the container file: make test-deploy",
}


def pytest_configure(config):
    for name, text in OPT_IN.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    """Leave these out unless they are asked for."""
    wanted = [name for name in OPT_IN if name in config.option.markexpr]
    left_out = [
        item
        for item in items
        if any(mark.name in OPT_IN and mark.name not in wanted for mark in item.iter_markers())
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def _one_process():
    """Work in this process unless a test asks for several: each takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def short_sketches():
    """Fit sketches of policies to two worlds instead of 24, which took 80 % of a tiny run.

    How good a sketch is, is tested in tests/learn/imitate/test_sketch.py.
    """
    schedule = pytest.importorskip("tailrace.learn.world_schedule")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SKETCH_WORLDS", 2)
        yield
