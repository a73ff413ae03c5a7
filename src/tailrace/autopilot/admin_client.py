"""The autopilot's side of the router's admin listener."""

import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from tailrace.errors import TailraceError
from tailrace.net.tls import TlsFiles, explain, pinned_context

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class AdminAccess:
    """How the admin listener is reached."""

    url: str
    """http://host:port or https://host:port."""
    token_env: str | None = None
    """Variable with its token."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """``ca``: the listener's own certificate. The others: shown to it if it asks for one."""


class AdminClient:
    """Asks the admin listener, directly and never by a proxy: the token is for it alone."""

    def __init__(self, access: AdminAccess) -> None:
        self._access = access
        self._headers = {}
        if access.token_env is not None:
            self._headers["Authorization"] = f"Bearer {os.environ.get(access.token_env, '')}"

    def get(self, path: str) -> Any:
        """Read a page."""
        return self._ask(urllib.request.Request(self._access.url + path, headers=self._headers))

    def post(self, path: str, value: Any) -> Any:
        """Make a change."""
        body = json.dumps(value).encode()
        return self._ask(
            urllib.request.Request(
                self._access.url + path, body, self._headers | {"Content-Type": "application/json"}
            )
        )

    def _ask(self, request: urllib.request.Request) -> Any:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._access.tls.ca is not None:
            # Made anew each time, as the router reads changed certificates again too.
            context = pinned_context(self._access.tls)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = error.read(500).decode(errors="replace")
            raise TailraceError(f"the router refuses {request.selector}: {why}") from None
        except urllib.error.URLError as error:
            known = isinstance(error.reason, ssl.SSLError)
            why = explain(error.reason) if known else str(error.reason)  # type: ignore[arg-type]
            raise TailraceError(f"the router does not answer: {why}") from None
        except (OSError, ValueError) as error:
            raise TailraceError(f"the router does not answer: {error}") from None
