"""The decision log: complete, without text, rotated, and harmless when the disk is not."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from router.clusters import Clock, chat, new_cluster, send
from tailrace.errors import TailraceError
from tailrace.router.observe.decision_log import DecisionLog, DecisionLogSettings, load_salt
from tailrace.router.state.cluster import ClusterState

SECRET = "xyzzy plugh"


def _log(folder: Path | None, **settings: Any) -> DecisionLog:
    return DecisionLog(DecisionLogSettings(folder=folder, **settings), b"s" * 32, clock_now=0.0)


def _play(log: DecisionLog, cluster: ClusterState, count: int = 1) -> None:
    for i in range(count):
        attempt = send(cluster, chat(f"{SECRET} {i} " * 100, user=SECRET))
        attempt.tokens(2)
        attempt.usage(700, 9, 64)
        attempt.close("done")
        log.write(attempt, "done")


def _lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("decisions-*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += [json.loads(line) for line in data.splitlines()]
    return [line for line in found if "id" in line]


def test_times_follow_a_machine_whose_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of the last minutes of a log use the machine's clock, not its uptime."""
    clock = Clock(50.0)
    cluster = new_cluster(2, clock)
    log = _log(tmp_path)
    started = time.time()
    for elapsed_s, set_by_s in ((10.0, 0.0), (20.0, 0.3), (30.0, 600.0), (40.0, 600.0)):
        now = started + elapsed_s + set_by_s
        monkeypatch.setattr(time, "time", lambda now=now: now)
        clock.now = elapsed_s
        log.keep_time(clock.now)
        _play(log, cluster)
    log.close()
    arrived = [line["arrived"] - started for line in _lines(tmp_path)]
    # A few tenths of a second would only put requests out of order.
    assert arrived == pytest.approx([10.0, 20.0, 630.0, 640.0], abs=0.1)


def test_a_line_says_all_there_is_to_know(tmp_path: Path) -> None:
    clock = Clock(50.0)
    cluster = new_cluster(2, clock)
    log = _log(tmp_path)
    attempt = send(cluster, chat("hello " * 300, priority=2), 1)
    clock.now = 51.0
    attempt.tokens(1)
    clock.now = 53.0
    attempt.usage(450, 12, 0)
    attempt.close("done")
    log.write(attempt, "done")
    log.close()
    (line,) = _lines(tmp_path)
    assert (line["replica"], line["policy"], line["outcome"]) == (1, "least_outstanding", "done")
    assert (line["prompt_tokens"], line["prompt_known"]) == (450, "usage")
    assert (line["output_tokens"], line["priority"], line["model"]) == (12, 2, "m")
    assert (line["cached_believed"], line["cached_reported"]) == (0, 0)
    assert line["first"] - line["arrived"] == pytest.approx(1.0)
    assert line["last"] - line["sent"] == pytest.approx(3.0)
    assert line["estimated"] is False
    assert log.written == 1


def test_no_text_and_no_name_of_a_user_is_written(tmp_path: Path) -> None:
    log = _log(tmp_path)
    _play(log, new_cluster(1), 3)
    log.close()
    data = b"".join(path.read_bytes() for path in tmp_path.glob("decisions-*"))
    assert b"id" in data
    for part in SECRET.split():
        assert part.encode() not in data


def test_equal_content_has_equal_hashes_under_one_salt_only(tmp_path: Path) -> None:
    cluster = new_cluster(1)
    found = []
    for name, salt in (("a", b"1" * 32), ("b", b"1" * 32), ("c", b"2" * 32)):
        settings = DecisionLogSettings(folder=tmp_path / name)
        log = DecisionLog(settings, salt, clock_now=0.0)
        _play(log, cluster)
        log.close()
        found.append(_lines(tmp_path / name)[0])
    assert found[0]["blocks"] == found[1]["blocks"] != found[2]["blocks"]
    assert found[0]["session"] == found[1]["session"] != found[2]["session"]


def test_content_may_be_left_out(tmp_path: Path) -> None:
    log = _log(tmp_path, content=False)
    _play(log, new_cluster(1))
    log.close()
    assert "blocks" not in _lines(tmp_path)[0]


def test_files_are_rotated_by_size_compressed_and_limited_in_number(tmp_path: Path) -> None:
    log = _log(tmp_path, max_mb=0.005, keep=3)
    _play(log, new_cluster(1), 60)
    log.close()
    files = sorted(path.name for path in tmp_path.glob("decisions-*"))
    assert len([name for name in files if name.endswith(".gz")]) >= 2
    assert len(files) <= 4  # three, and the one under way
    assert not list(tmp_path.glob("*.partial"))
    ids = [int(line["id"].split("-")[1]) for line in _lines(tmp_path)]
    assert ids == list(range(ids[0], 60))
    assert log.dropped == 0


