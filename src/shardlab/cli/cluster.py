"""The cluster that a command is asked to predict for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import tyro

from shardlab.cli.amounts import read_bytes
from shardlab.program import UserError

if TYPE_CHECKING:
    from shardlab.hardware import Cluster


DeviceMemory = Annotated[str | None, tyro.conf.arg(metavar="BYTES", help_behavior_hint="(default: all of it)")]
"""Memory of each device that a step may take, such as 72GiB."""


def cluster_called(name: str, *, other_machine: bool, memory: str | None = None) -> Cluster:
    """The cluster of that name; "local" or a profile's file is this machine as measured, or another one if asked for.

    torch, which knows what this machine is, is imported for that alone.

    Args:
        name: as `find_cluster` takes it.
        other_machine: take a profile from another machine.
        memory: so much of each device's alone, as a user writes it (None: all of it).

    Raises:
        UserError: as of `find_cluster`; when `other_machine` is said of no profile, or a device has less memory.
    """
    cluster = _named(name, other_machine=other_machine)
    if memory is None:
        return cluster
    room, device = read_bytes(memory, "--memory"), cluster.device
    if room > device.memory:
        raise UserError(
            f"--memory {memory} is more than {device.name} has, {device.memory / 2**30:.0f} GiB; give less, or another "
            "cluster"
        )
    return replace(cluster, device=replace(device, memory=room))


def _named(name: str, *, other_machine: bool) -> Cluster:
    from shardlab.hardware import find_cluster
    from shardlab.hardware.clusters import is_measured

    if not is_measured(name):
        if other_machine:
            raise UserError(
                f"--other-machine is for profiles, and {name} is not a profile; give --cluster local or "
                "FILE.json, or leave it out"
            )
        return find_cluster(name)
    from shardlab.measure.saving import this_machine

    return find_cluster(name, here=this_machine(), other_machine=other_machine)
