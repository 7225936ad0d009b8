"""Mistakes in collectives: missing, doubled, of another kind, in another order or group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.language import Group, Op, OpKind, Program
from shardlab.language.mesh import group_of
from shardlab.language.ops import COLLECTIVES
from tests.support.mutating import changed, fresh_number, mutation, places, renamed, wait_of, with_tape

REDUCES = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER})


def communications(program: Program, kinds: frozenset[OpKind]) -> Iterator[list[tuple[int, int]]]:
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


def without_collective(program: Program, members: list[tuple[int, int]]) -> Program:
    """These members do not issue it, and each goes on with its own value."""
    for rank, at in members:
        tape = program.tapes[rank]
        op, wait = tape[at], wait_of(program, rank, tape[at].handle)
        freed = [i for i, o in enumerate(tape) if o.kind is OpKind.FREE and o.inputs == op.inputs]
        if not op.inputs or not op.outputs:  # a root's value that others lack, or a barrier
            freed = []
        kept = [o for i, o in enumerate(tape) if i not in (at, wait, *freed[:1])]
        for old, new in zip(op.outputs, op.inputs, strict=False):
            kept = renamed(kept, old, new)
        program = with_tape(program, rank, kept)
    return program


@mutation
def missing_reduce(program: Program) -> Iterator[Program]:
    for members in communications(program, REDUCES):
        yield without_collective(program, members)


@mutation
def missing_gather(program: Program) -> Iterator[Program]:
    for members in communications(program, frozenset({OpKind.ALL_GATHER})):
        yield without_collective(program, members)


@mutation
def double_reduce(program: Program) -> Iterator[Program]:
    """Every member reduces the result once more, and goes on with that."""
    for members in communications(program, REDUCES):
        mutant = program
        for rank, at in members:
            tape = mutant.tapes[rank]
            op, wait = tape[at], wait_of(mutant, rank, tape[at].handle)
            fresh = fresh_number(tape)
            handle = 1 + max(o.handle for o in tape)
            again = op._replace(kind=OpKind.ALL_REDUCE, inputs=op.outputs, outputs=(fresh,), handle=handle)
            free = Op(OpKind.FREE, -1, op.outputs)
            rest = renamed(tape[wait + 1 :], op.outputs[0], fresh)
            tape = [*tape[: wait + 1], again, Op(OpKind.WAIT, -1, handle=handle), free, *rest]
            mutant = with_tape(mutant, rank, tape)
        yield mutant


@mutation
def collective_of_another_kind(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COLLECTIVES):
        for kind in sorted(COLLECTIVES - {op.kind}, key=lambda k: k.value):
            yield changed(program, rank, at, op._replace(kind=kind))


@mutation
def collective_of_another_kind_everywhere(program: Program) -> Iterator[Program]:
    for members in communications(program, COLLECTIVES):
        for kind in sorted(COLLECTIVES, key=lambda k: k.value):
            mutant = program
            for rank, at in members:
                mutant = changed(mutant, rank, at, mutant.tapes[rank][at]._replace(kind=kind))
            if mutant.tapes != program.tapes:
                yield mutant


@mutation
def collectives_in_another_order(program: Program) -> Iterator[Program]:
    """One rank issues two collectives of a group in the other order."""
    for rank, tape in enumerate(program.tapes):
        calls = [i for i, op in enumerate(tape) if op.kind in COLLECTIVES]
        for one, other in itertools.pairwise(calls):
            swapped = list(tape)
            swapped[one], swapped[other] = tape[other], tape[one]
            yield with_tape(program, rank, swapped)


@mutation
def collective_dropped_on_one_rank(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, *COLLECTIVES):
        yield without_collective(program, [(rank, at)])


@mutation
def wrong_group(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COLLECTIVES):
        assert op.group is not None
        ranks = op.group.ranks
        others = [(rank,), ranks[::-1], (*ranks, ranks[0]), (*ranks, program.ranks), (*ranks, -1), (), ranks[1:]]
        for other in others:
            if other != ranks:
                yield changed(program, rank, at, op._replace(group=group_of(op.group.axis, other)))
        yield changed(program, rank, at, op._replace(group=group_of("another axis", ranks)))
        yield changed(program, rank, at, op._replace(group=Group(op.group.axis, ranks)))
        yield changed(program, rank, at, op._replace(group=None))
