"""`lapilli devices`: the Vulkan devices."""

from __future__ import annotations

import dataclasses

import click

from lapilli.cli.common import console, json_option, print_json, size, table


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List the Vulkan devices, best first: name, driver, type, memory and relevant features."""
    from lapilli.runtime.devices import devices as list_devices

    found = list_devices()
    if as_json:
        print_json([dataclasses.asdict(device) for device in found])
        return
    shown = table("#", "name", "type", "driver", "Vulkan", "memory", "features", title="Vulkan devices, best first")
    for device in found:
        features = ", ".join(name for name, there in device.features.items() if there)
        shown.add_row(
            str(device.index),
            device.name,
            device.type,
            device.driver,
            device.api_version,
            size(device.memory),
            features,
        )
    console().print(shown)
