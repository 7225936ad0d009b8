"""Mistakes in half-blocks: in the sums over slices, the pieces of sequences, and the residual beside the branch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from shardlab.language import ExpectedValue, Holds, Kind, Op, OpKind, Program, Reduction
from shardlab.language.mesh import group_of
from shardlab.language.ops import COLLECTIVES
from shardlab.language.rules.kinds import ONE, factor_of
from tests.support.mutating import (
    changed,
    everywhere,
    fresh_number,
    living_on,
    move_op,
    mutation,
    places,
    reading,
    renamed,
    with_tape,
)

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Over which a rank might meet the wrong others."""

ROWS = (
    OpKind.FORWARD,
    OpKind.ATTEND,
    OpKind.LOSS_STATS,
    OpKind.LOSS,
    OpKind.BACKWARD,
    OpKind.BACKWARD_INPUT,
    OpKind.ATTEND_BACKWARD,
    OpKind.LOAD_WEIGHT,
)
"""Ops whose results a rank might put together with others' although it must not."""


def layer_of_result(program: Program, op: Op, place: int) -> int:
    """The number of what an op in `ROWS` makes."""
    sizes = program.sizes
    if op.kind is OpKind.BACKWARD and place == 0:
        return sizes.weight_of(op.layer)
    if op.kind is OpKind.ATTEND:
        return op.layer + 1
    if op.kind is not OpKind.FORWARD or sizes.signatures[op.layer].projects:
        return op.layer
    return sizes.signatures[op.layer].outputs[place].layer


@mutation
def collective_too_many(program: Program) -> Iterator[Program]:
    """Reduce or gather the output of a layer, a loss or a load once more, over an axis on all its ranks."""
    mesh = program.mesh
    for axis in AXES:
        group = mesh.group(0, axis)
        if len(group.ranks) < 2:
            continue
        for at, op in enumerate(program.tapes[0]):
            ops_at = [program.tapes[rank][at : at + 1] for rank in group.ranks]
            signature = (op.kind, op.layer, len(op.outputs))
            if op.kind not in ROWS or any(
                [(o.kind, o.layer, len(o.outputs)) for o in ops] != [signature] for ops in ops_at
            ):
                continue
            outputs = len(op.outputs) - (op.kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT))
            for place, kind in itertools.product(range(outputs), sorted(COLLECTIVES, key=lambda kind: kind.value)):
                mutant = program
                for rank in group.ranks:
                    tape = mutant.tapes[rank]
                    number = tape[at].outputs[place]
                    fresh, handle = fresh_number(tape), 1 + max(o.handle for o in tape)
                    layer = layer_of_result(program, op, place)
                    extra_ops = [
                        Op(kind, layer, (number,), (fresh,), handle, mesh.group(rank, axis)),
                        Op(OpKind.WAIT, -1, handle=handle),
                        Op(OpKind.FREE, -1, (number,)),
                    ]
                    rest = renamed(tape[at + 1 :], number, fresh)
                    mutant = with_tape(mutant, rank, [*tape[: at + 1], *extra_ops, *rest])
                yield mutant


@mutation
def collective_over_another_axis(program: Program) -> Iterator[Program]:
    """All ranks that meet, and those that they meet instead, take the other axis."""
    mesh = program.mesh
    axes = [axis for axis in AXES if len(mesh.group(0, axis).ranks) > 1]
    for at, op in enumerate(program.tapes[0]):
        if op.kind in COLLECTIVES and op.group is not None:
            for axis in axes:
                mutant = program
                for rank, tape in enumerate(program.tapes):
                    is_same_op = at < len(tape) and tape[at].kind is op.kind and tape[at].layer == op.layer
                    if is_same_op and axis != op.group.axis:
                        mutant = changed(mutant, rank, at, tape[at]._replace(group=mesh.group(rank, axis)))
                if mutant is not program:
                    yield mutant


@mutation
def residual_for_branch(program: Program) -> Iterator[Program]:
    """A norm takes one for the other, or hands one on for the other, forward or backward; on one rank or on all."""
    swaps = {
        OpKind.FORWARD: ((3, "inputs", 0, 2), (3, "outputs", 0, 1)),
        OpKind.BACKWARD: ((5, "inputs", 1, 4), (3, "outputs", 1, 2)),
        OpKind.BACKWARD_INPUT: ((5, "inputs", 1, 4), (3, "outputs", 0, 1)),
    }
    for rank, at, op in places(program, *swaps):
        for count, field, one, other in swaps[op.kind]:
            numbers = list(getattr(op, field))
            if len(numbers) == count:
                numbers[one], numbers[other] = numbers[other], numbers[one]
                yield changed(program, rank, at, op._replace(**{field: tuple(numbers)}))
    for at, op in enumerate(program.tapes[0]):
        for count, field, one, other in swaps.get(op.kind, ()):
            mutant = program
            for rank, tape in enumerate(program.tapes):
                if at < len(tape) and tape[at].kind is op.kind and len(getattr(tape[at], field)) == count:
                    numbers = list(getattr(tape[at], field))
                    numbers[one], numbers[other] = numbers[other], numbers[one]
                    mutant = changed(mutant, rank, at, tape[at]._replace(**{field: tuple(numbers)}))
            if mutant is not program:
                yield mutant


