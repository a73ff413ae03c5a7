"""Reading decision logs with their times."""

import json

import numpy as np
import pytest

from replay.logged import write_log
from tailrace.config import Cluster, Replica, Workload
from tailrace.errors import TailraceError
from tailrace.replay import recorded
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
CLUSTER = Cluster(replicas=(Replica(count=2),))


@pytest.fixture
def log(tmp_path):
    settings = Workload(name="sessions-hot", requests=200, rate=4, load=None)
    result = write_log(tmp_path, CLUSTER, from_settings(settings, 4, 5))
    return tmp_path, result


def test_times_and_replicas_come_back(log):
    folder, result = log
    found = recorded.read(folder)
    order = np.argsort(result.requests["arrived_s"], kind="stable")
    done = result.requests[order]
    start = done["arrived_s"][0]
    for name, ours in (("arrived_s", "arrived_s"), ("first_token_s", "first_s")):
        np.testing.assert_allclose(found.outcomes[ours], done[name] - start, atol=1e-5)
    np.testing.assert_allclose(found.outcomes["last_s"], done["finished_s"] - start, atol=1e-5)
    assert (found.outcomes["replica"] == done["replica"]).all()
    assert (found.outcomes["cached_tokens"] == done["cached_tokens"]).all()
    assert (found.policies, found.replicas) == (("least_outstanding",), 2)
    rows = found.by_sending(1)
    part = found.at(rows)
    assert (part.rows["parent"] == -1).all()
    assert part.rows["arrival_s"][0] == 0


def test_two_backends_that_had_the_same_number_are_two_replicas(log):
    """The second backend is removed half way, another one gets its number, then it comes back."""
    folder, result = log
    (file,) = folder.glob("*.jsonl")
    head, *lines = file.read_text().splitlines()
    lines = sorted(map(json.loads, lines), key=lambda line: line["arrived"])
    third = len(lines) // 3
    for row, line in enumerate(lines):
        second = "new" if third <= row < 2 * third else "b"
        line["backend"] = second if line["replica"] else "a"
    file.write_text("\n".join([head, *map(json.dumps, lines)]))
    found = recorded.read(file)
    was = np.sort(result.requests, order="arrived_s")["replica"]
    is_new = (was == 1) & (np.arange(len(was)) // third == 1)
    assert found.replicas == 3
    assert (found.outcomes["replica"] == np.where(is_new, 2, was)).all()


def test_what_is_no_log_is_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,10\n")
    with pytest.raises(TailraceError, match="is no decision log"):
        recorded.read(table)
    with pytest.raises(TailraceError, match="cannot read"):
        recorded.read(tmp_path / "missing")


@pytest.mark.parametrize(("change", "what"), [
    ({"first": None}, "column first"), ({"replica": "x"}, "column replica"),
    ({"replica": float("inf")}, "column replica"), ({"replica": 10**12}, "column replica"),
    ({"first": 1.0}, "not in order"),
])  # fmt: skip
def test_damaged_lines_are_named(log, tmp_path, change, what):
    folder, _ = log
    (file,) = folder.glob("*.jsonl")
    head, first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([head, json.dumps({**json.loads(first), **change}), *rest]))
    with pytest.raises(TailraceError, match=f"line 2.*{what}"):
        recorded.read(file)


def test_a_server_that_reports_impossible_counts_spoils_no_log(log, tmp_path):
    folder, _ = log
    (file,) = folder.glob("*.jsonl")
    head, first, *rest = file.read_text().splitlines()
    changed = json.dumps({**json.loads(first), "cached_reported": 2**40})
    path = tmp_path / "decisions-x.jsonl"
    path.write_text("\n".join([head, changed, *rest]))
    assert recorded.read(path).outcomes["cached_tokens"].max() == 2**24
