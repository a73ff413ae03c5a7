"""What policies would give on recorded traffic, on logs whose true servers are known."""

from dataclasses import replace

import numpy as np
import pytest

from replay.logged import write_log
from tailrace.assess import assessment
from tailrace.assess.assessment import (
    Assessment,
    Blocks,
    Estimate,
    Prospect,
    ReplayErrors,
    ServerModel,
    assess,
    slowest_first,
    with_targets,
)
from tailrace.config import Cluster, Replica, Scenario, Workload
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.metrics import summarise
from tailrace.evaluate.measure.runner import play, policy_for
from tailrace.replay import recorded
from tailrace.report.assessment import render_assessment, tiles_of
from tailrace.terminal.assessments import paragraph
from tailrace.workload.library import from_settings

pytestmark = pytest.mark.compiled
CLUSTER = Cluster(replicas=(Replica(speed=1.4), Replica(), Replica(speed=0.5)))
POLICIES = ("round_robin", "load_aware", "tailrace")


def requests(name="sessions-hot", count=600, rate=14.0):
    return from_settings(Workload(name=name, requests=count, rate=rate, load=None), rate, 5)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assess") / "decisions"
    write_log(folder, CLUSTER, requests(), policy="round_robin")
    return recorded.read(folder)


@pytest.fixture(scope="module")
def found(log):
    return assess(log, ServerModel(CLUSTER), POLICIES, jobs=1)


def test_the_best_policy_is_that_of_the_true_servers(log, found):
    scenario, table = Scenario(cluster=CLUSTER), requests()
    cost_s = {
        name: summarise(play(scenario, table, policy_for(scenario, name), 0)).cost_s
        for name in POLICIES
    }
    best = min(cost_s, key=cost_s.get)
    assert best != "round_robin"
    assert found.best.policy == best
    assert found.gains
    for prospect in found.prospects:
        assert prospect.cost_s.value == pytest.approx(cost_s[prospect.policy], rel=0.1)
        assert prospect.cost_s.low <= prospect.cost_s.value <= prospect.cost_s.high
    text = paragraph(found)
    assert text.startswith("Your 3 servers answered 600 requests in")
    assert f"On the same requests {best} would have the first token" in text
    assert found.present == "round_robin"


def test_the_error_is_that_against_the_record(tmp_path):
    write_log(tmp_path, CLUSTER, requests(count=300), policy="round_robin", overhead_s=0.5)
    log = recorded.read(tmp_path)
    found = assess(log, ServerModel(CLUSTER), ["round_robin"], jobs=1)
    e2e_s = float((log.outcomes["last_s"] - log.outcomes["sent_s"]).mean())
    assert found.errors.e2e == pytest.approx((e2e_s - 0.5) / e2e_s - 1, abs=0.01)
    assert found.errors.requests == 300
    assert not found.errors.held_out
    known = assess(log, ServerModel(CLUSTER, overhead_ms=(500.0,)), ["round_robin"], jobs=1)
    assert abs(known.errors.e2e) < 0.02
    assert abs(known.errors.ttft) < 0.02
    assert "own error, on 300 requests: mean first token" in paragraph(found)


def test_a_figure_of_the_replay_is_not_taken_for_one_of_the_servers():
    """The replay of the present rule misses more SLOs than it did: no gain of the best policy's."""
    sure = Estimate(0.01, 0.01, 0.01)

    def prospect(name, missed, change=None):
        share = Estimate(missed, missed, missed)
        return Prospect(name, sure, sure, sure, share, sure, change, change, change)

    less = Estimate(-0.3, -0.35, -0.25)
    found = Assessment(
        300, 60.0, 1, "round_robin", prospect("recorded", 0.003),
        (prospect("tailrace", 0.003, less), prospect("round_robin", 0.054)),
        ReplayErrors(-0.004, 0.001, 73, True, -0.004, 0.15, 0.051), None,
    )  # fmt: skip
    text = paragraph(found)
    assert "and 0.3% missed their SLO" in text
    assert "with 0.3% missed SLOs (round_robin replayed: 5.4%)" in text
    assert "first token 30% sooner (25 to 35%)" in text
    assert "mean first token 0%, mean whole answer 0%" in text
    page = render_assessment(found, "switch", "again")
    assert "<li>1 server</li>" in page
    tiles = {tile.label: tile for tile in tiles_of(found)}
    assert tiles["missed SLOs"].verdict == "even"
    assert tiles["end to end, mean"].verdict == "better"
    same = replace(found, recorded=prospect("recorded", 0.054))
    assert "with 0.3% missed SLOs instead of 5.4%" in paragraph(same)


def test_a_gain_within_the_error_is_none(tmp_path):
    """The replay is off by more than what the other policy would gain."""
    write_log(tmp_path, CLUSTER, requests("chat", 300, 3.0), policy="least_outstanding")
    slow = Cluster(replicas=tuple(r.model_copy(update={"speed": r.speed / 3})
                                  for r in CLUSTER.expanded()))  # fmt: skip
    found = assess(recorded.read(tmp_path), ServerModel(slow), ["least_predicted_ttft"], jobs=1)
    assert found.errors.worst_e2e > 0.5
    assert not found.gains
    assert "keep least_outstanding" in paragraph(found)


def test_calibration_leaves_out_what_tests_it(log):
    calibration, model = assessment.calibrate(log, Replica())
    assert model.held_out
    assert len(calibration.replicas) == 3
    points = sum(regime.count for c in calibration.replicas for regime in c.regimes)
    assert points < 2 * 600 * 0.8
    found = assess(log, model, ["tailrace"], jobs=1)
    assert 100 < found.errors.requests < 200
    assert found.errors.held_out
    assert abs(found.errors.e2e) < 0.1


