"""Links between devices and between nodes, from `links.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlab.errors import find
from shardlab.hardware.figure import Figure
from shardlab.hardware.tables import rows


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        name: how a cluster file calls it.
        bandwidth: bytes per second that one device (inside a node) or one NIC (between nodes) sends, all its lanes
            together, in one direction.
        latency: seconds of a hop.
        efficiency: the share of the bandwidth that a large collective gets.
        pair: bytes per second of a message between two devices; less than `bandwidth` where the lanes go to different
            peers and no switch joins them.
        net_step: seconds that each step of a ring or a tree over several nodes takes at least, also inside them (0: as
            its hop; gathers are then priced by what is fastest, and not as NCCL's rings).
        source: where the figures are from.
        figures: where latency and efficiency are from, which links of a kind share.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float
    source: str
    pair: float = 0.0
    net_step: float = 0.0
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure], compare=False)

    @property
    def speed(self) -> float:
        """Bytes per second that a large collective gets."""
        return self.bandwidth * self.efficiency

    @property
    def pair_speed(self) -> float:
        """Bytes per second that a large message between two devices gets."""
        return (self.pair or self.bandwidth) * self.efficiency


_KINDS = rows("links", "kind")

LINKS = {name: Link(name, **(_KINDS[row.pop("kind")] | row)) for name, row in rows("links", "link").items()}
"""Every link by name."""


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    return find(LINKS, name, "link")
