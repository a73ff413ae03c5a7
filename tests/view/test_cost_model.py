"""The cost model: slopes may fall, times never; one answer in both engines."""

import numpy as np
import pytest

from tailrace.calibrate.iteration_fit import predicted_ms
from tailrace.config import Cluster, CostModel, Engine, Replica, parse
from tailrace.errors import TailraceError
from tailrace.sim.simulator import simulate
from tailrace.view.cost_model import cost_rows, iteration_s
from tailrace.workload import library

#: A mixture of experts: the first tokens are the dearest. The knots need not be sorted.
CONCAVE = CostModel(
    base_ms=16.0, per_token_ms=0.17, knots=((256, -0.045), (32, -0.10), (512, 0.02)),
    per_context_ms=3e-5, per_prefill_ms=6e-6,
)  # fmt: skip


def test_times_follow_the_knots_and_never_fall():
    (row,) = cost_rows([CONCAVE])
    tokens = np.arange(1, 3000)
    ms = np.array([1e3 * iteration_s(row, t, 0.0, 0.0, 1.0) for t in tokens.tolist()])
    assert (np.diff(ms) > 0).all()
    assert ms == pytest.approx(predicted_ms(CONCAVE, tokens, 0 * tokens, 0 * tokens), rel=1e-12)
    slopes = np.diff(ms)[[10, 100, 300, 1000]]
    assert slopes == pytest.approx([0.17, 0.07, 0.025, 0.045], rel=1e-9)


@pytest.mark.parametrize(
    "knots", [[[32, -0.2]], [[64, -0.1], [128, -0.08]], [[128, 0.5], [64, -0.18]]]
)
def test_a_token_never_costs_less_than_nothing(knots):
    data = {"base_ms": 10, "per_token_ms": 0.17, "knots": knots}
    with pytest.raises(TailraceError, match="tokens on a token would cost -0"):
        parse(CostModel, data)


def test_a_flat_end_is_allowed():
    model = CostModel(base_ms=1, per_token_ms=0.3, knots=((10, -0.1), (20, -0.2)))
    assert predicted_ms(model, [20, 500], [0, 0], [0, 0]).tolist() == pytest.approx([6.0, 6.0])


@pytest.mark.compiled
@pytest.mark.parametrize("policy", ["least_outstanding", "least_predicted_ttft"])
def test_engines_agree_on_falling_slopes(policy):
    table = library.make("chat", 150, 12.0, 3)
    cluster = Cluster(replicas=(Replica(count=2, cost=CONCAVE, num_blocks=4000),))
    both = [
        simulate(cluster, table, policy, engine=Engine(engine=name, exact=True))
        for name in ("compiled", "reference")
    ]
    assert both[0].requests.tobytes() == both[1].requests.tobytes()
