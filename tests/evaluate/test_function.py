"""``tailrace.evaluate`` is a package, and a function of the public interface."""

import pyarrow as pa

import tailrace as tr
from tailrace.evaluate.judge import suite


def test_evaluate_is_a_function_and_a_package():
    found = tr.evaluate(
        "demo",
        ["lmetric"],
        against=["round_robin"],
        seeds=1,
        selection_seeds=1,
        requests=40,
        jobs=1,
    )
    assert isinstance(found.to_arrow(), pa.Table)
    assert {p.policy for p in found.results.policies} >= {"lmetric", "round_robin"}
    assert isinstance(found.evaluation, suite.Evaluation)
