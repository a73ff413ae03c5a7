"""The decision log: a line of JSON for every request at a replica, in files that are rotated.

It holds lengths, times and hashes, never text. Content and session ids stand in it as keyed hashes
(BLAKE2b with a secret of this installation, which lies beside the log): equal prefixes have equal
hashes in all its files, but nobody can find out a text by hashing guesses without the secret.
`tailrace workload import` turns a file, or a whole folder of them, back into a request table.

Writing is a background thread's work. A full disk or a missing folder costs lines, which are
counted, and never a request.
"""

import base64
import contextlib
import gzip
import hashlib
import os
import queue
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import IO, Any

import orjson
from pydantic import Field

from tailrace.config import Settings
from tailrace.errors import TailraceError
from tailrace.router.content import BLOCK_UNITS
from tailrace.router.fleet import Flight

FORMAT = 1
PREFIX, SUFFIX = "decisions-", ".jsonl"
SALT_FILE = "salt"
_SALT_BYTES = 32
#: Lines that may wait for the disk; more are dropped and counted.
_MOST_PENDING = 20_000
_FLUSH_S = 1.0
_RETRY_S = 5.0
_LONGEST_NAME = 128


class DecisionLogSettings(Settings):
    """Where decisions are written, and how much of them is kept."""

    folder: Path | None = None
    """Folder for the files; default: no decision log."""
    max_mb: float = Field(default=64.0, gt=0, le=1e6, allow_inf_nan=False)
    """Size in MB at which a file is closed and compressed..."""
    max_age_s: float = Field(default=86_400.0, gt=0, le=1e9, allow_inf_nan=False)
    """... or its age in seconds."""
    keep: int = Field(default=14, ge=1, le=100_000)
    """Files kept; the oldest are deleted."""
    content: bool = True
    """Write the hashes of prompts, without which prefix sharing cannot be replayed."""


def load_salt(folder: Path | None) -> bytes:
    """Return this installation's secret, made at the first start; without a folder a passing one.

    Only its owner can read the file.
    """
    if folder is None:
        return secrets.token_bytes(_SALT_BYTES)
    path = folder / SALT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(_SALT_BYTES))
        salt = path.read_bytes()
    except OSError as error:
        raise TailraceError(
            f"cannot use {folder} for the decision log: {error.strerror or error}"
        ) from None
    if len(salt) != _SALT_BYTES:
        raise TailraceError(f"{path} is damaged; delete it, and hashes begin anew")
    return salt


