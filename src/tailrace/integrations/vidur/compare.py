"""Many policies on identical arrivals with real Vidur as the engine. Needs no Vidur to import."""

from collections.abc import Callable, Sequence
from functools import partial

from tailrace.config import Scenario, VidurSettings
from tailrace.errors import TailraceError
from tailrace.evaluate.judge import compare as evaluate
from tailrace.evaluate.judge.compare import DEFAULT_REFERENCE, Comparison, ComparisonTask
from tailrace.evaluate.measure.metrics import Summary, summarise
from tailrace.evaluate.measure.runner import policy_for
from tailrace.integrations.vidur import require
from tailrace.integrations.vidur.limits import replicas_for_vidur
from tailrace.integrations.vidur.setup import SCENARIO_ONLY, VidurSetup
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
    """Return the shipped policy and the rules that can run in Vidur, and those that cannot."""
    rules = registry.rules()
    left_out = [rule.name for rule in rules if rule.in_engine]
    able = [rule.name for rule in rules if rule.name not in left_out]
    return [registry.SHIPPED_NAME, *able], left_out


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    reference: str = DEFAULT_REFERENCE,
    warmup_fraction: float = 0.0,
    own: VidurSettings = SCENARIO_ONLY,
) -> Comparison:
    """Run every policy on every seed in real Vidur; the rest is as in evaluate/judge/compare.py.

    ``own``: play these settings of Vidur's own instead of the scenario's cluster and traffic.
    """
    require()
    if not own.arguments:
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
        play=partial(_play, own),
    )


def _play(own: VidurSettings, task: ComparisonTask) -> Summary:
    setup, seed = VidurSetup(task.scenario, own), task.seed
    simulator = setup.simulator(setup.requests(task.scenario.workload.requests, seed), seed)
    simulator.use(vidur_policy(task.scenario, task.policy), seed)
    simulator.play()
    return summarise(simulator.result(), task.warmup)
