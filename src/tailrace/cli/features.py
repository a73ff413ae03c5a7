"""``tailrace features``: the schema of what a learned policy and the environments observe."""

from typing import Any

import click

from tailrace.cli import console, names, options
from tailrace.errors import unknown_name


@click.command("features")
@click.argument("name", required=False, shell_complete=names.features)
@options.json
def command(name: str | None) -> None:
    """List the features of an observation, or show one (NAME).

    A feature is a column of observation["replicas"], which has a row per replica, or of
    observation["request"]: the quantity in its unit, after the scaling and clipped to +-10.
    """
    from tailrace.terminal.listings import print_listing, print_record

    rows = schema()
    if name is None:
        cells = [tuple(map(str, row.values())) for row in rows]
        console.show(rows, lambda screen: print_listing(screen, tuple(rows[0]), cells))
        return
    known = {row["name"]: row for row in rows}
    if name not in known:
        raise unknown_name("feature", name, known)
    fields = {key: str(value) for key, value in known[name].items() if key != "name"}
    console.show(known[name], lambda screen: print_record(screen, name, fields))


def schema() -> list[dict[str, Any]]:
    """Return every feature with the part of the observation that holds it, and its column there."""
    from tailrace.policy.learned.observation import REPLICA_FEATURES, REQUEST_FEATURES

    return [
        {
            "name": feature.name,
            "unit": feature.unit,
            "scaling": feature.scaling,
            "source": feature.source,
            "in": part,
            "column": column,
            "meaning": feature.help,
        }
        for part, features in (("replicas", REPLICA_FEATURES), ("request", REQUEST_FEATURES))
        for column, feature in enumerate(features)
    ]