class DecisionLog:
    """Writes decisions. Without a folder it does nothing."""

    def __init__(self, settings: DecisionLogSettings, salt: bytes, *, clock_now: float) -> None:
        """``clock_now``: the time of the fleet's clock at this moment, s."""
        self.settings = settings
        self.written = 0
        """Lines on disk or on their way to it."""
        self.dropped = 0
        """Lines lost, because the disk was full or too slow."""
        self.last_error = ""
        self._salt = salt
        self._offset_s = time.time() - clock_now
        self._boot = secrets.token_hex(4)
        self._queue: queue.SimpleQueue[tuple[Flight, str] | None] = queue.SimpleQueue()
        self._file: IO[bytes] | None = None
        self._path = Path()
        self._size = 0
        self._opened_at = 0.0
        self._retry_at = 0.0
        self._serial = 0
        self._thread: threading.Thread | None = None
        if settings.folder is not None:
            self._folder = settings.folder
            self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
            self._thread.start()

    def write(self, flight: Flight, outcome: str) -> None:
        """Write a flight that has been closed. Takes a microsecond; the thread does the rest."""
        if self._thread is None:
            return
        if self._queue.qsize() >= _MOST_PENDING:
            self.dropped += 1
            return
        self._queue.put((flight, outcome))

    def close(self) -> None:
        """Write what is pending and close the file; it stays uncompressed until the next start."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=30)
            self._thread = None

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._compress_leftovers()
        while True:
            try:
                item = self._queue.get(timeout=_FLUSH_S)
            except queue.Empty:
                self._safely(self._idle)
                continue
            if item is None:
                break
            self._put_line(*item)
        self._safely(self._close_file)

    def _put_line(self, flight: Flight, outcome: str) -> None:
        if time.monotonic() < self._retry_at:
            self.dropped += 1
            return
        try:
            line = orjson.dumps(self.record(flight, outcome)) + b"\n"
            file = self._file or self._open_file()
            file.write(line)
            self._size += len(line)
            self.written += 1
            if self._is_due():
                self._rotate()
        except Exception as error:
            self._failed(error)
            self.dropped += 1

    def _safely(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.last_error = str(error)
        self._retry_at = time.monotonic() + _RETRY_S
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _is_due(self) -> bool:
        age_s = time.monotonic() - self._opened_at
        return self._size >= self.settings.max_mb * 1e6 or age_s >= self.settings.max_age_s

    def _idle(self) -> None:
        if self._file is not None:
            self._file.flush()
            if self._is_due():
                self._rotate()

    def _open_file(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._serial += 1
        name = f"{PREFIX}{stamp}-{os.getpid()}-{self._serial:04d}{SUFFIX}"
        self._path = self._folder / name
        self._file = self._path.open("xb", buffering=1 << 16)
        head = {"tailrace": "decisions", "format": FORMAT, "started": time.time()}
        self._file.write(orjson.dumps(head) + b"\n")
        self._size, self._opened_at = 0, time.monotonic()
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        self._close_file()
        _compress(self._path)
        files = sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}*"))
        for path in files[: max(0, len(files) - self.settings.keep)]:
            path.unlink(missing_ok=True)

    def _compress_leftovers(self) -> None:
        """Compress the last file of routers that run no more."""
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            pid = path.name.split("-")[2]
            if pid.isdecimal() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
                _compress(path)

    # ---- a line ---------------------------------------------------------------------------------

    def record(self, flight: Flight, outcome: str) -> dict[str, Any]:
        """Return what is written of a flight; times are Unix times in s."""
        arrival, decision = flight.arrival, flight.decision
        asked = arrival.asked
        prompt, known = flight.known_prompt_tokens
        record: dict[str, Any] = {
            "id": f"{self._boot}-{arrival.id}",
            "attempt": flight.serial & 0xFF,
            "kind": asked.kind,
            "model": asked.model[:_LONGEST_NAME],
            "policy": decision.policy,
            "replica": flight.replica,
            "runner_up": decision.runner_up,
            "reason": decision.reason,
            "fell_back": decision.fell_back,
            "shadow": decision.shadow,
            "shadow_ttft_s": decision.shadow_ttft_s,
            "took_s": decision.took_s,
            "predicted_ttft_s": decision.ttft_s,
            "prompt_tokens": prompt,
            "prompt_known": known,
            "predicted_output": flight.predicted,
            "output_tokens": flight.output_tokens,
            "cached_believed": flight.cached,
            "cached_reported": flight.reported_cached,
            "arrived": self._unix(arrival.arrived_at),
            "sent": self._unix(flight.sent_at),
            "first": self._unix(flight.first_at),
            "last": self._unix(flight.last_at),
            "estimated": flight.estimated,
            "outcome": outcome,
            "streams": asked.streams,
            "priority": asked.priority,
            "ttft_slo_s": asked.ttft_slo_s,
            "session": self._session(flight),
            "turn": arrival.turn,
        }
        if self.settings.content:
            runs = arrival.runs
            keys = runs.keys[:-1].astype("<u8")
            record["end"] = self._hashed(keys[-1:].tobytes()).hex()
            if runs.branch_key:
                record["continues"] = self._hashed(runs.keys[-1:].astype("<u8").tobytes()).hex()
            # The last run is not whole and says nothing that "end" does not say.
            record["block_units"] = BLOCK_UNITS
            record["units"] = runs.total
            record["blocks"] = base64.b64encode(
                b"".join(self._hashed(key.tobytes()) for key in keys[: runs.whole])
            ).decode()
        return record

    def _unix(self, at: float | None) -> float | None:
        return None if at is None else at + self._offset_s

    def _session(self, flight: Flight) -> str | None:
        arrival = flight.arrival
        if arrival.asked.session is not None:
            name = "id " + arrival.asked.session
        elif arrival.session is not None:
            name = f"number {self._boot} {arrival.session.number}"
        else:
            return None
        return self._hashed(name.encode(errors="surrogatepass")).hex()

    def _hashed(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8, key=self._salt).digest()


def _compress(path: Path) -> None:
    """Replace a file by its gzip; a crash leaves the one or the other whole."""
    target = path.with_name(path.name + ".gz")
    partial = path.with_name(path.name + ".partial")
    with path.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    partial.replace(target)
    path.unlink()
