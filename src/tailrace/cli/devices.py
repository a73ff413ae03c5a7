"""``tailrace devices``: the device and model presets."""

import click

from tailrace.cli import console, names
from tailrace.cli.options import json_option


@click.command("devices")
@click.argument("name", required=False, shell_complete=names.devices)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the device and model presets, or show one of them (NAME)."""
    from tailrace.terminal.listings import print_listing, print_record
    from tailrace.view import devices

    presets = [devices.get(name)] if name else [devices.get(n) for n in devices.names()]
    if as_json:
        console.print_json(presets[0] if name else presets)
        return
    if name:
        device = presets[0]
        fields = {k: str(v) for k, v in device.cost.model_dump().items() if k != "knots"}
        fields["knots"] = ", ".join(f"{k:g}: {ms:g}" for k, ms in device.cost.knots)
        fields["num_blocks"] = f"{device.num_blocks} ({device.kv_tokens} tokens)"
        for field in device.derived:
            fields[field] += "  (derived)"
        print_record(
            console.stdout(),
            device.name,
            {"description": device.description, **fields, "source": device.source},
        )
        return
    rows = [
        (d.name, d.description, f"{d.cost.base_ms:g}", f"{d.kv_tokens}", ", ".join(d.derived))
        for d in presets
    ]
    headings = ("device", "description", "base ms", "KV tokens", "derived, not fitted")
    print_listing(console.stdout(), headings, rows)
