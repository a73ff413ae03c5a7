"""Compiled hashes: the chain over a prompt's blocks, and the keyed hash that is written to disk.

The chain's hash is built like XXH3: products of the two halves of each word, with a secret mixed
in, summed up and scrambled at the end of a block. It need not resist an attacker, who could at
worst spoil the routing of requests he sends himself; its start is this installation's secret
anyway. What goes to disk is SipHash-2-4, which does: without its key nobody can tell from a hash
which content it may be of.
"""

# mypy: disallow-untyped-defs=False

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit

_U = np.uint64
_P1, _P2 = _U(0x9E3779B185EBCA87), _U(0xC2B2AE3D27D4EB4F)
_P3, _P4 = _U(0x165667B19E3779F9), _U(0x85EBCA77C2B2AE63)
_LOW = _U(0xFFFFFFFF)
_0, _8, _27, _29, _32, _37, _64 = _U(0), _U(8), _U(27), _U(29), _U(32), _U(37), _U(64)
WORD_BYTES = 8


def _secret(words: int) -> NDArray[np.uint64]:
    """Fixed words without a pattern (SplitMix64)."""
    state, out = 0x7461696C72616365, []
    for _ in range(words):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return np.array(out, np.uint64)


_SECRET = _secret(32)


@inner
def _mixed(h):
    h ^= h >> _37
    h *= _P3
    return h ^ (h >> _29)


@inner
def _block(data, start, end, seed):
    """Hash of at most 256 bytes of ``data`` uint8 [n]."""
    size = end - start
    count = size // WORD_BYTES
    words = data[start : start + count * WORD_BYTES].view(np.uint64)
    a, b, c, d = _P1, _P2, _P3, _P4
    k = 0
    while k + 4 <= count:
        w, x, y, z = words[k], words[k + 1], words[k + 2], words[k + 3]
        b += w
        a += x
        d += y
        c += z
        w ^= _SECRET[k]
        x ^= _SECRET[k + 1]
        y ^= _SECRET[k + 2]
        z ^= _SECRET[k + 3]
        a += (w & _LOW) * (w >> _32)
        b += (x & _LOW) * (x >> _32)
        c += (y & _LOW) * (y >> _32)
        d += (z & _LOW) * (z >> _32)
        k += 4
    h = seed ^ (_U(size) * _P2)
    while k < count:
        h = _mixed(h ^ (words[k] + _SECRET[k]) * _P1) * _P2
        k += 1
    last = _0
    for k in range(end - 1, start + count * WORD_BYTES - 1, -1):
        last = (last << _8) | _U(data[k])
    h = _mixed(h ^ (last + _P4) * _P1)
    h = (((h << _27) | (h >> _37)) ^ _mixed(a)) * _P1 + _P4
    h = (((h << _27) | (h >> _37)) ^ _mixed(b)) * _P1 + _P4
    h = (((h << _27) | (h >> _37)) ^ _mixed(c)) * _P1 + _P4
    h = (((h << _27) | (h >> _37)) ^ _mixed(d)) * _P1 + _P4
    return _mixed(h)


@jit
def chain(data, block, unit, branch_from, branch_to, keys, units):
    """Hash ``data`` uint8 [n > 0] block by block, each seeded with the hash of the one before.

    Fills ``keys`` uint64 [u + 1], whose last entry is the start of the chain, and ``units`` int32
    [u + 1] as :class:`prompt_blocks.PromptBlocks` has them. Returns the block of the branch, -1 if
    there is none.
    ``branch_from`` > 0 and ``branch_to``: the bytes of the latest earlier answer.
    """
    size = data.size
    count = keys.size - 1
    key = keys[count]
    branch = branch_from - 1
    if branch_from <= 0 or branch_from >= size:
        branch = -1
    keys[count], units[count] = _0, 0
    for k in range(count):
        start = k * block
        end = min(size, start + block)
        if 0 <= branch - start < block:
            keys[count] = _block(data, start, branch_from, key)
            units[count] = (min(branch_to, size) - start + unit - 1) // unit
        key = _block(data, start, end, key)
        keys[k] = key
        units[k] = (end - start + unit - 1) // unit
    return branch // block if branch >= 0 else -1


@jit
def fingerprint(data, start, end):
    """Hash of the bytes from ``start`` to ``end`` of ``data`` uint8 [n], for comparison only."""
    key = _P1
    while start < end:
        key = _block(data, start, min(end, start + 256), key)
        start += 256
    return key


# ---- what is written to disk --------------------------------------------------------------------


@inner
def _turn(x, by):
    return (x << by) | (x >> (_64 - by))


@inner
def _round(a, b, c, d):
    a += b
    b = _turn(b, _U(13)) ^ a
    a = _turn(a, _32)
    c += d
    d = _turn(d, _U(16)) ^ c
    a += d
    d = _turn(d, _U(21)) ^ a
    c += b
    b = _turn(b, _U(17)) ^ c
    c = _turn(c, _32)
    return a, b, c, d


@jit
def keyed(keys, secret, out):
    """SipHash-2-4 of each of ``keys`` uint64 [n] as eight bytes, under ``secret`` uint64 [2].

    ``out`` uint64 has room for at least as many.
    """
    end = _8 << _U(56)
    for k in range(keys.size):
        a = secret[0] ^ _U(0x736F6D6570736575)
        b = secret[1] ^ _U(0x646F72616E646F6D)
        c = secret[0] ^ _U(0x6C7967656E657261)
        d = secret[1] ^ _U(0x7465646279746573)
        d ^= keys[k]
        a, b, c, d = _round(a, b, c, d)
        a, b, c, d = _round(a, b, c, d)
        a ^= keys[k]
        d ^= end
        a, b, c, d = _round(a, b, c, d)
        a, b, c, d = _round(a, b, c, d)
        a ^= end
        c ^= _U(0xFF)
        for _ in range(4):
            a, b, c, d = _round(a, b, c, d)
        out[k] = a ^ b ^ c ^ d
