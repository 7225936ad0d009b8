"""How a mistake is put into a correct tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardlab.program import Group, Op, OpKind, Program
from shardlab.program.tape import COLLECTIVES

Mutation = Callable[[Program], Iterator[Program]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__.replace("_", " ")] = function
    return function


def with_tape(program: Program, rank: int, ops: list[Op]) -> Program:
    return replace(program, tapes=[ops if r == rank else tape for r, tape in enumerate(program.tapes)])


def places(program: Program, *kinds: OpKind) -> Iterator[tuple[int, int, Op]]:
    """(rank, index, op) of every op, or of those of some kinds."""
    for rank, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            if not kinds or op.kind in kinds:
                yield rank, at, op


def changed(program: Program, rank: int, at: int, *ops: Op) -> Program:
    """One op replaced by others (or by none)."""
    tape = program.tapes[rank]
    return with_tape(program, rank, [*tape[:at], *ops, *tape[at + 1 :]])


def moved(program: Program, rank: int, at: int, to: int) -> Program:
    tape = list(program.tapes[rank])
    tape.insert(to, tape.pop(at))
    return with_tape(program, rank, tape)


def wait_of(program: Program, rank: int, handle: int) -> int:
    return next(at for at, op in enumerate(program.tapes[rank]) if op.kind is OpKind.WAIT and op.handle == handle)


def renamed(ops: list[Op], old: int, new: int) -> list[Op]:
    """Later ops read another value."""
    return [op._replace(inputs=tuple(new if n == old else n for n in op.inputs)) for op in ops]


def fresh_number(tape: list[Op]) -> int:
    """A number that no value of a tape has."""
    return 1 + max(n for op in tape for n in (*op.inputs, *op.outputs))


def living_on(tape: list[Op], number: int) -> list[Op]:
    """The tape with a value that is freed only when the step ends."""
    free = Op(OpKind.FREE, -1, (number,))
    return [*(op for op in tape if op != free), free]


def meetings(program: Program, kinds: frozenset[OpKind]) -> Iterator[list[tuple[int, int]]]:
    """For each collective, (rank, index) of its members' ops: the k-th of a group on each."""
    calls: dict[tuple[Group, int], list[list[tuple[int, int]]]] = {}
    for rank, tape in enumerate(program.tapes):
        counts: dict[Group, int] = {}
        for at, op in enumerate(tape):
            if op.kind in COLLECTIVES:
                assert op.group is not None
                turn = counts[op.group] = counts.get(op.group, -1) + 1
                calls.setdefault((op.group, turn), [[]])[0].append((rank, at))
    for (members,) in calls.values():
        rank, at = members[0]
        if program.tapes[rank][at].kind in kinds:
            yield members
