"""What a policy sees in the reference engine, decision by decision."""

import math

import numpy as np
import pytest

from reference_runs import replica_of, table_of
from tailrace.config import Cluster, Event, RouterSettings
from tailrace.errors import TailraceError
from tailrace.sim.reference import ReferenceEngine
from tailrace.view.records import RECENT_WORK_S


class Script:
    """Sends requests where it is told, and keeps a copy of every view. Not a Policy on purpose."""

    lowest_id_wins = True
    name = "script"

    def __init__(self, replicas):
        self.replicas = replicas
        self.seen = []

    def scores(self, view):
        self.seen.append((view.request.copy(), view.replicas.copy(), view.router.copy()))
        scores = np.ones(len(view.replicas))
        scores[self.replicas[int(view.request["id"])]] = 0.0
        return scores


def watch(rows, replicas, *, n=2, router=None, events=(), columns=None, **settings):
    """Run and return the result and what was seen at each decision."""
    scheduler = settings.pop("scheduler", "vllm_v1")
    cluster = Cluster(replicas=(replica_of(scheduler, count=n, **settings),))
    table = table_of(rows, **(columns or {}))
    script = Script(replicas)
    engine = ReferenceEngine(
        cluster, table, router=router or RouterSettings(staleness_s=0.5), events=events, seed=3
    )
    return engine.run(script), script.seen


def test_configuration_is_in_the_view():
    _, seen = watch([(0.0, 8, 1)], [0], speed=2.0, num_blocks=10, chunk_size=64, batch_cap=32)
    replica = seen[0][1][0]
    assert replica["available"] == 1
    assert replica["speed"] == 2.0
    assert replica["capacity_tokens"] == 160
    assert replica["block_size"] == 16
    assert replica["token_budget"] == 64
    assert replica["batch_cap"] == 32
    assert replica["prefill_tokens_per_s"] == 64 / 0.5
    _, seen = watch([(0.0, 8, 1)], [0], scheduler="vllm", max_batch_tokens=100)
    assert seen[0][1]["token_budget"].tolist() == [100, 100]


def test_ledger_follows_a_request_to_its_end():
    rows = [(0.0, 20, 3), (0.5, 30, 1), (1.5, 1, 1), (3.0, 1, 1), (9.0, 1, 1)]
    _, seen = watch(rows, [0, 0, 1, 1, 1])
    fields = ("in_flight", "queued", "queued_tokens", "queued_uncached", "context_tokens")
    # 0.5 s: the first is being prefilled. 1.5 s: it has one token out, the second is running.
    # 3 s: the second ended at 2 s, the first at this very instant.
    expected = [(0, 0, 0, 0, 0), (1, 1, 20, 20, 0), (2, 1, 30, 30, 21), (0, 0, 0, 0, 0)]
    assert [tuple(int(r[0][f]) for f in fields) for _, r, _ in seen[:4]] == expected
    assert [float(r[0]["queued_since_sum"]) for _, r, _ in seen[:4]] == [0.0, 0.0, 0.5, 0.0]
    last = seen[4][1][0]
    assert (last["finished"], last["finished_tokens"]) == (2, 4)
    assert [int(router["decisions"]) for _, _, router in seen] == [0, 1, 2, 3, 4]
    assert (seen[4][2]["finished"], seen[4][2]["finished_tokens"]) == (4, 6)


def test_recent_work_fades():
    _, seen = watch([(0.0, 100, 1), (90.0, 100, 1), (90.0, 1, 1)], [0, 0, 1])
    assert seen[1][1][0]["recent_work"] == 100.0
    faded = 100.0 * math.exp(-90.0 / RECENT_WORK_S)
    assert seen[2][1][0]["recent_work"] == faded + 100.0


def test_context_counts_answers_while_they_are_preempted():
    # Room for one only: the second loses its blocks at 1 s, with one token out.
    _, seen = watch(
        [(0.0, 32, 5), (0.0, 32, 5), (2.5, 1, 1)], [0, 0, 1], scheduler="vllm", num_blocks=4
    )
    assert seen[2][1][0]["context_tokens"] == (32 + 2) + (32 + 1)


