"""Many policies on identical arrivals with real Vidur as the engine. Needs no Vidur to import."""

from collections.abc import Callable, Sequence

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.judge import compare as evaluate
from tailrace.evaluate.judge.compare import DEFAULT_REFERENCE, Comparison, ComparisonTask
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for, traffic
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import replicas_for_vidur
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy

#: Vidur plays some hundreds of requests per second: a comparison has to be small.
DEFAULT_REQUESTS = 500


def vidur_policy(scenario: Scenario, name: str) -> Policy:
    """Return the policy of a name, or raise if there is none or it cannot run in Vidur."""
    policy = policy_for(scenario, name)
    if isinstance(policy, BuiltinPolicy) and policy.rule.in_engine:
        raise TailraceError(f"{policy.name} runs inside Tailrace's simulator, not in Vidur")
    return policy


def default_policies() -> tuple[list[str], list[str]]:
    """Return the built-in rules that can run in Vidur, and those that cannot."""
    rules = registry.rules()
    left_out = [rule.name for rule in rules if rule.in_engine]
    return [rule.name for rule in rules if rule.name not in left_out], left_out


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    reference: str = DEFAULT_REFERENCE,
    warmup_fraction: float = 0.0,
) -> Comparison:
    """Run every policy on every seed in real Vidur; the rest is as in evaluate/judge/compare.py."""
    require()
    replicas_for_vidur(scenario.cluster)
    for name in (*policies, reference):
        vidur_policy(scenario, name)
    return evaluate.compare(
        scenario,
        policies,
        seeds,
        jobs,
        progress,
        reference=reference,
        warmup_fraction=warmup_fraction,
        play=_play,
    )


def _play(task: ComparisonTask) -> Summary:
    from tailrace.integrations.vidur.simulation import simulate

    scenario = task.scenario
    result = simulate(
        scenario.cluster,
        traffic(scenario, task.rate, task.seed),
        vidur_policy(scenario, task.policy),
        router=scenario.router,
        seed=task.seed,
    )
    return summarise(result, task.warmup)
