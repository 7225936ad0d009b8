"""Two passes about buffers: `bucket` joins small collectives, and `arena` gives buffers fixed offsets in one
allocation.

`bucket` joins several collectives of one kind and group into one, which starts once all of them could have started, and
has the latency of one. PyTorch's DistributedDataParallel fills buckets of 25 MB (Li et al. 2020, arXiv 2006.15704,
section 3.2.3); here the size of buckets follows from the prices of collectives.

`arena` computes an offset in one allocation, the arena, for each buffer of a step (`shardlab.check.buffers`), since the
lifetimes of buffers are known from the tape. It places buffers from the largest to the smallest ("greedy by size",
Pisarchyk and Lee 2020, arXiv 2001.03288, section 5.2), each in the smallest gap that is free during its lifetime (best
fit; Wilson et al. 1995, "Dynamic storage allocation").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import numpy as np

from shardlab.check import Checked
from shardlab.check.buffers import ALIGNMENT, BUCKETED, FLAT, Buffer, BufferBytes, buffers_of, value_offsets
from shardlab.language import Op, OpKind, Spec
from shardlab.simulate.passes.reorder import CannotApply, Ordering, Tapes, reordered
from shardlab.simulate.timeline.memory import TapeMemory
from shardlab.simulate.timeline.prices import Bytes


def bucket(checked: Checked, parts: int) -> Tapes:
    """Join collectives of equal kind, group and dtype into buckets: at least `parts` buckets for each such set.

    Raises:
        CannotApply: if no two collectives have the same kind, group and dtype.
    """
    tapes_before = checked.program.tapes
    groups = _all_buckets(checked, parts)
    if not any(groups) and not any(_all_buckets(checked, 1)):
        raise CannotApply("no two collectives of weights or gradients are of one kind, group and dtype")
    tapes = reordered(checked, partial(_wish, groups))
    return [
        _issued_together(tape, [[tapes_before[rank][index].handle for index in members] for members in groups[rank]])
        for rank, tape in enumerate(tapes)
    ]


def _all_buckets(checked: Checked, parts: int) -> list[list[list[int]]]:
    """Return the buckets of each rank."""
    bytes_of = Bytes(checked.program.sizes)
    return [_buckets(tape, checked.specs[rank], bytes_of, parts) for rank, tape in enumerate(checked.program.tapes)]


def _buckets(tape: Sequence[Op], specs: Mapping[int, Spec], bytes_of: Bytes, parts: int) -> list[list[int]]:
    """Return for each bucket of a tape the indices of its collectives, of which there are at least two."""
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for index, op in enumerate(tape):
        if op.kind in BUCKETED and op.batch < 0 and (spec := specs[op.inputs[0]]).kind in FLAT:
            by_key[op.kind, op.group, op.reduction, spec.kind, spec.form.dtype, spec.step].append(index)
    buckets: list[list[int]] = []
    for indices in by_key.values():
        sizes = [
            max(bytes_of(specs[number]) for number in (*tape[index].inputs, *tape[index].outputs)) for index in indices
        ]
        bucket_bytes, free_bytes = sum(sizes) / parts, 0.0
        bucket_members: list[int] = []
        for index, size in zip(indices, sizes, strict=True):
            if not bucket_members or size > free_bytes:
                buckets.append(bucket_members := [])
                free_bytes = bucket_bytes
            bucket_members.append(index)
            free_bytes -= size
    return [bucket for bucket in buckets if len(bucket) > 1]


def _wish(groups: Sequence[list[list[int]]], order: Ordering) -> None:
    """Start gathers with the first of their bucket and reductions with the last, and await each before its use."""
    tape = order.needs.tape
    for bucket in groups[order.rank]:
        first, last = bucket[0], bucket[-1]
        for index in bucket:
            if tape[index].kind is OpKind.ALL_GATHER and not _needs_earlier_bucket(order, index, first):
                order.start_before(index, first)
            elif index != last:
                order.end_before(index, last)
                order.end_before(order.needs.end_of(index), len(tape))


def _needs_earlier_bucket(order: Ordering, index: int, first: int) -> bool:
    """Return whether a gather depends on an op after the first gather of its bucket."""
    channel = {first, *order.needs.successors[first]}
    return any(other > first and other not in channel for other in order.needs.predecessors[index])


def _issued_together(tape: list[Op], buckets: Sequence[Sequence[int]]) -> list[Op]:
    """Return the tape with adjacent collectives of a bucket as one batch."""
    bucket_of = {handle: number for number, handles in enumerate(buckets) for handle in handles}
    batch = max((op.batch for op in tape), default=-1)
    new_tape: list[Op] = []
    last = -1
    for op in tape:
        bucket = bucket_of.get(op.handle, -1) if op.kind in BUCKETED else -1
        if bucket >= 0 and bucket == last:
            if new_tape[-1].batch < 0:
                batch += 1
                new_tape[-1] = new_tape[-1]._replace(batch=batch)
            op = op._replace(batch=batch)
        last = bucket
        new_tape.append(op)
    return new_tape


def arena(checked: Checked, _: int) -> Tapes:
    """Put the executor's buffers into an arena, as far as the peak of the step does not rise.

    The arena exists for the whole step. So a buffer is left out if it would make the arena, and thereby the peak,
    larger. Saved activations stay where PyTorch allocates them.

    Raises:
        CannotApply: if the executor has no buffers.
    """
    program = checked.program
    plain = [[op._replace(offset=-1) if op.offset >= 0 else op for op in tape] for tape in program.tapes]
    size = BufferBytes(program, checked.specs)
    buffers = [buffers_of(tape, checked.specs[rank], program.sizes) for rank, tape in enumerate(plain)]
    if not any(buffers):
        raise CannotApply("nothing is received, gathered or summed, so no buffer can lie in an arena")
    bytes_of = Bytes(program.sizes)
    new_tapes: Tapes = []
    for rank, tape in enumerate(plain):
        specs = checked.specs[rank]
        live = TapeMemory(tape, specs, bytes_of, real=True, sizes=program.sizes).run().during
        sized = [
            (buffer, size.total(buffer, specs), sum(bytes_of(specs[n]) for n in buffer.values))
            for buffer in buffers[rank]
        ]
        offsets: dict[int, int] = {}
        for buffer, begin in best_fit(sized, live):
            offsets |= value_offsets(buffer, begin, size, specs)
        at_offsets = ((op, offsets.get(op.outputs[0], -1) if op.outputs else -1) for op in tape)
        new_tapes.append([op if offset < 0 else op._replace(offset=offset) for op, offset in at_offsets])
    return new_tapes


def best_fit(buffers: Sequence[tuple[Buffer, int, int]], live: Sequence[int]) -> list[tuple[Buffer, int]]:
    """Return each buffer with its first byte in the arena, except buffers that would raise the step's peak.

    Args:
        buffers: (buffer, its bytes, the part of these bytes that `live` includes).
        live: bytes that are live during each op, all buffers included.
    """
    rest, peak_bytes = np.array(live), max(live, default=0)
    top = 0
    placed: list[tuple[Buffer, int, int]] = []  # (buffer, its first byte, its end)
    for buffer, size, counts in sorted(buffers, key=lambda entry: (-entry[1], entry[0].begin)):
        begin = _gap(size, sorted((first, end) for other, first, end in placed if other.overlaps(buffer)))
        lifetime = slice(buffer.begin, buffer.end + 1)
        rest[lifetime] -= counts
        if max(top, begin + size) + rest.max(initial=0) > peak_bytes:
            rest[lifetime] += counts
            continue
        top = max(top, begin + size)
        placed.append((buffer, begin, begin + size))
    return [(buffer, begin) for buffer, begin, _ in placed]


def _gap(size: int, occupied: Sequence[tuple[int, int]]) -> int:
    """Return the start of the smallest gap of at least `size` bytes; if there is none, the end of all taken bytes."""
    free, best, smallest = 0, -1, 0
    for first, end in occupied:
        if size <= first - free and (best < 0 or first - free < smallest):
            best, smallest = free, first - free
        free = max(free, -(-end // ALIGNMENT) * ALIGNMENT)
    return free if best < 0 else best
