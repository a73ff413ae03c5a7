"""Compiles what the router needs, in two processes at once.

The router itself compiles how requests are decided and recorded (``Chooser``); meanwhile a helper
process compiles the network, the rules and the readers of request bodies, and leaves them in the
compile cache. It goes on with what only policies in Python and shadows need, so that a later change
of settings need not wait for it.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numba

from tailrace import compiled
from tailrace.net.chunk_kernel import RequestChunks
from tailrace.policy.learned import inference
from tailrace.policy.warmup import compile_rules
from tailrace.router.access import accounts
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake import fast_body, model_field
from tailrace.router.proxy import large_bodies
from tailrace.router.settings import BackendSettings
from tailrace.router.state.cluster import ClusterState


def helper() -> contextlib.AbstractContextManager[Callable[[], int | None]]:
    """Let a helper process compile its half (see :func:`tailrace.compiled.helper`)."""
    return compiled.helper(__name__)


def compile_readers() -> None:
    """Compile the network and the rules, then the readers of request bodies."""
    types: Any = numba
    numbers = types.float64[::1], types.float32[::1], types.int64
    inference.run.compile(numbers)
    inference.run_listed.compile(numbers)
    compile_rules()
    fast_body.BodyReader()
    compiled.mark(fast_body.__name__)
    RequestChunks().feed(b"0\r\n\r\n")
    model_field.is_clear(b"{}")
    accounts.warm_up()
    # Last: a router listens before this is there.
    large_bodies.LargeBodies().close()
    compiled.mark(large_bodies.__name__)


def compile_choosers() -> None:
    """Compile decisions: of built-in and learned policies, then what others need."""
    backend = BackendSettings(url="http://127.0.0.1:1")
    cluster = ClusterState((backend, backend))
    Chooser(cluster, ChooserSettings(), everything=True).close()


def compile_all() -> None:
    """Compile everything that a router may need, and note it in the cache."""
    compile_readers()
    compile_choosers()
    compiled.mark(__spec__.name)


def compile_beside_helper() -> None:
    """Compile everything, together with a helper if there is one."""
    compile_choosers()
    compiled.wait_for(__name__)
    compile_all()


if __name__ == "__main__":
    compile_all()
