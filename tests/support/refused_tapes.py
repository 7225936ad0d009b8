"""Tapes with one wrong op, by the name of the mistake; a tape from a file may contain anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardlab.check import check
from shardlab.common.errors import about_layer
from shardlab.language import Holds, Kind, Mesh, Op, OpKind, Program, Rank, Sizes, Spec, Strategy, Value, trace
from shardlab.language.mesh import Group, group_of
from shardlab.language.rules import arithmetic, attention, collectives, optimizer_step, refusals
from shardlab.language.rules.kinds import WHOLE, factor_of
from shardlab.language.rules.layer_rules import LayerRules
from shardlab.language.rules.spec import Term
from shardlab.strategies.plan.plan import Plan
from tests.language.rules.toys import Toy
from tests.support.mutations import places
from tests.support.random_plans import Planned, routed
from tests.support.refused_calls import Calls as Calls_imported
from tests.support.refused_calls import reducing, run_to_loss, single


def put(
    program: Callable[[], Program], kind: OpKind, change: Callable[[Op], list[Op]], layer: int | None = None
) -> Callable[[], object]:
    """A correct program in which the first op of a kind, and optionally of a layer, is changed."""

    def call() -> object:
        mutant = program()
        rank, at, op = next(candidate for candidate in places(mutant, kind) if layer in (None, candidate[2].layer))
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
    """Rank 1 sends a weight to rank 0, in a batch."""
    with rank.batch_p2p():
        handle = rank.recv(source=1, expect=("weights", 0, None)) if rank.index == 0 else None
        if rank.index:
            rank.send(rank.load_weight(0), to=0)
    if handle:
        await handle


async def from_a_root(rank: Rank) -> None:
    """Rank 0 receives a weight from rank 1."""
    await rank.broadcast(rank.load_weight(0) if rank.index else None, root=1)


async def lends(rank: Rank) -> None:
    """Each rank receives the other's weight, and updates its own."""
    activation, gradient, weight = run_to_loss(rank)
    await rank.exchange(weight, to=1 - rank.index, source=1 - rank.index)
    grad_weight, _ = rank.backward(0, activation, gradient, weight)
    rank.weights[0], rank.opt_states[0] = rank.update(0, grad_weight, weight, rank.opt_states[0])


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
    gradients: list[Value] = []
    for m in rank.share():
        activation = rank.activations[0, m] = rank.load_batch([m])
        gradient = rank.loss(rank.forward(0, activation, rank.weights[0]))
        gradients.append(rank.backward(0, activation, gradient, rank.weights[0])[0])
    handles = [rank.all_reduce(term) for term in gradients]
    first, second = await handles[0], await handles[1]
    rank.weights[0], rank.opt_states[0] = rank.update(0, first + second, rank.weights[0], rank.opt_states[0])


def together_on_one_rank() -> object:
    program = trace(reduces_twice, 2, 1, 4)
    program.tapes[0] = [op._replace(batch=0) if op.kind is OpKind.ALL_REDUCE else op for op in program.tapes[0]]
    return check(program)


def by_the_whole_weight(op: Op) -> list[Op]:
    x, gradient, _, *rest = op.inputs
    return [
        Op(OpKind.LOAD_WEIGHT, op.layer, (), (90,), holds=Holds(1, 1)),
        op._replace(inputs=(x, gradient, 90, *rest)),
    ]


def in_one_room() -> object:
    """Two gradients that a rank has in memory at the same time."""
    program = trace(reduces_twice, 2, 1, 4)
    program.tapes[0] = [op._replace(offset=0) if op.kind is OpKind.BACKWARD else op for op in program.tapes[0]]
    return check(program)


def other_world() -> object:
    program = trace(single, 1, 1, 2)
    return check(replace(program, tapes=program.tapes * 2))


