"""Clusters by name: `h100x16`, a TOML file, or a profile: `local` for this machine's, or a JSON file.

A file names a device and its nodes, and may put its own figures in the place of the table's:

    device = "h100"             # or [device] with base = "h100" and, say, memory = 96e9
    nodes = 4
    per_node = 8
    intra_node = "nvlink4"          # or [intra_node] with base = "nvlink4" and, say, efficiency = 0.7
    inter_node = "infiniband-ndr"
    host = "pcie5"                  # between a device and the host's memory
    nics = 8
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from shardlab.errors import UserError, nearest
from shardlab.hardware.cluster import Cluster
from shardlab.hardware.device import Device
from shardlab.hardware.devices import DEVICES, find_device
from shardlab.hardware.links import Link, find_link
from shardlab.hardware.profile import Machine, Profile
from shardlab.hardware.tables import rows
from shardlab.program.nesting import read_file

T = TypeVar("T", Device, Link)

MOST_EFFICIENT = 1.1
"""The largest share of a link's bandwidth that a file may give it: what a switch sums is sent once (see `links`)."""


@dataclass(frozen=True)
class NodeType:
    """How many devices a usual node has, its links by name, its NICs, and where that was looked up."""

    devices: int
    intra_node: str
    inter_node: str
    host: str
    nics: int
    source: str


NODES = {name: NodeType(**row) for name, row in rows("nodes", "node").items()}
"""The node that each device usually sits in."""


def find_cluster(name: str, *, here: Machine | None = None, other_machine: bool = False) -> Cluster:
    """The cluster of that name.

    Args:
        name: DEVICExCOUNT, such as "h100x16"; or the path of a TOML file; or "local", what `shardlab bench` measured,
            or the path of the JSON file that its --profile wrote.
        here: this machine, which a profile has to be from.
        other_machine: take a profile from another machine.

    Raises:
        UserError: there is no such device, the count is not whole nodes, or the file does not describe a cluster.
    """
    if is_measured(name):
        path = Path(name) if name.endswith(".json") else None
        return Cluster.of_profile(Profile.read(path, here=here, other_machine=other_machine))
    if name.endswith(".toml"):
        return read_cluster(Path(name))
    if (words := _other_order(name.strip().lower())) is not None:
        raise UserError(f"{name!r} is not a cluster; {words}")
    found = re.fullmatch(r"(.+)x(\d+)", name.strip().lower())
    if found is None or int(found[2]) == 0:
        raise UserError(
            f"{name!r} is not a cluster; write DEVICExCOUNT such as h100x16, the path of a .toml file or a profile's "
            f".json, or local; "
            f"of clusters with 8 devices {nearest(name, [f'{device}x8' for device in DEVICES])}"
        )
    if (own := f"{found[1]}x") in DEVICES and found[1] not in DEVICES:
        raise UserError(
            f"{name!r} lacks the x before the count, since the device is called {own}; give {own}x{found[2]}"
        )
    device = find_device(found[1])
    return cluster_of(device, int(found[2]))


def _other_order(name: str) -> str | None:
    """What to write for a name such as 4x8xh100 or h100x4x8: nodes, their devices, and which ones."""
    devices = "|".join(map(re.escape, sorted(DEVICES, key=len, reverse=True)))
    counts = r"[1-9]\d*"
    found = re.fullmatch(rf"(?:({counts})x)?({counts})x({devices})|({devices})x({counts})x({counts})", name)
    if found is None:
        return None
    device = found[3] or found[4]
    nodes, each = int(found[1] or found[5] or 1), int(found[2] or found[6])
    usual = NODES[device].devices
    if each == usual or (nodes == 1 and (each < usual or each % usual == 0)):
        size = min(usual, each)
        count = nodes * each // size
        made_of = f"{count} nodes of {size}" if count > 1 else f"one node of {size}" if size > 1 else "one device"
        return f"write {device}x{nodes * each}, which is {made_of}"
    return (
        f"nodes of {device} usually have {usual} devices; for {nodes} of {each}, write a .toml file with "
        f'device = "{device}", nodes = {nodes} and per_node = {each}'
    )