def test_replicas_to_spare(found):
    """One more would make it worse than the present rule in some respect."""
    spare = {p.policy: int(p.spare.value) for p in found.prospects}
    assert spare["tailrace"] >= 1
    order = slowest_first(CLUSTER)
    assert order == [2, 1, 0]
    now = found.now
    scenario = Scenario(cluster=CLUSTER)
    each = CLUSTER.expanded()

    def means(off):
        kept = tuple(each[k] for k in sorted(order[off:]))
        fewer = scenario.model_copy(update={"cluster": Cluster(replicas=kept)})
        run = play(fewer, with_targets(requests(), None, None), policy_for(fewer, "tailrace"), 0)
        s = summarise(run)
        return s.ttft_s.mean, s.e2e_s.mean, 1 - s.slo_attainment

    limits = (now.ttft_s.value, now.e2e_s.value, now.missed.value)
    assert all(a <= 1.02 * b for a, b in zip(means(spare["tailrace"]), limits, strict=True))
    if spare["tailrace"] < 2:
        worse = zip(means(spare["tailrace"] + 1), limits, strict=True)
        assert any(a > 0.98 * b for a, b in worse)


def test_chance_is_part_of_the_interval():
    """Five replays in which nothing differs but the replay."""
    replays = np.broadcast_to(np.arange(5.0)[:, None, None], (5, 200, 4)) + 1.0
    found = Blocks.of(200).prospect("it", replays, replays)
    assert (found.ttft_s.value, found.ttft_s.low, found.ttft_s.high) == (3.0, 1.0, 5.0)
    assert (found.ttft_p99_s.value, found.ttft_p99_s.low, found.ttft_p99_s.high) == (3.0, 1.0, 5.0)
    assert found.cost_change.low == found.cost_change.high == 0.0  # of the same replays


def test_replays_shift_arrivals_and_keep_their_order():
    table = requests(count=200)
    assert assessment.shifted(table, 0) is table
    one, two = (assessment.shifted(table, k).rows for k in (1, 2))
    late_s = one["arrival_s"] - table.rows["arrival_s"]
    assert late_s.min() >= 0
    assert 0 < late_s.max() < 10 * assessment.SHIFT_S
    assert (np.diff(one["arrival_s"]) >= 0).all()
    assert (one["arrival_s"] != two["arrival_s"]).any()
    first = table.rows["parent"] < 0
    assert (one["think_s"][first] == table.rows["think_s"][first]).all()
    assert (one["think_s"][~first] > table.rows["think_s"][~first]).all()


def test_targets_decide_what_is_missed(log):
    strict, loose = (
        assess(
            replace(log, table=with_targets(log.table, target, 10.0)),
            ServerModel(CLUSTER),
            ["round_robin"],
            jobs=1,
        )
        for target in (1e-4, 1e4)
    )
    assert strict.recorded.missed.value == 1.0
    assert loose.recorded.missed.value == loose.best.missed.value == 0.0


def test_a_trace_without_latencies():
    found = assess(
        requests(count=200), ServerModel(CLUSTER), ["tailrace"], present="round_robin", jobs=1
    )
    assert found.recorded is None
    assert found.errors is None
    assert found.now.policy == "round_robin"
    assert "the replay's own error is not known" in paragraph(found)
    with pytest.raises(TailraceError, match="give --present"):
        assess(requests(count=200), ServerModel(CLUSTER), ["tailrace"])
    with pytest.raises(TailraceError, match="too few to assess"):
        assess(requests(count=10), ServerModel(CLUSTER), ["tailrace"], present="random")


def test_less_than_one_percent_is_no_gain():
    """An idle cluster: some rule is always better by a hair, and by the same hair in every draw."""
    found = assess(
        requests("chat", 400, 0.3), ServerModel(CLUSTER), ["tailrace", "lmetric", "load_aware"],
        present="least_outstanding", jobs=1,
    )  # fmt: skip
    hair = replace(found.best, policy="lmetric", cost_change=Estimate(-0.004, -0.005, -0.003))
    found = replace(found, prospects=(hair, *found.prospects))
    assert not found.gains
    text = paragraph(found)
    assert "No policy gains 1% on these requests: keep least_outstanding." in text
    assert "the first token would take" in text
    clear = replace(hair, cost_change=Estimate(-0.04, -0.05, -0.03))
    assert replace(found, prospects=(clear, *found.prospects)).gains


def test_a_rule_that_is_not_here_is_set_against_the_record(log):
    other = replace(log, policies=("nginx",))
    found = assess(other, ServerModel(CLUSTER), ["tailrace"], jobs=1)
    assert found.now is found.recorded
    assert found.errors.rule_e2e is None
    assert "nginx, cannot be replayed here" in paragraph(found)


def test_intervals_cover_the_mean_of_blocks():
    """Of independent values the interval is that of the textbook."""
    rng = np.random.default_rng(1)
    values = rng.normal(5.0, 1.0, (4000, 4))
    blocks = Blocks.of(4000)
    mean, drawn = blocks.means(values[None])
    np.testing.assert_allclose(mean, values.mean(axis=0))
    spread = np.percentile(drawn[:, 0], 97.5) - np.percentile(drawn[:, 0], 2.5)
    assert spread == pytest.approx(2 * 1.96 / np.sqrt(4000), rel=0.5)
    assert blocks.p99(values[None, :, 0]).value == pytest.approx(np.percentile(values[:, 0], 99))
