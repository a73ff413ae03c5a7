"""Fixtures that many tests share."""

import os

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
