"""What the autopilot says about itself, as read from the file that it keeps (autopilot.json).

The autopilot is another process; the router shows what it has written last and never waits for it.
"""

import json
from pathlib import Path
from typing import Any

#: Parts of the file that only the autopilot itself needs.
_PRIVATE = ("format", "cycles", "rests")
#: A larger file is not the autopilot's, bytes.
_MOST_BYTES = 4 << 20


class AutopilotReport:
    """Reads the file again when it has changed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed_at = -1
        self._found: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Return what is shown; None: the autopilot is off, or has written nothing yet."""
        if self._path is None:
            return None
        try:
            about = self._path.stat()
            if about.st_mtime_ns != self._changed_at:
                self._changed_at = about.st_mtime_ns
                self._found = None
                if about.st_size <= _MOST_BYTES:
                    data = json.loads(self._path.read_bytes())
                    self._found = {k: v for k, v in data.items() if k not in _PRIVATE}
        except (OSError, ValueError, AttributeError):
            self._found = None  # it is gone, or not what the autopilot writes
        return self._found
