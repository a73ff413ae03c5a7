"""Tests with the real vidur package: `make test-vidur`. Only test_absent.py runs without it."""

import logging
import sys
import warnings
from pathlib import Path

import pytest

WITHOUT = ("conftest.py", "test_absent.py")


def pytest_configure(config):
    if "vidur" in config.option.markexpr:
        # The helpers of this folder cannot be imported by its name: that is the real package's.
        sys.path.append(str(Path(__file__).parent))


def pytest_ignore_collect(collection_path, config):
    """Do not even import the tests with the real package unless they are asked for."""
    if collection_path.suffix != ".py" or collection_path.name in WITHOUT:
        return None
    return True if "vidur" not in config.option.markexpr else None


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    """Vidur's own dependencies warn when they are imported; warnings are errors here."""
    logging.getLogger("vidur").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vidur.simulator  # noqa: F401
        except ImportError:
            return
