"""A program's process groups, on a default process group that already exists."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch.distributed as dist

from shardlab.program import Group, Program


def make_groups(program: Program, rank: int) -> dict[Group, dist.ProcessGroup]:
    """The groups that a rank is a member of; every rank of the program calls this.

    Programs may use fewer ranks than there are processes; only members take part in making a group. For that, torch
    names a group by its members and by how many groups each has made before: a rank that has none to make while others
    do makes one of itself alone, so that all count alike, also in the next program.
    """
    made: dict[Group, dist.ProcessGroup] = {}
    for groups in rounds(program):
        mine = next((group for group in groups if rank in group.ranks), None)
        ranks = [rank] if mine is None else list(mine.ranks)
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), f"rank {rank} is not in {ranks}"
        if mine is not None:
            made[mine] = group
    return made


def rounds(program: Program) -> list[list[Group]]:
    """All groups of a program, each round's without a common member; the same on every rank."""
    groups = {op.group for tape in program.tapes for op in tape if op.group is not None}
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
