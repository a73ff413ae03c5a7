"""The container file and the unit in deploy/ (``make test-deploy`` runs the file's steps)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from router.processes import HOST, free_ports
from tailrace.cli import cli

ROOT = Path(__file__).parents[1]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "tailrace.service").read_text(encoding="utf-8")
SETTINGS = 'listen = "127.0.0.1:{port}"\n[admin]\nlisten = "off"\n[[backends]]\nurl = "{url}"\n'


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in CONTAINER.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_container_is_not_root_and_brings_its_compiled_code():
    found = dict(instructions())
    assert found["USER"].split(":")[0] not in ("root", "0")
    assert ("RUN", "venv/bin/tailrace warmup serve") in instructions()
    assert "/ready" in found["HEALTHCHECK"]
    for word, rest in instructions():
        if word == "COPY":
            assert all((ROOT / name).exists() for name in rest.split()[:-1])


def test_the_unit_runs_commands_that_exist():
    for name, options in re.findall(r"^ExecStart\w*=\S+/tailrace (\w+)(.*)$", UNIT, re.MULTILINE):
        command = cli.get_command(None, name)
        assert command is not None
        known = {flag for param in command.params for flag in param.opts}
        assert set(re.findall(r"--[\w-]+", options)) <= known
    assert "DynamicUser=yes" in UNIT
    assert "ProtectSystem=strict" in UNIT
    # What it learned of the servers outlives a restart.
    assert "StateDirectory=tailrace" in UNIT
    assert 'speeds.file = "/var/lib/tailrace/' in UNIT


#: In a mount name space of its own /srv is empty at first, and read-only once the image is built.
BUILT = """
set -eu
mount -t tmpfs -o size=2g none /srv
{steps}
cp {settings} /srv/tailrace/router.toml
mount -o remount,ro /srv
cd /srv/tailrace
touch x 2>/dev/null && exit 9
as_user="setpriv --reuid={user} --regid={group} --clear-groups {read_all}"
export HOME=/nonexistent TMPDIR=/nonexistent
$as_user {entry} >{log} 2>&1 & router=$!
for _ in $(seq 300); do
  if {health} 2>/dev/null; then healthy=1; break; fi
  kill -0 $router || break
  sleep 0.2
done
kill $router; wait $router
test "${{healthy:-}}" = 1
"""


class Replica(BaseHTTPRequestHandler):
    """Answers every GET, as a healthy server does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), Replica)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.deploy
def test_the_steps_of_the_container_file_give_a_router_that_is_ready(tmp_path, replica):
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("needs root, unshare and setpriv")
    (port,) = free_ports(1)
    steps, user, entry, health = [], "", [], ""
    for word, rest in instructions():
        if word == "ENV":
            steps.append(f"export {rest}")
        elif word == "WORKDIR":
            steps.append(f"mkdir -p {rest}; cd {rest}")
        elif word == "COPY":
            *names, target = rest.split()
            sources = " ".join(str(ROOT / name) for name in names)
            steps.append(f"mkdir -p build; cp -r {sources} {target}")
        elif word == "RUN":
            steps.append(rest.replace("python -m venv", f"{sys.executable} -m venv"))
        elif word == "USER":
            user = rest
        elif word in ("ENTRYPOINT", "CMD"):
            entry += json.loads(rest)
        elif word == "HEALTHCHECK":
            health = rest.partition("CMD ")[2].replace(":8080", f":{port}")
    settings, log = tmp_path / "router.toml", tmp_path / "log"
    settings.write_text(SETTINGS.format(port=port, url=replica))
    script = BUILT.format(
        steps="\n".join(steps), settings=settings, log=log, health=health, entry=shlex.join(entry),
        user=user.split(":")[0], group=user.split(":")[1],
        # Python itself may be where only root may look.
        read_all="--inh-caps=+dac_read_search --ambient-caps=+dac_read_search",
    )  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME") or k.startswith("PIP_")}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], env=kept, capture_output=True, text=True,
        check=False, timeout=900,
    )  # fmt: skip
    said = log.read_text() if log.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + said
    assert "listening on" in said
    assert "compiling" not in said
