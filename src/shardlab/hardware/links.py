"""Links between devices and between nodes, as data: bytes per second in one direction, for one device or one card.

A data sheet often adds both directions; the figures here are halves of those. What a collective really gets of a link
is its `efficiency`; where it comes from stands in `source`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.hardware.names import find


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        name: how a cluster file calls it.
        bandwidth: bytes per second that one device (inside a node) or one card (between nodes) sends, all its lanes
            together, in one direction.
        latency: seconds of a hop.
        efficiency: the share of the bandwidth that a large collective gets.
        pair: bytes per second of a message between two devices; less than `bandwidth` where the lanes go to different
            peers and no switch joins them.
        source: where the figures are from.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float
    source: str
    pair: float = 0.0

    @property
    def speed(self) -> float:
        """Bytes per second that a large collective gets."""
        return self.bandwidth * self.efficiency

    @property
    def pair_speed(self) -> float:
        """Bytes per second that a large message between two devices gets."""
        return (self.pair or self.bandwidth) * self.efficiency


GB = 1e9
GBIT = 1e9 / 8

# Seconds of a hop: of a ring in NCCL's tuning model (NVIDIA/nccl src/graph/tuning.cc, hwLat, LL128).
NVLINK = 1.9e-6
PCI = 2.5e-6
NETWORK = 4.0e-6
TCP = 25e-6  # a round through the kernel's network stack; an order of magnitude, not from a data sheet

# NCCL itself expects 235 of an A100's 300 GB/s at most (tuning.cc, compCap80): 0.78. CS336's figures on H100 imply 297
# and 301 of 450 GB/s in single calls (formulas.py): 0.66.
NVLINK_SHARE = 0.80
NVLINK4_SHARE = 0.70
# Most published runs hardly tell what a network gives: shares from 0.55 to 0.9 (InfiniBand) or 0.4 to 0.7 (RoCE) change
# the mean error of a source by about a point. ZeRO-3's run of SC21 (docs/validation.md), which waits for little else,
# tells InfiniBand's.
INFINIBAND_SHARE = 0.65
ROCE_SHARE = 0.70
OMNI_PATH_SHARE = 0.80

LINKS = {
    link.name: link
    for link in (
        Link(
            "nvlink1", 80 * GB, NVLINK, NVLINK_SHARE, "P100 data sheet: 160 GB/s in both directions; 4 links", 40 * GB
        ),
        Link(
            "nvlink2", 150 * GB, NVLINK, NVLINK_SHARE, "V100 data sheet: 300 GB/s in both directions; 6 links", 50 * GB
        ),
        Link("nvlink2-switch", 150 * GB, NVLINK, NVLINK_SHARE, "V100 data sheet; NVSwitch as in DGX-2"),
        Link("nvlink3", 300 * GB, NVLINK, NVLINK_SHARE, "A100 data sheet: 600 GB/s in both directions; NVSwitch"),
        Link(
            "nvlink3-mesh", 300 * GB, NVLINK, NVLINK_SHARE, "A100 data sheet; 4 devices, 4 links to each peer", 100 * GB
        ),
        Link("nvlink4", 450 * GB, NVLINK, NVLINK4_SHARE, "H100 data sheet: 900 GB/s in both directions; NVSwitch"),
        Link(
            "nvlink4-bridge",
            300 * GB,
            NVLINK,
            NVLINK4_SHARE,
            "H100 PCIe data sheet: 600 GB/s in both directions, pairs",
        ),
        Link("nvlink5", 900 * GB, NVLINK, NVLINK_SHARE, "Blackwell data sheet: 1.8 TB/s in both directions; NVSwitch"),
        Link(
            "infinity-fabric-3",
            448 * GB,
            NVLINK,
            NVLINK_SHARE,
            "MI300X data sheet: 7 links of 128 GB/s both ways",
            64 * GB,
        ),
        Link(
            "ici-v5p",
            600 * GB,
            NVLINK,
            NVLINK_SHARE,
            "cloud.google.com/tpu/docs/v5p: 1200 GB/s both ways; torus",
            100 * GB,
        ),
        Link("pcie3", 15.75 * GB, PCI, 0.8, "PCI Express 3.0, 16 lanes of 8 GT/s, 128b/130b"),
        Link("pcie4", 31.5 * GB, PCI, 0.8, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b"),
        Link("pcie5", 63.0 * GB, PCI, 0.8, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b"),
        Link("infiniband-edr", 100 * GBIT, NETWORK, INFINIBAND_SHARE, "InfiniBand EDR, 4 lanes: 100 Gb/s"),
        Link("infiniband-hdr", 200 * GBIT, NETWORK, INFINIBAND_SHARE, "InfiniBand HDR, 4 lanes: 200 Gb/s"),
        Link("infiniband-ndr", 400 * GBIT, NETWORK, INFINIBAND_SHARE, "InfiniBand NDR, 4 lanes: 400 Gb/s"),
        Link("infiniband-xdr", 800 * GBIT, NETWORK, INFINIBAND_SHARE, "InfiniBand XDR, 4 lanes: 800 Gb/s"),
        Link("roce-100", 100 * GBIT, NETWORK, ROCE_SHARE, "Ethernet of 100 Gb/s with RDMA"),
        Link("roce-200", 200 * GBIT, NETWORK, ROCE_SHARE, "Ethernet of 200 Gb/s with RDMA"),
        Link("roce-400", 400 * GBIT, NETWORK, ROCE_SHARE, "Ethernet of 400 Gb/s with RDMA"),
        Link("omni-path-100", 100 * GBIT, NETWORK, OMNI_PATH_SHARE, "Omni-Path 100: 100 Gb/s"),
        Link("slingshot-11", 200 * GBIT, NETWORK, ROCE_SHARE, "HPE Slingshot 11: 200 Gb/s"),
        Link("ethernet-10", 10 * GBIT, TCP, 0.9, "Ethernet of 10 Gb/s, TCP"),
        Link("ethernet-25", 25 * GBIT, TCP, 0.9, "Ethernet of 25 Gb/s, TCP"),
        Link("ethernet-100", 100 * GBIT, TCP, 0.6, "Ethernet of 100 Gb/s, TCP"),
        Link("dcn-v5p", 50 * GBIT, TCP, 0.9, "cloud.google.com/tpu/docs/v5p: 50 Gb/s a chip between slices"),
    )
}
"""Every link by name. Shares of PCIe and TCP are round figures of ours."""


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    return find(LINKS, name, "link")
