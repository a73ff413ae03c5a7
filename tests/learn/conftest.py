"""What all tests of training share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _short_sketches(short_sketches):
    """A run of a moment does not spend most of it on the sketch of its policy."""
