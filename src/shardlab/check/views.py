"""Which values of a tape lie in another one's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlab.program import Op, OpKind, Spec
from shardlab.rules.dealing import is_view


def roots_of(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each slice that is a view, by number, to the value whose memory it lies in, which is no slice itself."""
    roots: dict[int, int] = {}
    for op in tape:
        if op[0] is OpKind.SLICE:
            (whole,), (part,) = op[2], op[3]
            if is_view(specs[whole], specs[part]):
                roots[part] = roots.get(whole, whole)
    return roots


def ends_of(tape: Sequence[Op]) -> dict[int, int]:
    """Map each value that ends to the index of the op that ends it."""
    ends: dict[int, int] = {}
    for at, op in enumerate(tape):
        for place in op[0].row.ends:
            ends[op[2][place]] = at
    return ends


def last_ends(ends: Mapping[int, int], roots: Mapping[int, int]) -> dict[int, int]:
    """When the memory of each value that is no view ends: with it, or with the last of its views."""
    last = {number: at for number, at in ends.items() if number not in roots}
    for view, root in roots.items():
        if view not in ends:
            last.pop(root, None)
        elif root in last:
            last[root] = max(last[root], ends[view])
    return last
