"""Tests with the real Ray: `make test-ray`. Those in WITHOUT need none and always run."""

import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WITHOUT = ("conftest.py", "test_absent.py", "test_serve_state.py", "test_space.py", "test_trial.py")


def pytest_configure(config):
    if "ray" in config.option.markexpr:
        # The helpers of this folder cannot be imported by its name: that is the real package's.
        sys.path.append(str(HERE))
        # A busy machine must not make a replica look as if it were gone.
        os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "60"
        with warnings.catch_warnings():  # which are errors here, and Ray gives some on import
            warnings.simplefilter("ignore")
            import ray.serve
            import ray.tune  # noqa: F401


def pytest_ignore_collect(collection_path, config):
    """Do not even import the tests with the real package unless they are asked for."""
    if collection_path.suffix != ".py" or collection_path.name in WITHOUT:
        return None
    return True if "ray" not in config.option.markexpr else None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Ray with two CPUs on this machine, for all tests that share it."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    if {line.split(":")[0].strip() for line in lines if ":" in line} != {"lo"}:
        pytest.exit("Ray listens to the network: `make test-ray` gives it one of its own")
    import ray

    # Workers import the helpers by name.
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for attempt in range(3):  # on a busy machine its parts may wait for each other too long
        try:
            ray.init(
                address="local",
                num_cpus=2,
                object_store_memory=200 * 2**20,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                logging_level="error",
                log_to_driver=False,
            )
            break
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise
    yield ray
    ray.shutdown()
