"""The autopilot's process: started, started again, ended with the router; what it reports."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tailrace.router import autopilot_process
from tailrace.router.autopilot_process import AutopilotProcess
from tailrace.router.observe.autopilot_report import AutopilotReport
from tailrace.router.serve_settings import ServeSettings

BACKENDS = [{"url": "http://127.0.0.1:1"}]


def until(what: str, holds: Callable[[], bool], limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.1)


@pytest.fixture
def admin() -> Iterator[tuple[str, int]]:
    """An admin listener that knows the roles of policies."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"settings_policy": "random", "vetoed": []}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield "127.0.0.1", server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_reports_is_started_again_and_ends_with_the_router(
    tmp_path: Path, admin: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopilot_process, "FIRST_PAUSE_S", 0.0)
    settings = ServeSettings.model_validate(
        {"backends": BACKENDS, "decisions": {"folder": tmp_path}, "autopilot": {"mode": "suggest"}}
    )
    file = settings.autopilot_file
    assert file is not None
    process = AutopilotProcess(settings)
    process.start(admin)
    try:
        child = process._process
        assert child is not None
        until("it has written its state", file.exists)
        shown = AutopilotReport(file).read()
        assert shown is not None
        # There is no decision log yet, which is no reason to end.
        assert (shown["mode"], shown["says"][:8]) == ("suggest", "waiting:")
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19
        child.kill()
        until(
            "it is started again",
            lambda: (process.watch(), process._process)[1] not in (None, child),
        )
        again = process._process
        assert again is not None
    finally:
        process.stop()
    assert not is_running(again.pid)
    process.watch()
    assert process._process is None


def test_it_ends_when_the_router_is_killed(tmp_path: Path, admin: tuple[str, int]) -> None:
    settings = ServeSettings.model_validate(
        {"backends": BACKENDS, "decisions": {"folder": tmp_path}, "autopilot": {"mode": "suggest"}}
    )
    process = AutopilotProcess(settings)
    process.start(admin)
    child = process._process
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()  # as the system does for a killed process
    try:
        assert child.wait(300) == 0
    finally:
        process.stop()


def test_off_means_off(tmp_path: Path) -> None:
    settings = ServeSettings.model_validate(
        {"backends": BACKENDS, "decisions": {"folder": tmp_path}}
    )
    process = AutopilotProcess(settings)
    process.start(("127.0.0.1", 1))
    process.watch()
    assert process._process is None
    process.stop()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "set decisions.folder"),
        ({"decisions": {"folder": "d"}, "admin": {"listen": "off"}}, "admin.listen is off"),
        (
            {
                "decisions": {"folder": "d"},
                "admin": {"tls": {"certificate": "a.pem", "client_ca": "b.pem"}},
            },
            "set autopilot.certificate",
        ),
    ],
)
def test_what_it_needs_is_said(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings.model_validate({"autopilot": {"mode": "act"}, **wrong})


def test_a_report_is_read_again_when_it_changes_and_damage_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "autopilot.json"
    report = AutopilotReport(path)
    assert report.read() is None
    path.write_text('{"format": 1, "says": "a", "cycles": {}}')
    assert report.read() == {"says": "a"}
    for text in ("{", "[1]", '"x"'):
        path.write_text(text)
        os.utime(path, ns=(time.time_ns(), time.time_ns()))
        assert report.read() is None
    assert AutopilotReport(None).read() is None