def test_metrics_are_as_old_as_the_last_snapshot():
    rows = [(0.0, 40, 9), (0.1, 40, 1), (0.9, 1, 1), (1.0, 1, 1), (1.6, 1, 1)]
    _, seen = watch(rows, [0, 0, 1, 1, 1], num_blocks=10, prefix_caching=False)
    at = [float(r[0]["metrics_at"]) for _, r, _ in seen]
    assert at == [0.0, 0.0, 0.5, 1.0, 1.5]
    waiting = [int(r[0]["waiting"]) for _, r, _ in seen]
    running = [int(r[0]["running"]) for _, r, _ in seen]
    used = [float(r[0]["kv_used"]) for _, r, _ in seen]
    # At 1 s the iteration has ended but the next batch is not formed: the second still waits.
    assert waiting == [0, 0, 1, 1, 0]
    assert running == [0, 0, 1, 1, 2]
    assert used == [0.0, 0.0, 0.3, 0.3, 0.6]
    since = [(int(r[0]["sent_requests"]), int(r[0]["sent_tokens"])) for _, r, _ in seen]
    assert since == [(0, 0), (1, 40), (0, 0), (0, 0), (0, 0)]


def test_snapshot_comes_after_the_iterations_that_end_then():
    # The first request ends at 1 s, when the snapshot is due and the second request comes.
    _, seen = watch([(0.0, 40, 1), (1.0, 1, 1)], [0, 0], prefix_caching=False)
    assert (seen[1][1][0]["metrics_at"], seen[1][1][0]["running"]) == (1.0, 0)


def test_fresh_metrics_see_the_decision_just_made():
    rows = [(0.25, 8, 1), (0.25, 8, 1), (0.25, 8, 1)]
    _, seen = watch(rows, [0, 0, 0], router=RouterSettings(staleness_s=0.0))
    assert [float(r[0]["metrics_at"]) for _, r, _ in seen] == [0.25] * 3
    assert [int(r[0]["waiting"]) for _, r, _ in seen] == [0, 1, 2]
    assert [int(r[0]["sent_requests"]) for _, r, _ in seen] == [0, 0, 0]


def test_first_snapshot_is_taken_at_time_0():
    _, seen = watch([(0.0, 8, 1), (4.9, 8, 1)], [0, 0], router=RouterSettings(staleness_s=5.0))
    assert [float(r[0]["metrics_at"]) for _, r, _ in seen] == [0.0, 0.0]


def test_prefix_index_believes_what_was_sent():
    rows = [
        (0.0, 40, 8, [(7, 40)]),
        (0.5, 40, 1, [(7, 40)]),  # the first is still running
        (20.0, 64, 1, [(7, 64)]),  # 48 tokens have been there, prompt and answer
        (30.0, 32, 1, [(7, 32)]),  # all of it, but the last token is always computed
        (40.0, 40, 1),  # nothing in common
    ]
    result, seen = watch(rows, [0, 1, 0, 0, 0])
    cached = [tuple(r["cached_tokens"].tolist()) for _, r, _ in seen]
    assert cached == [(0, 0), (32, 0), (48, 32), (16, 16), (0, 0)]
    assert result.requests["expected_cached"].tolist() == [0, 0, 48, 16, 0]
    assert result.requests["cached_tokens"].tolist() == [0, 0, 48, 16, 0]
    assert [int(r[0]["index_tokens"]) for _, r, _ in seen] == [0, 40, 48, 65, 65]
    assert seen[3][1][0]["queued_uncached"] == 0


@pytest.mark.parametrize(
    "settings", [{"prefix_caching": False}, {"scheduler": "sarathi"}], ids=["off", "no cache"]
)
def test_nothing_is_believed_cached_where_nothing_is_cached(settings):
    rows = [(0.0, 40, 1, [(7, 40)]), (5.0, 40, 1, [(7, 40)])]
    _, seen = watch(rows, [0, 0], **settings)
    assert seen[1][1]["cached_tokens"].tolist() == [0, 0]
    assert seen[1][1]["index_tokens"].tolist() == [0, 0]