TAPES: Calls_imported = {
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
    "never updated": tape(OpKind.UPDATE, lambda op: []),
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


# Calls of the rules with values that do not fit, by a name of what is wrong.


Calls = dict[str, Callable[[], object]]

WHOLE_BLOCKS = Toy(Sizes.puzzle(1), microbatches=2)
BODIES = Toy(Sizes.half_blocks(1), Mesh(tp=2), 2)
"""Bodies 0, 2, 4, 6 and norms 1, 3, 5, cut along heads, features and the vocabulary; two slices of each sequence."""

EXPERTS = Toy(routed(2), Mesh(ep=2))
"""Layer 4 sends tokens to experts, layer 5 has the experts, layer 6 combines their outputs."""


def rows(kind: Kind, cells: int, toy: Toy = BODIES, layer: int = 1, **form: Any) -> Spec:
    return toy.spec_of(kind, layer, cells, **form)


def buffers(microbatches: int, experts: int = 0, layer: int = 5) -> Spec:
    """Buffers of some experts, as a bit set (0: of all)."""
    return EXPERTS.spec_of(Kind.ACTIVATION, layer, microbatches, slices={"expert": experts} if experts else {})


def exchanged(*members: Spec) -> Callable[[], object]:
    return lambda: EXPERTS.meet(OpKind.ALL_TO_ALL, *members)


def scaled_by(by: int, kind: Kind = Kind.GRAD_WEIGHT) -> Spec:
    return arithmetic.scale(rows(kind, by), factor_of(by))


def queries(cells: int, **form: Any) -> Spec:
    return rows(Kind.QUERIES, cells, **form)


def keys(cells: int, **form: Any) -> Spec:
    return rows(Kind.KEYS_VALUES, cells, **form)


def layer_of(toy: Toy, number: int) -> LayerRules:
    return toy.rules.layers[number]


def weight_of(toy: Toy, layer: int, holds: Holds = WHOLE) -> Spec:
    return toy.spec_of(Kind.WEIGHT, layer, 0, holds)


def parted(layer: int, part: Holds) -> Callable[[], object]:
    """A forward pass to a part of the experts."""
    spec = EXPERTS.spec_of(Kind.ACTIVATION, layer, 0b1)
    return lambda: layer_of(EXPERTS, layer).forward([spec], weight_of(EXPERTS, layer), part=part)


def routed_back(term: int) -> object:
    """A backward pass of the buffer of expert 0, with the gradient of other experts' routing."""
    gradients = [
        EXPERTS.spec_of(Kind.GRAD_ACTIVATION, 5, 0b1, slices={"expert": 0b01}),
        EXPERTS.spec_of(Kind.GRAD_ROUTING, 6, 0b1, term=Term(("expert",), term)),
    ]
    return layer_of(EXPERTS, 4).backward(EXPERTS.spec_of(Kind.ACTIVATION, 4, 0b1), gradients, weight_of(EXPERTS, 4))


def unevenly_scaled() -> object:
    gradients = [
        rows(Kind.GRAD_ACTIVATION, 0b1, layer=2),
        arithmetic.scale(rows(Kind.GRAD_RESIDUAL, 0b1, layer=3), factor_of(2)),
    ]
    return layer_of(BODIES, 1).backward(rows(Kind.ACTIVATION, 0b1), gradients, weight_of(BODIES, 1))


def term(index: str) -> Spec:
    return rows(Kind.ACTIVATION, 0b1, term=Term((index,), 0b1))


ATTENDED = attention.attend(1, queries(0b10), keys(0b01))

RULES: Calls = {
    "masked keys": lambda: attention.attend(1, queries(0b01), keys(0b10)),
    "merged terms": lambda: BODIES.meet(OpKind.ALL_REDUCE, ATTENDED, ATTENDED),
    "not exchanged": lambda: WHOLE_BLOCKS.meet(
        OpKind.ALL_TO_ALL, *[rows(Kind.ACTIVATION, cells, WHOLE_BLOCKS, 0) for cells in (0b01, 0b10)]
    ),
    "not gathered": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, 0b11, slices={"head": piece}) for piece in (1, 2)]
    ),
    "other indices": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, 0b11, slices={"ffn": n, "head": n}) for n in (1, 2)]
    ),
    "other factors": lambda: arithmetic.add_two(scaled_by(1), scaled_by(2)),
    "frozen in the norm": lambda: optimizer_step.require_no_frozen(
        about_layer("update", 1), rows(Kind.SCALAR, 0), Holds(0b01, 2)
    ),
    "missing microbatches, of cut sequences": lambda: optimizer_step.norm(7, 1, rows(Kind.GRAD_WEIGHT, 0b0011)),
    "missing terms, of keys": lambda: attention.attend_backward(
        1, queries(0b10), keys(0b01), ATTENDED, rows(Kind.GRAD_ACTIVATION, 0b10, layer=2)
    ),
    "other tokens, of keys": lambda: attention.attend(1, queries(0b0011), keys(0b1100)),
    "other tokens, of one microbatch": lambda: attention.attend(1, queries(0b0110), keys(0b0110)),
    "wrong layer, of queries": lambda: attention.attend(2, queries(0b01), keys(0b01)),
    "other pieces, of keys": lambda: attention.attend(1, queries(0b01), keys(0b01, slices={"head": 0b01})),
    "unknown slice": lambda: collectives.slice_of(rows(Kind.WEIGHT, 0), 3, 2),
    "unknown slice, of a layer that deals nothing": parted(5, Holds(1, 2)),
    "wrong kind, sliced": lambda: collectives.slice_of(rows(Kind.SCALAR, 0), 0, 2),
    "wrong kind, scaled": lambda: arithmetic.scale(rows(Kind.WEIGHT, 0), factor_of(2)),
    "wrong factor": lambda: arithmetic.scale(rows(Kind.GRAD_WEIGHT, 0b1), factor_of(0)),
    "does not divide, sliced": lambda: collectives.slice_of(rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS), 0, 2),
    "does not divide, slices of sequences": lambda: collectives.slice_of(rows(Kind.ACTIVATION, 0b1), 0, 2),
    "does not divide, into parts of the experts": parted(4, Holds(1, 3)),
    "does not divide, experts": exchanged(*(buffers(1 << n) for n in range(3))),
    "does not divide, one expert": exchanged(*(buffers(1 << n, 0b01) for n in range(2))),
    "does not divide, microbatches": exchanged(buffers(0b1, 0b01), buffers(0b1, 0b10)),
    "other order, of experts": exchanged(buffers(0b11, 0b10), buffers(0b11, 0b01)),
    "other tokens, of experts": exchanged(buffers(0b0011, 0b01), buffers(0b1100, 0b10)),
    "other tokens, more of them": exchanged(buffers(0b1), buffers(0b110)),
    "other values, exchanged": exchanged(buffers(0b1), buffers(0b1, 0b01)),
    "other values, gathered": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, cells, slices={"ffn": cells}) for cells in (1, 2)]
    ),
    "other factors, gathered": lambda: BODIES.meet(OpKind.ALL_GATHER, scaled_by(1), scaled_by(2)),
    "other factors, of one pass": unevenly_scaled,
    "other sums": lambda: arithmetic.add_two(term("ffn"), term("head")),
    "other pieces, of experts": lambda: layer_of(EXPERTS, 5).forward(
        [buffers(0b1, 0b01)], weight_of(EXPERTS, 5, Holds(0b10, 2))
    ),
    "other pieces, of the routing": lambda: routed_back(0b10),
    "other dtypes": lambda: arithmetic.cast(rows(Kind.GRAD_WEIGHT, 0b1), "float7"),
    "other dtypes, of one sum": lambda: arithmetic.add_two(
        rows(Kind.GRAD_WEIGHT, 0b1), arithmetic.cast(rows(Kind.GRAD_WEIGHT, 0b10), "bfloat16")
    ),
    "other dtypes, of what is computed with": lambda: layer_of(WHOLE_BLOCKS, 0).forward(
        [rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS, 0)], arithmetic.cast(weight_of(WHOLE_BLOCKS, 0), "bfloat16")
    ),
    "elsewhere": lambda: refusals.offload(weight_of(WHOLE_BLOCKS, 0), "attic"),
    "elsewhere, on the disk": lambda: refusals.offload(rows(Kind.GRAD_WEIGHT, 0b1), "disk"),
    "elsewhere, on the device": lambda: refusals.reload(weight_of(WHOLE_BLOCKS, 0)),
    "elsewhere, computed with": lambda: layer_of(WHOLE_BLOCKS, 0).forward(
        [rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS, 0)], refusals.offload(weight_of(WHOLE_BLOCKS, 0), "host")
    ),
    "elsewhere, of one sum": lambda: arithmetic.add_two(
        rows(Kind.GRAD_WEIGHT, 0b1), refusals.offload(rows(Kind.GRAD_WEIGHT, 0b10), "host")
    ),
    "wrong kind, offloaded": lambda: refusals.offload(rows(Kind.SCALAR, 0), "host"),
    "missing terms, offloaded": lambda: refusals.offload(term("ffn"), "host"),
    "wrong kind, cast": lambda: arithmetic.cast(rows(Kind.SCALAR, 0), "bfloat16"),
    "wrong step, cast": lambda: arithmetic.cast(rows(Kind.WEIGHT, 0, step=1), "bfloat16"),
}