def test_a_file_is_closed_by_age(tmp_path: Path) -> None:
    log = _log(tmp_path, max_age_s=1e-9)
    _play(log, new_cluster(1), 3)
    log.close()
    assert len(list(tmp_path.glob("decisions-*.gz"))) == 3


def test_what_a_dead_router_left_is_compressed_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "decisions-20200101T000000-999999999-0001.jsonl"
    left.write_bytes(b'{"tailrace":"decisions","format":1}\n')
    log = _log(tmp_path)
    _play(log, new_cluster(1))
    log.close()
    assert not left.exists()
    assert left.with_name(left.name + ".gz").exists()


def test_a_disk_that_fails_costs_lines_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    log = _log(blocked / "log")
    cluster = new_cluster(1)
    _play(log, cluster, 5)
    log.close()
    assert (log.written, log.dropped) == (0, 5)
    assert log.last_error
    assert cluster.replicas[0]["in_flight"] == 0


FULL = """
import resource, signal, sys
from pathlib import Path
from router.clusters import new_cluster
from router.observe.test_decision_log import _log, _play
from tailrace.router.observe import decision_log

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room, keep, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
decision_log._RETRY_S = 0.0  # try again with every batch
log, cluster = _log(folder, keep=keep, max_mb=0.05), new_cluster(1)
_play(log, cluster, 3)
log.flush()
while log.written < 3:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
for _ in range(6):
    taken = log._taken
    _play(log, cluster, 40)
    log.flush()
    while log._taken == taken:
        pass
log.close()
print(log.written, log.dropped)
"""


def _run(code: str, *arguments: object) -> str:
    """Run code in a process of its own, whose files cannot grow beyond a size."""
    folder = Path(__file__).parents[2]
    path = os.pathsep.join((str(folder), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("room", [10, 9000])
def test_a_full_disk_leaves_whole_lines_and_no_empty_files(tmp_path: Path, room: int) -> None:
    written, dropped = map(int, _run(FULL, room, 3, tmp_path).split())
    assert written + dropped == 3 + 240
    assert dropped > 0
    files = sorted(tmp_path.iterdir())
    # What was written before is still there: failures do not push it out.
    assert 1 <= len(files) <= 4
    assert all(path.name.startswith("decisions-") for path in files)
    lines = _lines(tmp_path)  # each can be read
    assert len(lines) <= written
    assert lines[0]["id"].endswith("-0")
    for path in files:
        data = path.read_bytes()
        assert (gzip.decompress(data) if path.suffix == ".gz" else data).count(b"\n") > 1


SALT = """
import resource, signal, sys
from pathlib import Path
from tailrace.errors import TailraceError
from tailrace.router.observe.decision_log import load_salt

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    load_salt(Path(sys.argv[2]))
except TailraceError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_damaged_salt(tmp_path: Path) -> None:
    assert "cannot use" in _run(SALT, 7, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "salt").touch()  # as left by earlier versions
    assert len(load_salt(tmp_path)) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["salt"]


def test_a_line_is_made_when_it_is_asked_for_or_enough_have_come(tmp_path: Path) -> None:
    log = _log(tmp_path)
    cluster = new_cluster(1)
    _play(log, cluster, 3)
    log.flush()
    log.flush()  # there is nothing more
    _play(log, cluster, 100)
    log.close()
    ids = [int(line["id"].split("-")[1]) for line in _lines(tmp_path)]
    assert ids == list(range(103))
    assert (log.written, log.dropped) == (103, 0)


def test_a_line_that_cannot_be_made_costs_lines_only(tmp_path: Path) -> None:
    log = _log(tmp_path)
    attempt = send(new_cluster(1), chat("x"))
    attempt.close("done")
    attempt.arrival.asked.model = "\ud800"  # no JSON can hold it
    log.write(attempt, "done")
    log.close()
    assert (log.written, log.dropped) == (0, 1)
    assert log.last_error


def test_without_a_folder_nothing_happens() -> None:
    log = _log(None)
    _play(log, new_cluster(1))
    log.close()
    assert log.written == log.dropped == 0


def test_the_salt_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "log"
    salt = load_salt(folder)
    assert len(salt) == 32
    assert load_salt(folder) == salt
    assert (folder / "salt").stat().st_mode & 0o777 == 0o600
    assert load_salt(None) != load_salt(None)
    (folder / "salt").write_bytes(b"short")
    with pytest.raises(TailraceError, match="damaged"):
        load_salt(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(TailraceError, match="cannot use"):
        load_salt(tmp_path / "file" / "log")
