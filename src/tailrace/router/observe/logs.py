"""Logs as lines of JSON on standard error; never keys, never text of requests."""

import logging
import sys
import time
from typing import Any

import orjson

_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, message, and what was given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        given = record.__dict__.items()
        line |= {key: value for key, value in given if key not in _PLAIN and value is not None}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def to_stderr(level: str) -> None:
    """Send the router's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("tailrace")
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False
