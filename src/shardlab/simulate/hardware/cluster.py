"""Clusters: nodes of devices, the links inside and between nodes, and the time that communication takes on them.

`Link` and `Cluster` come first. `find_cluster` finds a cluster by name: `h100x16`, the path of a TOML file, or a
profile (`local` for this machine's, or the path of its JSON file). A TOML file names a device and its nodes, and may
replace figures of the tables:

    device = "h100"                 # or [device] with base = "h100" and, say, memory = 96e9
    nodes = 4
    per_node = 8
    intra_node = "nvlink4"          # or [intra_node] with base = "nvlink4" and, say, efficiency = 0.7
    inter_node = "infiniband-ndr"
    host = "pcie5"                  # between a device and the host's memory
    nics = 8
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

from shardlab.common.errors import UserError, find_by_name, suggest_name
from shardlab.common.fields import (
    COUNT,
    Amount,
    Positive,
    field_types,
    number,
    read_fields,
    read_settings,
    read_value,
)
from shardlab.common.files import load_table, read_file
from shardlab.common.text import counted
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.rules.refusals import HOST
from shardlab.models.layout import Pointwise
from shardlab.simulate.hardware.collectives import COSTS, START, GroupSpan, collective_seconds, nodes_of
from shardlab.simulate.hardware.device import ALIASES, CONSTANTS, DEVICES, Device, Figure, find_device, rows
from shardlab.simulate.hardware.profile import AlphaBeta, Machine, Profile, Rate, device_of_profile, measured_seconds

SECONDS = number("seconds, 0 or more", lambda value: 0 <= value < inf)

MOST_EFFICIENT = 1.1
"""Largest efficiency that a file may give a link.

