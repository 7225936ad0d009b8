"""Tools that put a mistake into a correct tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardlab.language import Op, OpKind, Program

Mutation = Callable[[Program], Iterator[Program]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__.replace("_", " ")] = function
    return function


def with_tape(program: Program, rank: int, ops: list[Op]) -> Program:
    tapes = [*program.tapes]
    tapes[rank] = ops
    return Program(program.mesh, program.microbatches, program.sizes, tapes)


def places(program: Program, *kinds: OpKind) -> Iterator[tuple[int, int, Op]]:
    """(rank, index, op) of every op, or of those of some kinds."""
    for rank, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            if not kinds or op.kind in kinds:
                yield rank, at, op


def changed(program: Program, rank: int, at: int, *ops: Op) -> Program:
    """Replace one op by others (or by none)."""
    tape = program.tapes[rank]
    return with_tape(program, rank, [*tape[:at], *ops, *tape[at + 1 :]])


def move_op(program: Program, rank: int, at: int, to: int) -> Program:
    tape = list(program.tapes[rank])
    tape.insert(to, tape.pop(at))
    return with_tape(program, rank, tape)


def wait_of(program: Program, rank: int, handle: int) -> int:
    return next(at for at, op in enumerate(program.tapes[rank]) if op.kind is OpKind.WAIT and op.handle == handle)


def renamed(ops: list[Op], old: int, new: int) -> list[Op]:
    """Let ops read value `new` in place of `old`."""
    return [
        op._replace(inputs=tuple(new if n == old else n for n in op.inputs)) if old in op.inputs else op for op in ops
    ]


def fresh_number(tape: list[Op]) -> int:
    """A number that no value of a tape has."""
    return 1 + max(max(op[2] + op[3]) for op in tape if op[2] or op[3])


def living_on(tape: list[Op], number: int) -> list[Op]:
    """Free a value only at the end of the tape."""
    free = Op(OpKind.FREE, -1, (number,))
    at = tape.index(free) if free in tape else len(tape)
    return [*tape[:at], *tape[at + 1 :], free]


def without_summand(tape: list[Op], number: int) -> list[Op] | None:
    """Leave out an ADD and one of its inputs, and continue with the other; None if other ops read the input."""
    readers = [op for op in tape if number in op.inputs and op.kind is not OpKind.FREE]
    if len(readers) != 1 or readers[0].kind is not OpKind.ADD:
        return None
    add = readers[0]
    other = next(n for n in add.inputs if n != number)
    frees = [Op(OpKind.FREE, -1, (number,)), Op(OpKind.FREE, -1, (other,))]
    return renamed([op for op in tape if op not in (add, *frees)], add.outputs[0], other)


def added_twice(tape: list[Op], at: int, number: int, layer: int) -> list[Op]:
    """Add a value to itself after op `at`, and continue with the sum."""
    fresh = fresh_number(tape)
    add = Op(OpKind.ADD, layer, (number, number), (fresh,))
    rest = [op for op in tape[at + 1 :] if op != Op(OpKind.FREE, -1, (number,))]
    return [*tape[: at + 1], add, Op(OpKind.FREE, -1, (number,)), *renamed(rest, number, fresh)]


def reading(program: Program, rank: int, op: Op, place: int, other: int) -> Program:
    """Let an op read another value, and free both values only at the end of the tape."""
    if other == op.inputs[place]:
        return program
    tape = living_on(living_on(program.tapes[rank], op.inputs[place]), other)
    inputs = (*op.inputs[:place], other, *op.inputs[place + 1 :])
    return with_tape(program, rank, [op._replace(inputs=inputs) if o == op else o for o in tape])


def everywhere(program: Program, at: int, op: Op) -> Iterator[tuple[int, Op]]:
    """Yield (rank, op) of all ranks whose op at this index has the same kind and layer."""
    for rank, tape in enumerate(program.tapes):
        if at < len(tape) and (tape[at].kind, tape[at].layer) == (op.kind, op.layer):
            yield rank, tape[at]
