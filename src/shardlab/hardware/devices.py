"""Devices by name, from `devices.toml`."""

from __future__ import annotations

from shardlab.errors import find
from shardlab.hardware.device import Device, Efficiency
from shardlab.hardware.tables import rows
from shardlab.program.files import packaged

_EFFICIENCIES = {name: Efficiency(**row) for name, row in rows("devices", "efficiency").items()}

DEVICES = {
    name: Device(
        name=name,
        flops=row["flops"],
        memory=row["memory_gib"] * 2.0**30,
        bandwidth=row["bandwidth"],
        sms=row["sms"],
        efficiency=_EFFICIENCIES[row["efficiency"]],
        source=row["source"],
    )
    for name, row in rows("devices", "device").items()
}
"""Every device by name."""

ALIASES: dict[str, str] = packaged("hardware/devices.toml")["alias"]


def find_device(name: str) -> Device:
    """The device of that name, in any case; "a100" is the one of 80 GB.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    name = name.strip().lower()
    return find(DEVICES, ALIASES.get(name, name), "device")
