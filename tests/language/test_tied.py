"""A head tied to the embedding: one weight used by two layers, whose gradients meet and count once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.check import check
from shardlab.language import Deadlock, Holds, Mesh, Op, OpKind, Program, Rank, Refused, Sizes, Value, trace
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from tests.support.mutating import changed, places, renamed, with_tape
from tests.support.refusing import Told, refusal, refuses, tells, told

SIZES = Sizes.half_blocks(1, tied=True)
LAST = SIZES.layers - 1
TWO = Plan(Mesh(pp=2))
PROGRAM = trace(planned(TWO), TWO.mesh, SIZES, 2)
Verbs = Callable[[Rank], object]


def alone(verbs: Verbs) -> Program:
    """What `verbs` make of a rank that has both gradients of the weight in grad_weights["embedding"] and ["head"]."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        for l in rank.layers[1:-1]:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        x, residual = rank.load_batch([0]), list[Value]()
        inputs: list[Value] = []
        for l in rank.layers:
            weight = rank.weights[0 if l == LAST else l]
            rank.activations[l] = x
            inputs.append(x)
            if l % 2:
                x, *residual = rank.forward(l, (x, *residual), weight)
            else:
                x = rank.forward(l, x, weight)
        gradient, above = rank.loss(x), list[Value]()
        for l in reversed(rank.layers):
            weight = rank.weights[0 if l == LAST else l]
            key = "embedding" if l == 0 else "head" if l == LAST else l
            if l % 2:
                rank.grad_weights[key], gradient, *above = rank.backward(l, inputs[l], (gradient, *above), weight)
            else:
                rank.grad_weights[key], gradient = rank.backward(l, inputs[l], gradient, weight)
        verbs(rank)

    return trace(strategy, 1, SIZES, 1)


def finish(rank: Rank) -> None:
    """The sum of both gradients, clipping and all updates."""
    rank.grad_weights[0] = rank.grad_weights.pop("embedding") + rank.grad_weights.pop("head")
    for l in rank.layers[:-1]:
        squares = rank.norm(l, rank.grad_weights[l])
        rank.scalars["norm"] = rank.scalars["norm"] + squares if l else squares
    for l in rank.layers[:-1]:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"]
        )


def update(rank: Rank, key: str) -> None:
    rank.update(0, rank.grad_weights[key], rank.weights[0], rank.opt_states[0])


def test_one_rank_adds_both_gradients_and_updates_the_weight_once() -> None:
    program = alone(finish)
    check(program)
    assert not [op for op in program.tapes[0] if op.kind is OpKind.UPDATE and op.layer == LAST]


MISTAKES: list[tuple[Verbs, Told]] = [
        (lambda r: update(r, "embedding"), told("missing microbatches", layer=0, missing=(1,))),
        (lambda r: update(r, "head"), told("missing microbatches", layer=0, missing=(0,))),
        (lambda r: r.norm(0, r.grad_weights["embedding"]), told("missing microbatches", layer=0, missing=(1,))),
        (lambda r: r.grad_weights["head"] + r.grad_weights["head"], told("counted twice", layer=0, doubled=(1,))),
        (lambda r: r.load_weight(LAST), told("tied weight", layer=LAST)),
        (lambda r: r.load_opt_state(LAST), told("tied weight", layer=LAST)),
        (lambda r: r.forward(LAST, r.activations[LAST], r.weights[2]), told("wrong layer", layer=LAST)),
        (lambda r: r.forward(0, r.activations[0], r.weights[2]), told("wrong layer", layer=0)),
]  # fmt: skip


@pytest.mark.parametrize(("verbs", "said"), MISTAKES)
def test_what_is_missing_doubled_or_not_there_is_said_by_its_use(verbs: Verbs, said: Told) -> None:
    with pytest.raises(Refused) as refused:
        alone(verbs)
    tells(refused.value, said)


def test_a_tape_that_loads_a_weight_for_the_head_is_refused() -> None:
    load = Op(OpKind.LOAD_WEIGHT, LAST, (), (10**6,), holds=Holds(1, 1))
    tells(refusal(with_tape(PROGRAM, 0, [load, *PROGRAM.tapes[0]])), "tied weight", rank=0, op=0, layer=LAST)


def test_the_two_gradients_meet_once_in_a_group_of_the_first_and_the_last_stage() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=2, tp=2))
    program = trace(planned(plan), plan.mesh, SIZES, 4)
    communications = [
        op.group for _, _, op in places(program, OpKind.ALL_REDUCE) if op.group and "ranks" in op.group.axis
    ]
    assert sorted(group.ranks for group in communications) == sorted([(0, 4), (1, 5), (2, 6), (3, 7)] * 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2)], ids=str)
