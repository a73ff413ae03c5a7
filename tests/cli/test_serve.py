"""Options of ``tailrace serve``; what the router does is tested in tests/router."""

import pytest

pytest.importorskip("uvloop")

from tailrace.cli.routers import given_settings
from tailrace.router.serve_settings import load

OPTIONS = dict.fromkeys(
    ("backends", "policy", "listen", "admin", "cluster", "max_in_flight", "log_level",
     "log_requests")
)  # fmt: skip
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


def test_a_cluster_file_describes_the_servers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[[cluster.replicas]]\nspeed = 0.5\n\n[[cluster.replicas]]\nbatch_cap = 7\n")
    given = OPTIONS | {"backends": URLS, "cluster": path}
    first, second = load(None, given_settings(given)).backends
    assert (first.server.speed, second.server.batch_cap) == (0.5, 7)
    # What the file does not say is left to what the servers tell.
    assert first.server.model_fields_set == {"speed", "count"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no backend"),
        (["-b", "nowhere"], "is no address"),
        (["-b", URLS[0], "--cluster", "none.toml"], "none.toml"),
        (["-b", URLS[0], "-p", "lookahead"], "lookahead"),
        (["-b", URLS[0], "--listen", "8080"], "must be host:port"),
        (["-b", URLS[0], "--admin", "0.0.0.0:9"], "set admin.token_env"),
    ],
)
def test_mistakes(refuse, arguments, message):
    assert message in refuse("serve", *arguments)


def test_as_many_servers_as_backends(refuse, tmp_path):
    (tmp_path / "two.toml").write_text("[[cluster.replicas]]\ncount = 2\n")
    told = refuse("serve", "-b", URLS[0], "--cluster", "two.toml")
    assert "describes 2 replicas, but 1 are given" in told
