"""Mistakes in the way that blocks of keys and values go, and their gradients home."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Kind, Op, OpKind, Program
from tests.support.mutating import (
    changed,
    everywhere,
    fresh_number,
    living_on,
    mutation,
    places,
    reading,
    renamed,
    wait_of,
    with_tape,
)

BLOCKS = (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES)


@mutation
def another_block_sent(program: Program) -> Iterator[Program]:
    """A block, or a gradient of one, in the place of another, on one rank or on all."""
    for rank, at, op in places(program, OpKind.SEND):
        blocks = blocks_of(program, program.tapes[rank])
        for other in sorted(blocks - set(op.inputs)) if op.inputs[0] in blocks else []:
            yield reading(program, rank, op, 0, other)
            mutant = program
            for member, its in everywhere(program, at, op):
                if {its.inputs[0], other} <= blocks_of(program, program.tapes[member]):
                    mutant = reading(mutant, member, its, 0, other)
            yield mutant


def blocks_of(program: Program, tape: list[Op]) -> set[int]:
    """The numbers of a rank's blocks of keys and values, its own and those that came, and of their gradients."""
    found: set[int] = set()
    for op in tape:
        came = op.expect is not None and op.expect.kind in BLOCKS
        gathers = op.kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ADD) and op.inputs[0] in found
        projects = op.kind is OpKind.FORWARD and program.sizes.signatures[op.layer].projects
        if projects or op.kind is OpKind.ATTEND_BACKWARD:
            found.add(op.outputs[1])
        elif came or gathers:
            found |= set(op.outputs)
    return found


def exchanges(program: Program, at: int, op: Op) -> list[tuple[int, Op]]:
    """(rank, send) of all ranks that exchange the same at the same place."""
    return [(rank, its) for rank, its in everywhere(program, at, op) if its.batch >= 0]


@mutation
def hop_the_other_way(program: Program) -> Iterator[Program]:
    """All ranks send one hop's block or gradient to the rank before them: it comes to queries, or home, wrongly."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, its in exchanges(program, at, op):
            both = {there: o for there, o in enumerate(program.tapes[rank]) if o.batch == its.batch}
            peers = [o.peer for o in both.values()][::-1]
            for (there, o), peer in zip(both.items(), peers, strict=True):
                mutant = changed(mutant, rank, there, o._replace(peer=peer))
        yield mutant


@mutation
def hop_left_out(program: Program) -> Iterator[Program]:
    """Nobody sends, and each goes on with what it has: a block twice, or a gradient that is not at home."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, its in exchanges(program, at, op):
            mutant = with_tape(mutant, rank, _without_hop(mutant, rank, its))
        yield mutant


def _without_hop(program: Program, rank: int, send: Op) -> list[Op]:
    tape = program.tapes[rank]
    both = [op for op in tape if op.batch == send.batch]
    recv = next(op for op in both if op.kind is OpKind.RECV)
    gone = [*both, *(tape[wait_of(program, rank, op.handle)] for op in both)]
    own, came, fresh = send.inputs[0], recv.outputs[0], fresh_number(tape)
    if any(came in op.inputs and own in op.inputs for op in tape):
        return renamed([op for op in tape if op not in gone], came, fresh)  # the value would be added to itself
    once = Op(OpKind.FREE, -1, (own,))
    kept = [op for op in tape if op not in gone and op != once]
    freed_twice = renamed(kept, came, own)
    return living_on(freed_twice, own)
