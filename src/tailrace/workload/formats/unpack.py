"""Files that may be gzip, unpacked; a small one can stand for any number of bytes."""

import gzip
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from tailrace.errors import TailraceError

_MARK = b"\x1f\x8b"
#: Most bytes of a gzip file once it is unpacked.
MOST_UNPACKED = 4 * 2**30
#: Bytes of a file that are read to recognise its format.
_HEAD = 1 << 16


def is_gzip(path: Path) -> bool:
    """Whether a file is packed, by its first bytes."""
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


def opened(path: Path) -> BinaryIO:
    """Open a file to read it from its beginning, unpacked."""
    file: Any = (gzip.open if is_gzip(path) else open)(path, "rb")
    return file  # type: ignore[no-any-return]


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is gzip."""
    if not is_gzip(path):
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TailraceError(f"{path} is not a whole gzip file: {error}") from None
    if len(content) > MOST_UNPACKED:
        raise TailraceError(f"{path} has more than {MOST_UNPACKED} bytes unpacked; split it")
    return content


def head(path: Path) -> bytes:
    """Return the beginning of a file, unpacked if it is gzip."""
    with path.open("rb") as file:
        start = file.read(_HEAD)
    if not start.startswith(_MARK):
        return start
    try:
        return zlib.decompressobj(wbits=31).decompress(start, _HEAD)
    except zlib.error as error:
        raise TailraceError(f"{path} is not a whole gzip file: {error}") from None
