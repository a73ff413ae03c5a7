import numpy as np
import pytest

from learn.tiny import SCENARIO
from tailrace.config import Workload
from tailrace.learn import validation as module
from tailrace.learn.validation import Validation
from tailrace.learn.worlds import FIGURE_NAMES, CompiledPolicy, World, WorldScore
from tailrace.parallel import WorkerPool
from tailrace.seeds import Purpose, seeds

SEEDS = seeds(Purpose.TRAINING, 2, 900_000_000)
QUIET = SCENARIO.model_copy(update={"workload": Workload(name="chat", rate=4.0)})
WORKERS = WorkerPool(1)
FIGURES = {"ttft_p99_s": 0.5, "e2e_mean_s": None, "requests_per_s": 4.0}


def worlds(requests=120):
    return [
        World(scenario, seed, requests, number)
        for number, scenario in enumerate((SCENARIO, QUIET))
        for seed in SEEDS
    ]


@pytest.mark.compiled
def test_a_rule_judged_as_a_policy_gets_the_score_it_gets_as_a_rule():
    validation = Validation(worlds(), ("round_robin", "lmetric", "random"))
    validation.evaluate_rules(WORKERS)
    result = validation.evaluate(CompiledPolicy.of("lmetric"), WORKERS)
    assert result.costs == validation.rule_costs["lmetric"]
    assert validation.best_rule == ("lmetric", result.score)
    assert validation.evaluate(CompiledPolicy.of("round_robin"), WORKERS).score == 1.0
    assert result.figures == {
        name: value for name, value in validation.rule_figures["lmetric"].items() if name != "score"
    }
    for name in FIGURE_NAMES:
        assert result.figures[name] > 0, name
    for latency in ("ttft", "tpot", "e2e"):
        p50, p90, p99 = (result.figures[f"{latency}_{p}_s"] for p in ("p50", "p90", "p99"))
        assert p50 < p90 < p99
    shares = result.scenario_shares[SCENARIO.name]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1)
    assert len(result.costs) == 2
    assert len(result.largest_shares) == 4
    assert result.relative_shares.shape == (12,)
    assert result.relative_shares.mean() == pytest.approx(1)
    assert max(result.relative_shares) == pytest.approx(3 * max(result.largest_shares))


def test_scores_by_hand(monkeypatch):
    """Costs are means over a scenario's worlds; scores are geometric means over scenarios."""
    costs = iter([1.0, 3.0, 8.0, 8.0, 4.0, 4.0, 1.0, 3.0])
    played = lambda _: WorldScore(next(costs), FIGURES, (0.9, 0.1))  # noqa: E731
    validation = Validation(worlds(), ("first", "second"), played)
    monkeypatch.setattr(module.CompiledPolicy, "of", lambda name: name)
    validation.evaluate_rules(WORKERS)
    assert validation.rule_costs == {"first": (2.0, 8.0), "second": (4.0, 2.0)}
    # sqrt(4/2 * 2/8)
    assert validation.best_rule == ("second", pytest.approx(np.sqrt(0.5)))
    costs = iter([2.0, 2.0, 16.0, 16.0])
    result = validation.evaluate(None, WORKERS)
    assert result.score == pytest.approx(np.sqrt(2))
    assert result.ttft_p99_s == pytest.approx(0.5)
    assert np.isnan(result.e2e_mean_s)
    assert result.figures["requests_per_s"] == pytest.approx(4.0)
    assert validation.rule_figures["second"]["score"] == pytest.approx(np.sqrt(0.5))
    assert validation.rule_figures["first"]["ttft_p99_s"] == pytest.approx(0.5)
    assert result.largest_shares == (0.9,) * 4
    assert result.relative_shares.tolist() == pytest.approx([1.8, 0.2] * 4)
