"""One of several router processes, and how they are started: ``tailrace serve --processes N``.

Each worker is a complete router with connections, health checks and a decision log file of its own;
the system spreads clients' connections over them. Limits per replica and for the router as a whole
are divided among them.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from tailrace.errors import TailraceError
from tailrace.net.server import ClientConnection, HttpRequest, Work
from tailrace.router.admin import Admin, json
from tailrace.router.app import Router
from tailrace.router.decide.chooser import Chooser
from tailrace.router.observe import status
from tailrace.router.observe.decision_log import load_salt
from tailrace.router.serve_settings import ServeSettings
from tailrace.router.state.cluster import ClusterState
from tailrace.router.state.shared_state import new_shared_state
from tailrace.router.workers import aggregate
from tailrace.router.workers.peer_workers import PeerRequest, PeerWorkers
from tailrace.router.workers.supervisor import Supervisor, SupervisorPipes, reserve

Load = Callable[[], ServeSettings]
Warn = Callable[[str, str], None]


def serve_several(
    settings: ServeSettings,
    load: Load | None,
    started: Callable[[ServeSettings], None],
    failing: Warn,
) -> int:
    """Serve with ``settings.processes`` workers until SIGTERM or SIGINT; return the exit code.

    ``started`` is given the settings with the addresses in use, ``failing`` the address of a
    backend that does not answer, and why.
    """
    listen, kept = reserve(settings.listen)
    held, admin = [kept], settings.admin
    if admin.listen != "off":
        where, kept = reserve(admin.listen)
        held.append(kept)
        admin = admin.model_copy(update={"listen": where})
    settings = settings.model_copy(update={"listen": listen, "admin": admin})
    count, salt = settings.processes, load_salt(settings.decisions.folder)
    settings.admin.token()
    shared = new_shared_state(settings.backends, count)
    # Everything is compiled here, once: workers are copies of this process.
    Chooser(ClusterState(settings.backends, worker_view=shared.of(0)), settings.routing).close()
    with tempfile.TemporaryDirectory(prefix="tailrace-") as folder:

        def work(number: int, pipes: SupervisorPipes) -> int:
            again = None if load is None else lambda: part_of(load(), number, count)
            part, worker_view = part_of(settings, number, count), shared.of(number)
            router = Router(part, load=again, salt=salt, worker_view=worker_view)
            peers = PeerWorkers(Path(folder), number, count)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(router, peers, pipes, failing))

        supervisor = Supervisor(count, work, drain_s=settings.drain_s, lost=shared.clear)
        try:
            return supervisor.run(lambda: started(settings))
        finally:
            for kept in held:
                kept.close()


def part_of(settings: ServeSettings, number: int, count: int) -> ServeSettings:
    """Return the settings of one worker: its part of what is limited, and a port that is shared."""

    def part(limit: int | None, least: int = 1) -> int | None:
        if limit is None:
            return None
        return max(least, limit // count + (number < limit % count))

    limits, admission = settings.limits, settings.admission
    return settings.model_copy(
        update={
            "share_port": True,
            "limits": limits.model_copy(update={"connections": part(limits.connections)}),
            "admission": admission.model_copy(
                update={
                    "max_in_flight": part(admission.max_in_flight),
                    "queue": part(admission.queue, 0),
                }
            ),
            "backends": tuple(
                b.model_copy(update={"max_in_flight": part(b.max_in_flight)})
                for b in settings.backends
            ),
        }
    )


async def _serve(router: Router, peers: PeerWorkers, pipes: SupervisorPipes, failing: Warn) -> int:
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(pipes.parent)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        loop.add_reader(pipes.parent, orphaned)
        for backend, why in await router.probe():
            if peers.number == 0:  # they would all say the same
                failing(backend.settings.url, why)
        await join_peers(router, peers)
        return await router.run(pipes.report_ready)
    finally:
        await router.stop()


async def join_peers(router: Router, peers: PeerWorkers) -> None:
    """Serve the admin requests of other workers, and let this one answer for all of them."""
    if peers.number >= peers.count:
        raise TailraceError(f"there is no worker {peers.number} of {peers.count}")
    own_status = {
        ("GET", "/status"): lambda: json(
            status.describe_worker(router.telemetry, router.snapshot())
        )
    }
    private = Admin({**router.admin.routes, **own_status}, None)
    path = peers.own_path
    Path(path).unlink(missing_ok=True)  # of a worker that has died
    loop = asyncio.get_running_loop()
    router.also(await loop.create_unix_server(lambda: ClientConnection(private), path))

    def ask_workers(request: HttpRequest, asked: str) -> Work:
        return PeerRequest(request, peers, asked, partial(aggregate.merge, asked))

    router.admin.ask_workers = ask_workers
