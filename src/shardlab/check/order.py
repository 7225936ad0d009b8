"""Groups that share two or more ranks issue their common collectives in one order on all of them.

Otherwise two communicators can each hold one rank while waiting for the other (NCCL's documentation, "Using
multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from itertools import combinations

from shardlab.program import Group, Program, Refused
from shardlab.program.tape import COLLECTIVES


def check_common_order(program: Program) -> None:
    """Compare, for every two groups that share ranks, the order of their collectives on each shared rank.

    Raises:
        Refused: naming the two ranks and the first place where they differ.
    """
    issued = [[(op.group, at) for at, op in enumerate(tape) if op.kind in COLLECTIVES] for tape in program.tapes]
    seen: set[tuple[Group, Group]] = set()
    for rank, calls in enumerate(issued):
        groups = list(dict.fromkeys(group for group, _ in calls if group is not None))
        for one, other in combinations(groups, 2):
            shared = sorted(set(one.ranks) & set(other.ranks))
            if len(shared) < 2 or (one, other) in seen:
                continue
            seen |= {(one, other), (other, one)}
            reference = [call for call in issued[rank] if call[0] in (one, other)]
            for peer in shared:
                theirs = [call for call in issued[peer] if call[0] in (one, other)]
                for (mine, at), (its, there) in zip(reference, theirs, strict=False):
                    if mine is not its:
                        raise Refused(
                            f"{program.tapes[rank][at]}: rank {peer} issues {program.tapes[peer][there]} (its op "
                            f"{there}) at this place; groups that share two or more ranks must issue their common "
                            "collectives in one order."
                        ).at(rank, at)
