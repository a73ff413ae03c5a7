"""``tailrace devices``: the device and model presets."""

import click

from tailrace.cli import console, names, options


@click.command("devices")
@click.argument("name", required=False, shell_complete=names.devices)
@options.json
def command(name: str | None) -> None:
    """List the device and model presets, or show one of them (NAME)."""
    from tailrace.terminal.listings import print_listing, print_record
    from tailrace.view import devices

    if name:
        device = devices.get(name)
        fields = {k: str(v) for k, v in device.cost.model_dump().items() if k != "knots"}
        fields["knots"] = ", ".join(f"{k:g}: {ms:g}" for k, ms in device.cost.knots)
        fields["num_blocks"] = f"{device.num_blocks} ({device.kv_tokens} tokens)"
        for field in device.derived:
            fields[field] += "  (derived)"
        fields = {"description": device.description, **fields, "source": device.source}
        console.show(device, lambda screen: print_record(screen, device.name, fields))
        return
    presets = [devices.get(n) for n in devices.names()]
    rows = [
        (d.name, d.description, f"{d.cost.base_ms:g}", f"{d.kv_tokens}", ", ".join(d.derived))
        for d in presets
    ]
    headings = ("device", "description", "base ms", "KV tokens", "derived, not fitted")
    console.show(presets, lambda screen: print_listing(screen, headings, rows))
