"""The compiled hashes: the standard's own test vector, and no equal hashes of unequal bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.router.intake.hashing import keyed
from tailrace.router.intake.prompt_blocks import BLOCK_BYTES, text_blocks


def test_the_keyed_hash_is_siphash_2_4() -> None:
    secret = np.frombuffer(bytes(range(16)), np.uint64)
    data = np.frombuffer(bytes(range(8)), np.uint64)
    out = np.zeros(1, np.uint64)
    keyed(data, secret, out)
    assert int(out[0]) == 0x93F5F5799A932462  # from its reference implementation


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=BLOCK_BYTES), st.data())
def test_one_changed_bit_changes_the_hash(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    one, two = text_blocks(data, 1).end_key, text_blocks(bytes(other), 1).end_key
    assert one != two
    assert text_blocks(data, 2).end_key != one
    assert text_blocks(data + b"\0", 1).end_key != one


def test_hashes_of_alike_blocks_are_spread_evenly() -> None:
    hashes = [
        text_blocks(b"%d" % i + b"a" * fill, 7).end_key for i in range(500) for fill in (0, 40, 250)
    ]
    assert len(set(hashes)) == len(hashes)
    bits = np.unpackbits(np.array(hashes, np.uint64).view(np.uint8).reshape(-1, 8), axis=1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.08
