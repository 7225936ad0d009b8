"""Mistakes in attention over cut sequences: in the blocks that queries attend to, and in the ranks' slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.language import Holds, Op, OpKind, Program
from shardlab.language.ops import COLLECTIVES
from tests.support.mutating import (
    added_twice,
    changed,
    everywhere,
    fresh_number,
    living_on,
    move_op,
    mutation,
    places,
    reading,
    renamed,
    wait_of,
    with_tape,
    without_summand,
)

MEETS = (OpKind.ATTEND, OpKind.ATTEND_BACKWARD)


@mutation
def block_met_twice(program: Program) -> Iterator[Program]:
    """Add the result of a block twice: to the output, to the queries' gradient or to the block's gradient."""
    for rank, at, op in places(program, *MEETS):
        for number in op.outputs:
            layer = op.layer + (op.kind is OpKind.ATTEND)
            yield with_tape(program, rank, added_twice(program.tapes[rank], at, number, layer))


@mutation
def block_left_out(program: Program) -> Iterator[Program]:
    """Leave the result of a block out of the sum, or leave out the op that computes it as well."""
    for rank, _, op in places(program, *MEETS):
        for number in op.outputs:
            rest = without_summand(program.tapes[rank], number)
            if rest is not None:
                at = rest.index(op) + 1
                yield with_tape(program, rank, [*rest[:at], Op(OpKind.FREE, -1, (number,)), *rest[at:]])
        tape: list[Op] | None = program.tapes[rank]
        for number in op.outputs:
            tape = tape and without_summand(tape, number)
        if tape:
            yield with_tape(program, rank, [o for o in tape if o != op])


@mutation
def blocks_of_another_meeting(program: Program) -> Iterator[Program]:
    """Use an input (queries, block, result or gradient) of another layer, microbatch or hop, on one rank or on all."""
    for rank, at, op in places(program, *MEETS):
        others = [(other_at, o) for r, other_at, o in places(program, op.kind) if r == rank and o != op]
        for other_at, other in others:
            for place in range(len(op.inputs)):
                yield reading(program, rank, op, place, other.inputs[place])
                mutant = program
                for member, member_op in everywhere(program, at, op):
                    theirs = program.tapes[member]
                    if other_at < len(theirs) and theirs[other_at].kind is op.kind:
                        mutant = reading(mutant, member, member_op, place, theirs[other_at].inputs[place])
                if rank == 0:
                    yield mutant


@mutation
def attended_in_part(program: Program) -> Iterator[Program]:
    """Let the next layer or the backward pass read a partial sum of attention, before all blocks are added."""
    for rank, tape in enumerate(program.tapes):
        partial_sums = {n for op in tape if op.kind is OpKind.ATTEND for n in op.outputs}
        for op in tape:
            if op.kind is OpKind.ADD and partial_sums & set(op.inputs):
                partial_sums |= set(op.outputs)
        for op in tape:
            if op.kind in (OpKind.ADD, OpKind.FREE, OpKind.WAIT):
                continue
            for place, number in enumerate(op.inputs):
                for other in sorted(partial_sums - {number}) if number in partial_sums else []:
                    yield reading(program, rank, op, place, other)


@mutation
def slices_dealt_otherwise(program: Program) -> Iterator[Program]:
    """Read other slices of the sequence on one rank, swap those of two ranks, or give all ranks contiguous slices."""
    loads = [place for place in places(program, OpKind.LOAD_BATCH) if place[2].holds]
    for rank, at, op in loads:
        assert op.holds is not None
        for other in {op.holds.mask << 1, op.holds.mask >> 1, op.holds.mask & op.holds.mask - 1} - {0}:
            yield changed(program, rank, at, op._replace(holds=Holds(other, op.holds.of)))
        for other_rank, other_at, theirs in loads:
            if rank < other_rank and op.holds != theirs.holds:
                mutant = changed(program, rank, at, op._replace(holds=theirs.holds))
                yield changed(mutant, other_rank, other_at, theirs._replace(holds=op.holds))
    count = program.rules.space.sequence
    runs, mutant = program.mesh.cp, program
    for rank, at, op in loads:
        assert op.holds is not None
        if op.holds.of != program.microbatches * count or runs == 1:
            return
        place, size = program.mesh.coordinate(rank, "cp"), count // runs
        microbatches = {i // count for i in range(op.holds.of) if op.holds.mask >> i & 1}
        mask = sum(((1 << size) - 1) << m * count + place * size for m in microbatches)
        mutant = changed(mutant, rank, at, op._replace(holds=Holds(mask, op.holds.of)))
    yield mutant


# Mistakes in backward passes of two halves, and in optimizer states that are sharded apart from their weights.


@mutation
def weight_half_left_out(program: Program) -> Iterator[Program]:
    """Leave out the backward half for the weight."""
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        yield changed(program, rank, at)
        rest = without_summand(program.tapes[rank], op.outputs[0])
        if rest is not None:
            yield with_tape(program, rank, [o for o in rest if o != op])


@mutation
def weight_half_done_twice(program: Program) -> Iterator[Program]:
    """Run the backward half for the weight twice, or add its gradient twice."""
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        tape = program.tapes[rank]
        fresh, (gradient,) = fresh_number(tape), op.outputs
        second = op._replace(outputs=(fresh,))
        free = Op(OpKind.FREE, -1, (fresh,))
        ops = living_on(living_on(tape, op.inputs[0]), op.inputs[1])
        at = ops.index(op) + 1
        yield with_tape(program, rank, [*ops[:at], second, free, *ops[at:]])
        add = Op(OpKind.ADD, op.layer, (gradient, gradient), (fresh,))
        rest = [o for o in tape if o != Op(OpKind.FREE, -1, (gradient,))]
        at = rest.index(op) + 1
        once = Op(OpKind.FREE, -1, (gradient,))
        yield with_tape(program, rank, [*rest[:at], add, once, *renamed(rest[at:], gradient, fresh)])


@mutation
def weight_half_of_another_microbatch(program: Program) -> Iterator[Program]:
    """Use some or all inputs of another microbatch or layer, which are kept in memory for it."""
    for rank, _, op in places(program, OpKind.BACKWARD_WEIGHT):
        for _, _, other in [p for p in places(program, OpKind.BACKWARD_WEIGHT) if p[0] == rank and p[2] != op]:
            for swapped in itertools.product((False, True), repeat=3):
                inputs = tuple(
                    theirs if s else n for s, n, theirs in zip(swapped, op.inputs, other.inputs, strict=True)
                )
                if inputs == op.inputs:
                    continue
                tape = program.tapes[rank]
                for number in {*op.inputs[:2], *other.inputs[:2]}:
                    tape = living_on(tape, number)
                yield with_tape(program, rank, [op._replace(inputs=inputs) if o == op else o for o in tape])


@mutation
def weight_half_before_its_input_half(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        tape = program.tapes[rank]
        first = next(i for i, o in enumerate(tape) if op.inputs[2] in o.outputs)
        yield move_op(program, rank, at, first)
        if first:
            yield move_op(program, rank, at, first - 1)


@mutation
def whole_backward_and_a_weight_half(program: Program) -> Iterator[Program]:
    """Run the whole backward pass, and then the half for the weight again."""
    for rank, at, op in places(program, OpKind.BACKWARD_INPUT):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        whole = op._replace(kind=OpKind.BACKWARD, outputs=(fresh, op.outputs[0]))
        yield changed(program, rank, at, whole, Op(OpKind.FREE, -1, (fresh,)))


@mutation
def state_of_another_shard(program: Program) -> Iterator[Program]:
    """Swap the slices of the optimizer state of two ranks, or load the same slice on both."""
    loads = list(places(program, OpKind.LOAD_OPT_STATE))
    for (one, at, op), (other, other_at, theirs) in itertools.combinations(loads, 2):
        if one != other and op.layer == theirs.layer and op.holds != theirs.holds:
            mutant = changed(program, one, at, op._replace(holds=theirs.holds))
            yield mutant
            yield changed(mutant, other, other_at, theirs._replace(holds=op.holds))


@mutation
def new_weight_not_gathered(program: Program) -> Iterator[Program]:
    """Leave out the gather of the updated slice, on one rank or on all."""
    everywhere = program
    for rank, tape in enumerate(program.tapes):
        updated = {op.outputs[0]: op for op in tape if op.kind is OpKind.UPDATE}
        for op in [o for o in tape if o.kind in COLLECTIVES and o.outputs and updated.keys() & o.inputs]:
            mutant = with_tape(program, rank, _ungathered(tape, op))
            yield mutant
            everywhere = with_tape(everywhere, rank, _ungathered(everywhere.tapes[rank], op))
    if everywhere is not program:
        yield everywhere


def _ungathered(tape: list[Op], gather: Op) -> list[Op]:
    frees = [Op(OpKind.FREE, -1, gather.inputs), Op(OpKind.WAIT, -1, handle=gather.handle), gather]
    return renamed([op for op in tape if op not in frees], gather.outputs[0], gather.inputs[0])


# Mistakes in the norm of the gradient and in what updates make of it.


def scalars(tape: list[Op]) -> set[int]:
    """Numbers of the values of norms and of their sums on a tape."""
    numbers: set[int] = set()
    for op in tape:
        summed = op.kind in (OpKind.ADD, OpKind.ALL_REDUCE) and op.inputs[0] in numbers
        if op.kind is OpKind.NORM or summed or (op.kind is OpKind.RECV and op.expect and not op.expect.microbatches):
            numbers |= set(op.outputs)
    return numbers


@mutation
def norm_without_a_layer(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.NORM):
        rest = without_summand(program.tapes[rank], op.outputs[0])
        if rest is not None:
            yield with_tape(program, rank, [o for o in rest if o != op])


@mutation
def part_of_the_norm_twice(program: Program) -> Iterator[Program]:
    """Add a part of the norm to itself, or use another layer's part in its place."""
    for rank, at, op in places(program, OpKind.NORM):
        tape, (part,) = program.tapes[rank], op.outputs
        yield with_tape(program, rank, added_twice(tape, at, part, 0))
        for other in [o for o in tape if o.kind is OpKind.NORM and o != op]:
            ops = living_on(tape, other.inputs[0])
            yield with_tape(program, rank, [op._replace(inputs=other.inputs) if o == op else o for o in ops])
            replaced = op._replace(inputs=other.inputs, layer=other.layer)
            yield with_tape(program, rank, [replaced if o == op else o for o in ops])


