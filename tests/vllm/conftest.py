"""Two real vLLM servers with a tiny random model, and the router in front of them.

Left out unless asked for: `make test-vllm`. The servers take a minute to start and 1.5 GB each.
"""

import subprocess

import pytest

from .client import Tap
from .processes import PYTHON, Router, vllm_environment, vllm_server

HERE = __file__.rpartition("/")[0]


@pytest.fixture(scope="session")
def vllm_python():
    """The Python that has vLLM."""
    if not PYTHON.exists():
        pytest.fail(f"there is no {PYTHON}: run `make test-vllm`, which installs vLLM there")
    return str(PYTHON)


@pytest.fixture(scope="session")
def model(vllm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    subprocess.run(
        [vllm_python, f"{HERE}/tiny_model.py", str(folder)],
        check=True, env=vllm_environment(), capture_output=True, timeout=300,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def servers(model, tmp_path_factory):
    """Two servers that answer."""
    folder = tmp_path_factory.mktemp("servers")
    pair = [vllm_server(name, model, folder / f"{name}.log") for name in ("left", "right")]
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_healthy()
        yield pair
    finally:
        for server in pair:
            server.kill()


@pytest.fixture(scope="session")
def start_router(servers, tmp_path_factory):
    """Returns a started router, by default in front of both servers: start_router({name: url})."""
    started = []

    def start(backends=None, policy="tailrace"):
        if backends is None:
            backends = {server.name: server.url for server in servers}
        router = Router(backends, tmp_path_factory.mktemp("router"), policy)
        started.append(router)
        router.start()
        router.wait_until_healthy()
        return router

    try:
        yield start
    finally:
        for router in started:
            router.kill()
    # Whatever the clients saw, the router must not have stumbled.
    assert [line for router in started for line in router.errors()] == []


@pytest.fixture(scope="session")
def router(start_router):
    """The router with its default policy in front of both servers; not to be stopped."""
    return start_router()


@pytest.fixture
def tap(servers):
    """Between the router and the first server, to see what the server sent."""
    tap = Tap(servers[0].address)
    yield tap
    tap.close()
