"""Prompts for the requests of a table: text that is shared exactly as far as its content is.

A content run becomes the beginning of an endless text that its key names, so equal content is equal
text. Where a turn of a session repeats the answer to the turn before, the answer that really came
stands there, because that is what the server may have cached.
"""

from dataclasses import dataclass

import numpy as np

from tailrace.emulate import tokenizer
from tailrace.workload.prefix import content_keys, mix64
from tailrace.workload.table import RequestTable

_PRIVATE = 0x70726976617465
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt: text as it stands inside a JSON string, and who says it."""

    role: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in pieces; the last run of its content begins with piece ``last_run``."""

    pieces: tuple[Piece, ...]
    last_run: int
    key: int
    """Of the last run."""
    last_tokens: int
    """Of the last run."""

    def text(self) -> bytes:
        """Return everything in one piece."""
        return b"".join(piece.text for piece in self.pieces)

    def messages(self) -> bytes:
        """Return a conversation as a JSON list."""
        says = b'{"role":"%b","content":"%b"}'
        return b"[%b]" % b",".join(says % (p.role.encode(), p.text) for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Spoken:
    """The last run of a prompt with the answer it got."""

    key: int
    tokens: int
    pieces: tuple[Piece, ...]


def spoken(prompt: Prompt, answer: bytes, tokens: int) -> Spoken:
    """Return what a session has come to; ``answer`` is escaped for JSON and has ``tokens``."""
    pieces = (*prompt.pieces[prompt.last_run :], Piece("assistant", answer))
    return Spoken(prompt.key, prompt.last_tokens + tokens, pieces)


class PromptWriter:
    """Writes the prompts of a table; ``words_per_token`` fits their length to a tokenizer.

    Another ``salt`` gives other texts that share the same way, for a server that still has those of
    an earlier run in its cache.
    """

    def __init__(self, table: RequestTable, words_per_token: float = 1.0, salt: int = 0) -> None:
        self._rows = table.rows
        self._tokens = table.runs["tokens"]
        self._keys = content_keys(table)
        self._words_per_token = words_per_token
        self._salt = salt

    def write(self, row: int, so_far: Spoken | None = None) -> Prompt:
        """Return the prompt of a row; ``so_far``: what its session has come to."""
        about = self._rows[row]
        start, count = int(about["run_start"]), int(about["run_count"])
        if count == 0:
            tokens = int(about["prompt_tokens"])
            key = (_PRIVATE + row) & _MASK
            return Prompt((Piece("user", self._text(key, 0, tokens)),), 0, key, tokens)
        last = start + count - 1
        pieces = [
            Piece("system", self._text(self._key(run), 0, int(self._tokens[run])))
            for run in range(start, last)
            if self._tokens[run] > 0
        ]
        key, tokens, begun = self._key(last), int(self._tokens[last]), 0
        first = len(pieces)
        if so_far is not None and so_far.key == key and so_far.tokens <= tokens:
            pieces.extend(so_far.pieces)
            begun = so_far.tokens
        if tokens > begun or not pieces:
            pieces.append(Piece("user", self._text(key, begun, tokens)))
        return Prompt(tuple(pieces), first, key, tokens)

    def _key(self, run: int) -> int:
        return int(self._keys[run])

    def _text(self, key: int, start: int, end: int) -> bytes:
        """Tokens ``start`` to ``end - 1`` of a text; words need no escaping."""
        if end <= start:
            return b""
        per = self._words_per_token
        with np.errstate(over="ignore"):
            salted = int(
                mix64(np.array([key ^ (self._salt * 0x9E3779B97F4A7C15 & _MASK)], "u8"))[0]
            )
        return tokenizer.words(salted, round(start * per), max(round(end * per), 1))
