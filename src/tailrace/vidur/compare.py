"""Many policies on identical arrivals with real Vidur as the engine. Needs no Vidur to import."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace import scenario as scenarios
from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.compare import DEFAULT_REFERENCE, Comparison, Entry, averaged, ratio_interval
from tailrace.evaluate.metrics import Summary, summarise
from tailrace.evaluate.runner import policy_for, traffic
from tailrace.parallel import Crew
from tailrace.policy import registry
from tailrace.policy.base import BuiltinPolicy, Policy
from tailrace.vidur import require
from tailrace.vidur.limits import replicas_for_vidur

#: Vidur plays some hundreds of requests per second: a comparison has to be small.
DEFAULT_REQUESTS = 500


@dataclass(frozen=True)
class _Task:
    scenario: Scenario
    rate: float | None
    policy: str
    seed: int
    warmup: float


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
    progress: Callable[[int], None] | None = None,
    *,
    reference: str = DEFAULT_REFERENCE,
    warmup_fraction: float = 0.0,
) -> Comparison:
    """Run every policy on every seed in real Vidur; the rest is as in evaluate/compare.py."""
    require()
    replicas_for_vidur(scenario.cluster)
    wanted = list(dict.fromkeys([*policies, reference]))
    for name in wanted:
        vidur_policy(scenario, name)
    if not seeds or len(set(seeds)) != len(seeds):
        raise TailraceError("a comparison needs at least one seed, and each seed once")
    rate = scenarios.resolve_rate(scenario)
    tasks = [
        _Task(scenario, rate, policy, seed, warmup_fraction) for seed in seeds for policy in wanted
    ]
    found: dict[tuple[str, int], Summary] = {}
    with Crew(jobs) as crew:
        for done, (task, summary) in enumerate(crew.run(_run_one, tasks), start=1):
            found[task.policy, task.seed] = summary
            if progress is not None:
                progress(done)
    costs = {p: np.array([found[p, seed].cost_s for seed in seeds]) for p in wanted}
    entries = []
    for policy in wanted:
        runs = tuple(found[policy, seed] for seed in seeds)
        ratio = ratio_interval(costs[policy], costs[reference])
        entries.append(Entry(policy, ratio, averaged(runs), runs))
    entries.sort(key=lambda entry: entry.mean.cost_s)
    return Comparison(scenario, rate, tuple(seeds), reference, tuple(entries))


def _run_one(task: _Task) -> Summary:
    from tailrace.vidur.simulation import simulate

    scenario = task.scenario
    result = simulate(
        scenario.cluster,
        traffic(scenario, task.rate, task.seed),
        vidur_policy(scenario, task.policy),
        router=scenario.router,
        seed=task.seed,
    )
    return summarise(result, task.warmup)
