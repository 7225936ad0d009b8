"""A cluster: so many nodes of so many devices, and the links inside a node and between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from shardlab.errors import UserError, find
from shardlab.hardware.collectives import COSTS, START, GroupSpan, collective_seconds, nodes_of
from shardlab.hardware.device import Device
from shardlab.hardware.figure import CONSTANTS
from shardlab.hardware.links import Link, find_link
from shardlab.hardware.measured import device_of_profile, measured_seconds
from shardlab.hardware.profile import Profile
from shardlab.models.kernels import Pointwise
from shardlab.program.lag import NO_LAG, Lag
from shardlab.rules.pieces import counted
from shardlab.rules.place import HOST

DISK_LINK = find_link("nvme")

HOST_MEMORY: float = CONSTANTS["host_memory"].value
"""Bytes/s of the host's memory that each device's share of its processors gets."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices on nodes; global ranks are placed on the nodes in order.

    Attributes:
        device: what every rank runs on.
        per_node: how many of them share a node.
        nodes: how many nodes.
        intra_node: the link between devices of a node.
        inter_node: the link between nodes; its bandwidth is that of one NIC.
        host: the link between a device and its host's memory.
        nics: how many NICs a node has, shared evenly by its devices.
        profile: what was measured on this machine; it stands in for the links.
    """

    device: Device
    per_node: int
    nodes: int
    intra_node: Link
    inter_node: Link
    host: Link
    nics: int
    profile: Profile | None = None

    @classmethod
    def of_profile(cls, profile: Profile) -> Cluster:
        """The machine that the profile was measured on: as many ranks as it has cores or devices, on one node."""
        link = Link("measured", 1.0, 0.0, 1.0, "a profile")
        most = max((processes for _, processes in profile.peaks), default=0)
        crowd = replace(profile, peaks={key: peak for key, peak in profile.peaks.items() if key[1] == most})
        return cls(device_of_profile(crowd), profile.machine.places, 1, link, link, link, 1, profile)

    def at_work(self, ranks: int) -> Cluster:
        """This cluster with so many of its devices at work: as measured, one alone has the memory to itself."""
        if self.profile is None or ranks > 1 or not self.profile.alone:
            return self
        peaks = {key: peak for key, peak in self.profile.peaks.items() if key[1] == 1}
        return replace(self, device=device_of_profile(replace(self.profile, kernels=self.profile.alone, peaks=peaks)))

    @property
    def contention(self) -> float:
        """Seconds that a second of communication takes from the compute of its rank; of data sheets none."""
        return self.profile.contention if self.profile is not None else 0.0

    @property
    def lag(self) -> Lag:
        """What a rank loses beside that where it waits for others; of data sheets nothing."""
        return self.profile.lag if self.profile is not None else NO_LAG

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} {self.device.name}"

    def require(self, ranks: int) -> None:
        """See that so many ranks have a device each.

        Raises:
            UserError: there are more ranks than devices.
        """
        if ranks > self.size:
            raise UserError(
                f"{counted(ranks, 'rank')} do not fit on {counted(self.size, 'device')} ({self}); "
                f"make the mesh smaller, or the cluster {ranks} devices"
            )

    def span(self, ranks: Sequence[int]) -> GroupSpan:
        """Where a group lies. Other groups of its axis use the rest of a node's NICs at the same time."""
        nodes, members = nodes_of(ranks, self.per_node)
        return GroupSpan(
            size=len(ranks),
            nodes=nodes,
            members=members,
            intra_node=self.intra_node.speed,
            inter_node=self.inter_node.speed * self.nics / self.per_node,
            hop_intra_node=self.intra_node.latency,
            hop_inter_node=self.inter_node.latency,
            net_step=self.inter_node.net_step,
        )

    def collective_seconds(self, kind: str, bytes: float, ranks: Sequence[int]) -> float:
        """How long a collective of these global ranks takes.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                "scatter" or "barrier".
            bytes: of the whole value: the tensor that is reduced or broadcast, the gathered result, what is scattered,
                one rank's whole input of an all_to_all.
            ranks: global numbers of the members.

        Raises:
            UserError: no collective has that name, the profile has not measured it, or bytes or ranks cannot be.
        """
        find(COSTS, kind, "collective")
        self._want_bytes(bytes)
        self._want_ranks(ranks)
        if self.profile is not None:
            return measured_seconds(self.profile, kind, bytes, len(ranks))
        return collective_seconds(kind, bytes, self.span(ranks))

    def message_seconds(self, bytes: float, source: int, target: int) -> float:
        """How long a message takes from one global rank to another.

        Raises:
            UserError: the profile has not measured it, or bytes or ranks cannot be.
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
        own = self.inter_node.speed * self.nics / self.per_node  # a device's own NICs carry a message together
        return START + self.inter_node.latency + bytes / own

    def copy_seconds(self, bytes: float, place: str) -> float:
        """How long a device takes to copy to or from the host's memory or the disk; a CPU's ranks copy their own.

        Raises:
            UserError: bytes cannot be, or the profile is one of GPUs, whose copies are not measured.
        """
        self._want_bytes(bytes)
        if self.on_cpu:
            return self.device.seconds(Pointwise("copy", bytes / 2, 0.0), "float32")  # read and written
        if self.profile is not None:
            raise UserError("the profile has no copies to the host; predict offloading on a cluster by name")
        link = self.host if place == HOST else DISK_LINK
        return START + link.latency + bytes / link.speed

    def host_seconds(self, bytes: float) -> float:
        """How long a device's share of its host's processors takes to read and write so many bytes."""
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
