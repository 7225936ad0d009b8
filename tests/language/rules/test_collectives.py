"""Rules of collectives: a gather unites pieces, a reduction unites sums, and each piece counts once."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardlab.common.errors import About
from shardlab.language import Holds, Kind, OpKind, Refused, Sizes, Spec
from shardlab.language.collective_calls import Call, collective_results
from shardlab.language.rules import collectives
from shardlab.language.rules.kinds import WHOLE as WHOLE_imported
from shardlab.language.rules.kinds import mask_of
from shardlab.language.rules.layer_graph import Node, build_layers
from shardlab.language.rules.layer_rules import Rules, rules_of
from shardlab.language.rules.spec import KEY, Space, Term, form_of
from tests.language.rules.toys import Refusals, Toy, is_refused, shard
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses

TOY = Toy(Sizes.puzzle(2))
ALL = 0b1111
"""The step's four microbatches."""

GATHER, REDUCE, SCATTER = OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER
meet = TOY.meet


def weight(holds: Holds = WHOLE_imported, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, 1, 0, holds, step)


def activation(cells: int) -> Spec:
    return TOY.spec_of(Kind.ACTIVATION, 1, cells)


def gradient(cells: int = ALL, holds: Holds = WHOLE_imported) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, 1, cells, holds)


def scalar(parts: int, of: int) -> Spec:
    return TOY.spec_of(Kind.SCALAR, 0, 0, Holds(parts, of))


def test_all_gather_unites_holds() -> None:
    assert meet(GATHER, *[weight(shard(n, 3)) for n in (2, 0, 1)]) == [weight()] * 3
    mixed = [weight(Holds(0b1, 2)), weight(Holds(0b1000, 4)), weight(Holds(0b0100, 4))]
    assert meet(GATHER, *mixed)[0].holds.complete


def test_all_gather_of_rows_remembers_whose_they_were() -> None:
    for first, second in ((0b01, 0b10), (0b10, 0b01), (0b1001, 0b0110)):
        gathered = meet(GATHER, activation(first), activation(second))
        assert gathered == [activation(first | second)._replace(joined=((first, ()), (second, ())))] * 2
        assert collectives.divide_cells(gathered[0], 2) == [(first, ()), (second, ())]


def test_rows_that_nobody_put_together_are_dealt_in_even_runs() -> None:
    assert collectives.divide_cells(activation(0b1111), 2) == [(0b0011, ()), (0b1100, ())]
    assert collectives.divide_cells(activation(0b0111), 2) is None


def test_all_reduce_unites_sums() -> None:
    assert meet(REDUCE, *[gradient(1 << n) for n in range(4)]) == [gradient()] * 4


def test_reduce_scatter_unites_sums_and_splits_holds() -> None:
    scattered = meet(SCATTER, *[gradient(1 << n) for n in range(4)])
    assert scattered == [gradient(ALL, shard(n, 4)) for n in range(4)]


@given(st.permutations(range(4)), st.integers(1, 4))
def test_gathering_what_was_scattered_gives_the_reduced_gradient(order: list[int], members: int) -> None:
    pieces = [gradient(1 << n) for n in order[:members]]
    gathered = meet(GATHER, *meet(SCATTER, *pieces))[0]
    reduced = meet(REDUCE, *pieces)[0]
    assert gathered.cells == reduced.cells
    assert gathered.holds.equals(reduced.holds)


def some_specs() -> st.SearchStrategy[Spec]:
    return st.builds(
        TOY.spec_of,
        st.sampled_from([Kind.WEIGHT, Kind.GRAD_WEIGHT]),
        st.integers(0, 1),
        st.integers(0, 7),
        st.integers(1, 3).flatmap(lambda of: st.integers(1, (1 << of) - 1).map(lambda mask: Holds(mask, of))),
        st.integers(0, 1),
    )


def with_holds(spec: Spec, mask: int) -> Spec:
    return spec._replace(form=spec.form.but(holds=Holds(mask, spec.holds.of)))


similar_specs = some_specs().flatmap(
    lambda first: st.lists(
        st.one_of(
            st.just(first),
            st.integers(0, 7).map(lambda cells: first._replace(cells=cells)),
            st.integers(1, (1 << first.holds.of) - 1).map(lambda mask: with_holds(first, mask)),
            some_specs(),
        ),
        max_size=2,
    ).map(lambda rest: [first, *rest])
)


