import pytest

from tailrace.report.timelines import burst_stretch, failure_stretch, share_scenarios

pytestmark = pytest.mark.compiled


def test_stretches(loaded, played):
    assert failure_stretch(loaded, played) is None
    burst = burst_stretch(loaded, played)
    runs = {r.scenario: r for r in played.runs if r.policy == "mine"}
    assert 0 <= burst.start_s < burst.stop_s <= runs[burst.scenario].time.edges_s[-1]
    assert share_scenarios(loaded, played) == ["uniform-chat-80"]
