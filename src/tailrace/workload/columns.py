"""Columns of a file of requests, checked: every error names file, line and column."""

import csv
import io
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tailrace.errors import TailraceError
from tailrace.workload.formats.unpack import is_gzip, opened, read_bytes

MAX_TOKENS = 2**24
#: Largest accepted time, s (1 000 years). A larger number is a time in ms, or a typing error.
MAX_TIME_S = 3.2e10
#: Longest line of a CSV file, bytes.
_LONGEST_LINE = 1 << 26
#: What Arrow says of a row with too few or too many columns: its number, from 1, and both counts.
_BAD_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Sheet:
    """A table read from a file, whose columns are checked as they are taken from it."""

    def __init__(self, path: Path, table: pa.Table, *, is_text: bool) -> None:
        self.path = path
        self._table = table
        self.is_text = is_text

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __contains__(self, column: str) -> bool:
        return column in self._table.column_names

    def raw(self, column: str) -> Any:
        """Return a column as an Arrow array [n]."""
        if column not in self:
            raise TailraceError(
                f"{self.path}: there is no column {column}; it has {', '.join(self.columns)}"
            )
        return self._table.column(column).combine_chunks()

    def fail(self, row: int, column: str, what: str) -> NoReturn:
        """Raise the error for a cell."""
        raise TailraceError(f"{self.path}, {self.where(row)}, column {column}: {what}")

    def where(self, row: int) -> str:
        """Return the place of a row in the file, for text as an editor counts lines."""
        if not self.is_text:
            return f"row {row}"
        return f"line {_physical_line(self.path, row + 2)}"

    def refuse(self, bad: Bools, column: str, what: str) -> None:
        """Raise an error for the first bad row of [n], if any; {} in ``what`` becomes its value."""
        if bad.any():
            row = int(np.argmax(bad))
            self.fail(row, column, what.format(self._shown(column, row)))

    def floats(self, column: str) -> Floats:
        """Return a column of numbers [n] that are finite and not negative."""
        values: Floats = self.cast(column, self.raw(column), pa.float64(), "a number").to_numpy(
            zero_copy_only=False
        )
        self.refuse(~np.isfinite(values), column, "must be a finite number, got {}")
        self.refuse(values < 0, column, "must not be negative, got {}")
        return values

    def seconds(self, column: str) -> Floats:
        """Return a column of times or durations [n] in s."""
        values = self.floats(column)
        self.refuse(values > MAX_TIME_S, column, "{} seconds are more than a thousand years")
        return values

    def known_seconds(self, column: str) -> Floats:
        """Return a column of times or durations [n] in s; NaN where it is empty or missing."""
        if column not in self:
            return np.full(len(self), np.nan)
        raw = pc.utf8_trim_whitespace(self.raw(column)) if self.is_text else self.raw(column)
        raw = (
            pc.replace_substring_regex(raw, "^$", "nan") if self.is_text else raw.fill_null(np.nan)
        )
        values: Floats = self.cast(column, raw, pa.float64(), "a number").to_numpy(
            zero_copy_only=False
        )
        self.refuse(values < 0, column, "must not be negative, got {}")
        self.refuse(values > MAX_TIME_S, column, "{} seconds are more than a thousand years")
        return values

    def ints(self, column: str, low: int, high: int) -> Ints:
        """Return a column of whole numbers [n] between two bounds, both allowed."""
        values: Floats = self.cast(column, self.raw(column), pa.float64(), "a number").to_numpy(
            zero_copy_only=False
        )
        self.refuse(~np.isfinite(values), column, "must be a finite number, got {}")
        self.refuse(values != np.rint(values), column, "must be a whole number, got {}")
        self.refuse(values < low, column, f"must be at least {low}, got {{}}")
        self.refuse(values > high, column, f"must be at most {high}, got {{}}")
        return values.astype(np.int64)

    def tokens(self, column: str, low: int = 1) -> Ints:
        """Return a column of token counts [n]."""
        return self.ints(column, low, MAX_TOKENS)

    def cast(self, column: str, values: Any, to: pa.DataType, what: str) -> Any:
        """Convert an Arrow array [n]; an error names the first cell that cannot be converted."""
        if values.null_count:
            self.fail(
                int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))), column, "is empty"
            )
        if pa.types.is_string(values.type):
            values = pc.utf8_trim_whitespace(values)
        try:
            return values.cast(to)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            row = _first_bad(values, to)
            shown = self._shown(column, row)
            self.fail(row, column, "is empty" if shown == "''" else f"must be {what}, got {shown}")

    def _shown(self, column: str, row: int) -> str:
        text = repr(self._table.column(column)[row].as_py())
        return text if len(text) <= 40 else text[:37] + "..."


def read_text(path: Path) -> Sheet:
    """Read a CSV file with a header as columns of strings."""
    header = _header(path)
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise TailraceError(f"{path}, line 1: column {min(twice)} stands there twice")
    try:
        table = pa_csv.read_csv(
            io.BytesIO(read_bytes(path)) if is_gzip(path) else path,
            # Rows have numbers only when they are read by one thread.
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=_LONGEST_LINE),
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in _raw_header(path)},
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        bad = _BAD_ROW.search(str(error))
        if bad:
            line = _physical_line(path, int(bad[1]))
            raise TailraceError(
                f"{path}, line {line}: {bad[3]} columns, but the header has {bad[2]}"
            ) from None
        raise TailraceError(f"{path} is not a CSV file: {error}") from None
    if table.num_rows == 0:
        raise TailraceError(f"{path} has a header but no requests")
    return Sheet(path, table.rename_columns(header), is_text=True)


def read_parquet(path: Path) -> Sheet:
    """Read a Parquet file."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TailraceError(f"{path} is not a Parquet file: {error}") from None
    if table.num_rows == 0:
        raise TailraceError(f"{path} has no requests")
    return Sheet(path, table, is_text=False)


def header_of(path: Path) -> list[str]:
    """Return the column names of a CSV file."""
    return _header(path)


def _raw_header(path: Path) -> list[str]:
    """Return the column names exactly as the file has them."""
    try:
        with opened(path) as file:
            for line in file:
                if line.strip():
                    return _split(line.decode("utf-8-sig").rstrip("\r\n"))
    except UnicodeDecodeError:
        raise TailraceError(f"{path}, line 1 is not text (UTF-8)") from None
    except csv.Error as error:
        raise TailraceError(f"{path} is not a CSV file: {error}") from None
    except (EOFError, zlib.error) as error:
        raise TailraceError(f"{path} is not a whole gzip file: {error}") from None
    raise TailraceError(f"{path} is empty")


def _header(path: Path) -> list[str]:
    return [name.strip() for name in _raw_header(path)]


def _split(line: str) -> list[str]:
    """Split one line of CSV as Arrow does."""
    return next(csv.reader([line]))


def _physical_line(path: Path, ordinal: int) -> int:
    """Return the line number of the ``ordinal``-th line that is not blank, from 1."""
    seen = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            seen += bool(line.rstrip(b"\r\n"))
            if seen == ordinal:
                return number
    return ordinal


def _first_bad(values: Any, to: pa.DataType) -> int:
    """Return the first index of an Arrow array that cannot be cast, by halving."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(to)
            low = middle
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
    return low
