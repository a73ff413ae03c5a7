"""A replica's settings as the router's records show them."""

import numpy as np
import pytest

from tailrace.config import Cluster, Engine, Replica, RouterSettings
from tailrace.sim.build import build_fleet, build_tables
from tailrace.sim.simulator import simulate
from tailrace.view.records import NEVER
from tailrace.view.replicas import idle_views, is_caching, is_chunked, replica_costs, token_budget
from tailrace.workload.library import make


@pytest.mark.parametrize(
    ("scheduler", "caching", "chunked", "budget"),
    [
        ("vllm_v1", True, True, 512),
        ("sarathi", False, True, 512),
        ("vllm", False, False, 16384),
        ("orca", False, False, 16384),
        ("faster_transformer", False, False, 16384),
        ("lightllm", False, False, 16384),
    ],
)
def test_schedulers(scheduler: str, caching: bool, chunked: bool, budget: int) -> None:
    replica = Replica.model_validate({"scheduler": scheduler})
    assert is_caching(replica) == caching
    assert not is_caching(replica.model_copy(update={"prefix_caching": False}))
    assert is_chunked(replica) == chunked
    assert token_budget(replica) == budget


def test_an_idle_replica_is_available_and_has_no_metrics() -> None:
    view = idle_views([Replica(num_blocks=100, block_size=8, speed=0.5)])[0]
    assert view["available"] == 1
    assert view["capacity_tokens"] == 800
    assert view["speed"] == 0.5
    assert view["metrics_at"] == NEVER
    assert view["in_flight"] == view["queued"] == view["finished"] == 0
    assert len(idle_views([])) == len(replica_costs([])) == 0


def test_prefill_throughput_is_that_of_full_iterations() -> None:
    slow, fast = idle_views([Replica(speed=0.5), Replica(speed=1.0)])
    assert fast["prefill_tokens_per_s"] == pytest.approx(2 * slow["prefill_tokens_per_s"])
    assert 1e3 < fast["prefill_tokens_per_s"] < 1e5


def test_the_compiled_engine_starts_from_idle_views() -> None:
    replicas = (Replica(), Replica(scheduler="vllm", speed=2.0))
    cluster, table = Cluster(replicas=replicas), make("chat", 3, 1.0, seed=1)
    router = RouterSettings()
    tables = build_tables([table], (), router, 0)
    fleet = build_fleet(cluster, [table], tables, router, Engine(), [0])
    np.testing.assert_array_equal(fleet.replicas_view[0], idle_views(replicas))
    np.testing.assert_array_equal(fleet.costs[0], replica_costs(replicas))


def test_the_router_assumes_another_speed_than_the_server_has() -> None:
    """Simulated times do not change with what the router assumes; what it chooses may."""
    right, wrong = Replica(speed=2.0), Replica(speed=2.0, assumed_speed=1.0)
    views = idle_views([right, wrong])
    assert views["speed"].tolist() == [2.0, 1.0]
    assert views["prefill_tokens_per_s"][0] == pytest.approx(2 * views["prefill_tokens_per_s"][1])
    table = make("chat", 200, 4.0, 1)
    for engine in ("compiled", "reference"):
        ends = [
            simulate(
                Cluster(replicas=(replica,)), table, "round_robin", engine=Engine(engine=engine)
            ).requests["finished_s"]
            for replica in (right, wrong)
        ]
        assert np.array_equal(*ends)
    routed = [
        simulate(
            Cluster(replicas=(Replica(), wrong)),
            table,
            "least_predicted_ttft",
            engine=Engine(engine=engine),
        ).requests["replica"]
        for engine in ("compiled", "reference")
    ]
    assert np.array_equal(*routed)
