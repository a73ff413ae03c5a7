"""What a prompt consists of, for the prefix index: a chain of hashes over blocks of its bytes.

The key of a block is the hash of its bytes, seeded with the key of the block before: equal keys
mean equal text from the first byte on. Nothing but hashes and lengths is kept. Content is counted
in units of four bytes, about a token of English text; a token id is one unit exactly.

Blocks of 256 bytes (64 tokens) all along: hashing takes 0.13 ms for 128 KB, and blocks that grow
with the position would save time the router has at the price of a share of every long prompt.
"""

from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.policy.view import PREFIX_HASH_TOKENS

UNIT_BYTES = 4
BLOCK_BYTES = 256
BLOCK_UNITS = BLOCK_BYTES // UNIT_BYTES
_HASHED_BLOCKS = PREFIX_HASH_TOKENS // BLOCK_UNITS

_hash = xxhash.xxh3_64_intdigest


class Runs(NamedTuple):
    """The content of one prompt of ``u`` runs.

    The last entry of ``keys`` and ``units`` is no run but the branch: the key under which the
    conversation's previous prompt ended, and how many units that prompt and its answer can be of
    this one, counted from run ``branch_at`` on. ``branch_at`` = -1: there is none.
    """

    keys: NDArray[np.uint64]  #: [u + 1]
    units: NDArray[np.int32]  #: [u + 1]
    total: int  #: units of all runs
    branch_at: int
    prefix_hash: int  #: of the first PREFIX_HASH_TOKENS tokens' worth
    end_key: int  #: of the whole prompt: what its continuation will have as branch key
    branch_key: int  #: 0: none
    whole: int  #: runs that are whole blocks and may be shared; the others are not


def text_runs(data: bytes, root: int, answer: tuple[int, int] | None = None) -> Runs:
    """Return the runs of a prompt's bytes; ``root`` stands for the model and the salt.

    ``answer``: the bytes of the latest earlier answer in it, so everything before was a prompt.
    """
    size = len(data)
    if size == 0:
        return private_runs(root, 1)
    key = root
    keys: list[int] = []
    for at in range(0, size, BLOCK_BYTES):
        key = _hash(data[at : at + BLOCK_BYTES], key)
        keys.append(key)
    count = len(keys)
    branch_at, branch_key, branch_units = -1, 0, 0
    if answer is not None and 0 < answer[0] < size:
        start, end = answer
        branch_at = (start - 1) // BLOCK_BYTES
        before = keys[branch_at - 1] if branch_at else root
        branch_key = _hash(data[branch_at * BLOCK_BYTES : start], before)
        branch_units = _units(min(end, size) - branch_at * BLOCK_BYTES)
    keys.append(branch_key)
    units = np.full(count + 1, BLOCK_UNITS, np.int32)
    units[count - 1] = _units(size - (count - 1) * BLOCK_BYTES)
    units[count] = branch_units
    return Runs(
        np.array(keys, np.uint64),
        units,
        (count - 1) * BLOCK_UNITS + _units(size - (count - 1) * BLOCK_BYTES),
        branch_at,
        keys[min(_HASHED_BLOCKS, count) - 1],
        key,
        branch_key,
        size // BLOCK_BYTES,
    )


def token_runs(ids: list[int], root: int) -> Runs:
    """Return the runs of a prompt given as token ids."""
    return text_runs(np.array(ids, np.int32).tobytes(), root)


def private_runs(number: int, tokens: int) -> Runs:
    """Return the one run of a prompt of unknown content, which shares nothing with any other."""
    key = _hash(number.to_bytes(8, "little"), 0x70726976617465FF)
    units = np.array([max(1, tokens), 0], np.int32)
    return Runs(np.array([key, 0], np.uint64), units, int(units[0]), -1, key, key, 0, 0)


def root_of(model: str, salt: str, seed: int) -> int:
    """Return where the chain of a prompt begins; ``seed`` is this installation's."""
    return _hash(f"{model}\0{salt}".encode(errors="surrogatepass"), seed)


def _units(size: int) -> int:
    return -(-size // UNIT_BYTES)
