"""JSON text of traces: lists of block ids are taken out before the rest is parsed.

Python's parser makes an object of every id; the lists are nearly all of the text.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TailraceError

Ints = NDArray[np.int64]

_KEY = b'"hash_ids"'


class BlockLists:
    """Lists of block ids taken out of a text; in their place stands {"list": number}."""

    def __init__(self, path: Path, text: bytes) -> None:
        """Take the lists out of ``text``; :attr:`rest` is what remains of it."""
        self.path = path
        starts: list[int] = []
        ends: list[int] = []
        rest: list[bytes] = []
        done = 0
        at = text.find(_KEY)
        while at >= 0:
            opens = text.find(b"[", at)
            closes = text.find(b"]", opens)
            after = at + len(_KEY)
            if 0 <= opens < closes and text[after:opens].strip() == b":":
                rest += (text[done:opens], b'{"list":%d}' % len(starts))
                starts.append(opens + 1)
                ends.append(closes)
                after = done = closes + 1
            at = text.find(_KEY, after)
        rest.append(text[done:])
        self.rest = b"".join(rest)
        self._ids, self.counts = self._parse(text, np.array(starts), np.array(ends))
        self._first = np.cumsum(self.counts) - self.counts

    def _parse(self, text: bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
        counts = np.zeros(len(starts), np.int64)
        if len(starts) == 0:
            return np.zeros(0, np.int64), counts
        from tailrace.workload.formats import scan  # the compiler is loaded only where needed

        ids = np.empty(int((ends - starts).sum()) // 2 + len(starts), np.int64)
        letters = np.frombuffer(text, np.uint8)
        bad = int(scan.parse_ids(letters, starts, ends, ids, counts))
        if bad >= 0:
            line = text.count(b"\n", 0, int(starts[bad])) + 1
            raise TailraceError(
                f"{self.path}, line {line}, column hash_ids: must be a list of whole numbers"
            )
        return ids[: int(counts.sum())], counts

    def rank(self) -> Ints:
        """Put in the place of each id its rank among all distinct ids; return these [d]."""
        ids = self._ids
        if ids.size and ids.min() >= 0 and ids.max() < 4 * ids.size:
            # As they usually are: sorting millions takes as long as reading them.
            seen = np.zeros(int(ids.max()) + 1, np.bool_)
            seen[ids] = True
            self._ids = (np.cumsum(seen) - 1)[ids]
            return np.flatnonzero(seen)
        distinct, self._ids = np.unique(ids, return_inverse=True)
        return distinct

    def of(self, where: str, record: dict[str, Any]) -> Ints:
        """Return the block ids [b] of a record; none if it has no such list."""
        found = record.get("hash_ids")
        if not found:
            return self._ids[:0]
        k = found.get("list") if isinstance(found, dict) else None
        if type(k) is not int or not 0 <= k < len(self.counts):
            raise TailraceError(f"{where}, column hash_ids: must be a list of whole numbers")
        return self._ids[self._first[k] : self._first[k] + self.counts[k]]


def lines(path: Path, text: bytes) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number from 1, the place for errors and the object of each line of JSON lines."""
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield number, where, parse(where, line)


def parse(where: str, text: bytes) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        data = json.loads(text)
    except UnicodeDecodeError:
        raise TailraceError(f"{where} is not text (UTF-8)") from None
    except ValueError as error:
        raise TailraceError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise TailraceError(f"{where}: nested too deeply") from None
    if not isinstance(data, dict):
        raise TailraceError(f"{where}: must be a JSON object")
    return data
