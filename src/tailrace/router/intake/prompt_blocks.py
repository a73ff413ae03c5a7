"""What a prompt consists of, for the prefix index: a chain of hashes over blocks of its bytes.

The key of a block is the hash of its bytes, seeded with the key of the block before: equal keys
mean equal text from the first byte on. Nothing but hashes and lengths is kept. Content is counted
in units of four bytes, about a token of English text; a token id is one unit exactly.

Blocks of 256 bytes (64 tokens) all along: hashing 128 KB takes a few microseconds (hashing.py), and
blocks that grow with the position would save nothing at the price of a share of every long prompt.
"""

from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.router.intake.hashing import chain
from tailrace.view.records import PREFIX_HASH_TOKENS

UNIT_BYTES = 4
BLOCK_BYTES = 256
BLOCK_UNITS = BLOCK_BYTES // UNIT_BYTES
#: Bytes of a prompt that are divided into blocks; what follows is one run, which is not shared.
#: Entering the 131 072 blocks of 32 MB into the index took 50 ms, in which no client is served.
MAX_BLOCK_BYTES = 4 * 2**20
_HASHED_BLOCKS = PREFIX_HASH_TOKENS // BLOCK_UNITS

_hash = xxhash.xxh3_64_intdigest
_empty, _frombuffer, _tuple = np.empty, np.frombuffer, tuple.__new__
_U1, _I4, _U8 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.uint64)


class PromptBlocks(NamedTuple):
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


def text_blocks(data: bytes, root: int, answer: tuple[int, int] | None = None) -> PromptBlocks:
    """Return the runs of a prompt's bytes; ``root`` stands for the model and the salt.

    ``answer``: the bytes of the latest earlier answer in it, so everything before was a prompt.
    """
    return array_blocks(_frombuffer(data, _U1), root, answer) if data else private_block(root, 1)


def array_blocks(
    data: NDArray[np.uint8], root: int, answer: tuple[int, int] | None = None
) -> PromptBlocks:
    """The same of an array [n > 0]; nothing of it is kept."""
    rest = 0
    if data.size > MAX_BLOCK_BYTES:
        # A hash of the rest makes its run, and the key of the whole prompt, this prompt's own.
        mark = _hash(data[MAX_BLOCK_BYTES:].data).to_bytes(8, "little")
        rest = -(-(data.size - MAX_BLOCK_BYTES) // UNIT_BYTES)
        data = np.concatenate((data[:MAX_BLOCK_BYTES], _frombuffer(mark, _U1)))
        if answer is not None and answer[0] > MAX_BLOCK_BYTES:
            answer = None
    size = data.size
    count = -(-size // BLOCK_BYTES)
    keys = _empty(count + 1, _U8)
    units = _empty(count + 1, _I4)
    keys[count] = root
    start, end = answer if answer is not None else (0, 0)
    branch_at = chain(data, BLOCK_BYTES, UNIT_BYTES, start, end, keys, units)
    total = -(-size // UNIT_BYTES)
    if rest:
        units[count - 1] = rest
        total = MAX_BLOCK_BYTES // UNIT_BYTES + rest
    item = keys.item
    end_key = item(count - 1)
    prefix_hash = end_key if count <= _HASHED_BLOCKS else item(_HASHED_BLOCKS - 1)
    # As PromptBlocks(...) in the order of its fields, in half the time.
    return _tuple(
        PromptBlocks,
        (
            keys, units, total, branch_at, prefix_hash, end_key, item(count),
            size // BLOCK_BYTES,
        ),
    )  # fmt: skip


def token_blocks(ids: list[int], root: int) -> PromptBlocks:
    """Return the runs of a prompt given as token ids."""
    return text_blocks(np.array(ids, np.int32).tobytes(), root)


def private_block(number: int, tokens: int) -> PromptBlocks:
    """Return the one run of a prompt of unknown content, which shares nothing with any other."""
    key = _hash(number.to_bytes(8, "little"), 0x70726976617465FF)
    units = np.array([max(1, tokens), 0], np.int32)
    return PromptBlocks(np.array([key, 0], np.uint64), units, int(units[0]), -1, key, key, 0, 0)


def root_of(model: str, salt: str, seed: int) -> int:
    """Return where the chain of a prompt begins; ``seed`` is this installation's."""
    return _hash(f"{model}\0{salt}".encode(errors="surrogatepass"), seed)
