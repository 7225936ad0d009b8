"""Sizes of values: the puzzles' constants, and tables of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import (
    Deadlock,
    Holds,
    Kind,
    Mesh,
    Op,
    OpKind,
    Program,
    Rank,
    Refused,
    Sizes,
    Spec,
    Strategy,
    Value,
    trace,
)
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.layer_graph import Node, build_layers
from shardlab.language.rules.spec import Space, Term, form_of
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.language.rules.toys import matrices
from tests.language.tapes import refusal as refusal_imported
from tests.support.mutating import changed, places, renamed, with_tape
from tests.support.refusing import ExpectedRefusal, refusal, refusal_by, refuses, require_refusal

SQUARE, ROW = 512 * 512, 512 * 256


def spec_of(kind: Kind, layer: int, cells: int = 0, holds: Holds = WHOLE) -> Spec:
    return Spec(form_of(kind, layer, 0, Space(4), holds), cells)


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        (spec_of(Kind.WEIGHT, 0), SQUARE),
        (spec_of(Kind.WEIGHT, 1, 0, Holds(0b0001, 4)), SQUARE // 4),
        (spec_of(Kind.OPT_STATE, 0, 0, Holds(0b0011, 4)), SQUARE // 2),
        (spec_of(Kind.GRAD_WEIGHT, 1, 0b1), SQUARE),
        (spec_of(Kind.ACTIVATION, 0, 0b0001), ROW),
        (spec_of(Kind.ACTIVATION, 2, 0b0111), 3 * ROW),
        (spec_of(Kind.GRAD_ACTIVATION, 2, 0b1111), 4 * ROW),
        (spec_of(Kind.SAVED, 1, 0b1111), 0),
        (spec_of(Kind.SAVED_FOR_WEIGHT, 1, 0b1111), 0),
        (spec_of(Kind.SCALAR, 0, 0, Holds(0b01, 2)), 1),
    ],
)
def test_the_puzzles_sizes(spec: Spec, elements: int) -> None:
    assert Sizes.puzzle(2).elements(spec) == elements
    assert Sizes.puzzle(2).bytes(spec) == 4 * elements


SIZES = Sizes(
    weights=(10, 7),
    opt_states=(20, 14),
    activations=(1, 2, 3),
    saved=(5, 6),
    element_bytes={
        Kind.WEIGHT: 2,
        Kind.OPT_STATE: 4,
        Kind.GRAD_WEIGHT: 2,
        Kind.ACTIVATION: 2,
        Kind.GRAD_ACTIVATION: 2,
        Kind.SAVED: 1,
    },
)


@pytest.mark.parametrize(
    ("spec", "elements", "size"),
    [
        (spec_of(Kind.WEIGHT, 1), 7, 14),
        (spec_of(Kind.GRAD_WEIGHT, 1, 1), 7, 14),
        (spec_of(Kind.OPT_STATE, 1), 14, 56),
        (spec_of(Kind.ACTIVATION, 2, 0b101), 6, 12),
        (spec_of(Kind.GRAD_ACTIVATION, 1, 0b001), 2, 4),
        (spec_of(Kind.SAVED, 1, 0b011), 12, 12),
    ],
)
def test_each_kind_has_its_own_table_and_element_size(spec: Spec, elements: int, size: int) -> None:
    assert SIZES.elements(spec) == elements
    assert SIZES.bytes(spec) == size


def test_elements_between_the_halves_have_a_table_or_equal_the_saved_ones() -> None:
    spec = spec_of(Kind.SAVED_FOR_WEIGHT, 1, 0b011)
    assert SIZES.elements(spec) == 2 * 6
    assert replace(SIZES, saved_for_weight=(8, 9)).elements(spec) == 2 * 9


def test_uneven_shares_round_up() -> None:
    assert [SIZES.elements(spec_of(Kind.WEIGHT, 1, 0, Holds(1 << shard, 4))) for shard in range(4)] == [2, 2, 2, 2]
    assert SIZES.elements(spec_of(Kind.WEIGHT, 1, 0, Holds(0b0111, 4))) == 6  # 5.25


@given(st.integers(1, 1000), st.integers(1, 12))
def test_shards_cover_the_layer_and_waste_less_than_an_element_each(parameters: int, shards: int) -> None:
    sizes = Sizes((parameters,), (parameters,), (1, 1), (0,))
    share = sizes.elements(spec_of(Kind.WEIGHT, 0, 0, Holds(1, shards)))
    assert parameters <= share * shards < parameters + shards
    assert sizes.elements(spec_of(Kind.WEIGHT, 0, 0, Holds((1 << shards) - 1, shards))) == parameters


def test_the_number_of_layers_is_that_of_the_tables() -> None:
    assert SIZES.layers == 2
    assert Sizes.puzzle(5).layers == 5
    assert len(Sizes.puzzle(5).activations) == 6


def test_a_slice_takes_its_share_of_room_and_a_term_takes_all() -> None:
    sizes = Sizes((8, 8), (8, 8), (12, 20, 12), (0, 0), signatures=matrices(["column", "row"]))
    space = sizes.space(Mesh(tp=2), 1)

    def slice_elements(kind: Kind, layer: int) -> int:
        return sizes.elements(Spec(form_of(kind, layer, 0, space, slices=(("ffn", 0b01),)), 0b11))

    def term_elements(kind: Kind, layer: int) -> int:
        return sizes.elements(Spec(form_of(kind, layer, 0, space, term=Term(("ffn",), 0b10)), 0b11))

    assert slice_elements(Kind.ACTIVATION, 1) == slice_elements(Kind.GRAD_ACTIVATION, 1) == 10
    assert term_elements(Kind.ACTIVATION, 2) == term_elements(Kind.GRAD_ACTIVATION, 0) == 12


# A head tied to the embedding: one weight used by two layers, whose gradients meet and count once.


TIED_SIZES = Sizes.half_blocks(1, tied=True)
LAST = TIED_SIZES.layers - 1
TWO = Plan(Mesh(pp=2))
PROGRAM = trace(program_from_plan(TWO), TWO.mesh, TIED_SIZES, 2)
Verbs = Callable[[Rank], object]


def alone(verbs: Verbs) -> Program:
    """Trace `verbs` on a rank with both gradients of the weight in grad_weights["embedding"] and ["head"]."""

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
        gradient, grad_residual = rank.loss(x), list[Value]()
        for l in reversed(rank.layers):
            weight = rank.weights[0 if l == LAST else l]
            key = "embedding" if l == 0 else "head" if l == LAST else l
            if l % 2:
                rank.grad_weights[key], gradient, *grad_residual = rank.backward(
                    l, inputs[l], (gradient, *grad_residual), weight
                )
            else:
                rank.grad_weights[key], gradient = rank.backward(l, inputs[l], gradient, weight)
        verbs(rank)

    return trace(strategy, 1, TIED_SIZES, 1)


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


MISTAKES: list[tuple[Verbs, ExpectedRefusal]] = [
        (lambda r: update(r, "embedding"), refusal_by("missing microbatches", layer=0, missing=(1,))),
        (lambda r: update(r, "head"), refusal_by("missing microbatches", layer=0, missing=(0,))),
        (lambda r: r.norm(0, r.grad_weights["embedding"]), refusal_by("missing microbatches", layer=0, missing=(1,))),
        (lambda r: r.grad_weights["head"] + r.grad_weights["head"], refusal_by("counted twice", layer=0, doubled=(1,))),
        (lambda r: r.load_weight(LAST), refusal_by("tied weight", layer=LAST)),
        (lambda r: r.load_opt_state(LAST), refusal_by("tied weight", layer=LAST)),
        (lambda r: r.forward(LAST, r.activations[LAST], r.weights[2]), refusal_by("wrong layer", layer=LAST)),
        (lambda r: r.forward(0, r.activations[0], r.weights[2]), refusal_by("wrong layer", layer=0)),
]  # fmt: skip


@pytest.mark.parametrize(("verbs", "expected"), MISTAKES)
def test_missing_and_doubled_contributions_are_named_by_their_use(verbs: Verbs, expected: ExpectedRefusal) -> None:
    with pytest.raises(Refused) as refused:
        alone(verbs)
    require_refusal(refused.value, expected)


def test_a_tape_that_loads_a_weight_for_the_head_is_refused() -> None:
    load = Op(OpKind.LOAD_WEIGHT, LAST, (), (10**6,), holds=Holds(1, 1))
    require_refusal(refusal(with_tape(PROGRAM, 0, [load, *PROGRAM.tapes[0]])), "tied weight", rank=0, op=0, layer=LAST)


def test_the_two_gradients_meet_once_in_a_group_of_the_first_and_the_last_stage() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=2, tp=2))
    program = trace(program_from_plan(plan), plan.mesh, TIED_SIZES, 4)
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
    assert check(trace(program_from_plan(plan), mesh, sizes, 4 * mesh.dp_shard)).backends() == ["gloo", "nccl"]


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
    refused = refusal(mutant)
    assert refused is not None
    assert refused.rule == "counted twice"
    assert refused.doubled


def test_a_norm_without_the_tied_weight_is_not_the_models() -> None:
    program = alone(finish)
    ((_, at, op),) = [place for place in places(program, OpKind.NORM) if place[2].layer == 0]
    ((_, add_at, add),) = [p for p in places(program, OpKind.ADD) if op.outputs[0] in p[2].inputs]
    other = next(number for number in add.inputs if number != op.outputs[0])
    tape = [o for i, o in enumerate(program.tapes[0]) if i not in (at, add_at) and o.inputs != op.outputs]
    tape.remove(Op(OpKind.FREE, -1, (other,)))
    mutant = with_tape(program, 0, renamed(tape, add.outputs[0], other))
    require_refusal(refusal(mutant), "partial norm", rank=0, missing=(0, LAST))


def test_a_gradient_that_meets_nobody_is_refused() -> None:
    (rank, at, op), _ = [p for p in places(PROGRAM, OpKind.ALL_REDUCE) if p[2].group and p[2].layer == 0
                         and p[2].group.axis != "pp"]  # fmt: skip
    wait = next(i for i, o in enumerate(PROGRAM.tapes[rank]) if o.kind is OpKind.WAIT and o.handle == op.handle)
    tape = [o for i, o in enumerate(PROGRAM.tapes[rank]) if i not in (at, wait)]
    tape = [o for o in tape if o != Op(OpKind.FREE, -1, op.inputs)]
    mutant = with_tape(PROGRAM, rank, renamed(tape, op.outputs[0], op.inputs[0]))
    require_refusal(refusal(mutant), "missing microbatches", rank=rank, layer=0, missing=(2, 3))


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
    require_refusal(refusal(changed(PROGRAM, rank, at, op._replace(layer=0))), "wrong layer", rank=rank, op=at, layer=0)


# Column and row layers: what lies side by side is gathered, what is a term is summed, and the other way is refused.


# Programs with one mistake each, on two ranks; layers 0 and 1 are columns, 2 is a row after one, 3 is a column.

COLUMNS = Sizes((8,) * 4, (8,) * 4, (16,) * 5, (0,) * 4, signatures=matrices(["column", "column", "row", "column"]))


def start(rank: Rank) -> Value:
    """Make the output of the first layer."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch([0])
    return rank.forward(0, rank.activations[0], rank.weights[0])


