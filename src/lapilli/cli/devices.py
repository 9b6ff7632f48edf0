"""`lapilli devices`: the Vulkan devices."""

from __future__ import annotations

import dataclasses

import click

from lapilli.cli.common import console, json_option, print_json, print_table, size


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List the Vulkan devices, best first: name, driver, type, memory and relevant features."""
    from lapilli.runtime.devices import devices as list_devices

    found = list_devices()
    if as_json:
        print_json([dataclasses.asdict(device) for device in found])
        return
    rows = []
    for device in found:
        features = ", ".join(name for name, there in device.features.items() if there)
        about = (device.name, device.type, device.driver, device.api_version, size(device.memory), features)
        rows.append((str(device.index), *about))
    names = ("#", "name", "type", "driver", "Vulkan", "memory", "features")
    print_table(console(), names, rows, title="Vulkan devices, best first")
