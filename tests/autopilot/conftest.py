"""A decision log for the autopilot's rounds."""

from pathlib import Path

import pytest

from replay.logged import write_log
from tailrace.assess.assessment import ServerModel
from tailrace.autopilot import pilot as pilots
from tailrace.autopilot.twin import Twin
from tailrace.config import Cluster, Replica, Workload
from tailrace.workload.library import from_settings

CLUSTER = Cluster(replicas=(Replica(speed=1.4), Replica(), Replica(speed=0.5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pilot") / "decisions"
    workload = Workload(name="sessions-hot", requests=900, rate=14.0, load=None)
    write_log(folder, CLUSTER, from_settings(workload, 14.0, 5), policy="round_robin")
    return folder


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of the log need not be fitted: they are known."""
    monkeypatch.setattr(pilots, "reported_capacity", lambda urls: {})
    monkeypatch.setattr(Twin, "fit", lambda window, known: Twin(ServerModel(CLUSTER)))