def is_measured(name: str) -> bool:
    """Whether a cluster of that name is what `shardlab bench` measured."""
    return name.strip().lower() == "local" or name.endswith(".json")


def cluster_of(device: Device, count: int) -> Cluster:
    """Make a cluster of `count` devices on their usual nodes; fewer than a node's are part of one.

    Raises:
        UserError: they do not fill whole nodes.
    """
    node = NODES[device.name]
    per_node = min(count, node.devices)
    if count % per_node:
        raise UserError(
            f"{count} x {device.name} are not whole nodes of {per_node}; take {count - count % per_node} or "
            f"{count - count % per_node + per_node}, or describe the nodes in a .toml file"
        )
    nics = max(1, node.nics * per_node // node.devices)
    intra_node, inter_node, host = map(find_link, (node.intra_node, node.inter_node, node.host))
    return Cluster(device, per_node, count // per_node, intra_node, inter_node, host, nics)


def read_cluster(path: Path) -> Cluster:
    """The cluster that a TOML file describes; what it leaves out is as in the device's usual node.

    Raises:
        UserError: the file cannot be read, or an entry is missing, unknown or not of its type.
    """
    data = read_file(path, "TOML")
    known = ("device", "nodes", "per_node", "intra_node", "inter_node", "host", "nics")
    for key in data:
        if key not in known:
            raise UserError(f"{path}: {key!r} is no entry of a cluster; {nearest(key, known)}")
    if "device" not in data:
        raise UserError(f'{path} names no device; write device = "h100"')
    base = base_of(data["device"], None)
    if not isinstance(base, str):
        raise UserError(f'{path}: [device] has no base; write base = "h100"')
    node = NODES[find_device(base).name]
    per_node = whole(path, data, "per_node", node.devices)
    return Cluster(
        device=changed(path, find_device(base), data["device"]),
        per_node=per_node,
        nodes=whole(path, data, "nodes", 1),
        intra_node=link_of(path, data, "intra_node", node.intra_node),
        inter_node=link_of(path, data, "inter_node", node.inter_node),
        host=link_of(path, data, "host", node.host),
        nics=whole(path, data, "nics", max(1, node.nics * per_node // node.devices)),
    )


def whole(path: Path, data: dict[str, Any], key: str, default: int) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} is {value!r}, not a whole number of at least 1")
    return value


def link_of(path: Path, data: dict[str, Any], key: str, default: str) -> Link:
    given: Any = data.get(key, default)
    base = base_of(given, default)
    if not isinstance(base, str):
        raise UserError(f"{path}: {key} is {given!r}, not a link's name")
    return changed(path, find_link(base), given)


def base_of(given: Any, default: str | None) -> object:
    """The name in an entry that is either a name, or a table that says what it is based on."""
    return cast(dict[str, Any], given).get("base", default) if isinstance(given, dict) else given


def changed(path: Path, row: T, given: Any) -> T:
    """The table's row, with the numbers that the file gives instead."""
    if not isinstance(given, dict):
        return row
    numbers = [field.name for field in fields(row) if isinstance(getattr(row, field.name), (int, float))]
    new = {key: value for key, value in cast(dict[str, Any], given).items() if key != "base"}
    for key, value in new.items():
        if key not in numbers:
            raise UserError(f"{path}: {row.name} has no number called {key!r}; {nearest(key, numbers)}")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UserError(f"{path}: {key} of {row.name} is {value!r}, not a number")
        if wanted := what_else(key, value):
            raise UserError(f"{path}: {key} of {row.name} is {value!r}; give {wanted}")
    return replace(row, **new)


def what_else(key: str, value: float) -> str | None:
    """Say what a number of a device or a link should be; None if it may be as it is."""
    if key == "sms":
        return None if isinstance(value, int) and value >= 1 else "a whole number of at least 1"
    if key == "efficiency":
        good = 0 < value <= MOST_EFFICIENT
        return None if good else f"the share of its bandwidth that is reached, above 0 and at most {MOST_EFFICIENT}"
    if key in ("latency", "net_step"):
        return None if 0 <= value < float("inf") else "seconds, 0 or more"
    return None if 0 < value < float("inf") else "a number above 0"