@mutation
def slice_of_another_rank(program: Program) -> Iterator[Program]:
    """A rank loads another one's slice of a layer, weight and state; or two ranks have changed places."""
    loads: dict[tuple[int, int], dict[OpKind, tuple[int, Op]]] = {}
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        loads.setdefault((op.layer, rank), {})[op.kind] = at, op
    for (layer, rank), mine in loads.items():
        for (other_layer, other), theirs in loads.items():
            same_slices = (
                all(mine[kind][1].holds == theirs[kind][1].holds for kind in mine) if layer == other_layer else True
            )
            if same_slices or rank == other:
                continue
            mutant = program
            for kind, (at, op) in mine.items():
                mutant = changed(mutant, rank, at, op._replace(holds=theirs[kind][1].holds))
            yield mutant
            if rank < other:
                for kind, (at, op) in theirs.items():
                    mutant = changed(mutant, other, at, op._replace(holds=mine[kind][1].holds))
                yield mutant


# Mistakes with slices cut on one rank and with their concatenation, and with the memory that slices share.


@mutation
def another_slice(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SLICE):
        mask, of = op.holds or (1, 1)
        for holds in (Holds(1, of), Holds(1 << of - 1, of), Holds(mask, of + 1), Holds(1 << of, of), Holds(3, of)):
            yield changed(program, rank, at, op._replace(holds=holds))
        yield changed(program, rank, at, op._replace(holds=None))


@mutation
def another_value_sliced(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SLICE):
        for other in {n for o in program.tapes[rank][:at] for n in o.outputs}:
            yield reading(program, rank, op, 0, other)


@mutation
def another_zero(program: Program) -> Iterator[Program]:
    """A gradient of nothing in the place of one that is summed, or of other slices or another layer."""
    for rank, at, op in places(program, OpKind.ZERO_GRADIENT):
        for layer in (op.layer - 1, op.layer + 1):
            yield changed(program, rank, at, op._replace(layer=layer))
        for holds in (None, Holds(1, 2), Holds(2, 2), Holds(0, 1), Holds(2, 1)):
            yield changed(program, rank, at, op._replace(holds=holds))
    for rank, _, op in places(program, OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.ADD):
        fresh = fresh_number(program.tapes[rank])
        zero = Op(OpKind.ZERO_GRADIENT, op.layer, (), (fresh,), holds=Holds(1, 1))
        for place in range(len(op.inputs)):
            tape = living_on(program.tapes[rank], op.inputs[place])
            spoilt = op._replace(inputs=(*op.inputs[:place], fresh, *op.inputs[place + 1 :]))
            index = tape.index(op)
            end = Op(OpKind.FREE, -1, (fresh,))
            yield with_tape(program, rank, [*tape[:index], zero, spoilt, *tape[index + 1 :], end])


@mutation
def another_factor(program: Program) -> Iterator[Program]:
    """On one rank, or on all that do the same: a factor that does not cancel, or none."""
    for rank, at, op in places(program, OpKind.SCALE):
        assert op.factor is not None
        count = factor_of(1, ((1, 1),))
        for factor in (
            None,
            ONE,
            op.factor * 2,
            op.factor / 3,
            op.factor * op.factor,
            op.factor * count,
            1 / op.factor,
        ):
            yield changed(program, rank, at, op._replace(factor=factor))
            mutant = program
            for other, member_op in everywhere(program, at, op):
                mutant = changed(mutant, other, at, member_op._replace(factor=factor))
            yield mutant


@mutation
def scaled_once_more(program: Program) -> Iterator[Program]:
    """Halve the output of a backward pass, a loss or a sum."""
    makes = {OpKind.BACKWARD: (0, 1), OpKind.BACKWARD_WEIGHT: (0,), OpKind.LOSS: (0,), OpKind.ADD: (0,)}
    for rank, at, op in places(program, *makes):
        tape = program.tapes[rank]
        for place in makes[op.kind]:
            number, fresh = op.outputs[place], fresh_number(tape)
            half = Op(OpKind.SCALE, op.layer, (number,), (fresh,), factor=factor_of(Fraction(1, 2)))
            rest = renamed(tape[at + 1 :], number, fresh)
            yield with_tape(program, rank, [*tape[: at + 1], half, Op(OpKind.FREE, -1, (number,)), *rest])


