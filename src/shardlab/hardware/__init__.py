"""Devices, links and clusters: how long kernels and collectives take."""

from shardlab.hardware.cluster import Cluster
from shardlab.hardware.clusters import cluster_of, find_cluster
from shardlab.hardware.device import Device, Efficiency
from shardlab.hardware.devices import DEVICES, find_device
from shardlab.hardware.links import LINKS, Link, find_link
from shardlab.hardware.profile import AlphaBeta, Machine, Profile, Rate

__all__ = [
    "DEVICES",
    "LINKS",
    "AlphaBeta",
    "Cluster",
    "Device",
    "Efficiency",
    "Link",
    "Machine",
    "Profile",
    "Rate",
    "cluster_of",
    "find_cluster",
    "find_device",
    "find_link",
]
