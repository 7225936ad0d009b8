"""The cluster that a command is asked to predict for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.program import UserError

if TYPE_CHECKING:
    from shardlab.hardware import Cluster


def cluster_called(name: str, *, force: bool) -> Cluster:
    """The cluster of that name; "local" or a profile's file is this machine as measured, or another one by force.

    torch, which knows what this machine is, is imported for that alone.

    Raises:
        UserError: as of `find_cluster`; or when nothing is there that could be forced.
    """
    from shardlab.hardware import find_cluster
    from shardlab.hardware.clusters import is_measured

    if not is_measured(name):
        if force:
            raise UserError(
                f"--force takes a profile, and {name} is none; give --cluster local or FILE.json, or leave it out"
            )
        return find_cluster(name)
    from shardlab.measure.saving import this_machine

    return find_cluster(name, here=this_machine(), force=force)
