import pytest

from tailrace.cli.options import SEED
from tailrace.errors import TailraceError
from tailrace.seeds import MAX_SEED, generator


def test_seeds_have_limits():
    assert SEED.max == MAX_SEED
    assert generator(MAX_SEED).random() != generator(0).random()
    for seed, message in ((-1, "must not be negative"), (MAX_SEED + 1, "must be at most")):
        with pytest.raises(TailraceError, match=message):
            generator(seed)