@mutation
def mean_for_a_sum(program: Program) -> Iterator[Program]:
    """On all members, or on one."""
    for rank, at, op in places(program, OpKind.ALL_REDUCE, OpKind.REDUCE):
        other = Reduction.MEAN if op.reduction is Reduction.SUM else Reduction.SUM
        yield changed(program, rank, at, op._replace(reduction=other))
        mutant = program
        for member, member_op in everywhere(program, at, op):
            mutant = changed(mutant, member, at, member_op._replace(reduction=other))
        yield mutant


@mutation
def piece_left_out(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CONCATENATE):
        for place in range(len(op.inputs)):
            yield changed(program, rank, at, op._replace(inputs=op.inputs[:place] + op.inputs[place + 1 :]))


@mutation
def another_piece(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CONCATENATE):
        earlier_outputs = {n for o in program.tapes[rank][:at] for n in o.outputs}
        for place in range(len(op.inputs)):
            for other in (*op.inputs, *earlier_outputs):
                yield reading(program, rank, op, place, other)


def sliced(op: Op, number: int, output: int, holds: Holds) -> Op:
    return Op(OpKind.SLICE, op.layer, (number,), (output,), holds=holds)


@mutation
def slice_in_flight_while_it_is_updated(program: Program) -> Iterator[Program]:
    """A part of what an update writes, or of what it leaves, is being read through a slice."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        part, copy, handle = fresh_number(tape), fresh_number(tape) + 1, 1 + max(o.handle for o in tape)
        for holds in (Holds(1, 2), Holds(2, 3)):
            start = [
                sliced(op, op.inputs[1], part, holds),
                Op(OpKind.ALL_GATHER, op.layer, (part,), (copy,), handle, group_of("dp_shard", (rank,))),
            ]
            end = [Op(OpKind.WAIT, -1, handle=handle), *(Op(OpKind.FREE, -1, (n,)) for n in (part, copy))]
            yield with_tape(program, rank, [*tape[:at], *start, op, *end, *tape[at + 1 :]])


@mutation
def a_second_update_through_slices(program: Program) -> Iterator[Program]:
    """An update has moved a weight; then a slice of its old state moves a part of it again."""
    for rank, at, op in places(program, OpKind.UPDATE):
        gradient, weight, state, *norms = op.inputs
        tape = program.tapes[rank]
        for number in (gradient, *norms):
            tape = living_on(tape, number)
        view, part, new, new_state = range(fresh_number(tape), fresh_number(tape) + 4)
        second = Op(OpKind.UPDATE, op.layer, (gradient, view, part, *norms), (new, new_state))
        slices = [sliced(op, weight, view, Holds(1, 1)), sliced(op, state, part, Holds(2, 2))]
        for updates in ([op, second], [second, op]):
            frees = [Op(OpKind.FREE, -1, (n,)) for n in (new, new_state)]
            yield with_tape(program, rank, [*tape[:at], *slices, *updates, *frees, *tape[at + 1 :]])


@mutation
def an_arrival_beside_a_slice(program: Program) -> Iterator[Program]:
    """A rank is told what a weight becomes, and then steps a slice of the old one, which had to stay."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        view, output = range(fresh_number(tape), fresh_number(tape) + 2)
        handle = 1 + max(o.handle for o in tape)
        for other, other_at, other_op in places(program, OpKind.UPDATE):
            if other == rank or other_op.layer != op.layer:
                continue
            arrival = [
                sliced(op, op.inputs[1], view, Holds(1, 1)),
                Op(OpKind.FREE, -1, op.inputs[1:2]),
                Op(
                    OpKind.RECV,
                    op.layer,
                    (),
                    (output,),
                    handle,
                    peer=other,
                    expect=ExpectedValue(Kind.WEIGHT, op.layer, 0),
                ),
                Op(OpKind.WAIT, -1, handle=handle),
            ]
            late = op._replace(inputs=(op.inputs[0], view, *op.inputs[2:]))
            rest = renamed(tape[at + 1 :], op.outputs[0], output)
            mine = [*tape[:at], *arrival, late, Op(OpKind.FREE, -1, op.outputs[:1]), *rest]
            theirs = program.tapes[other]
            number = 1 + max(o.handle for o in theirs)
            send = Op(OpKind.SEND, op.layer, other_op.outputs[:1], (), number, peer=rank)
            telling = [*theirs[: other_at + 1], send, Op(OpKind.WAIT, -1, handle=number), *theirs[other_at + 1 :]]
            yield with_tape(with_tape(program, rank, mine), other, telling)


