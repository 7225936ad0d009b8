"""The cluster of a published run, from what its source says of GPUs and network."""

from __future__ import annotations

import math
import re
from typing import Any

from shardlab.hardware import Cluster
from shardlab.hardware.clusters import NODES
from shardlab.hardware.devices import find_device
from shardlab.hardware.links import find_link

GPUS = (
    ("variant", "h100-96gb"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H100", "h100"),
    ("A100_40GB", "a100-40gb"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100", "a100-80gb"),
    ("V100", "v100"),
    ("MI300X", "mi300x"),
)
"""What a GPU's name contains, and which device that is; the first that fits."""

NETWORKS = (
    ("NVL72", "infiniband-ndr", 8),
    ("800 Gb/s per node", "infiniband-hdr", 4),
    ("Omni-Path", "omni-path-100", 4),
    ("RoCE RDMA", "roce-200", 4),  # bandwidth not stated: that of the authors' cloud is assumed
    ("1600 Gbps", "roce-200", 8),
)
"""What a network's description contains, its link, and how many cards eight GPUs share."""


def device_name(gpu: str) -> str | None:
    """The device of that description; None: unknown."""
    return next(
        (name for said, name in GPUS if re.search(rf"(?<![A-Za-z0-9]){said}(?![0-9])", gpu, re.IGNORECASE)), None
    )


def cluster_of(hardware: dict[str, Any]) -> Cluster | None:
    """The devices that a run used, on nodes joined by their links; None: the GPU is unknown."""
    name = device_name(str(hardware["gpu"]))
    if name is None:
        return None
    usual, count, said = NODES[name], int(hardware["gpus"]), str(hardware.get("interconnect") or "")
    per_node = usual.devices if "NVL72" in said else int(hardware.get("gpus_per_node") or usual.devices)
    per_node = min(per_node, count)
    link, cards = next(((link, cards) for words, link, cards in NETWORKS if words in said), (usual.inter_node, 8))
    cards = max(1, math.ceil(cards * per_node / 8))
    outside, inside = find_link(link), find_link(usual.intra_node)
    return Cluster(find_device(name), per_node, math.ceil(count / per_node), inside, outside, cards)
