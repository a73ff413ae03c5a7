import numpy as np
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


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 6 * 10**9 + 1, MAX_SEED])
@pytest.mark.parametrize("stream", ["", "chat/length", "é\0"])
def test_streams_are_those_of_numpy(seed, stream):
    """Published figures depend on these numbers."""
    expected = np.random.default_rng([seed, *stream.encode()]).random(4)
    assert generator(seed, stream).random(4).tolist() == expected.tolist()