@given(st.sampled_from([REDUCE, GATHER]), similar_specs)
def test_a_collective_says_what_the_rule_for_its_members_says(kind: OpKind, members: list[Spec]) -> None:
    names = [f"rank {rank}" for rank in range(len(members))]
    rule = collectives.gather if kind is GATHER else collectives.reduce
    name = members[0].about(kind.value)
    assert outcome(lambda: [rule(name, members, names)] * len(members)) == outcome(lambda: meet(kind, *members))


def outcome(call: Callable[[], list[Spec]]) -> list[Spec] | str:
    try:
        return call()
    except Refused as refusal:
        return str(refusal)


@given(similar_specs)
def test_a_sum_counts_every_contribution_once(members: list[Spec]) -> None:
    try:
        total = meet(REDUCE, *members)[0]
    except Refused:
        return
    assert total.cells == sum(member.cells for member in members), "a sum of disjoint bit sets is their union"
    assert all(member.holds.equals(total.holds) for member in members)


@given(similar_specs)
def test_a_gathered_value_holds_every_piece_once(members: list[Spec]) -> None:
    try:
        total = meet(GATHER, *members)[0]
    except Refused:
        return
    shares = sum(Fraction(member.holds.pieces, member.holds.of) for member in members)
    assert Fraction(total.holds.pieces, total.holds.of) == shares
    assert all(total.holds.contains(member.holds) for member in members)


@given(st.permutations([1, 2, 4, 8]), st.integers(1, 4))
def test_rows_put_together_and_dealt_again_are_each_ones_own(order: list[int], members: int) -> None:
    pieces = [activation(cells) for cells in order[:members]]
    whole = meet(GATHER, *pieces)[0]
    assert collectives.scatter(About("scatter"), whole, members) == pieces


