"""Average the weights of two policies, the second trained from the first: the shipped policy's end.

    python benchmarks/average_policies.py FIRST SECOND --share 0.35 -o averaged.tailrace [--run RUN]

``--share`` is the weight of the second. With ``--run``, the folder of a training run, the average
gets its own sketch for large clusters, fitted to worlds of that run; otherwise both policies' are
averaged, if they have one. Prints the file as JSON.
"""

import argparse
import json
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.learn.trainer import Trainer
from tailrace.policy.learned import checkpoint
from tailrace.policy.learned.architecture import NetworkConfig


def main() -> None:
    """Read both, average, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.35)
    parser.add_argument("--run", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("averaged.tailrace"))
    given = parser.parse_args()
    one, first = checkpoint.read(given.first)
    about, second = checkpoint.read(given.second)
    if one["network"] != about["network"]:
        raise TailraceError("policies of different networks cannot be averaged")
    averaged = {
        name: (first[name] * (1 - given.share) + second[name] * given.share).astype(weights.dtype)
        for name, weights in first.items()
        if name in second
    }
    notes = {name: about[name] for name in ("training", "seeds", "scores")}
    checkpoint.save(given.out, NetworkConfig.model_validate(about["network"]), averaged, **notes)
    if given.run:
        Trainer(given.run, None, jobs=1).sketch(given.out)
    print(json.dumps({"policy": str(given.out), "share": given.share}))


if __name__ == "__main__":
    main()
