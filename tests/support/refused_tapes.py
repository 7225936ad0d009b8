"""Tapes with one op that is wrong, by a name of what is wrong; a tape may come from a file and say anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardlab.check import check
from shardlab.language import Holds, Mesh, Op, OpKind, Program, Rank, Strategy, Value, trace
from shardlab.language.mesh import Group, group_of
from shardlab.strategies.plan.plan import Plan
from tests.support.mutations import places
from tests.support.random_plans import Planned
from tests.support.refused_calls import Calls, begun, reducing, single


def put(
    program: Callable[[], Program], kind: OpKind, change: Callable[[Op], list[Op]], layer: int | None = None
) -> Callable[[], object]:
    """A right program in which the first op of a kind, and perhaps of a layer, is changed."""

    def call() -> object:
        mutant = program()
        rank, at, op = next(each for each in places(mutant, kind) if layer in (None, each[2].layer))
        mutant.tapes[rank][at : at + 1] = change(op)
        return check(mutant)

    return call


def tape(
    kind: OpKind, change: Callable[[Op], list[Op]], strategy: Strategy = single, ranks: int = 1
) -> Callable[[], object]:
    """A strategy's program on one layer and two microbatches in which the first op of a kind is changed."""
    return put(lambda: trace(strategy, ranks, 1, 2), kind, change)


def fields(kind: OpKind, strategy: Strategy = single, ranks: int = 1, **changes: object) -> Callable[[], object]:
    """A strategy's program on one layer and two microbatches in which the first op of a kind has other fields."""
    return tape(kind, lambda op: [op._replace(**changes)], strategy, ranks)  # pyright: ignore[reportArgumentType]


async def from_the_other(rank: Rank) -> None:
    """Rank 0 is sent a weight by rank 1, in a batch."""
    with rank.batch_p2p():
        handle = rank.recv(source=1, expect=("weights", 0, None)) if rank.index == 0 else None
        if rank.index:
            rank.send(rank.load_weight(0), to=0)
    if handle:
        await handle


async def from_a_root(rank: Rank) -> None:
    """Rank 0 is given a weight by rank 1."""
    await rank.broadcast(rank.load_weight(0) if rank.index else None, root=1)


async def lends(rank: Rank) -> None:
    """Each rank is sent the other's weight, and updates its own."""
    activation, gradient, weight = begun(rank)
    await rank.exchange(weight, to=1 - rank.index, source=1 - rank.index)
    made, _ = rank.backward(0, activation, gradient, weight)
    rank.weights[0], rank.opt_states[0] = rank.update(0, made, weight, rank.opt_states[0])


async def meets(rank: Rank) -> None:
    await rank.barrier()


async def in_slices(rank: Rank) -> None:
    rank.weights[0] = rank.load_weight(0)
    rank.weights["half"] = rank.slice(rank.weights[0], 0, 2)


async def scaled(rank: Rank) -> None:
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.weights[0] = rank.load_weight(0)
    rank.scale(rank.loss(rank.forward(0, rank.activations[0], rank.weights[0])), 2)


def halves() -> Program:
    """Norms, which carry a residual, and halves of backward passes."""
    return Planned(Plan(Mesh(tp=2), "zb-h1"), 2, "halves", 1).program


def tied() -> Program:
    return Planned(Plan(), 2, "tied", 1).program


