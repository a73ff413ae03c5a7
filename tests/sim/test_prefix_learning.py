"""When the prefix index learns of a prompt: when sent, at the first token, by KV events."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.test_compiled import EXACT, REFERENCE, TROUBLE, assert_same, longest, small_tables, three
from sim.test_fleet import empty_twin, rule
from tailrace.config import Cluster, Engine, Replica, RouterSettings
from tailrace.policy import registry
from tailrace.policy.base import Policy
from tailrace.sim.build import build_fleet, build_tables
from tailrace.sim.fleet import copy_cluster, run_for
from tailrace.sim.simulator import Simulation, simulate
from tailrace.workload import library
from tailrace.workload.table import RequestTable

LEARNING = (
    RouterSettings(prefix_learns="first_token"),
    RouterSettings(prefix_learns="events"),
    RouterSettings(prefix_learns="events", events_lag_s=0.4),
)
each_way = pytest.mark.parametrize("router", LEARNING, ids=["first_token", "events", "late events"])


class Recorder(Policy):
    """Sends everything to replica 0 and keeps what the index believed of it."""

    name = "recorder"

    def __init__(self) -> None:
        self.cached: list[int] = []

    def scores(self, view):  # type: ignore[no-untyped-def]
        self.cached.append(int(view.replicas["cached_tokens"][0]))
        return np.arange(len(view.replicas), dtype=float)


def repeated(arrivals: list[float]) -> RequestTable:
    """The same prompt of 640 tokens at each of some times, answered with 400 tokens."""
    count = len(arrivals)
    prompts, outputs = np.full(count, 640), np.full(count, 400)
    return RequestTable.build(np.array(arrivals), prompts, outputs, [[(7, 640)]] * count)


@pytest.mark.parametrize("engine", [EXACT, REFERENCE], ids=["compiled", "reference"])
def test_known_answers(engine: Engine) -> None:
    one = Cluster(replicas=(Replica(),))
    # The first prompt takes about 60 ms and its answer 3 s.
    table = repeated([0.0, 0.001, 0.5, 1.5])
    alone = simulate(one, table, "random", engine=engine).requests
    assert 0.001 < alone["first_token_s"][0] < 0.5 < alone["finished_s"][0]
    assert alone["first_token_s"][0] + 1.0 < 1.5 < alone["finished_s"][0]
    whole = 639 // 16 * 16  # the last token of a prompt is always computed
    for router, believed in (
        (RouterSettings(), [0, whole, whole, whole]),
        (RouterSettings(prefix_learns="first_token"), [0, 0, whole, whole]),
        (RouterSettings(prefix_learns="events"), [0, 0, whole, whole]),
        (RouterSettings(prefix_learns="events", events_lag_s=1.0), [0, 0, 0, whole]),
        (RouterSettings(prefix_learns="events", events_lag_s=9.0), [0, 0, 0, 0]),
    ):
        policy = Recorder()
        simulate(one, table, policy, router=router, engine=engine)
        assert policy.cached == believed, router


@pytest.mark.compiled
@each_way
@pytest.mark.parametrize("policy", ["sglang_cache_aware", "dynamo", "dynamo+order", "lmetric"])
@pytest.mark.parametrize("trouble", [(), TROUBLE], ids=["calm", "trouble"])
def test_both_engines_agree(router: RouterSettings, policy: str, trouble) -> None:  # type: ignore[no-untyped-def]
    for workload in ("sessions-hot", "agents"):
        table = library.make(workload, 120, 12.0, seed=8)
        same = {"router": router, "events": trouble, "seed": 2}
        cluster = three("vllm_v1", max(900, -(-longest(table) // 16) + 50))
        assert_same(
            simulate(cluster, table, policy, engine=REFERENCE, **same),
            simulate(cluster, table, policy, engine=EXACT, **same),
        )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_tables(), st.sampled_from(LEARNING))
def test_both_engines_agree_on_odd_cases(table: RequestTable, router: RouterSettings) -> None:
    assume(longest(table) <= 1500)
    cluster = three("vllm_v1", 230)
    for policy in ("dynamo", "cache_aware"):
        results = [
            simulate(cluster, table, policy, router=router, engine=engine, seed=1)
            for engine in (REFERENCE, EXACT)
        ]
        assert_same(*results)


@pytest.mark.compiled
@each_way
def test_what_is_believed_depends_on_it(router: RouterSettings) -> None:
    table = library.make("sessions-hot", 300, 20.0, seed=2)
    believed = [
        int(
            simulate(three("vllm_v1"), table, "lmetric", router=r).requests["expected_cached"].sum()
        )
        for r in (RouterSettings(), router)
    ]
    assert believed[1] < believed[0]


@pytest.mark.compiled
def test_a_copy_takes_the_events_on_their_way_along() -> None:
    table = library.make("sessions-hot", 200, 20.0, seed=2)
    router = RouterSettings(prefix_learns="events", events_lag_s=2.0)
    simulation = Simulation(three("vllm_v1"), table, router=router)
    for _ in range(80):
        simulation.next_decision()
        simulation.assign(0)
    twin = simulation.copy()
    tables = build_tables([table], (), router, seed=0)
    fleet = build_fleet(three("vllm_v1"), [table], tables, router, Engine(), [0])
    run_for(fleet, tables, 0, *rule("lmetric"), 4.0)
    copied = empty_twin(fleet)
    copy_cluster(fleet, 0, copied, 0)
    assert fleet.servers["event_head"].max() >= 0
    for each in (simulation, twin):
        each.run(registry.get("lmetric"))
    assert simulation.result().requests.tobytes() == twin.result().requests.tobytes()
    for each in (fleet, copied):
        run_for(each, tables, 0, *rule("lmetric"), 9.0)
    assert fleet.replicas_view.tobytes() == copied.replicas_view.tobytes()
    assert fleet.index_totals["held_tokens"].tolist() == copied.index_totals["held_tokens"].tolist()