def test_request_view():
    rows = [(0.0, 40, 4), (1.0, 50, 6), (8.0, 60, 1)]
    columns = {
        "session": np.array([5, -1, 5]),
        "turn": np.array([0, 0, 1]),
        "priority": np.array([0, 3, 0]),
        "ttft_slo_s": np.array([1.0, 2.0, 1.0]),
    }
    router = RouterSettings(prior_output_tokens=100.0)
    _, seen = watch(rows, [1, 0, 1], columns=columns, router=router)
    requests = [request for request, _, _ in seen]
    assert [int(r["id"]) for r in requests] == [0, 1, 2]
    assert [float(r["now"]) for r in requests] == [0.0, 1.0, 8.0]
    assert [int(r["prompt_tokens"]) for r in requests] == [40, 50, 60]
    assert [int(r["session"]) for r in requests] == [5, -1, 5]
    assert [int(r["turn"]) for r in requests] == [0, 0, 1]
    assert [int(r["last_replica"]) for r in requests] == [-1, -1, 1]
    assert [int(r["priority"]) for r in requests] == [0, 3, 0]
    assert [float(r["ttft_slo_s"]) for r in requests] == [1.0, 2.0, 1.0]
    assert [float(r["predicted_output"]) for r in requests] == [100.0, 100.0, 110.0 / 3]


def test_static_predictions_replace_the_mean():
    rows = [(0.0, 40, 4), (1.0, 50, 6)]
    for predictor, expected in (("exact", [4.0, 6.0]), ("bucket", [4.0, 8.0])):
        _, seen = watch(rows, [0, 0], router=RouterSettings(predictor=predictor))
        assert [float(request["predicted_output"]) for request, _, _ in seen] == expected


def test_death_clears_what_the_router_knew():
    rows = [(0.0, 40, 9, [(7, 40)]), (5.0, 40, 1, [(7, 40)])]
    events = [Event(at_s=3.0, replica=0, kind="die"), Event(at_s=4.0, replica=0, kind="return")]
    _, seen = watch(rows, [0, 0], events=events)
    replica = seen[1][1][0]
    for field in ("in_flight", "queued", "context_tokens", "cached_tokens", "recent_work"):
        assert replica[field] == 0


def test_unavailable_replicas_are_marked_and_never_chosen():
    result, seen = watch([(1.0, 8, 1)], [0], events=[Event(at_s=0.5, replica=0, kind="drain")])
    assert seen[0][1]["available"].tolist() == [0, 1]
    assert result.requests["replica"].tolist() == [1]


class Indifferent:
    name = "indifferent"

    def scores(self, view):
        return np.zeros(len(view.replicas))


def test_ties_are_broken_by_the_seed():
    table = table_of([(float(k), 8, 1) for k in range(40)])
    cluster = Cluster(replicas=(replica_of("sarathi", count=4),))

    def choices(seed):
        return ReferenceEngine(cluster, table, seed=seed).run(Indifferent()).requests["replica"]

    assert (choices(1) == choices(1)).all()
    assert (choices(1) != choices(2)).any()
    assert set(choices(1)) == {0, 1, 2, 3}


def test_bad_scores_are_refused():
    class Short(Indifferent):
        def scores(self, view):
            return np.zeros(1)

    engine = ReferenceEngine(
        Cluster(replicas=(replica_of("sarathi", count=2),)), table_of([(0.0, 8, 1)])
    )
    with pytest.raises(TailraceError, match="one score per replica"):
        engine.run(Short())


def test_presets_give_cost_and_memory():
    engine = ReferenceEngine(Cluster(), table_of([(0.0, 8, 1)]))
    assert [replica.num_blocks for replica in engine.replicas] == [30_208] * 4
    result = engine.run(Indifferent())
    assert 0.01 < result.requests["finished_s"][0] < 0.02
