"""Attention over cut sequences: what has been met is counted, and what is missing or met twice is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import About
from shardlab.language import Kind, OpKind, Sizes, Spec
from shardlab.language.collective_calls import Call, collective_results
from shardlab.language.rules import arithmetic
from shardlab.language.rules.attention import attend, attend_backward, split_cells, work
from shardlab.language.rules.kinds import bits, mask_of
from shardlab.language.rules.layer_rules import rules_of
from shardlab.language.rules.spec import KEY, Space, Term, form_of
from shardlab.strategies.plan.context_parallel import slices_of_rank
from tests.support.refusing import refuses

LAYER = 2


def spec(kind: Kind, slices_held: set[int], slices: int, layer: int = LAYER, term: Term | None = None) -> Spec:
    """A value of microbatch 1 of 2."""
    return Spec(form_of(kind, layer, 0, Space(2, slices), term=term), mask_of(slices + s for s in slices_held))


def added(parts: list[Spec]) -> Spec:
    """The sum of parts, in their order."""
    return (
        arithmetic.add(About("add"), parts, [f"part {place}" for place in range(len(parts))])
        if len(parts) > 1
        else parts[0]
    )


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    """Slices of a sequence dealt among ranks, each with some: any order, not only the balanced one."""
    ranks = draw(st.integers(1, 5))
    slices = draw(st.integers(ranks, 9))
    rest = st.lists(st.integers(0, ranks - 1), min_size=slices - ranks, max_size=slices - ranks)
    owners = draw(st.permutations([*range(ranks), *draw(rest)]))
    return slices, [{s for s in range(slices) if owners[s] == rank} for rank in range(ranks)]


def sees(queries: set[int], keys: set[int]) -> bool:
    return max(queries) >= min(keys)


def is_term(value: Spec) -> bool:
    return value.form.term is not None


@given(deals(), st.randoms(use_true_random=False))
def test_queries_must_meet_all_visible_keys_in_any_order_and_no_others(
    dealt: tuple[int, list[set[int]]], chance: random.Random
) -> None:
    slices, ranks = dealt
    gradients: dict[int, list[Spec]] = {}
    for mine in ranks:
        queries = spec(Kind.QUERIES, mine, slices)
        visible = [place for place, theirs in enumerate(ranks) if sees(mine, theirs)]
        chance.shuffle(visible)
        parts = [attend(LAYER, queries, spec(Kind.KEYS_VALUES, ranks[place], slices)) for place in visible]
        assert all(map(is_term, parts)) or len(parts) == 1
        whole = added(parts)
        assert whole == spec(Kind.ACTIVATION, mine, slices, LAYER + 1)
        gradient = spec(Kind.GRAD_ACTIVATION, mine, slices, LAYER + 1)
        backward = [
            attend_backward(LAYER, queries, spec(Kind.KEYS_VALUES, ranks[place], slices), whole, gradient)
            for place in visible
        ]
        for place, (_, for_keys) in zip(visible, backward, strict=True):
            gradients.setdefault(place, []).append(for_keys)
        assert added([for_queries for for_queries, _ in backward]) == spec(Kind.GRAD_QUERIES, mine, slices)
        if len(parts) > 2:
            assert is_term(added(parts[1:]))
    for place, given_by in gradients.items():
        assert added(given_by) == spec(Kind.GRAD_KEYS_VALUES, ranks[place], slices)
        if len(given_by) > 2:
            assert is_term(added(given_by[1:]))


@given(deals())
def test_queries_refuse_keys_that_they_do_not_see(dealt: tuple[int, list[set[int]]]) -> None:
    slices, ranks = dealt
    for mine in ranks:
        for theirs in ranks:
            pair = spec(Kind.QUERIES, mine, slices), spec(Kind.KEYS_VALUES, theirs, slices)
            if not sees(mine, theirs):
                with refuses("masked keys", layer=2):
                    attend(LAYER, *pair)


@given(st.integers(1, 6))
def test_the_balanced_order_gives_every_rank_the_same_work(ranks: int) -> None:
    slices = 2 * ranks
    shares = [set(slices_of_rank(rank, ranks)) for rank in range(ranks)]
    everything = spec(Kind.KEYS_VALUES, set(range(slices)), slices)
    work_of_ranks = [work(spec(Kind.QUERIES, share, slices), everything) for share in shares]
    assert work_of_ranks == pytest.approx([1 / ranks] * ranks)
    assert sorted(s for share in shares for s in share) == list(range(slices))


@given(deals())
def test_gathered_chunks_gradients_come_home_as_they_were_gathered(dealt: tuple[int, list[set[int]]]) -> None:
    """In the balanced order, striped, or any other: equally many slices or not."""
    slices, ranks = dealt
    members, rules = range(len(ranks)), rules_of(Sizes.context_blocks(1).signatures, Space(2, slices))
    chunks = [spec(Kind.KEYS_VALUES, mine, slices) for mine in ranks]
    gathered = collective_results(Call(OpKind.ALL_GATHER), chunks, members, rules)
    terms: list[Spec] = []
    for mine, keys in zip(ranks, gathered, strict=True):
        assert keys is not None
        whole = spec(Kind.ACTIVATION, mine, slices, LAYER + 1)
        gradient = spec(Kind.GRAD_ACTIVATION, mine, slices, LAYER + 1)
        terms.append(attend_backward(LAYER, spec(Kind.QUERIES, mine, slices), keys, whole, gradient)[1])
    if len(ranks) > 1:
        home = collective_results(Call(OpKind.REDUCE_SCATTER), terms, members, rules)
        assert home == [spec(Kind.GRAD_KEYS_VALUES, mine, slices) for mine in ranks]
        term = terms[0].form.term
        assert term is not None
        with refuses("counted twice", layer=2, doubled=tuple(bits(term.bits))):
            collective_results(Call(OpKind.REDUCE_SCATTER), terms[:1] * 2, [0, 1], rules)


def test_a_chunk_that_was_met_twice_is_named() -> None:
    queries, keys = spec(Kind.QUERIES, {1, 2}, 4), spec(Kind.KEYS_VALUES, {1, 2}, 4)
    part = attend(LAYER, queries, keys)
    assert part == spec(Kind.ACTIVATION, {1, 2}, 4, LAYER + 1, Term(KEY, 0b110, merged=True))
    with refuses("counted twice", doubled=(1, 2)):
        added([part, part])
    with refuses("no term"):
        added([part, spec(Kind.ACTIVATION, {1, 2}, 4, LAYER + 1)])


def test_partial_attention_is_no_term_over_ranks() -> None:
    part = attend(LAYER, spec(Kind.QUERIES, {0, 3}, 4), spec(Kind.KEYS_VALUES, {1, 2}, 4))
    rules = rules_of(Sizes.context_blocks(1).signatures, Space(2, 4))
    with refuses("merged terms", layer=3):
        collective_results(Call(OpKind.ALL_REDUCE), [part, part], [0, 1], rules)


@given(deals())
def test_a_pattern_is_the_slices_that_every_microbatch_has(dealt: tuple[int, list[set[int]]]) -> None:
    slices, (mine, *_) = dealt
    cells = mask_of(m * slices + s for m in (0, 2) for s in mine)
    assert split_cells(cells, slices) == (0b101, mask_of(mine))
    if len(mine) < slices:
        other = next(s for s in range(slices) if s not in mine)
        assert split_cells(cells | 1 << other, slices) == (0b101, -1)