async def to_the_row(rank: Rank) -> Value:
    rank.activations[1] = await rank.all_gather(start(rank), axis="tp")
    rank.activations[2] = rank.forward(1, rank.activations[1], rank.weights[1])
    return rank.activations[2]


async def to_the_end(rank: Rank) -> Value:
    """Forward; the gradient of the last activation."""
    terms = rank.forward(2, await to_the_row(rank), rank.weights[2])
    rank.activations[3] = await rank.all_reduce(terms, axis="tp")
    logits = await rank.all_gather(rank.forward(3, rank.activations[3], rank.weights[3]), axis="tp")
    return rank.loss(logits)


async def forgot_to_gather(rank: Rank) -> None:
    rank.forward(1, start(rank), rank.weights[1])


async def summed_slices(rank: Rank) -> None:
    await rank.all_reduce(start(rank), axis="tp")


async def scattered_slices(rank: Rank) -> None:
    await rank.reduce_scatter(start(rank), axis="tp")


async def gathered_terms(rank: Rank) -> None:
    await rank.all_gather(rank.forward(2, await to_the_row(rank), rank.weights[2]), axis="tp")


async def gathered_twice(rank: Rank) -> None:
    await rank.all_gather(await rank.all_gather(start(rank), axis="tp"), axis="tp")


