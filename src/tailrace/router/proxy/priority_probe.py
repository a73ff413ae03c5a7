"""Asks a server whether it accepts a priority in a request's body.

Some servers refuse a field they do not know, and vLLM's first engine refused a priority unless it
was started with ``--scheduling-policy priority``. Its present engine accepts the field in any case
and goes by it only if started so, which nothing that it publishes tells: acceptance means that
sending priorities does no harm.
"""

import orjson

from tailrace.net.client import FetchError
from tailrace.router.proxy.backends import Backend

#: A token may take this long on a busy server, s.
TIMEOUT_S = 30.0


async def accepts_priorities(backend: Backend, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """Send a request of one token with a priority; return whether it is accepted, or why not."""
    try:
        listed = await backend.pool.fetch("GET", "/v1/models", timeout_s=timeout_s)
        models = orjson.loads(listed.body)["data"] if listed.status == 200 else []
        body = {"model": models[0]["id"], "prompt": "a", "max_tokens": 1, "priority": 1}
        headers = {"content-type": "application/json"}
        response = await backend.pool.fetch(
            "POST", "/v1/completions", headers, orjson.dumps(body), timeout_s
        )
    except FetchError as error:
        return False, str(error)
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return False, "it lists no model to try"
    if response.status < 400:
        return True, ""
    return False, f"answered {response.status}"