REFUSALS: Refusals = {
    "all_reduce, replicas' squares": (
        lambda: meet(REDUCE, *[scalar(0b1, 2)] * 2, ranks=[4, 6]),
        refusal_by("counted twice", doubled=(0,)),
    ),
    "all_gather, scalars": (
        lambda: meet(GATHER, scalar(0b01, 2), scalar(0b10, 2)),
        refusal_by("wrong kind"),
    ),
    "reduce_scatter, scalars": (
        lambda: meet(SCATTER, scalar(0b01, 2)),
        refusal_by("wrong kind"),
    ),
    "all_reduce, twice": (
        lambda: meet(REDUCE, gradient(0b1), gradient(2), gradient(3), ranks=[0, 2, 4]),
        refusal_by("counted twice", layer=1, doubled=(0, 1)),
    ),
    "all_reduce, kind": (
        lambda: meet(REDUCE, activation(1), activation(2)),
        refusal_by("no term", layer=1),
    ),
    "all_reduce, weights": (
        lambda: meet(REDUCE, weight(), weight()),
        refusal_by("no term", layer=1),
    ),
    "reduce_scatter, twice": (
        lambda: meet(SCATTER, gradient(), gradient(), ranks=[3, 5]),
        refusal_by("counted twice", layer=1, doubled=(0, 1, 2, 3)),
    ),
    "all_gather, slices overlap": (
        lambda: meet(GATHER, *[weight(shard(1, 2))] * 2),
        refusal_by("pieces overlap", layer=1, doubled=(1,)),
    ),
    "all_gather, whole already": (
        lambda: meet(GATHER, *[weight()] * 2),
        refusal_by("pieces overlap", layer=1, doubled=(0,)),
    ),
    "all_gather, rows overlap": (
        lambda: meet(GATHER, *[activation(0b11)] * 2),
        refusal_by("pieces overlap", layer=1, doubled=(0, 1)),
    ),
    "all_gather, steps": (
        lambda: meet(GATHER, weight(shard(0, 2)), weight(shard(1, 2), step=1)),
        refusal_by("other values", layer=1),
    ),
    "all_gather, sums": (
        lambda: meet(GATHER, gradient(0b1, shard(0, 2)), gradient(0b10, shard(1, 2))),
        refusal_by("other sums", layer=1),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_broken_rule_is_refused_with_the_given_and_the_expected_value(case: str) -> None:
    assert is_refused(REFUSALS[case]).about.startswith(case.split(",")[0]), "a refusal begins with the op's name"


# Results of ALL_TO_ALL on buffers, and values that no rank may exchange or sum.


SIZES = Sizes.mixture(2)
STEP = 12
"""Microbatches of the step in these tests."""


def space(of: int) -> Space:
    return Space(STEP, 1, (("expert", of),))


def rules(of: int = 2) -> Rules:
    return rules_of(SIZES.signatures, space(of))


def buffers(
    microbatches: set[int], experts: int = 0, kind: Kind = Kind.ACTIVATION, layer: int = 1, of: int = 2
) -> Spec:
    """Buffers of some slices of the experts, as a bit set (0: of all), for some microbatches."""
    slices = (("expert", experts),) if experts else ()
    return Spec(form_of(kind, layer, 0, space(of), slices=slices), mask_of(microbatches))


def exchanged(specs: list[Spec], of: int = 2) -> list[Spec]:
    outputs = collective_results(Call(OpKind.ALL_TO_ALL), specs, range(len(specs)), rules(of))
    return [spec for spec in outputs if spec is not None]


def plain(specs: list[Spec]) -> list[tuple[object, int]]:
    """All but how they were put together."""
    return [(spec.form, spec.cells) for spec in specs]


@st.composite
def deals(draw: st.DrawFn) -> list[set[int]]:
    """Equally many microbatches for each rank, in any order."""
    ranks, share = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    order = draw(st.permutations(range(STEP)))
    return [set(order[rank * share : (rank + 1) * share]) for rank in range(ranks)]


@given(deals(), st.sampled_from([Kind.ACTIVATION, Kind.GRAD_ACTIVATION]))
def test_dispatch_and_combine_are_each_others_reverse(dealt: list[set[int]], kind: Kind) -> None:
    ranks = len(dealt)
    inputs = [buffers(mine, kind=kind, of=ranks) for mine in dealt]
    dispatched = exchanged(inputs, ranks)
    if ranks > 1:
        everything = set[int]().union(*dealt)
        assert plain(dispatched) == plain([buffers(everything, 1 << i, kind, of=ranks) for i in range(ranks)])
    assert exchanged(dispatched, ranks) == inputs


@given(st.sampled_from([2, 3, 4]), st.integers(1, 3))
def test_buffers_that_no_rank_put_together_are_dealt_in_runs(ranks: int, share: int) -> None:
    everything = set(range(ranks * share))
    combined = exchanged([buffers(everything, 1 << i, of=ranks) for i in range(ranks)], ranks)
    assert combined == [buffers(set(range(i * share, (i + 1) * share)), of=ranks) for i in range(ranks)]


def test_experts_make_the_slices_that_they_were_given() -> None:
    weight = Spec(form_of(Kind.WEIGHT, 1, 0, space(2), Holds(0b10, 2)))
    x, gradient = buffers({0, 3}, 0b10), buffers({0, 3}, 0b10, Kind.GRAD_ACTIVATION, 2)
    layer = rules().layers[1]
    outputs, saved_spec = layer.forward([x], weight)
    assert outputs == [buffers({0, 3}, 0b10, layer=2)]
    assert saved_spec == buffers({0, 3}, 0b10, Kind.SAVED)
    (grad_weight, grad_input), follows = layer.backward(x, [gradient], weight)
    assert grad_weight == Spec(form_of(Kind.GRAD_WEIGHT, 1, 0, space(2), Holds(0b10, 2)), mask_of({0, 3}))
    assert grad_input == buffers({0, 3}, 0b10, Kind.GRAD_ACTIVATION)
    assert layer.backward_weight(x, [gradient], Spec(follows.half_form, x.cells)) == grad_weight


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([buffers({0}), buffers({0})], refusal_by("pieces overlap", layer=1, doubled=(0,))),
        ([buffers({0}), buffers({1, 2})], refusal_by("other tokens", layer=1)),
        ([buffers({0}), buffers({0}, 1)], refusal_by("other values", layer=1)),
        ([buffers({0}), buffers({1}, layer=2)], refusal_by("other values", layer=1)),
        ([buffers({0, 1}, 2), buffers({0, 1}, 1)], refusal_by("other order", layer=1)),
        ([buffers({0, 1}, 1), buffers({2, 3}, 2)], refusal_by("other tokens", layer=1)),
        ([buffers({0}, 1), buffers({0}, 2)], refusal_by("does not divide", layer=1)),
        ([buffers({0}), buffers({1}), buffers({2})], refusal_by("does not divide", layer=1)),
        ([buffers({0}, layer=0), buffers({1}, layer=0)], refusal_by("not exchanged")),
        ([buffers({0}, layer=5), buffers({1}, layer=5)], refusal_by("not exchanged")),
        ([buffers({0}, kind=Kind.RESIDUAL, layer=2)] * 2, refusal_by("not exchanged")),
    ],
)
def test_values_that_no_all_to_all_can_exchange_are_refused(specs: list[Spec], expected: ExpectedRefusal) -> None:
    with refuses(expected):
        exchanged(specs)


@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER])
def test_experts_buffers_are_never_summed(kind: OpKind) -> None:
    with refuses("no term", layer=1):
        collective_results(Call(kind), [buffers({0}, 1), buffers({0}, 2)], range(2), rules())