It is above 1, since an all-reduce whose values a switch sums (NVLS) can be faster than its links allow.
"""

EFFICIENCY = number(
    f"the share of its bandwidth that is reached, above 0 and at most {MOST_EFFICIENT}",
    lambda value: 0 < value <= MOST_EFFICIENT,
)


@dataclass(frozen=True)
class Link:
    """Kind of link.

    Attributes:
        name: name in a cluster file.
        bandwidth: bytes per second that one device (inside a node) or one NIC (between nodes) sends over all its lanes,
            in one direction.
        latency: seconds of a hop.
        efficiency: fraction of the bandwidth that a large collective reaches.
        pair: bytes per second of a message between two devices; less than `bandwidth` if the lanes go to different
            peers and no switch joins them (0: as `bandwidth`).
        net_step: minimum seconds of each step of a ring or a tree over several nodes, also inside nodes (0: no minimum;
            collectives then use the fastest algorithm, not only NCCL's rings and trees).
        half_speed_ranks: number of ranks that halves the bytes per second of a ring or a tree over several nodes (0:
            bytes per second do not depend on the number of ranks).
        source: source of the figures.
        figures: sources of latency and efficiency, which links of a kind share.
    """

    name: str
    bandwidth: Positive
    latency: Annotated[float, SECONDS]
    efficiency: Annotated[float, EFFICIENCY]
    source: str
    pair: Positive = 0.0
    net_step: Annotated[float, SECONDS] = 0.0
    half_speed_ranks: Amount = 0.0
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure], compare=False)

    @property
    def speed(self) -> float:
        """Bytes per second of a large collective."""
        return self.bandwidth * self.efficiency

    @property
    def pair_speed(self) -> float:
        """Bytes per second of a large message between two devices."""
        return (self.pair or self.bandwidth) * self.efficiency


_KINDS = rows("links", "kind")

LINKS = {
    name: read_settings(Link, {"name": name} | _KINDS[row.pop("kind")] | row, "links.toml", name)
    for name, row in rows("links", "link").items()
}
"""Every link by name."""


def find_link(name: str) -> Link:
    """Return the link with a name.

    Raises:
        UserError: if there is none; the message suggests the nearest names.
    """
    return find_by_name(LINKS, name, "link")


DISK_LINK = find_link("nvme")

HOST_MEMORY: float = CONSTANTS["host_memory"].value
"""Bytes/s of the host's memory for each device's share of the host's processors."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices on nodes. Ranks are placed on the nodes in order.

    Attributes:
        device: the device of every rank.
        per_node: number of devices of a node.
        nodes: number of nodes.
        intra_node: the link between devices of a node.
        inter_node: the link between nodes; its bandwidth is that of one NIC.
        host: the link between a device and its host's memory.
        nics: number of NICs of a node, shared evenly by its devices.
        profile: measurements of this machine, which replace the links.
        assumed: names of the network's fields that were not given. Their values are those of the device's usual node.
    """

    device: Device
    per_node: int
    nodes: int
    intra_node: Link
    inter_node: Link
    host: Link
    nics: int
    profile: Profile | None = None
    assumed: tuple[str, ...] = ()

    @classmethod
    def of_profile(cls, profile: Profile) -> Cluster:
        """Return the machine of a profile: one node with as many ranks as the machine has cores or devices."""
        link = Link("measured", 1.0, 0.0, 1.0, "a profile")
        processes_at_peak = max((processes for _, processes in profile.peaks), default=0)
        crowd = replace(
            profile, peaks={key: peak for key, peak in profile.peaks.items() if key[1] == processes_at_peak}
        )
        return cls(device_of_profile(crowd), profile.machine.places, 1, link, link, link, 1, profile)

    def at_work(self, ranks: int) -> Cluster:
        """Return this cluster with `ranks` busy devices.

        One rank on a measured machine has the speeds of `Profile.alone`.
        """
        if self.profile is None or ranks > 1 or not self.profile.alone:
            return self
        peaks = {key: peak for key, peak in self.profile.peaks.items() if key[1] == 1}
        return replace(self, device=device_of_profile(replace(self.profile, kernels=self.profile.alone, peaks=peaks)))

    @property
    def contention(self) -> float:
        """Seconds of compute lost for each second with a communication in flight beside it; 0 without a profile."""
        return self.profile.contention if self.profile is not None else 0.0

    @property
    def lag(self) -> Lag:
        """Time lost at a wait for other ranks, in addition to the wait and `contention`; none without a profile."""
        return self.profile.lag if self.profile is not None else NO_LAG

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} {self.device.name}"

    @property
    def network(self) -> dict[str, str | int]:
        """Names of the links that collectives use, and the number of NICs; empty for a measured machine."""
        if self.profile is not None:
            return {}
        intra_node: dict[str, str | int] = {"intra_node": self.intra_node.name} if self.per_node > 1 else {}
        inter_node: dict[str, str | int] = {"inter_node": self.inter_node.name, "nics": self.nics}
        return intra_node | (inter_node if self.nodes > 1 else {})

    @property
    def network_text(self) -> str:
        """The network and its assumed parts as text ("": there is a single device, or the machine was measured)."""
        network = self.network
        inter_node = f"{counted(self.nics, 'NIC')} of {self.inter_node.name} a node" if "nics" in network else ""
        intra_node = f"{self.intra_node.name} inside a node" if "intra_node" in network else ""
        text = ", ".join(filter(None, (inter_node, intra_node)))
        if not (guessed := [name for name in network if name in self.assumed]):
            return text
        scope = "" if len(guessed) == len(network) else f"{', '.join(guessed)} "
        return f"{text}; {scope}assumed, as in the usual node of {self.device.name}"

    def require(self, ranks: int) -> None:
        """Raise an error if there are more ranks than devices.

        Raises:
            UserError: if there are more ranks than devices.
        """
        if ranks > self.size:
            raise UserError(
                f"{counted(ranks, 'rank')} do not fit on {counted(self.size, 'device')} ({self}); "
                f"make the mesh smaller, or the cluster {ranks} devices"
            )

    def span(self, ranks: Sequence[int]) -> GroupSpan:
        """Return the layout of a group.

        Each member has only its device's share of the node's NICs, because other groups use the rest at the same time.
        """
        nodes, members = nodes_of(ranks, self.per_node)
        link = self.intra_node
        lanes = link.pair_speed * max(1, members - 1) if link.pair else link.speed  # those to the other members
        return GroupSpan(
            size=len(ranks),
            nodes=nodes,
            members=members,
            intra_node=min(link.speed, lanes),
            inter_node=self.inter_node.speed * self.nics / self.per_node,
            hop_intra_node=self.intra_node.latency,
            hop_inter_node=self.inter_node.latency,
            net_step=self.inter_node.net_step,
            half_speed_ranks=self.inter_node.half_speed_ranks,
        )

    def collective_seconds(self, kind: str, bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                "scatter" or "barrier".
            bytes: bytes of the whole value: the tensor that is reduced, broadcast or scattered, the gathered result, or
                one rank's whole input of an all_to_all.
            ranks: global numbers of the members.

        Raises:
            UserError: if there is no such collective, the profile lacks it, or bytes or ranks are invalid.
        """
        find_by_name(COSTS, kind, "collective")
        self._want_bytes(bytes)
        self._want_ranks(ranks)
        if self.profile is not None:
            return measured_seconds(self.profile, kind, bytes, len(ranks))
        return collective_seconds(kind, bytes, self.span(ranks))

    def message_seconds(self, bytes: float, source: int, target: int) -> float:
        """Return the seconds of a message from one rank to another.

        Raises:
            UserError: if the profile has no messages, or bytes or ranks are invalid.
        """
        self._want_bytes(bytes)
        self._want_ranks([source, target] if source != target else [source])
        if source == target:
            return 0.0
        if self.profile is not None:
            if self.profile.messages is None:
                raise UserError("the profile has no messages; measure them: shardlab bench collectives")
            return self.profile.messages.seconds(bytes)
        if source // self.per_node == target // self.per_node:
            return START + self.intra_node.latency + bytes / self.intra_node.pair_speed
        device_speed = self.inter_node.speed * self.nics / self.per_node  # a device's own NICs carry a message together
        return START + self.inter_node.latency + bytes / device_speed

    def copy_seconds(self, bytes: float, place: str) -> float:
        """Return the seconds of a copy between a device and the host's memory or the disk. CPU ranks copy in memory.

        Raises:
            UserError: if bytes are invalid, or the profile is of GPUs, whose copies are not measured.
        """
        self._want_bytes(bytes)
        if self.on_cpu:
            return self.device.seconds(Pointwise("copy", bytes / 2, 0.0), "float32")  # read and written
        if self.profile is not None:
            raise UserError("the profile has no copies to the host; predict offloading on a cluster by name")
        link = self.host if place == HOST else DISK_LINK
        return START + link.latency + bytes / link.speed

    def host_seconds(self, bytes: float) -> float:
        """Return the seconds in which a device's share of its host's processors reads and writes some bytes."""
        if self.on_cpu:
            return self.device.seconds(Pointwise("host", bytes / 4, 0.0), "float32")
        return bytes / HOST_MEMORY

    @property
    def on_cpu(self) -> bool:
        """Whether ranks were measured on CPU cores."""
        return self.profile is not None and self.profile.machine.backend == "gloo"

    def _want_bytes(self, bytes: float) -> None:
        if not 0 <= bytes < inf:
            raise UserError(f"{bytes} bytes cannot be sent; give 0 or more")

    def _want_ranks(self, ranks: Sequence[int]) -> None:
        if not ranks:
            raise UserError("a collective of no ranks was asked for; give the numbers of its ranks")
        if min(ranks) < 0 or max(ranks) >= self.size:
            wrong = next(rank for rank in ranks if not 0 <= rank < self.size)
            raise UserError(f"there is no rank {wrong} on {self}; its ranks are 0 to {self.size - 1}")
        if len(set(ranks)) < len(ranks):
            raise UserError(f"ranks {list(ranks)} name one twice; give each member once")


T = TypeVar("T", Device, Link)


@dataclass(frozen=True)
class NodeType:
    """Usual node of a device: number of devices, names of its links, number of NICs, and the source.

    `boards` maps other numbers of devices to the name of the link inside nodes with that number.
    """

    devices: int
    intra_node: str
    inter_node: str
    host: str
    nics: int
    source: str
    boards: Mapping[str, str] = field(default_factory=dict[str, str])

    def link_between(self, devices: int) -> str:
        """Return the name of the link inside nodes with `devices` devices."""
        return self.boards.get(str(devices), self.intra_node)


NETWORK = ("intra_node", "inter_node", "nics")
"""Fields of a cluster that describe its network."""

NODES = {name: read_settings(NodeType, row, "nodes.toml", name) for name, row in rows("nodes", "node").items()}
"""Usual node of each device."""


def find_cluster(name: str, *, this_machine: Machine | None = None, other_machine: bool = False) -> Cluster:
    """Return the cluster with a name.

    Args:
        name: DEVICExCOUNT, such as "h100x16"; or the path of a TOML file; or "local" for the measurements of `shardlab
            bench`, or the path of the JSON file that its --profile wrote.
        this_machine: this machine; a profile of another machine is refused (None: any profile is accepted).
        other_machine: accept a profile of another machine.

    Raises:
        UserError: if there is no such device, the devices do not fill whole nodes, or the file does not describe a
            cluster.
    """
    if is_measured(name):
        path = Path(name) if name.endswith(".json") else None
        return Cluster.of_profile(Profile.read(path, this_machine=this_machine, other_machine=other_machine))
    if name.endswith(".toml"):
        return read_cluster(Path(name))
    if (words := _other_order(name.strip().lower())) is not None:
        raise UserError(f"{name!r} is not a cluster; {words}")
    match = re.fullmatch(r"(.+)x(\d+)", name.strip().lower())
    if match is None or int(match[2]) == 0:
        raise UserError(
            f"{name!r} is not a cluster; write DEVICExCOUNT such as h100x16, the path of a .toml file or a profile's "
            f".json, or local; "
            f"of clusters with 8 devices {suggest_name(name, [f'{device}x8' for device in (*DEVICES, *ALIASES)])}"
        )
    if (device_name := f"{match[1]}x") in DEVICES and match[1] not in DEVICES:
        raise UserError(
            f"{name!r} lacks the x before the count, since the device is called {device_name}; "
            f"give {device_name}x{match[2]}"
        )
    device = find_device(match[1])
    return cluster_of(device, int(match[2]))


def _other_order(name: str) -> str | None:
    """Return the correct form of a name such as 4x8xh100 or h100x4x8, as advice (None: the name has neither form)."""
    devices = "|".join(map(re.escape, sorted(DEVICES, key=len, reverse=True)))
    counts = r"[1-9]\d*"
    match = re.fullmatch(rf"(?:({counts})x)?({counts})x({devices})|({devices})x({counts})x({counts})", name)
    if match is None:
        return None
    device = match[3] or match[4]
    nodes, per_node = int(match[1] or match[5] or 1), int(match[2] or match[6])
    usual = NODES[device].devices
    if per_node == usual or (nodes == 1 and (per_node < usual or per_node % usual == 0)):
        size = min(usual, per_node)
        count = nodes * per_node // size
        made_of = f"{count} nodes of {size}" if count > 1 else f"one node of {size}" if size > 1 else "one device"
        return f"write {device}x{nodes * per_node}, which is {made_of}"
    return (
        f"nodes of {device} usually have {usual} devices; for {nodes} of {per_node}, write a .toml file with "
        f'device = "{device}", nodes = {nodes} and per_node = {per_node}'
    )


def is_measured(name: str) -> bool:
    """Return whether the name of a cluster is `local` or a profile's path, and so stands for a measured machine."""
    return name.strip().lower() == "local" or name.endswith(".json")


def cluster_of(device: Device, count: int) -> Cluster:
    """Return a cluster of `count` devices on their usual nodes, or on part of one node.

    Raises:
        UserError: if they do not fill whole nodes.
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
    return Cluster(device, per_node, count // per_node, intra_node, inter_node, host, nics, assumed=NETWORK)


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a TOML file describes. Missing entries are those of the device's usual node.

    Raises:
        UserError: if the file cannot be read, or an entry is missing, unknown or of a wrong type.
    """
    file = read_settings(ClusterFile, read_file(path, "TOML"), str(path))
    device = _changed(path, find_device, file.device, None)
    node = NODES[device.name]
    return Cluster(
        device,
        per_node := file.per_node or node.devices,
        file.nodes,
        _changed(path, find_link, file.intra_node, node.link_between(per_node)),
        _changed(path, find_link, file.inter_node, node.inter_node),
        _changed(path, find_link, file.host, node.host),
        file.nics or max(1, node.nics * per_node // node.devices),
        assumed=tuple(name for name in NETWORK if getattr(file, name) is None),
    )


@dataclass(frozen=True)
class ClusterFile:
    """Entries of a cluster file. A table changes figures of the device or link that it names as `base`."""

    device: str | Mapping[str, Any]
    nodes: Annotated[int, COUNT] = 1
    per_node: Annotated[int | None, COUNT] = None
    intra_node: str | Mapping[str, Any] | None = None
    inter_node: str | Mapping[str, Any] | None = None
    host: str | Mapping[str, Any] | None = None
    nics: Annotated[int | None, COUNT] = None


def _changed(path: Path, find: Callable[[str], T], entry: str | Mapping[str, Any] | None, usual: str | None) -> T:
    """Return the device or link that an entry describes. If the entry names none, it is the one called `usual`."""
    table: dict[str, Any] = {"base": entry} if isinstance(entry, str) else {"base": usual, **(entry or {})}
    if (base := table.pop("base")) is None:
        raise UserError(f'{path}: [device] has no base; write base = "h100"')
    row = find(read_value(str, base, str(path), "base"))
    return replace(row, **read_fields(field_types(type(row)), table, str(path), row.name)) if table else row


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


FIGURES: Mapping[str, Figure] = read_value(
    Mapping[str, Figure], load_table("simulate/hardware/unmeasured.toml")["figure"], "unmeasured.toml", "figure"
)
"""Figures of an unmeasured machine, each with its source, from `unmeasured.toml`."""

DEVICE = "unmeasured cores"
"""Name of the device of an unmeasured machine."""

SPEEDS = {"float64": 0.5, "float32": 1.0, "bfloat16": 1.0, "float16": 1.0}
"""FLOP/s of a core by dtype, relative to float32."""


def unmeasured(ranks: int, memory: float) -> Cluster:
    """Return an unmeasured machine with `ranks` ranks on CPU cores, which share `memory` bytes.

    Its prices suffice to choose a plan, but not to predict a time.
    """
    value = {name: figure.value for name, figure in FIGURES.items()}
    line = AlphaBeta(value["latency"], 1 / value["bandwidth"])
    rates = {
        "matmul": (0.0, value["flops"], 0.0),
        "attention": (value["launch"], value["flops"] / 2, 0.0),
        "pointwise": (value["launch"], 0.0, value["memory"]),
        "update": (value["update"], 0.0, value["update_memory"]),
        "op:forward": (value["op"], 0.0, 0.0),
        "op:backward": (value["op"], 0.0, 0.0),
    }
    kernels = {
        (family, dtype): Rate(launch, flops * speed, bytes)
        for family, (launch, flops, bytes) in rates.items()
        for dtype, speed in SPEEDS.items()
    }
    machine = Machine(DEVICE, ranks, "", "gloo")
    lines = {(kind, 2): line for kind in COSTS}
    lag = Lag(value["lag_share"], value["lag_most"], value["lag_hidden"])
    return Cluster.of_profile(Profile(machine, lines, line, kernels, memory, contention=value["contention"], lag=lag))