async def a_row_given_all(rank: Rank) -> None:
    await to_the_row(rank)
    rank.forward(2, await rank.all_gather(rank.activations[2], axis="tp"), rank.weights[2])


async def a_row_given_other_slices(rank: Rank) -> None:
    await to_the_row(rank)
    rank.weights["other"] = rank.load_weight(2, 1 - rank.index, 2)
    rank.forward(2, rank.activations[2], rank.weights["other"])


async def row_terms_unreduced(rank: Rank) -> None:
    rank.forward(3, rank.forward(2, await to_the_row(rank), rank.weights[2]), rank.weights[3])


async def reduced_twice(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    await rank.all_reduce(await rank.all_reduce(terms, axis="tp"), axis="tp")


async def gradient_unreduced(rank: Rank) -> None:
    """A row layer wants the sum; its slice's term looks like any."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    rank.backward(2, rank.activations[2], terms, rank.weights[2])


async def gradient_unreduced_below_a_column(rank: Rank) -> None:
    """A column takes its own slices of a gradient, but a term of it is none."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    _, terms = rank.backward(1, rank.activations[1], slices, rank.weights[1])
    rank.backward(0, rank.activations[0], terms, rank.weights[0])


async def summed_a_rows_gradients(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    await rank.all_reduce(slices, axis="tp")


COLUMNS_MISTAKES: dict[Strategy, ExpectedRefusal] = {
    forgot_to_gather: refusal_by("missing pieces", layer=1, missing=(1,)),
    summed_slices: refusal_by("no term", layer=1),
    scattered_slices: refusal_by("no term", layer=1),
    gathered_terms: refusal_by("a term", layer=3),
    gathered_twice: refusal_by("pieces overlap", layer=1, doubled=(0, 1)),
    a_row_given_all: refusal_by("other pieces", layer=2),
    a_row_given_other_slices: refusal_by("other pieces", layer=2),
    row_terms_unreduced: refusal_by("missing terms", layer=3, missing=(0,)),
    reduced_twice: refusal_by("no term", layer=3),
    gradient_unreduced: refusal_by("missing terms", layer=2, missing=(0,)),
    gradient_unreduced_below_a_column: refusal_by("missing terms", layer=0, missing=(1,)),
    summed_a_rows_gradients: refusal_by("no term", layer=2),
}


@pytest.mark.parametrize("strategy", COLUMNS_MISTAKES, ids=[mistake.__name__ for mistake in COLUMNS_MISTAKES])
def test_a_mistake_with_slices_is_refused_at_its_line(strategy: Strategy) -> None:
    require_refusal(refusal_imported(strategy, Mesh(tp=2), COLUMNS, 1), COLUMNS_MISTAKES[strategy])


@pytest.mark.parametrize(
    ("reduced", "words"),
    [
        (False, refusal_by("missing terms", layer=1, missing=(1,))),
        (True, refusal_by("other pieces", layer=1)),
    ],
)
def test_a_row_after_what_makes_no_slices_is_refused(reduced: bool, words: ExpectedRefusal) -> None:
    """Neither its terms nor their sum are slices of it."""
    up = Node("up", {"x": "width"}, {"x": "ffn"}, {"w1": "ffn width"})
    down = Node("down", {"x": "ffn"}, {"x": "width"}, {"w2": "width ffn"})
    row = Node("row", {"x": "width"}, {"x": "head"}, {"w": "head width"})
    layers = build_layers([("feed-forward", [up, down], ("ffn",)), ("row", [row], ("width",))])
    sizes = Sizes((8,) * 2, (8,) * 2, (16,) * 3, (0,) * 2, signatures=layers)

    async def strategy(rank: Rank) -> None:
        terms = start(rank)
        value = await rank.all_reduce(terms, axis="tp") if reduced else terms
        rank.forward(1, value, rank.weights[1])

    require_refusal(refusal_imported(strategy, Mesh(tp=2), sizes, 1), words)


def test_whole_weights_make_what_is_complete() -> None:
    async def strategy(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l)
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
            form = rank.activations[l + 1].spec.form
            assert (form.slices, form.term) == ((), None)

    trace(strategy, Mesh(tp=2), COLUMNS, 1)
