"""A program's process groups, on a default process group that already exists."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist

from shardlab.program import Group, Program, UserError

Groups = dict[Group, dist.ProcessGroup | None]
"""Process groups that exist, by the ranks that meet; None for those of others."""


def make_groups(program: Program, rank: int, known: Groups) -> dict[Group, dist.ProcessGroup]:
    """The groups that a rank is a member of; every rank of the program calls this.

    Those in `known` exist already; all ranks of the program know the same ones. New ones are added to it.

    Programs may use fewer ranks than there are processes, except on NCCL. Torch names a group by its members and by how
    many groups each has made before: a rank that has none to make while others do makes one of itself alone, so that
    all count alike, also in the next program. With NCCL's `device_id` torch also splits every group off from the
    world's communicator, in which each process must take part.

    Raises:
        UserError: for a group that is not in ascending order, if this torch can only make groups that are.
    """
    for groups in rounds(program, known):
        mine = next((group for group in groups if rank in group.ranks), None)
        ranks = [rank] if mine is None else list(mine.ranks)
        group = _new_group(ranks)
        known |= dict.fromkeys(groups)
        if mine is not None:
            known[mine] = group
    return {group: made for group, made in known.items() if made is not None}


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make the process group of these ranks, in this order: a rank's place in it says which piece it gives and takes.

    Torch sorts the ranks unless it is told not to, which versions before `sort_ranks` cannot be.
    """
    new_group = cast(Any, dist.new_group)
    order: dict[str, bool] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(new_group).parameters:
            named = ", ".join(map(str, ranks))
            raise UserError(
                f"the ranks {named} meet in this order, but torch {torch.__version__} makes groups in ascending order "
                "alone; name the ranks of `among` in ascending order, or use a newer torch"
            )
        order["sort_ranks"] = False
    group = new_group(list(ranks), timeout=_limit(), use_local_synchronization=True, **order)
    assert isinstance(group, dist.ProcessGroup), f"this rank is not in {ranks}"
    return group


def _limit() -> timedelta:
    """Time after which a communication of the default group is given up; torch has another for new groups."""
    world: Any = dist.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    return dist.default_pg_timeout if options is None else options._timeout  # torch's backend for tests has none


def rounds(program: Program, known: Collection[Group] = ()) -> list[list[Group]]:
    """The groups of a program that are not known yet, each round's without a common member; the same on every rank."""
    groups = {op.group for tape in program.tapes for op in tape if op.group is not None} - set(known)
    made: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: (group.axis, group.ranks)):
        members = set(group.ranks)
        free = (others for others in made if all(members.isdisjoint(other.ranks) for other in others))
        others = next(free, None)
        if others is None:
            made.append([group])
        else:
            others.append(group)
    return made
