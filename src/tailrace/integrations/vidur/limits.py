"""What real Vidur cannot play of a scenario, and the nearest thing it can. Needs no Vidur."""

from tailrace.config import Cluster, Replica, Scenario
from tailrace.errors import TailraceError
from tailrace.view.devices import resolved

#: Replica schedulers that both know and that mean the same in both.
SCHEDULERS = ("sarathi", "vllm", "orca")
#: What replicas of one Vidur cluster may differ in.
OWN = ("device", "cost", "speed")


def replicas_for_vidur(cluster: Cluster) -> tuple[Replica, ...]:
    """Return the replicas with cost and memory filled in, or raise if Vidur has no such cluster."""
    replicas = resolved(cluster)
    first = replicas[0]
    if first.scheduler not in SCHEDULERS:
        raise TailraceError(
            f"vidur has no replica scheduler {first.scheduler} that means the same there; it has "
            f"{', '.join(SCHEDULERS)}: add --scheduler sarathi"
        )
    if first.num_stages > 1:
        raise TailraceError("Tailrace runs Vidur with one pipeline stage: set num_stages = 1")
    for number, replica in enumerate(replicas):
        for name in Replica.model_fields:
            if name not in OWN and getattr(replica, name) != getattr(first, name):
                raise TailraceError(
                    f"all replicas of a Vidur cluster have the same {name}, but replica {number} "
                    f"has {getattr(replica, name)} and replica 0 {getattr(first, name)}"
                )
    return replicas


def nearest(scenario: Scenario) -> tuple[Scenario, list[str]]:
    """Return the scenario as Vidur can play it, and in sentences what was changed.

    Raises where nothing near it can be played.
    """
    if scenario.events:
        raise TailraceError("vidur has no failures or drains; choose a scenario without events")
    notes: list[str] = []
    kinds = []
    for kind in scenario.cluster.replicas:
        if kind.scheduler == "vllm_v1":
            other = {"scheduler": "sarathi", "scheduling_policy": "auto", "prefix_caching": False}
            kinds.append(kind.model_copy(update=other))
        else:
            kinds.append(kind)
    cluster = Cluster(replicas=tuple(kinds))
    if cluster != scenario.cluster:
        notes.append(
            "vidur has neither vllm_v1 nor a prefix cache to be driven: the replicas run sarathi"
        )
        scenario = scenario.model_copy(update={"cluster": cluster, "capacity_rps": None})
    replicas_for_vidur(scenario.cluster)
    return scenario, notes
