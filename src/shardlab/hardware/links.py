"""Links between devices and between nodes, as data: bytes per second in one direction, for one device or one NIC.

A data sheet often adds both directions; the figures here are halves of those. What a collective really gets of a link
is its `efficiency`; where it comes from stands in `source`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.errors import find
from shardlab.hardware import sources


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

# Seconds of a hop: of a ring in NCCL's tuning model (NVIDIA/nccl src/graph/tuning.cc of v2.30, hwLatencies, LL128).
NVLINK = 1.9e-6
PCI = 2.5e-6
NETWORK = 4.0e-6
TCP = 25e-6  # a round through the kernel's network stack; an order of magnitude, not from a data sheet

# NCCL expected 235 of an A100's 300 GB/s at most (tuning.cc of v2.12, compCap80), and as much was measured with 16 GiB:
# 0.78. Of NVLink 4's 450 GB/s a ring of 8 H200 reaches 0.80 to 0.82 with gigabytes (stas00/ml-engineering
# network/README.md); CS336's on H100 imply 297 and 301 in single calls of 400 MiB (formulas.py): 0.66. The share lies
# between. All-reduces of more than 4 of them are summed in the switch (NVLS, up to 1.07), which is not modelled.
NVLINK_SHARE = 0.80
NVLINK4_SHARE = 0.70
# Most published runs hardly tell what a network gives: shares from 0.55 to 0.9 (InfiniBand) or 0.4 to 0.7 (RoCE) change
# the mean error of a source by about a point. ZeRO-3's run of SC21 (docs/validation.md), which waits for little else,
# tells InfiniBand's.
INFINIBAND_SHARE = 0.65
ROCE_SHARE = 0.70
OMNI_PATH_SHARE = 0.80
# EFA's is what all-reduces of 8 GiB on four nodes of 8 B200 reach of it, taken as a hierarchy (the same page).
EFA_SHARE = 0.74
# A single copy reaches 0.88 of PCIe 5 (the same page).
PCI_SHARE = 0.8

NVLINKS = f"{sources.NETWORK}, NVLink"
H800 = f"400 GB/s in both directions: {sources.H800}; 160 GB/s is reached (0.8): {sources.DEEPSEEK}, section 3.2.2"
TCPX = f"4 in a3-highgpu, 8 in a3-megagpu: {sources.NETWORK}, inter-node networking, after Google's documentation"

LINKS = {
    link.name: link
    for link in (
        Link("nvlink1", 80 * GB, NVLINK, NVLINK_SHARE, f"P100, 4 links to as many peers: {NVLINKS}", 20 * GB),
        Link(
            "nvlink2",
            150 * GB,
            NVLINK,
            NVLINK_SHARE,
            f"V100, 6 links, two to some peers: {NVLINKS}; iitr.ac.in/dgx",
            50 * GB,
        ),
        Link("nvlink2-switch", 150 * GB, NVLINK, NVLINK_SHARE, f"V100, 6 links: {NVLINKS}; NVSwitch as in DGX-2"),
        Link("nvlink3", 300 * GB, NVLINK, NVLINK_SHARE, f"A100, 12 links, NVSwitch: {NVLINKS}"),
        Link("nvlink3-mesh", 300 * GB, NVLINK, NVLINK_SHARE, f"A100, 4 links to each of 3 peers: {NVLINKS}", 100 * GB),
        Link("nvlink4", 450 * GB, NVLINK, NVLINK4_SHARE, f"H100, 18 links, NVSwitch: {NVLINKS}"),
        Link("nvlink4-bridge", 300 * GB, NVLINK, NVLINK4_SHARE, f"H100 PCIe, pairs: {sources.H100_PCIE}"),
        Link("nvlink4-h800", 200 * GB, NVLINK, NVLINK_SHARE, H800),
        Link("nvlink5", 900 * GB, NVLINK, NVLINK_SHARE, f"B200, 18 links, NVSwitch: {NVLINKS}"),
        Link("infinity-fabric-3", 448 * GB, NVLINK, NVLINK_SHARE, f"MI300X, {sources.INFINITY_FABRIC}", 64 * GB),
        Link("infinity-fabric-4", 535.5 * GB, NVLINK, NVLINK_SHARE, f"MI355X, {sources.INFINITY_FABRIC}", 76.5 * GB),
        Link("ici-v4", 270 * GB, NVLINK, NVLINK_SHARE, f"6 links of a torus: {sources.TPUS}", 45 * GB),
        Link("ici-v5e", 200 * GB, NVLINK, NVLINK_SHARE, f"4 links of a torus: {sources.TPU_V5E}", 50 * GB),
        Link("ici-v5p", 600 * GB, NVLINK, NVLINK_SHARE, f"6 links of a torus: {sources.TPU_V5P}", 100 * GB),
        Link("ici-v6e", 400 * GB, NVLINK, NVLINK_SHARE, f"4 links of a torus: {sources.TPU_V6E}", 100 * GB),
        Link("pcie3", 15.75 * GB, PCI, PCI_SHARE, f"half of pcie4; {sources.PCIE}"),
        Link("pcie4", 31.5 * GB, PCI, PCI_SHARE, sources.PCIE),
        Link("pcie5", 63.0 * GB, PCI, PCI_SHARE, sources.PCIE),
        Link("infiniband-edr", 100 * GBIT, NETWORK, INFINIBAND_SHARE, sources.INFINIBAND),
        Link("infiniband-hdr", 200 * GBIT, NETWORK, INFINIBAND_SHARE, sources.INFINIBAND),
        Link("infiniband-ndr", 400 * GBIT, NETWORK, INFINIBAND_SHARE, sources.INFINIBAND),
        Link("infiniband-xdr", 800 * GBIT, NETWORK, INFINIBAND_SHARE, sources.INFINIBAND),
        Link("roce-100", 100 * GBIT, NETWORK, ROCE_SHARE, f"Ethernet with RDMA: {sources.BY_NAME}"),
        Link("roce-200", 200 * GBIT, NETWORK, ROCE_SHARE, f"Ethernet with RDMA: {sources.BY_NAME}"),
        Link("roce-400", 400 * GBIT, NETWORK, ROCE_SHARE, f"Ethernet with RDMA: {sources.BY_NAME}"),
        Link("efa-100", 100 * GBIT, NETWORK, EFA_SHARE, f"4 in p4d, 32 in p5 and p5e; {sources.EFA}"),
        Link("efa-200", 200 * GBIT, NETWORK, EFA_SHARE, f"16 in p5en and trn2; {sources.EFA}"),
        Link("efa-400", 400 * GBIT, NETWORK, EFA_SHARE, f"8 in p6-b200, 16 in p6-b300; {sources.EFA}"),
        Link("gpudirect-tcpx", 200 * GBIT, NETWORK, ROCE_SHARE, TCPX),
        Link("omni-path-100", 100 * GBIT, NETWORK, OMNI_PATH_SHARE, f"{sources.NETWORK}, inter-node networking"),
        Link("slingshot-11", 200 * GBIT, NETWORK, ROCE_SHARE, f"{sources.NETWORK}, inter-node networking"),
        Link("ethernet-10", 10 * GBIT, TCP, 0.9, f"Ethernet, TCP: {sources.BY_NAME}"),
        Link("ethernet-25", 25 * GBIT, TCP, 0.9, f"Ethernet, TCP: {sources.BY_NAME}"),
        Link("ethernet-100", 100 * GBIT, TCP, 0.6, f"Ethernet, TCP: {sources.BY_NAME}"),
        Link("dcn-v5e", 25 * GBIT, TCP, 0.9, f"two NICs of 100 Gb/s for 8 chips: {sources.TPU_V5E}"),
        Link("dcn-v5p", 50 * GBIT, TCP, 0.9, f"50 Gb/s a chip between slices: {sources.TPU_V5P}"),
    )
}
"""Every link by name. Shares of PCIe and TCP are round figures of ours; Infinity Fabric and TPUs have NVLink's, and
GPUDirect has RoCE's: no published run was compared with them."""


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    return find(LINKS, name, "link")