def test_every_plan_checks_and_runs_on_both_backends(mesh: Mesh, schedule: str) -> None:
    axes = ("dp_shard",)
    plan = Plan(mesh, schedule, shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes)
    sizes = Sizes.half_blocks(4, tied=True)
    assert check(trace(planned(plan), mesh, sizes, 4 * mesh.dp_shard)).backends() == ["gloo", "nccl"]


def test_the_weight_is_counted_once_in_the_norm() -> None:
    counts = [(rank, op.layer) for rank, _, op in places(PROGRAM, OpKind.NORM)]
    assert sorted(layer for _, layer in counts) == list(range(LAST))
    assert (0, 0) in counts


def test_squares_of_both_replicas_are_refused() -> None:
    """Rank 1 adds those of its copy to its part of the norm."""
    tape = PROGRAM.tapes[1]
    gradient = next(op.inputs[0] for op in tape if op.kind is OpKind.UPDATE and op.layer == 0)
    at, first = next((at, op) for at, op in enumerate(tape) if op.kind is OpKind.NORM)
    extra = [
        first,
        Op(OpKind.NORM, 0, (gradient,), (10**6,)),
        Op(OpKind.ADD, 0, (first.outputs[0], 10**6), (10**6 + 1,)),
        Op(OpKind.FREE, -1, (first.outputs[0],)),
        Op(OpKind.FREE, -1, (10**6,)),
    ]
    frees = Op(OpKind.FREE, -1, first.outputs)
    rest = [op._replace(inputs=(10**6 + 1,)) if op == frees else op for op in tape[at + 1 :]]
    mutant = with_tape(PROGRAM, 1, [*tape[:at], *extra, *renamed(rest, first.outputs[0], 10**6 + 1)])
    found = refusal(mutant)
    assert found is not None
    assert found.rule == "counted twice"
    assert found.doubled


def test_a_norm_without_the_tied_weight_is_not_the_models() -> None:
    program = alone(finish)
    ((_, at, op),) = [place for place in places(program, OpKind.NORM) if place[2].layer == 0]
    ((_, add_at, add),) = [p for p in places(program, OpKind.ADD) if op.outputs[0] in p[2].inputs]
    other = next(number for number in add.inputs if number != op.outputs[0])
    tape = [o for i, o in enumerate(program.tapes[0]) if i not in (at, add_at) and o.inputs != op.outputs]
    tape.remove(Op(OpKind.FREE, -1, (other,)))
    mutant = with_tape(program, 0, renamed(tape, add.outputs[0], other))
    tells(refusal(mutant), "partial norm", rank=0, missing=(0, LAST))


def test_a_gradient_that_meets_nobody_is_refused() -> None:
    (rank, at, op), _ = [p for p in places(PROGRAM, OpKind.ALL_REDUCE) if p[2].group and p[2].layer == 0
                         and p[2].group.axis != "pp"]  # fmt: skip
    wait = next(i for i, o in enumerate(PROGRAM.tapes[rank]) if o.kind is OpKind.WAIT and o.handle == op.handle)
    tape = [o for i, o in enumerate(PROGRAM.tapes[rank]) if i not in (at, wait)]
    tape = [o for o in tape if o != Op(OpKind.FREE, -1, op.inputs)]
    mutant = with_tape(PROGRAM, rank, renamed(tape, op.outputs[0], op.inputs[0]))
    tells(refusal(mutant), "missing microbatches", rank=rank, layer=0, missing=(2, 3))


def test_members_that_name_other_ranks_never_meet() -> None:
    async def strategy(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([rank.index])
        rank.weights[0] = rank.load_weight(0)
        rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        gradient, _ = rank.backward(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        await rank.all_reduce(gradient, among=[rank.index, 1 - rank.index])

    with pytest.raises(Deadlock, match="on ranks 0, 1 for rank 1"):
        trace(strategy, 2, 1, 2)


@pytest.mark.parametrize("among", [[], [1], [0, 0], [0, 2], [0, -1], 3, ["0", 0]])
def test_a_group_has_its_own_rank_and_others_each_once(among: object) -> None:
    async def strategy(rank: Rank) -> None:
        weight = rank.load_weight(0)
        await rank.all_reduce(weight, among=among)  # pyright: ignore[reportArgumentType]

    with refuses("unknown group"):
        trace(strategy, 2, 1, 2)


def test_ranks_named_beside_an_axis_lie_along_it() -> None:
    async def strategy(rank: Rank) -> None:
        await rank.all_reduce(rank.load_weight(0), axis="dp_shard", among=[0, 2])

    with refuses("unknown group"):
        trace(strategy, Mesh(pp=2, dp_shard=2), 1, 2)


def test_a_changed_use_on_the_tape_is_noticed() -> None:
    """The head's backward pass with another layer's number reads what is not for it."""
    rank, at, op = next(p for p in places(PROGRAM, OpKind.BACKWARD) if p[2].layer == LAST)
    tells(refusal(changed(PROGRAM, rank, at, op._replace(layer=0))), "wrong layer", rank=rank, op=at, layer=0)