def test_experts_buffers_are_never_gathered() -> None:
    with refuses("not gathered", layer=1):
        collective_results(Call(OpKind.ALL_GATHER), [buffers({0}, 1), buffers({0}, 2)], range(2), rules())


def summed(term: int, *, indices: tuple[str, ...] = ("ffn",)) -> list[Spec]:
    """Experts' results of two ranks, both terms of a sum."""
    both_indices = Space(STEP, 1, (("expert", 2), ("ffn", 2)))
    forms = [
        form_of(Kind.ACTIVATION, 2, 0, both_indices, slices=(("expert", 1 << i),), term=Term(indices, term))
        for i in (0, 1)
    ]
    return [Spec(form, 0b11) for form in forms]


def test_terms_of_a_sum_are_exchanged_and_stay_terms() -> None:
    """An all_to_all is linear: the sum of the returned terms is the returned sum."""
    for term in (0b01, 0b10):
        home = exchanged(summed(term))
        assert [spec.form.term for spec in home] == [Term(("ffn",), term)] * 2
        assert [(spec.form.slices, spec.cells) for spec in home] == [((), 0b01), ((), 0b10)]


def test_terms_of_other_slices_are_not_exchanged() -> None:
    with refuses("other values", layer=2):
        exchanged([summed(0b01)[0], summed(0b10)[1]])


def test_partial_attention_is_not_exchanged() -> None:
    with refuses("not exchanged", layer=2):
        exchanged(summed(0b01, indices=KEY))


def test_without_experts_there_is_nothing_to_exchange() -> None:
    whole = [Spec(form_of(Kind.ACTIVATION, 1, 0, Space(STEP)), 1 << m) for m in range(2)]
    with refuses("not exchanged", layer=1):
        collective_results(Call(OpKind.ALL_TO_ALL), whole, range(2), rules_of(Sizes.puzzle(4).signatures, Space(STEP)))


def test_an_exchange_keeps_the_number_of_buffers() -> None:
    sizes = Sizes.mixture(1)
    assert sizes.elements(buffers({0, 1}, 1)) == sizes.elements(buffers({0}))


# Matrices cut along both of their indices, and activations with them (2-D tensor parallelism; Shazeer et al. 2018,
# arXiv 1811.02084): each rank's numbers, computed in numpy from its slices alone, are what the rules say that they
# are.


