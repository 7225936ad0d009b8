"""Small collectives of one kind and group become one: it starts when all of them could, and costs one latency.

PyTorch's DistributedDataParallel fills buckets of 25 MB (Li et al. 2020, arXiv 2006.15704, section 3.2.3); here their
size follows from what collectives cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.check.buckets import BUCKETED, FLAT
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Op, OpKind, Spec
from shardlab.timeline.prices import Bytes


def bucket(checked: Checked, parts: int) -> Tapes:
    """Fill buckets, so many at least of all that a rank communicates alike.

    Raises:
        CannotApply: when no two collectives are alike.
    """
    before = checked.program.tapes
    groups = _all_buckets(checked, parts)
    if not any(groups) and not any(_all_buckets(checked, 1)):
        raise CannotApply("no two collectives of weights or gradients are of one kind, group and dtype")
    tapes = reordered(checked, partial(_wish, groups))
    return [
        _issued_together(tape, [[before[rank][at].handle for at in each] for each in groups[rank]])
        for rank, tape in enumerate(tapes)
    ]


def _all_buckets(checked: Checked, parts: int) -> list[list[list[int]]]:
    """The buckets of each rank."""
    bytes_of = Bytes(checked.program.sizes)
    return [_buckets(tape, checked.specs[rank], bytes_of, parts) for rank, tape in enumerate(checked.program.tapes)]


def _buckets(tape: Sequence[Op], specs: Mapping[int, Spec], bytes_of: Bytes, parts: int) -> list[list[int]]:
    """The indices of the collectives that go together, in the order of the tape."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for at, op in enumerate(tape):
        if op.kind in BUCKETED and op.batch < 0 and (given := specs[op.inputs[0]]).kind in FLAT:
            alike[op.kind, op.group, op.reduction, given.kind, given.form.dtype, given.step].append(at)
    found: list[list[int]] = []
    for places in alike.values():
        sizes = [max(bytes_of(specs[number]) for number in (*tape[at].inputs, *tape[at].outputs)) for at in places]
        room, left = sum(sizes) / parts, 0.0
        together: list[int] = []
        for at, size in zip(places, sizes, strict=True):
            if not together or size > left:
                found.append(together := [])
                left = room
            together.append(at)
            left -= size
    return [each for each in found if len(each) > 1]


def _wish(groups: Sequence[list[list[int]]], order: Ordering) -> None:
    """Gathers start with the first of their bucket, reductions with the last, and are awaited where they are needed."""
    tape = order.needs.tape
    for together in groups[order.rank]:
        first, last = together[0], together[-1]
        for at in together:
            if tape[at].kind is OpKind.ALL_GATHER and not _after(order, at, first):
                order.start_before(at, first)
            elif at != last:
                order.end_before(at, last)
                order.end_before(order.needs.over(at), len(tape))


def _after(order: Ordering, at: int, first: int) -> bool:
    """Whether a gather needs what comes after the first of its bucket."""
    channel = {first, *order.needs.after[first]}
    return any(other > first and other not in channel for other in order.needs.before[at])


def _issued_together(tape: list[Op], together: Sequence[Sequence[int]]) -> list[Op]:
    """The tape with each run of neighbours of a bucket as one batch."""
    bucket_of = {handle: number for number, handles in enumerate(together) for handle in handles}
    batch = max((op.batch for op in tape), default=-1)
    made: list[Op] = []
    last = -1
    for op in tape:
        here = bucket_of.get(op.handle, -1) if op.kind in BUCKETED else -1
        if here >= 0 and here == last:
            if made[-1].batch < 0:
                batch += 1
                made[-1] = made[-1]._replace(batch=batch)
            op = op._replace(batch=batch)
        last = here
        made.append(op)
    return made
