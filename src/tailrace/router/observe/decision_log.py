"""The decision log: a line of JSON for every request at a replica, in files that are rotated.

A request that is rejected while it waits (429) has a line, too, without a replica.

It holds lengths, times and hashes, never text. Content and session ids stand in it as keyed hashes
(SipHash and BLAKE2b with a secret of this installation, which lies beside the log): equal prefixes
have equal hashes in all its files, but nobody can find out a text by hashing guesses without the
secret.
`tailrace workload import` turns a file, or a whole folder of them, back into a request table.

Lines are made a few dozen at a time, which takes some microseconds each and less than one by one; a
background thread puts all that have come to disk a few times per second. (A thread that made the
lines would hold up the event loop, since only one of them can run at a time.) A full disk or a
missing folder costs lines, which are counted, and never a request: what a failed write has left of
a line is cut off, and a file without a line is removed.
"""

import contextlib
import fcntl
import gzip
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from binascii import b2a_base64
from collections import deque
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import Field

from tailrace.config import Settings
from tailrace.errors import TailraceError
from tailrace.router.intake.hashing import keyed
from tailrace.router.intake.prompt_blocks import BLOCK_UNITS
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt

FORMAT = 1
PREFIX, SUFFIX = "decisions-", ".jsonl"
SALT_FILE = "salt"
_SALT_BYTES = 32
#: Bytes that may wait for the disk; more lines are dropped and counted.
_MOST_PENDING = 64 << 20
#: How often lines are written, in s.
_WRITE_S = 0.2
_RETRY_S = 5.0
#: Difference at which times follow the machine's clock after it was set, s.
_CLOCK_SET_S = 1.0
_LONGEST_NAME = 128
#: Attempts whose lines are made together.
_BATCH = 32
#: Of gzip: most of a line are hashes, which more effort makes no smaller.
COMPRESSION = 1


class DecisionLogSettings(Settings):
    """The decision log: where it is written and how much of it is kept."""

    folder: Path | None = None
    """Folder of its files; default: no decision log."""
    max_mb: float = Field(default=64.0, gt=0, le=1e6, allow_inf_nan=False)
    """Size at which a file is closed and compressed, MB..."""
    max_age_s: float = Field(default=86_400.0, gt=0, le=1e9, allow_inf_nan=False)
    """... or its age, s."""
    keep: int = Field(default=14, ge=1, le=100_000)
    """Number of files to keep; older ones are deleted."""
    content: bool = True
    """Write hashes of prompts, which are needed to replay shared prefixes."""


def load_salt(folder: Path | None) -> bytes:
    """Return this installation's secret, made at the first start; without a folder a passing one.

    Only its owner can read the file. It appears whole or not at all, whatever happens meanwhile. An
    empty one was left by a full disk, and is replaced.
    """
    if folder is None:
        return secrets.token_bytes(_SALT_BYTES)
    path = folder / SALT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size == 0:
            _make_salt(path)
        salt = path.read_bytes()
    except OSError as error:
        raise TailraceError(
            f"cannot use {folder} for the decision log: {error.strerror or error}"
        ) from None
    if len(salt) != _SALT_BYTES:
        raise TailraceError(f"{path} is damaged; delete it, and hashes begin anew")
    return salt


def _make_salt(path: Path) -> None:
    """Write a new secret; of two processes that do so at the same time, one wins for both."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_size > 0:
            return
        handle, name = tempfile.mkstemp(prefix=f".{SALT_FILE}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(_SALT_BYTES))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    finally:
        os.close(folder)


class Rejection(NamedTuple):
    """A request that was rejected in the queue, before any replica was chosen for it."""

    arrival: Arrival
    policy: str
    """In charge when it arrived."""
    at: float
    """When, s of the cluster's clock."""
    status: int


