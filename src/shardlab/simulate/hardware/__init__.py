"""Devices, links and clusters: how long kernels and collectives take."""

from shardlab.simulate.hardware.cluster import LINKS, Cluster, Link, find_cluster, find_link
from shardlab.simulate.hardware.device import DEVICES, Device, find_device
from shardlab.simulate.hardware.profile import AlphaBeta, Machine, Profile, Rate

__all__ = [
    "DEVICES",
    "LINKS",
    "AlphaBeta",
    "Cluster",
    "Device",
    "Link",
    "Machine",
    "Profile",
    "Rate",
    "find_cluster",
    "find_device",
    "find_link",
]
