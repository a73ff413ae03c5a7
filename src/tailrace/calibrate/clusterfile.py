"""The cluster file a calibration writes: a TOML file that every command with a cluster reads."""

from pathlib import Path

from tailrace.calibrate.iteration_fit import FIELDS
from tailrace.calibrate.result import Calibrated, Calibration
from tailrace.config import CostModel, Replica
from tailrace.files import write_text

_HEAD = """\
# Replicas measured by `tailrace calibrate` ({source}), in the order of the router's backends.
# Times in ms; the overhead of a request (network, HTTP) is taken off and not simulated.
"""
#: Settings of a replica that are not always written.
_OTHERS = tuple(
    name for name in Replica.model_fields
    if name not in ("count", "device", "cost", "speed", "num_blocks", "block_size", "batch_cap",
                    "chunk_size", "scheduler", "prefix_caching")
)  # fmt: skip


def write_cluster(calibration: Calibration, path: Path) -> None:
    """Write the cluster; the file appears whole or not at all."""
    write_text(path, cluster_toml(calibration))


def cluster_toml(calibration: Calibration) -> str:
    """Return the cluster as TOML."""
    parts = [_HEAD.format(source=calibration.source)]
    parts += [_replica(found) for found in calibration.replicas]
    return "\n".join(parts)


def _replica(found: Calibrated) -> str:
    replica, sources = found.replica, found.sources
    assert replica.cost is not None
    about = f"{found.name}: overhead {found.overhead_ms:.2f} ms per request"
    lines = ["[[cluster.replicas]]", f"# {about}", f"count = {replica.count}"]
    lines += [f'device = "{replica.device}"', f'scheduler = "{replica.scheduler}"']
    for name in ("num_blocks", "block_size", "batch_cap", "chunk_size"):
        lines.append(f"{name} = {getattr(replica, name)}  # {sources[name]}")
    lines.append(f"prefix_caching = {str(replica.prefix_caching).lower()}")
    default = Replica()
    lines += [
        f"{name} = {getattr(replica, name)}"
        for name in _OTHERS
        if getattr(replica, name) != getattr(default, name)
    ]
    return "\n".join([*lines, "", "[cluster.replicas.cost]", *_cost(replica.cost), ""])


def _cost(model: CostModel) -> list[str]:
    knots = ", ".join(f"[{tokens:.6g}, {ms:.6g}]" for tokens, ms in model.knots)
    return [*(f"{name} = {getattr(model, name):.6g}" for name in FIELDS), f"knots = [{knots}]"]