class DecisionLog:
    """Writes decisions. Without a folder it does nothing."""

    def __init__(self, settings: DecisionLogSettings, salt: bytes, *, clock_now: float) -> None:
        """``clock_now``: the time of the cluster's clock at this moment, s."""
        self.settings = settings
        self.written = 0
        """Lines on disk or on their way to it."""
        self.dropped = 0
        """Lines lost, because the disk was full or too slow."""
        self.last_error = ""
        self._salt = salt
        self._offset_s = time.time() - clock_now
        self._boot = secrets.token_hex(4)
        digest = hashlib.blake2b(b"content", digest_size=16, key=salt).digest()
        self._content_key = np.frombuffer(digest, np.uint64)
        self._hashed = np.empty(64, np.uint64)
        if settings.content:
            keyed(self._hashed[:0], self._content_key, self._hashed)  # compile it now
        self._attempts: list[tuple[Attempt | Rejection, str, str]] = []
        self._lines: deque[list[bytes]] = deque()
        self._pending = 0  # bytes put in by the event loop ...
        self._taken = 0  # ... and taken out by the thread
        self._stop = threading.Event()
        self._file: FileIO | None = None
        self._path = Path()
        self._head_size = 0
        self._size = 0  # all that is on disk, whole lines
        self._opened_at = 0.0
        self._retry_at = 0.0
        self._serial = 0
        self._thread: threading.Thread | None = None
        if settings.folder is not None:
            self._folder = settings.folder
            self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
            self._thread.start()

    def keep_time(self, clock_now: float) -> None:
        """Follow the machine's clock if it was set; called a few times per second.

        ``clock_now``: the time of the cluster's clock at this moment, s. That clock measures
        durations: it does not know of steps, and on many machines it stands still while they sleep.
        """
        offset_s = time.time() - clock_now
        if abs(offset_s - self._offset_s) > _CLOCK_SET_S:
            self.flush()  # those ended before
            self._offset_s = offset_s

    def write(self, attempt: Attempt, outcome: str, backend: str = "") -> None:
        """Write an attempt that has been closed; ``backend``: the name of its replica."""
        self._add(attempt, outcome, backend)

    def rejected(self, arrival: Arrival, policy: str, at: float, status: int) -> None:
        """Write a request that was rejected in the queue at ``at`` (s of the cluster's clock).

        ``policy``: in charge when it arrived, so that it can be charged with the loss.
        """
        self._add(Rejection(arrival, policy, at, status), "shed", "")

    def _add(self, attempt: Attempt | Rejection, outcome: str, backend: str) -> None:
        if self._thread is None:
            return
        attempts = self._attempts
        attempts.append((attempt, outcome, backend))
        if len(attempts) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Make the lines of all attempts so far; called a few times per second."""
        attempts = self._attempts
        if not attempts:
            return
        self._attempts = []
        if self._pending - self._taken > _MOST_PENDING:
            self.dropped += len(attempts)
            return
        record, newline = self.record, orjson.OPT_APPEND_NEWLINE
        try:
            lines = [orjson.dumps(record(*closed), option=newline) for closed in attempts]
        except Exception as error:  # a bug of ours must not stop the traffic
            self.last_error = str(error)
            self.dropped += len(attempts)
            return
        self._pending += sum(map(len, lines))
        self._lines.append(lines)

    def close(self) -> None:
        """Write what is pending and close the file; it stays uncompressed until the next start."""
        if self._thread is not None:
            self.flush()
            self._stop.set()
            self._thread.join(timeout=30)
            self._thread = None

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._compress_leftovers()
        ending = False
        while not ending:
            ending = self._stop.wait(_WRITE_S)
            lines: list[bytes] = []
            while self._lines:
                lines += self._lines.popleft()
            if lines:
                self._put(lines)
                self._taken += sum(map(len, lines))
            elif not ending:
                self._safely(self._idle)
        self._safely(self._close_file)

    def _put(self, lines: list[bytes]) -> None:
        """Write lines, and begin a new file whenever it is time to."""
        if time.monotonic() < self._retry_at:
            self.dropped += len(lines)
            return
        done = pending = 0
        try:
            for k, line in enumerate(lines, 1):
                if self._file is None:
                    self._open_file()
                pending += len(line)
                if k < len(lines) and not self._is_due(pending):
                    continue
                self._append(b"".join(lines[done:k]))
                self.written += k - done
                done, pending = k, 0
                if self._is_due():
                    self._rotate()
        except Exception as error:
            self._failed(error)
            self.dropped += len(lines) - done

    def _append(self, data: bytes) -> None:
        """Write whole lines, or nothing: a part of a line would spoil the file."""
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

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
                self._close_file()
            self._file = None

    def _is_due(self, more: int = 0) -> bool:
        """Whether to start a new file before writing ``more`` bytes."""
        age_s = time.monotonic() - self._opened_at
        size = self._size + more
        return size >= self.settings.max_mb * 1e6 or age_s >= self.settings.max_age_s

    def _idle(self) -> None:
        if self._file is not None and self._is_due():
            self._rotate()

    def _open_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._serial += 1
        name = f"{PREFIX}{stamp}-{os.getpid()}-{self._serial:04d}{SUFFIX}"
        self._path = self._folder / name
        self._file = self._path.open("xb", buffering=0)  # lines come many at a time
        self._size, self._opened_at = 0, time.monotonic()
        head = orjson.dumps({"tailrace": "decisions", "format": FORMAT, "started": time.time()})
        self._head_size = len(head) + 1
        self._append(head + b"\n")

    def _close_file(self) -> None:
        """Close the file; one without a line is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._size <= self._head_size:
                self._path.unlink(missing_ok=True)

    def _rotate(self) -> None:
        self._close_file()
        _compress(self._path)
        files = sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}*"))
        for path in files[: max(0, len(files) - self.settings.keep)]:
            if path.suffix == SUFFIX and _is_running(path):
                continue  # another process writes it
            path.unlink(missing_ok=True)

    def _compress_leftovers(self) -> None:
        """Compress the last file of routers that run no more."""
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            # Of several workers that start together only one gets to compress it.
            with contextlib.suppress(FileNotFoundError):
                if not _is_running(path):
                    _compress(path)

    # ---- a line ---------------------------------------------------------------------------------

    def record(
        self, attempt: Attempt | Rejection, outcome: str, backend: str = ""
    ) -> dict[str, Any]:
        """Return what is written of an attempt; times are Unix times in s.

        The number of a replica may be given to another one once it was removed; ``backend``, its
        name, tells them apart.
        """
        if isinstance(attempt, Rejection):
            return self._rejection(attempt, outcome)
        arrival, decision, offset_s = attempt.arrival, attempt.decision, self._offset_s
        asked, first_at, last_at = arrival.asked, attempt.first_at, attempt.last_at
        prompt, known = attempt.known_prompt_tokens
        record: dict[str, Any] = {
            "id": f"{self._boot}-{arrival.id}",
            "attempt": attempt.serial & 0xFF,
            "kind": asked.kind,
            "model": asked.model[:_LONGEST_NAME],
            "policy": decision.policy,
            "replica": attempt.replica,
            "backend": backend,
            "runner_up": decision.runner_up,
            "reason": decision.reason,
            "fell_back": decision.fell_back,
            "shadow": decision.shadow,
            "shadow_ttft_s": decision.shadow_ttft_s,
            "took_s": decision.took_s,
            "predicted_ttft_s": decision.ttft_s,
            "prompt_tokens": prompt,
            "prompt_known": known,
            "prompt_routed": arrival.prompt_tokens,
            "prompt_routed_by": arrival.how_long,
            "predicted_output": attempt.predicted,
            "output_tokens": attempt.output_tokens,
            "cached_believed": attempt.cached,
            "cached_reported": attempt.reported_cached,
            "arrived": arrival.arrived_at + offset_s,
            "sent": attempt.sent_at + offset_s,
            "first": None if first_at is None else first_at + offset_s,
            "last": None if last_at is None else last_at + offset_s,
            "estimated": attempt.estimated,
            "outcome": outcome,
            "streams": asked.streams,
            "priority": asked.priority,
            "ttft_slo_s": asked.ttft_slo_s,
            "session": self._session(arrival),
            "turn": arrival.turn,
        }
        if decision.priority is not None:
            record["server_priority"] = decision.priority
        if decision.waited_s is not None:
            record["waited_s"] = round(decision.waited_s, 6)
            record["overtook"] = decision.overtook
            if decision.overtook:
                record["overtook_why"] = decision.overtook_why
            record["overtaken"] = decision.overtaken
        if self.settings.content:
            runs = arrival.runs
            count = runs.keys.size
            if count > self._hashed.size:
                self._hashed = np.empty(2 * count, np.uint64)
            keyed(runs.keys, self._content_key, self._hashed)
            data = self._hashed[:count].tobytes()
            record["end"] = data[-16:-8].hex()
            if runs.branch_key:
                record["continues"] = data[-8:].hex()
            # The last run is not whole and says nothing that "end" does not say.
            record["block_units"] = BLOCK_UNITS
            record["units"] = runs.total
            record["blocks"] = b2a_base64(data[: 8 * runs.whole], newline=False).decode()
        return record

    def _rejection(self, rejection: Rejection, outcome: str) -> dict[str, Any]:
        """Return what is written of a rejected request: no replica, no first token, no content."""
        arrival = rejection.arrival
        asked = arrival.asked
        return {
            "id": f"{self._boot}-{arrival.id}",
            "attempt": 0,
            "kind": asked.kind,
            "model": asked.model[:_LONGEST_NAME],
            "policy": rejection.policy,
            "replica": None,
            "backend": "",
            "fell_back": None,
            "shadow": None,
            "prompt_routed": arrival.prompt_tokens,
            "prompt_routed_by": arrival.how_long,
            "predicted_output": arrival.predicted_output,
            "arrived": arrival.arrived_at + self._offset_s,
            "last": rejection.at + self._offset_s,
            "waited_s": round(max(0.0, rejection.at - arrival.arrived_at), 6),
            "outcome": outcome,
            "status": rejection.status,
            "streams": asked.streams,
            "priority": asked.priority,
            "ttft_slo_s": asked.ttft_slo_s,
            "session": self._session(arrival),
            "turn": arrival.turn,
        }

    def _session(self, arrival: Arrival) -> str | None:
        session = arrival.asked.session
        if session is not None:
            name = session.encode(errors="surrogatepass")
            return hashlib.blake2b(name, digest_size=8, key=self._salt).hexdigest()
        if arrival.session is not None:
            return f"{self._boot}-{arrival.session.number}"
        return None


def _is_running(path: Path) -> bool:
    """Whether the process that has opened a file is still there, or cannot be told."""
    pid = path.name.split("-")[2]
    return not pid.isdecimal() or Path(f"/proc/{pid}").exists()


def _compress(path: Path) -> None:
    """Replace a file by its gzip; a crash leaves the one or the other whole."""
    target = path.with_name(path.name + ".gz")
    partial = path.with_name(path.name + ".partial")
    try:
        with path.open("rb") as source, gzip.open(partial, "wb", compresslevel=COMPRESSION) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    path.unlink()
