"""Mistakes in waits and messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.language import OpKind, Program
from tests.support.mutating import changed, moved, mutation, places, wait_of, with_tape


@mutation
def missing_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        yield changed(program, rank, at)


@mutation
def late_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        for to in (at + 1, at + 2, len(program.tapes[rank]) - 1):
            if to < len(program.tapes[rank]):
                yield moved(program, rank, at, to)


@mutation
def wait_for_another_handle(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.WAIT):
        for handle in (op.handle - 1, op.handle + 1, 10**6):
            yield changed(program, rank, at, op._replace(handle=handle))


@mutation
def wrong_peer(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SEND, OpKind.RECV):
        for peer in range(-1, program.ranks + 1):
            if peer != op.peer:
                yield changed(program, rank, at, op._replace(peer=peer))


def dropped_message(program: Program, kind: OpKind) -> Iterator[Program]:
    for rank, at, op in places(program, kind):
        wait = wait_of(program, rank, op.handle)
        yield with_tape(program, rank, [o for i, o in enumerate(program.tapes[rank]) if i not in (at, wait)])


@mutation
def dropped_send(program: Program) -> Iterator[Program]:
    yield from dropped_message(program, OpKind.SEND)


@mutation
def dropped_recv(program: Program) -> Iterator[Program]:
    yield from dropped_message(program, OpKind.RECV)


def swapped(program: Program, kind: OpKind) -> Iterator[Program]:
    """Two messages between the same ranks change places."""
    for rank, tape in enumerate(program.tapes):
        messages = [i for i, op in enumerate(tape) if op.kind is kind]
        for n, one in enumerate(messages):
            for other in messages[n + 1 :]:
                if tape[one].peer == tape[other].peer:
                    exchanged = list(tape)
                    exchanged[one], exchanged[other] = tape[other], tape[one]
                    yield with_tape(program, rank, exchanged)
                    yield moved(program, rank, one, other)


@mutation
def swapped_sends(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.SEND)


@mutation
def swapped_recvs(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.RECV)


@mutation
def swapped_senders_values(program: Program) -> Iterator[Program]:
    """Two sends keep their places, but each sends the other's value."""
    for rank, tape in enumerate(program.tapes):
        sends = [i for i, op in enumerate(tape) if op.kind is OpKind.SEND]
        for one, other in itertools.pairwise(sends):
            a, b = tape[one], tape[other]
            mutant = list(tape)
            mutant[one] = a._replace(inputs=b.inputs, layer=b.layer)
            mutant[other] = b._replace(inputs=a.inputs, layer=a.layer)
            yield with_tape(program, rank, mutant)


@mutation
def broken_batch(program: Program) -> Iterator[Program]:
    """Ops that an exchange issues together are torn apart, or others are counted in."""
    for rank, at, op in places(program, OpKind.SEND, OpKind.RECV):
        yield changed(program, rank, at, op._replace(batch=0 if op.batch else 5))
        if op.batch >= 0 and at + 2 < len(program.tapes[rank]):
            yield moved(program, rank, at, at + 2)
