"""Which values of a tape lie in another one's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.rules.dealing import is_view
from shardlab.rules.kind import ROW_KINDS

_COPYING = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL})


def roots_of(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each slice that is a view, by number, to the value whose memory it lies in, which is no slice itself."""
    roots: dict[int, int] = {}
    for op in tape:
        if op[0] is OpKind.SLICE:
            (whole,), (part,) = op[2], op[3]
            if is_view(specs[whole], specs[part]):
                roots[part] = roots.get(whole, whole)
    return roots


BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


def last_reads(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each FORWARD or RECOMPUTE that is the last to read its activation to that, by number.

    A backward pass names the activation, but goes through what the layer kept, which is not always that.
    """
    waits = {op[4]: at for at, op in enumerate(tape) if op[0] is OpKind.WAIT}
    last: dict[int, int] = {}
    shared: set[int] = set()
    for at, op in enumerate(tape):
        kind = op[0]
        if kind is OpKind.FREE or kind is OpKind.WAIT:
            continue
        until = waits[op[4]] if op[4] >= 0 else at
        for number in op[2][1:] if kind in BACKWARDS else op[2]:
            last[number] = max(last.get(number, 0), until)
        if kind is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    keeping = ((at, op) for at, op in enumerate(tape) if op[0].row.keeps is Kind.SAVED)
    return {
        at: op[2][0]
        for at, op in keeping
        if specs[op[3][-1]].kind is Kind.SAVED and last[op[2][0]] == at and op[2][0] not in shared
    }


def last_copies(tape: Sequence[Op], specs: Mapping[int, Spec]) -> set[int]:
    """Find the REDUCE_SCATTERs and ALL_TO_ALLs of rows that are the last to read these: they send a copy of them."""
    readers: dict[int, list[int]] = defaultdict(list)
    shared: set[int] = set()
    for at, op in enumerate(tape):
        if op[0] is not OpKind.FREE:
            for number in op[2]:
                readers[number].append(at)
        if op[0] is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    waits = {op[4]: at for at, op in enumerate(tape) if op[0] is OpKind.WAIT}

    def is_last(at: int, number: int) -> bool:
        return all(max(other, waits.get(tape[other][4], 0)) < at for other in readers[number] if other != at)

    return {
        at
        for at, op in enumerate(tape)
        if op[0] in _COPYING and specs[op[2][0]].kind in ROW_KINDS and op[2][0] not in shared and is_last(at, op[2][0])
    }


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