FFN, WIDTH = 2, 3
"""Ranks along which each index is cut: rank (i, j) has piece i of `ffn` and piece j of `width`."""
CUT = ("ffn", "width")
UP = Node("linear", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"})
DOWN = Node("linear", {"x": "ffn"}, {"x": "width"}, {"w": "width ffn"})
SIGNATURES = build_layers([("up", (UP,), CUT), ("down", (DOWN,), CUT)])
SPACE = Space(1, 1, (("ffn", FFN), ("width", WIDTH)))
RULES = rules_of(SIGNATURES, SPACE)
RANKS = list(product(range(FFN), range(WIDTH)))

Array = NDArray[np.int64]
RANDOM = np.random.default_rng(0)
X, W1, W2, G = (RANDOM.integers(-9, 9, shape) for shape in ((5, 6), (8, 6), (6, 8), (5, 6)))
H = X @ W1.T
WHOLE = {
    (Kind.ACTIVATION, 0): (X, ("row", "width")),
    (Kind.ACTIVATION, 1): (H, ("row", "ffn")),
    (Kind.ACTIVATION, 2): (H @ W2.T, ("row", "width")),
    (Kind.GRAD_ACTIVATION, 2): (G, ("row", "width")),
    (Kind.GRAD_ACTIVATION, 1): (G @ W2, ("row", "ffn")),
    (Kind.GRAD_ACTIVATION, 0): (G @ W2 @ W1, ("row", "width")),
    (Kind.WEIGHT, 0): (W1, ("ffn", "width")),
    (Kind.WEIGHT, 1): (W2, ("width", "ffn")),
    (Kind.GRAD_WEIGHT, 0): ((G @ W2).T @ X, ("ffn", "width")),
    (Kind.GRAD_WEIGHT, 1): (G.T @ H, ("width", "ffn")),
}
"""What one device has, and the indices of each."""


class Held(NamedTuple):
    """A rank's value: what the rules say of it, and its numbers."""

    spec: Spec
    data: Array


def whole_of(spec: Spec) -> Array:
    """Return one device's value in place of a complete value."""
    array, indices = WHOLE[spec.kind, spec.layer]
    pieces = dict(spec.form.slices)
    if spec.form.holds.of > 1:
        (place,) = (piece for piece in range(spec.holds.of) if spec.holds.mask >> piece & 1)
        pieces = {"ffn": 1 << place // WIDTH, "width": 1 << place % WIDTH}
    for dim, index in enumerate(indices):
        count, mask = SPACE.count(index), pieces.get(index)
        if mask is not None:
            array = np.concatenate([a for p, a in enumerate(np.split(array, count, dim)) if mask >> p & 1], dim)
    return array


def start(kind: Kind, layer: int, rank: tuple[int, int], index: str) -> Held:
    piece = 1 << rank[CUT.index(index)]
    spec = Spec(form_of(kind, layer, 0, SPACE, slices=((index, piece),)), 1)
    return Held(spec, whole_of(spec))


def weight_of_two_axes(layer: int, rank: tuple[int, int]) -> Held:
    spec = Spec(form_of(Kind.WEIGHT, layer, 0, SPACE, Holds(1 << rank[0] * WIDTH + rank[1], FFN * WIDTH)))
    return Held(spec, whole_of(spec))


def reduced(values: dict[tuple[int, int], Held], along: str) -> dict[tuple[int, int], Held]:
    """All-reduced among the ranks that have the other pieces of an index; complete then, and one device's numbers."""
    axis, outputs = CUT.index(along), dict[tuple[int, int], Held]()
    for place in range(WIDTH if axis == 0 else FFN):
        members = [rank for rank in RANKS if rank[1 - axis] == place]
        specs = collective_results(
            Call(OpKind.ALL_REDUCE), [values[rank].spec for rank in members], range(len(members)), RULES
        )
        total = sum((values[rank].data for rank in members), np.zeros((), np.int64))
        for rank, spec in zip(members, specs, strict=True):
            assert spec is not None
            assert spec.form.term is None
            np.testing.assert_array_equal(total, whole_of(spec))
            outputs[rank] = Held(spec, total)
    return outputs


def forward(layer: int, xs: dict[tuple[int, int], Held]) -> dict[tuple[int, int], Held]:
    outputs: dict[tuple[int, int], Held] = {}
    for rank, x in xs.items():
        (spec,), _ = RULES.layers[layer].forward([x.spec], weight_of_two_axes(layer, rank).spec)
        outputs[rank] = Held(spec, x.data @ weight_of_two_axes(layer, rank).data.T)
    return outputs


def backward(
    layer: int, xs: dict[tuple[int, int], Held], gradients: dict[tuple[int, int], Held]
) -> dict[tuple[int, int], Held]:
    """The gradients of a layer's input; those of its weight's slices are complete."""
    outputs: dict[tuple[int, int], Held] = {}
    for rank, x in xs.items():
        gradient, weight = gradients[rank], weight_of_two_axes(layer, rank)
        (of_weight, of_input), _ = RULES.layers[layer].backward(x.spec, [gradient.spec], weight.spec)
        np.testing.assert_array_equal(gradient.data.T @ x.data, whole_of(of_weight))
        outputs[rank] = Held(of_input, gradient.data @ weight.data)
    return outputs


def test_matrices_cut_along_both_indices_give_one_devices_numbers() -> None:
    """A rank has a slice of each matrix. The result is a piece of one index, and a term over the other index."""
    xs = {rank: start(Kind.ACTIVATION, 0, rank, "width") for rank in RANKS}
    up = forward(0, xs)
    assert str(up[1, 2].spec) == "activations[1] (microbatch 0, feed-forward slice 1 of 2, " + (
        "the term of feature slice 2 of 3)"
    )
    hs = reduced(up, "width")
    reduced(forward(1, hs), "ffn")
    gradients = {rank: start(Kind.GRAD_ACTIVATION, 2, rank, "width") for rank in RANKS}
    grad_between = reduced(backward(1, hs, gradients), "width")
    reduced(backward(0, xs, grad_between), "ffn")


def test_a_term_over_the_other_index_is_not_whole() -> None:
    up = forward(0, {rank: start(Kind.ACTIVATION, 0, rank, "width") for rank in RANKS})
    with refuses("missing terms", layer=1, missing=(0, 1)):
        forward(1, {(1, 2): up[1, 2]})


@pytest.mark.parametrize("other", [(0, 1), (1, 1)])
def test_slices_of_a_matrix_want_their_own_piece_of_what_they_read(other: tuple[int, int]) -> None:
    x = start(Kind.ACTIVATION, 0, other, "width")
    with refuses("other pieces", layer=0):
        RULES.layers[0].forward([x.spec], weight_of_two_axes(0, (0, 2)).spec)