async def reduces_twice(rank: Rank) -> None:
    """Each rank has the sums of two gradients of one weight."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    made: list[Value] = []
    for m in rank.share():
        activation = rank.activations[0, m] = rank.load_batch([m])
        gradient = rank.loss(rank.forward(0, activation, rank.weights[0]))
        made.append(rank.backward(0, activation, gradient, rank.weights[0])[0])
    handles = [rank.all_reduce(each) for each in made]
    first, second = await handles[0], await handles[1]
    rank.weights[0], rank.opt_states[0] = rank.update(0, first + second, rank.weights[0], rank.opt_states[0])


def together_on_one_rank() -> object:
    program = trace(reduces_twice, 2, 1, 4)
    program.tapes[0] = [op._replace(batch=0) if op.kind is OpKind.ALL_REDUCE else op for op in program.tapes[0]]
    return check(program)


def by_the_whole_weight(op: Op) -> list[Op]:
    x, gradient, _, *saved = op.inputs
    return [
        Op(OpKind.LOAD_WEIGHT, op.layer, (), (90,), holds=Holds(1, 1)),
        op._replace(inputs=(x, gradient, 90, *saved)),
    ]


def in_one_room() -> object:
    """Two gradients, which a rank has at once."""
    program = trace(reduces_twice, 2, 1, 4)
    program.tapes[0] = [op._replace(offset=0) if op.kind is OpKind.BACKWARD else op for op in program.tapes[0]]
    return check(program)


def other_world() -> object:
    program = trace(single, 1, 1, 2)
    return check(replace(program, tapes=program.tapes * 2))


TAPES: Calls = {
    "the layer's own": tape(OpKind.FORWARD, lambda op: [op, Op(OpKind.FREE, -1, op.outputs[1:])]),
    "freed, not made": fields(OpKind.FORWARD, inputs=(77, 0)),
    "freed, on a tape": tape(OpKind.UPDATE, lambda op: [op, op._replace(outputs=(70, 71))]),
    "in flight": tape(OpKind.ALL_REDUCE, lambda op: [op, Op(OpKind.FREE, -1, op.inputs)], reducing, 2),
    "left over": tape(OpKind.LOSS, lambda op: [op, Op(OpKind.LOAD_BATCH, 0, (), (70,), holds=Holds(1, 2))]),
    "loaded twice, on a tape": tape(OpKind.LOAD_WEIGHT, lambda op: [op, op._replace(outputs=(70,))]),
    "malformed tape": fields(OpKind.LOSS, inputs=()),
    "malformed tape, a handle": fields(OpKind.LOSS, handle=3),
    "unknown group, none": fields(OpKind.ALL_REDUCE, reducing, 2, group=None),
    "number in use": fields(OpKind.LOSS, outputs=(0,)),
    "number in use, of a handle": fields(OpKind.ALL_REDUCE, reducing, 2, handle=-1),
    "nothing to wait for": fields(OpKind.WAIT, reducing, 2, handle=9),
    "not kept": tape(OpKind.UPDATE, lambda op: [op, Op(OpKind.FREE, -1, op.outputs[:1])]),
    "wrong offset, no room": fields(OpKind.FORWARD, offset=0),
    "wrong offset, no beginning": fields(OpKind.BACKWARD, offset=1),
    "room taken": in_one_room,
    "no forward, on a tape": tape(OpKind.BACKWARD, lambda op: [op._replace(inputs=(*op.inputs[:3], 0))]),
    "unknown layer, on a tape": fields(OpKind.FORWARD, layer=5),
    "unknown microbatch, on a tape": fields(OpKind.LOAD_BATCH, holds=None),
    "unknown slice, on a tape": fields(OpKind.LOAD_WEIGHT, holds=None),
    "wrong layer, on a tape": fields(OpKind.LOAD_BATCH, layer=3),
    "unknown group, made by hand": fields(OpKind.ALL_REDUCE, reducing, 2, group=Group("world", (0, 1))),
    "malformed tape, another world": other_world,
    "malformed tape, a layer's outputs": fields(OpKind.FORWARD, outputs=(90, 91, 92)),
    "malformed tape, a gradient's outputs": put(
        halves, OpKind.BACKWARD_INPUT, lambda op: [op._replace(outputs=(90, 91, 92))]
    ),
    "malformed tape, a wait": fields(OpKind.WAIT, reducing, 2, inputs=(0,)),
    "malformed tape, nothing expected": fields(OpKind.RECV, from_the_other, 2, expect=None),
    "malformed tape, nothing expected of a root": fields(OpKind.BROADCAST, from_a_root, 2, expect=None),
    "malformed tape, a root's part": fields(OpKind.BROADCAST, from_a_root, 2, outputs=()),
    "malformed tape, no set of microbatches": tape(
        OpKind.RECV,
        lambda op: [op._replace(expect=op.expect and op.expect._replace(microbatches=-1))],
        from_the_other,
        2,
    ),
    "unknown group, a rank twice": fields(OpKind.ALL_REDUCE, reducing, 2, group=group_of("world", (0, 0))),
    "unknown rank, on a tape": fields(OpKind.RECV, from_the_other, 2, peer=7),
    "batch of messages, apart": tape(
        OpKind.RECV,
        lambda op: [op, Op(OpKind.LOAD_BATCH, 0, (), (70,), holds=Holds(1, 2)), op._replace(outputs=(71,), handle=9)],
        from_the_other,
        2,
    ),
    "batch of collectives": fields(OpKind.BARRIER, meets, 2, batch=0),
    "batch of collectives, on one rank": together_on_one_rank,
    "in flight, not arrived": tape(OpKind.WAIT, lambda op: [], from_the_other, 2),
    "in flight, updated": tape(OpKind.WAIT, lambda op: [], lends, 2),
    "in flight, at the end": tape(OpKind.WAIT, lambda op: [], meets, 2),
    "left over, twice": tape(
        OpKind.UPDATE, lambda op: [op, Op(OpKind.SLICE, 0, op.outputs[:1], (70,), holds=Holds(1, 1))]
    ),
    "unknown slice, of a value on a tape": fields(OpKind.SLICE, in_slices, holds=None),
    "wrong factor, on a tape": fields(OpKind.SCALE, scaled, factor=None),
    "tied weight, on a tape": put(tied, OpKind.LOAD_WEIGHT, lambda op: [op._replace(layer=6)]),
    "other forward, on a tape": put(halves, OpKind.BACKWARD_INPUT, by_the_whole_weight, 4),
    "no forward, recomputed": put(halves, OpKind.FORWARD, lambda op: [op, Op(OpKind.RECOMPUTE, 1, op.inputs, (90,))]),
    "no forward, second half on a tape": put(
        halves, OpKind.BACKWARD_WEIGHT, lambda op: [op._replace(inputs=(*op.inputs[:2], 0))]
    ),
}