# Mistakes with values that are cast to other numbers.


@mutation
def cast_left_out(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        tape = program.tapes[rank]
        (source,), (result,) = op.inputs, op.outputs
        rest = [o for o in tape[at + 1 :] if not (o.kind is OpKind.FREE and o.inputs == (result,))]
        free = next((i for i, o in enumerate(rest) if o.kind is OpKind.FREE and o.inputs == (source,)), None)
        end = next((i for i, o in enumerate(tape) if o.kind is OpKind.FREE and o.inputs == (result,)), None)
        if free is not None and end is not None:
            rest = [o for i, o in enumerate(rest) if i != free]
            rest.insert(min(len(rest), end - at - 2), Op(OpKind.FREE, -1, (result,)))
        yield with_tape(program, rank, [*tape[:at], *renamed(rest, result, source)])


@mutation
def cast_to_another_dtype(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        for dtype in ("", "float64", "bfloat16", "float16", "int8"):
            if dtype != op.dtype:
                yield changed(program, rank, at, op._replace(dtype=dtype))


@mutation
def cast_where_none_is(program: Program) -> Iterator[Program]:
    """Cast the output of any op to fewer bytes for all its readers."""
    for rank, at, op in places(program):
        tape = program.tapes[rank]
        for number in op.outputs if op.handle < 0 else ():
            fresh = fresh_number(tape)
            cast = Op(OpKind.CAST, op.layer, (number,), (fresh,), dtype="bfloat16")
            rest = renamed(tape[at + 1 :], number, fresh)
            yield with_tape(program, rank, [*tape[: at + 1], cast, Op(OpKind.FREE, -1, (number,)), *rest])


@mutation
def another_value_cast(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        for other in {n for o in program.tapes[rank][:at] for n in o.outputs}:
            yield changed(program, rank, at, op._replace(inputs=(other,)))


# Mistakes with the weights that a rank keeps: what writes them a second time.


def copied(tape: list[Op], rank: int, op: Op, fresh: int) -> list[Op]:
    """A copy of the weight that an update is given, made by a group of one."""
    handle = 1 + max(other.handle for other in tape)
    group = group_of("dp_shard", (rank,))
    gather = Op(OpKind.ALL_GATHER, op.layer, op.inputs[1:2], (fresh,), handle, group)
    return [gather, Op(OpKind.WAIT, -1, handle=handle)]


@mutation
def a_second_state_of_a_weight(program: Program) -> Iterator[Program]:
    """Half of what an update has moved is moved again, given a copy of the old weight, by a state of its own."""
    for rank, _, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        gradient, _, state, *norms = op.inputs
        load = next((o for o in tape if o.kind is OpKind.LOAD_OPT_STATE and o.outputs == (state,)), None)
        if load is None or load.holds is None:
            continue
        for number in (gradient, *norms):
            tape = living_on(tape, number)
        copy, second, new, new_state = range(fresh_number(tape), fresh_number(tape) + 4)
        second_op = Op(OpKind.UPDATE, op.layer, (gradient, copy, second, *norms), (new, new_state))
        at = tape.index(op)
        for holds in load.holds.split(2):
            start = [load._replace(holds=holds, outputs=(second,)), *tape[:at], *copied(tape, rank, op, copy)]
            yield with_tape(program, rank, [*start, op, second_op, Op(OpKind.FREE, -1, (new,)), *tape[at + 1 :]])


@mutation
def an_update_after_an_arrival(program: Program) -> Iterator[Program]:
    """A rank is told by another one what a weight becomes, lets the old one go, and then steps a copy of it."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        copy, output = range(fresh_number(tape), fresh_number(tape) + 2)
        copying = copied(tape, rank, op, copy)
        handle = copying[0].handle + 1
        for other, other_at, other_op in places(program, OpKind.UPDATE):
            if other == rank or other_op.layer != op.layer:
                continue
            expect = ExpectedValue(Kind.WEIGHT, op.layer, 0)
            arrival = [
                Op(OpKind.FREE, -1, op.inputs[1:2]),
                Op(OpKind.RECV, op.layer, (), (output,), handle, peer=other, expect=expect),
                Op(OpKind.WAIT, -1, handle=handle),
            ]
            late = op._replace(inputs=(op.inputs[0], copy, *op.inputs[2:]))
            rest = renamed(tape[at + 1 :], op.outputs[0], output)
            mine = [*tape[:at], *copying, *arrival, late, Op(OpKind.FREE, -1, op.outputs[:1]), *rest]
            theirs = program.tapes[other]
            number = 1 + max(o.handle for o in theirs)
            send = Op(OpKind.SEND, op.layer, other_op.outputs[:1], (), number, peer=rank)
            telling = [*theirs[: other_at + 1], send, Op(OpKind.WAIT, -1, handle=number), *theirs[other_at + 1 :]]
            yield with_tape(with_tape(program, rank, mine), other, telling)


# Mistakes in how long values live, and in when they are updated.


@mutation
def early_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        for distance in (1, 2, 3, 5, 9):
            if at >= distance:
                yield move_op(program, rank, at, at - distance)


@mutation
def missing_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        yield changed(program, rank, at)


@mutation
def early_update(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.UPDATE):
        for to in range(0, at, max(1, at // 12)):
            yield move_op(program, rank, at, to)


@mutation
def stale_weight(program: Program) -> Iterator[Program]:
    """The update comes before an op that reads the weight, and that op then reads the new one."""
    for rank, at, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        old, new = update.inputs[1], update.outputs[0]
        for reader in [i for i in range(at) if old in tape[i].inputs]:
            middle = renamed(tape[reader:at], old, new)
            yield with_tape(program, rank, [*tape[:reader], update, *middle, *tape[at + 1 :]])


@mutation
def weight_read_after_its_update(program: Program) -> Iterator[Program]:
    """A forward pass is done once more, with the new weight; its activation is kept until then."""
    for rank, _, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        for op in [o for o in tape if o.kind is OpKind.FORWARD and o.inputs[1] == update.inputs[1]]:
            free = Op(OpKind.FREE, -1, op.inputs[:1])
            rest = [o for o in tape if o != free]
            end = rest.index(update) + 1
            second_pass = op._replace(inputs=(op.inputs[0], update.outputs[0]), outputs=(fresh,))
            freed = [Op(OpKind.FREE, -1, (fresh,)), free]
            yield with_tape(program, rank, [*rest[:end], second_pass, *freed, *rest[end:]])


@mutation
def weight_left_stale(program: Program) -> Iterator[Program]:
    """The gradient is there, but the slice stays as it was."""
    for rank, at, _ in places(program, OpKind.UPDATE):
        yield changed(program, rank, at)


@mutation
def second_update(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.UPDATE):
        fresh = fresh_number(program.tapes[rank])
        second = op._replace(inputs=(op.inputs[0], *op.outputs), outputs=(fresh, fresh + 1))
        yield changed(program, rank, at, op, second)


# Mistakes with values that are copied to other places.


COPIES = (OpKind.OFFLOAD, OpKind.RELOAD)


@mutation
def copy_left_out(program: Program) -> Iterator[Program]:
    """Read the original in place of the copy, with the same lifetime."""
    for rank, at, op in places(program, *COPIES):
        (source,), (result,) = op.inputs, op.outputs
        removed = (Op(OpKind.WAIT, -1, handle=op.handle), Op(OpKind.FREE, -1, (source,)))
        rest = [other for other in program.tapes[rank][at + 1 :] if other not in removed]
        yield with_tape(program, rank, [*program.tapes[rank][:at], *renamed(rest, result, source)])


@mutation
def copied_to_another_place(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.OFFLOAD):
        for place in ("", "host", "disk", "attic"):
            if place != op.place:
                yield changed(program, rank, at, op._replace(place=place))


@mutation
def copied_the_other_way(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COPIES):
        back = op.kind is OpKind.OFFLOAD
        kind, place = (OpKind.RELOAD, "") if back else (OpKind.OFFLOAD, "host")
        yield changed(program, rank, at, op._replace(kind=kind, place=place))


@mutation
def another_value_copied(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COPIES):
        for other in sorted({n for o in program.tapes[rank][:at] for n in o.outputs}):
            yield reading(program, rank, op, 0, other)


@mutation
def loaded_from_another_place(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        for place in ("", "host", "disk", "attic"):
            if place != op.place:
                yield changed(program, rank, at, op._replace(place=place))


@mutation
def read_where_it_was(program: Program) -> Iterator[Program]:
    """An op reads the value of which a copy was made for it."""
    for rank, _, op in places(program, *COPIES):
        (source,), (result,) = op.inputs, op.outputs
        for other in program.tapes[rank]:
            if result in other.inputs and other.kind is not OpKind.FREE:
                yield reading(program, rank, other, other.inputs.index(result), source)
