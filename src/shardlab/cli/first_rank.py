"""What one rank decides for all, before they compute."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardlab.train.launch_environment import find_launch_environment


def of_first_rank(choose: Callable[[], str], timeout: float | None = None) -> str:
    """What the first of the ranks that a launcher has started chooses; without a launcher, what this process does.

    All ranks call it. Hosts that were measured each by itself would choose differently.

    Args:
        timeout: seconds that the others wait for it, and it for them (None: those of `JOINING`).

    Raises:
        UserError: on every rank, what the first one raises; or when they do not meet.
    """
    world = find_launch_environment(os.environ)
    if world is None or world.world == 1:
        return choose()
    from shardlab.train.launch import JOINING, start_limit
    from shardlab.train.stores import Together  # which needs torch

    together = Together(world, JOINING.start if timeout is None else start_limit(timeout))
    found = together.all(choose if together.rank == 0 else str)
    return together.exchange(found)[0]
