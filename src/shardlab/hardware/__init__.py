"""Devices, links and clusters: how long kernels and collectives take."""

from shardlab.hardware.cluster import Cluster
from shardlab.hardware.clusters import find_cluster
from shardlab.hardware.device import Device
from shardlab.hardware.devices import DEVICES, find_device
from shardlab.hardware.links import LINKS, Link, find_link
from shardlab.hardware.profile import AlphaBeta, Machine, Profile, Rate

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
