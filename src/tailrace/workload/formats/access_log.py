"""Reader of access logs: JSON lines of vLLM's request records and of LLM gateways.

Fields are found by the names that vLLM, LiteLLM, Envoy AI Gateway and OpenTelemetry's conventions
for generative AI use; a nested name is written with dots. Requests that failed or have no output
are left out and counted. The text of prompts is never looked at, so rows share no content.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.errors import TailraceError
from tailrace.workload.columns import MAX_TIME_S, MAX_TOKENS
from tailrace.workload.formats.json_text import lines
from tailrace.workload.formats.unpack import read_bytes
from tailrace.workload.table import RUN, RequestTable, blank_rows
from tailrace.workload.trace_formats import Imported, checked_number, session_keys

PROMPT = (
    *("prompt_tokens", "input_tokens", "input_toks", "num_prompt_tokens", "usage.prompt_tokens"),
    *("usage.input_tokens", "gen_ai.usage.input_tokens", "llm_input_token", "tokens.prompt"),
)
OUTPUT = (
    *("completion_tokens", "output_tokens", "output_toks", "num_generation_tokens"),
    *("usage.completion_tokens", "usage.output_tokens", "gen_ai.usage.output_tokens"),
    *("llm_output_token", "tokens.completion"),
)
#: When a request began; otherwise when it was logged, at its end, less how long it took.
START = ("arrival_time", "start_time", "startTime", "request_time", "arrived_at", "queued_ts")
LOGGED = ("@timestamp", "timestamp", "time", "ts")
TOOK_MS = ("duration_ms", "latency_ms", "duration", "response_time_ms")
TOOK_S = ("duration_s", "latency_s", "response_time", "latency")
STATUS = ("status_code", "response_code", "http_status", "status")
SESSION = ("session_id", "x-session-id", "conversation_id", "session", "metadata.session_id")
TENANT = (
    *("tenant", "tenant_id", "x-tenant-id", "team_id", "organization", "consumer", "end_user"),
    *("user_id", "user", "api_key_hash", "metadata.user_api_key_hash"),
)
#: Larger times count milliseconds (from 1970), even larger ones micro- or nanoseconds.
_LARGEST = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6), (np.inf, 1e-9))


def is_log(start: bytes) -> bool:
    """Whether a file that begins like this has the fields of an access log."""

    def has(names: tuple[str, ...]) -> bool:
        return any(f'"{n}"'.encode() in start or _last(n) in start for n in names)

    return start.lstrip().startswith(b"{") and has(PROMPT) and has(OUTPUT)


def _last(name: str) -> bytes:
    return f'"{name.rpartition(".")[2]}"'.encode()


def read(path: Path) -> Imported:
    """Read an access log; rows are in the order of arrival."""
    found: list[tuple[float, int, int, str, str, int]] = []
    skipped = 0
    for number, where, data in lines(path, read_bytes(path)):
        output = _field(data, OUTPUT)
        if not _answered(data) or output in (None, "", "-", 0, "0"):
            skipped += 1
            continue
        session, tenant = _field(data, SESSION), _field(data, TENANT)
        found.append(
            (
                _arrival_s(where, data),
                _tokens(where, PROMPT, _field(data, PROMPT)),
                _tokens(where, OUTPUT, output),
                "" if session in (None, "-") else str(session),
                "" if tenant in (None, "-") else str(tenant),
                number,
            )
        )
    if not found:
        raise TailraceError(f"{path} has no answered requests with token counts")
    found.sort(key=lambda one: one[0])
    rows = blank_rows(len(found))
    arrival_s, prompt, output_tokens, sessions, tenants, numbers = zip(*found, strict=True)
    rows["arrival_s"] = np.array(arrival_s) - arrival_s[0]
    if rows["arrival_s"][-1] > MAX_TIME_S:
        raise TailraceError(
            f"{path}, lines {numbers[0]} and {numbers[-1]}: more than a thousand years apart; "
            "correct the times or take the line out"
        )
    rows["prompt_tokens"], rows["output_tokens"] = prompt, output_tokens
    rows["session"], rows["turn"] = _numbered(sessions)
    rows["tenant"], _ = _numbered(tenants)
    table = RequestTable(rows, np.zeros(0, RUN))
    return Imported(table, np.array(numbers), skipped=skipped, session_keys=session_keys(sessions))


def _field(data: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first field of these names, as one key or as keys within keys; None: none."""
    for name in names:
        if data.get(name) is not None:
            return data[name]
        value: Any = data
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _answered(data: dict[str, Any]) -> bool:
    status = _field(data, STATUS)
    if status is None:
        return True
    whole = isinstance(status, float) and status.is_integer()
    text = str(int(status) if whole else status).lower()
    return text.startswith("2") if text.isdigit() else text in ("success", "ok", "completed")


def _tokens(where: str, names: tuple[str, ...], value: Any) -> int:
    name = names[0]
    if value is None:
        raise TailraceError(f"{where}: there is no field for {name}; known: {', '.join(names)}")
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return int(checked_number(where, {name: value}, name, 1, MAX_TOKENS, whole=True))


def _arrival_s(where: str, data: dict[str, Any]) -> float:
    """Return when a request arrived, s from 1970 or from wherever the log counts."""
    start = _field(data, START)
    if start is not None:
        return _seconds(where, start)
    logged = _field(data, LOGGED)
    if logged is None:
        raise TailraceError(f"{where}: there is no time; known: {', '.join((*START, *LOGGED))}")
    took_s = 0.0
    for names, unit in ((TOOK_MS, 1e-3), (TOOK_S, 1.0)):
        value = _field(data, names)
        if value is not None:
            took_s = unit * _number(where, names[0], value)
            break
    return _seconds(where, logged) - took_s


def _seconds(where: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            stamp = datetime.fromisoformat(value.strip())
        except ValueError:
            return _scaled(_number(where, "time", value))
        return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
    return _scaled(_number(where, "time", value))


def _scaled(value: float) -> float:
    return value * next(unit for largest, unit in _LARGEST if value < largest)


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise TailraceError(f"{where}, column {name}: must be a time, got {value!r}") from None
    return checked_number(where, {name: value}, name, 0, MAX_TIME_S * 1e9)


def _numbered(names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Number names [n] by first appearance, empty: -1; and their occurrences, from 0."""
    known: dict[str, int] = {}
    seen: dict[str, int] = {}
    numbers, turns = [], []
    for name in names:
        numbers.append(known.setdefault(name, len(known)) if name else -1)
        turns.append(seen.get(name, 0) if name else 0)
        seen[name] = seen.get(name, 0) + 1
    return numbers, turns