@mutation
def norm_of_an_unfinished_gradient(program: Program) -> Iterator[Program]:
    """Compute the norm of a gradient that is reduced, or added to, later."""
    for rank, _, op in places(program, OpKind.NORM):
        tape = program.tapes[rank]
        for number in sorted({n for o in tape if o.kind not in (OpKind.FREE, OpKind.WAIT) for n in o.inputs}):
            makers = {o.kind for o in tape if number in o.outputs}
            if makers & {OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT, OpKind.ADD, OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE}:
                ops = living_on(tape, number)
                if number != op.inputs[0]:
                    early_norm = op._replace(inputs=(number,))
                    yield with_tape(program, rank, [early_norm if o == op else o for o in ops])


@mutation
def update_with_a_part_of_the_norm(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        for number in sorted(scalars(tape) - set(op.inputs)):
            new_update = op._replace(inputs=(*op.inputs[:3], number, *op.inputs[4:]))
            yield with_tape(program, rank, [new_update if o == op else o for o in living_on(tape, number)])


@mutation
def update_without_the_norm(program: Program) -> Iterator[Program]:
    """Take the norm from one update, or from all updates of a rank."""
    for rank, at, op in places(program, OpKind.UPDATE):
        if len(op.inputs) > 3:
            yield changed(program, rank, at, _without_norm(op))
    for rank, tape in enumerate(program.tapes if program.ranks > 1 else []):
        plain = [_without_norm(op) if op.kind is OpKind.UPDATE else op for op in tape]
        if plain != tape:
            yield with_tape(program, rank, plain)


def _without_norm(update: Op) -> Op:
    return update._replace(inputs=(*update.inputs[:3], *update.inputs[4:]))


@mutation
def squares_counted_on_every_rank(program: Program) -> Iterator[Program]:
    """Sum the squares over an axis last, so that squares of replicated gradients are counted by every rank."""
    tape = program.tapes[0]
    norm_numbers = scalars(tape)
    for at, op in enumerate(tape):
        if op.kind is not OpKind.ALL_REDUCE or op.inputs[0] not in norm_numbers or op.group is None:
            continue
        mutant = program
        for rank in range(program.ranks):
            theirs = mutant.tapes[rank]
            if at < len(theirs) and theirs[at].kind is op.kind and theirs[at].layer == op.layer:
                mutant = with_tape(mutant, rank, _reduced_last(mutant, rank, theirs[at]))
        if mutant is not program:
            yield mutant


def _reduced_last(program: Program, rank: int, op: Op) -> list[Op]:
    tape = program.tapes[rank]
    wait = tape[wait_of(program, rank, op.handle)]
    once = Op(OpKind.FREE, -1, op.inputs)
    tape = renamed([o for o in tape if o not in (op, wait, once)], op.outputs[0], op.inputs[0])
    first = next((i for i, o in enumerate(tape) if o.kind is OpKind.UPDATE and len(o.inputs) > 3), None)
    if first is None:
        return tape
    norm = tape[first].inputs[3]
    fresh = fresh_number(tape)
    late_reduce = [op._replace(inputs=(norm,), outputs=(fresh,)), wait, Op(OpKind.FREE, -1, (norm,))]
    return [*tape[:first], *late_reduce, *renamed(tape[first:], norm, fresh)]


# Mistakes in the directions of matrices that are stepped whole.


def directed(program: Program) -> Iterator[tuple[int, Op, int]]:
    """Yield (rank, update, direction) of every update that reads a direction."""
    for rank, tape in enumerate(program.tapes):
        sources = {op.outputs[0]: op.inputs for op in tape if op.kind in (OpKind.DIRECTION, OpKind.ALL_GATHER)}
        first = {op.outputs[0] for op in tape if op.kind is OpKind.DIRECTION}
        for op in tape:
            if op.kind is OpKind.UPDATE and op.inputs[3:]:
                number = op.inputs[-1]
                while number in sources and number not in first:
                    (number,) = sources[number]
                if number in first:
                    yield rank, op, op.inputs[-1]


@mutation
def update_without_the_direction(program: Program) -> Iterator[Program]:
    for rank, op, _ in directed(program):
        at = program.tapes[rank].index(op)
        yield changed(program, rank, at, op._replace(inputs=op.inputs[:-1]))


@mutation
def direction_not_gathered(program: Program) -> Iterator[Program]:
    """Leave out the gather of a direction over the last axis, or over all axes."""
    for rank, op, direction in directed(program):
        tape = program.tapes[rank]
        gathers = {gather.outputs[0]: gather.inputs[0] for gather in tape if gather.kind is OpKind.ALL_GATHER}
        while direction in gathers:
            direction = gathers[direction]
            yield reading(program, rank, op, len(op.inputs) - 1, direction)


@mutation
def direction_of_another_layer(program: Program) -> Iterator[Program]:
    updates = list(directed(program))
    for rank, op, _ in updates:
        for other, update, direction in updates:
            if other == rank and update.layer != op.layer:
                yield reading(program, rank, op, len(op.inputs) - 1, direction)


@mutation
def direction_of_another_gradient(program: Program) -> Iterator[Program]:
    """Use the gradient of another layer, or one that lacks microbatches."""
    for rank, _, op in places(program, OpKind.DIRECTION):
        tape = program.tapes[rank]
        for other in tape:
            if other.kind in (OpKind.BACKWARD, OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.ADD):
                yield reading(program, rank, op, 0, other.outputs[0])


@mutation
def direction_without_the_norm(program: Program) -> Iterator[Program]:
    """Take the norm from one direction, or from all directions of a layer."""
    for rank, at, op in places(program, OpKind.DIRECTION):
        if op.inputs[2:]:
            yield changed(program, rank, at, op._replace(inputs=op.inputs[:2]))
    for layer in range(program.layers):
        plain = program
        for rank, at, op in places(program, OpKind.DIRECTION):
            if op.layer == layer and op.inputs[2:]:
                plain = changed(plain, rank, at, op._replace(inputs=op.inputs[:2]))
        if plain is not program:
            yield plain


@mutation
def direction_with_a_part_of_the_norm(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.DIRECTION):
        for other in program.tapes[rank]:
            if other.kind is OpKind.NORM and op.inputs[2:]:
                yield reading(program, rank, op, 2, other.outputs[0])


@mutation
def direction_with_a_new_state(program: Program) -> Iterator[Program]:
    """Compute a direction from a state that an update has already changed."""
    for rank, _, op in places(program, OpKind.DIRECTION):
        for update in program.tapes[rank]:
            if update.kind is OpKind.UPDATE:
                yield reading(program, rank, op, 1, update.outputs[1])


# Mistakes in routing: in what layers carry past others, and in the experts that a rank dispatches to.


CARRIED = {OpKind.FORWARD: 2, OpKind.BACKWARD: 4, OpKind.BACKWARD_INPUT: 4}
"""Index from which on the inputs of ops are carried values, or their gradients."""


@mutation
def carried_of_another_pass(program: Program) -> Iterator[Program]:
    """Use a carried value of another layer or microbatch, on one rank or on all."""
    for rank, at, op in places(program, *CARRIED):
        for place in range(CARRIED[op.kind], len(op.inputs)):
            for r, other_at, other in places(program, op.kind):
                if r != rank or other == op or len(other.inputs) <= place:
                    continue
                yield reading(program, rank, op, place, other.inputs[place])
                mutant = program
                for member, member_op in everywhere(program, at, op) if rank == 0 else ():
                    theirs = program.tapes[member]
                    if other_at < len(theirs) and len(theirs[other_at].inputs) > place:
                        mutant = reading(mutant, member, member_op, place, theirs[other_at].inputs[place])
                yield mutant


@mutation
def another_part_of_the_experts(program: Program) -> Iterator[Program]:
    """Dispatch to the experts of another part, to all experts or to fewer, on one rank or on all."""
    for rank, at, op in places(program, OpKind.FORWARD):
        if op.holds is None:
            continue
        for choice in range(5):
            yield changed(program, rank, at, op._replace(holds=other_part(op.holds, choice)))
        for choice in range(5) if rank == 0 else ():
            mutant = program
            for member, member_op in everywhere(program, at, op):
                mutant = changed(
                    mutant,
                    member,
                    at,
                    member_op._replace(holds=member_op.holds and other_part(member_op.holds, choice)),
                )
            yield mutant


def other_part(holds: Holds, choice: int) -> Holds | None:
    """Return the next part, its first half, a part of twice the size, all experts as one part, or None (all)."""
    place, of = holds.mask.bit_length() - 1, holds.of
    others = Holds(1 << (place + 1) % of, of), Holds(1 << 2 * place, 2 * of), Holds(1 << place // 2, (of + 1) // 2)
    return (*others, Holds(1, 1), None)[choice]


# Mistakes in a weight that head and embedding share: in its two gradients, and in who counts its squares.


GRADIENTS = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def uses(program: Program) -> Iterator[tuple[int, int, Op]]:
    """Yield (rank, index, op) of the ops that compute a gradient of the shared weight, in either layer."""
    for rank, at, op in places(program, *GRADIENTS):
        if program.sizes.tied and op.layer in (0, program.layers - 1):
            yield rank, at, op


@mutation
def use_of_a_tied_weight_left_out(program: Program) -> Iterator[Program]:
    """Compute a gradient of the shared weight but do not add it, on one rank or on all."""
    for rank, at, op in uses(program):
        one_rank = [(rank, op)]
        for members in (one_rank, list(everywhere(program, at, op))):
            mutant = program
            for member, member_op in members:
                rest = without_summand(mutant.tapes[member], member_op.outputs[0])
                if rest is not None:
                    end = rest.index(member_op) + 1
                    free = Op(OpKind.FREE, -1, member_op.outputs[:1])
                    mutant = with_tape(mutant, member, [*rest[:end], free, *rest[end:]])
            yield mutant


@mutation
def use_of_a_tied_weight_twice(program: Program) -> Iterator[Program]:
    for rank, at, op in uses(program):
        yield with_tape(program, rank, added_twice(program.tapes[rank], at, op.outputs[0], 0))


@mutation
def one_use_of_a_tied_weight_for_the_other(program: Program) -> Iterator[Program]:
    """Add the gradient of the other use of the weight, or of another microbatch, in place of the right one."""
    for rank, _, op in uses(program):
        for r, _, other in uses(program):
            if r != rank or other == op:
                continue
            tape = living_on(living_on(program.tapes[rank], op.outputs[0]), other.outputs[0])
            swapped = [
                o._replace(inputs=tuple(other.outputs[0] if n == op.outputs[0] else n for n in o.inputs))
                if o.kind is not OpKind.FREE
                else o
                for o in tape
            ]
            yield with_tape(program, rank, swapped)


@mutation
def squares_of_a_tied_weight_twice(program: Program) -> Iterator[Program]:
    """Add the squares of the shared weight's gradient to the norm a second time, on each rank with the weight."""
    if not program.sizes.tied:
        return
    for rank, at, op in places(program, OpKind.UPDATE):
        if op.layer == 0 and len(op.inputs) == 4:
            tape = program.tapes[rank]
            fresh = fresh_number(tape)
            extra_ops = [
                Op(OpKind.NORM, 0, op.inputs[:1], (fresh,)),
                Op(OpKind.ADD, 0, (op.inputs[3], fresh), (fresh + 1,)),
                Op(OpKind.FREE, -1, (fresh,)),
            ]
            new_update = op._replace(inputs=(*op.inputs[:3], fresh + 1))
            yield changed(program, rank, at, *extra_ops, new_update, Op(OpKind.FREE, -1, (fresh + 1,)))


@mutation
def head_updated_as_if_alone(program: Program) -> Iterator[Program]:
    """Leave out the sum of the gradients of both uses: each rank updates its copy with its local gradient."""
    if not program.sizes.tied:
        return
    mutant = program
    for rank, tape in enumerate(program.tapes):
        for op in [o for o in tape if o.kind is OpKind.UPDATE and o.layer == 0]:
            producer = next(o for o in tape if op.inputs[0] in o.outputs)
            if producer.kind is OpKind.ALL_REDUCE:
                new_update = op._replace(inputs=(producer.inputs[0], *op.inputs[1:]))
                ops = living_on(mutant.tapes[rank], producer.inputs[0])
                mutant = with_tape(mutant, rank, [new_update if o == op else o for o in ops])
    yield mutant
