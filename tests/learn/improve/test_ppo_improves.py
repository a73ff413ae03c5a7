"""PPO improves a small clone of simple rules until it beats them: the whole way, in seconds."""

import pytest

torch = pytest.importorskip("torch")

from tailrace.config import Cluster, Replica, Scenario, Workload  # noqa: E402
from tailrace.learn import settings as s  # noqa: E402
from tailrace.learn.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.compiled

#: Equal replicas near saturation: who counts requests does not see how long their prompts are.
SCENARIO = Scenario(
    name="small",
    cluster=Cluster(replicas=(Replica(count=3),)),
    workload=Workload(name="chat", arrivals="poisson", rate=20.0),
)
RULES = ("least_outstanding", "round_robin", "random")
SETTINGS = {
    "scenarios": [SCENARIO.model_dump(mode="json")],
    "advantage": "grouped",
    "objective": "clipped",
    "updates": 6,
    "network": {"hidden": 16, "attention": 8, "heads": 2, "scorer_hidden": 8, "value_hidden": 8},
    "demonstrations": {
        "rounds": 1, "worlds": 6, "decisions": 200, "warmup": 100, "epochs": 8, "batch_size": 64,
        "teachers": {"least_outstanding": 1, "round_robin": 1, "random": 1, "lookahead": 0},
    },
    # Rollouts of 25 s: a request stays for seven.
    "ppo": {
        "clusters": 16, "group_size": 8, "decisions": 512, "warmup": 256, "minibatch": 1024,
        "learning_rate": 3e-3, "discount_half_life_s": 60.0, "gae_lambda_half_life_s": 30.0,
    },
    "evaluation": {"every": 100, "worlds": 2, "requests": 1500, "baselines": list(RULES)},
}  # fmt: skip


def test_ppo_improves_a_clone_of_simple_rules_until_it_beats_them_all(tmp_path):
    """The last policy, not the best. Fails if advantages have the wrong sign."""
    trainer = Trainer(tmp_path / "run", s.build(SETTINGS), 1)
    scores = []
    evaluate = trainer.validation.evaluate
    trainer.validation.evaluate = lambda *given: scores.append(evaluate(*given)) or scores[-1]
    trainer.run()
    cloned, last = [result.score for result in scores]
    rules = {rule: trainer.validation.score(c) for rule, c in trainer.validation.rule_costs.items()}
    assert set(rules) == set(RULES)
    assert last < 0.99 * cloned
    assert last < 0.95 * min(rules.values())
