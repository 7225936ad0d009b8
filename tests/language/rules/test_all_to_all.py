"""What an ALL_TO_ALL makes of buffers, and what no rank may exchange or sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Holds, Kind, OpKind, Sizes, Spec
from shardlab.language.collective_calls import Call, collective
from shardlab.language.rules.kinds import mask_of
from shardlab.language.rules.layer_rules import Rules, rules_of
from shardlab.language.rules.spec import KEY, Space, Term, form_of
from tests.support.refusing import Told, refuses, told

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
    made = collective(Call(OpKind.ALL_TO_ALL), specs, range(len(specs)), rules(of))
    return [spec for spec in made if spec is not None]


def plain(specs: list[Spec]) -> list[tuple[object, int]]:
    """All but how they were put together."""
    return [(spec.form, spec.cells) for spec in specs]


@st.composite
def deals(draw: st.DrawFn) -> list[set[int]]:
    """Equally many microbatches for each rank, in any order."""
    ranks, each = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    chosen = draw(st.permutations(range(STEP)))
    return [set(chosen[rank * each : (rank + 1) * each]) for rank in range(ranks)]


@given(deals(), st.sampled_from([Kind.ACTIVATION, Kind.GRAD_ACTIVATION]))
def test_dispatch_and_combine_are_each_others_reverse(dealt: list[set[int]], kind: Kind) -> None:
    ranks = len(dealt)
    given_ = [buffers(mine, kind=kind, of=ranks) for mine in dealt]
    there = exchanged(given_, ranks)
    if ranks > 1:
        everything = set[int]().union(*dealt)
        assert plain(there) == plain([buffers(everything, 1 << i, kind, of=ranks) for i in range(ranks)])
    assert exchanged(there, ranks) == given_


@given(st.sampled_from([2, 3, 4]), st.integers(1, 3))
def test_buffers_that_no_rank_put_together_are_dealt_in_runs(ranks: int, each: int) -> None:
    everything = set(range(ranks * each))
    here = exchanged([buffers(everything, 1 << i, of=ranks) for i in range(ranks)], ranks)
    assert here == [buffers(set(range(i * each, (i + 1) * each)), of=ranks) for i in range(ranks)]


def test_experts_make_the_slices_that_they_were_given() -> None:
    weight = Spec(form_of(Kind.WEIGHT, 1, 0, space(2), Holds(0b10, 2)))
    x, gradient = buffers({0, 3}, 0b10), buffers({0, 3}, 0b10, Kind.GRAD_ACTIVATION, 2)
    layer = rules().layers[1]
    made, saved = layer.forward([x], weight)
    assert made == [buffers({0, 3}, 0b10, layer=2)]
    assert saved == buffers({0, 3}, 0b10, Kind.SAVED)
    (own, below), follows = layer.backward(x, [gradient], weight)
    assert own == Spec(form_of(Kind.GRAD_WEIGHT, 1, 0, space(2), Holds(0b10, 2)), mask_of({0, 3}))
    assert below == buffers({0, 3}, 0b10, Kind.GRAD_ACTIVATION)
    assert layer.backward_weight(x, [gradient], Spec(follows.half, x.cells)) == own


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ([buffers({0}), buffers({0})], told("pieces overlap", layer=1, doubled=(0,))),
        ([buffers({0}), buffers({1, 2})], told("other tokens", layer=1)),
        ([buffers({0}), buffers({0}, 1)], told("other values", layer=1)),
        ([buffers({0}), buffers({1}, layer=2)], told("other values", layer=1)),
        ([buffers({0, 1}, 2), buffers({0, 1}, 1)], told("other order", layer=1)),
        ([buffers({0, 1}, 1), buffers({2, 3}, 2)], told("other tokens", layer=1)),
        ([buffers({0}, 1), buffers({0}, 2)], told("does not divide", layer=1)),
        ([buffers({0}), buffers({1}), buffers({2})], told("does not divide", layer=1)),
        ([buffers({0}, layer=0), buffers({1}, layer=0)], told("not exchanged")),
        ([buffers({0}, layer=5), buffers({1}, layer=5)], told("not exchanged")),
        ([buffers({0}, kind=Kind.RESIDUAL, layer=2)] * 2, told("not exchanged")),
    ],
)
def test_what_no_all_to_all_can_exchange_is_refused(given_: list[Spec], said: Told) -> None:
    with refuses(said):
        exchanged(given_)


@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER])
def test_experts_buffers_are_never_summed(kind: OpKind) -> None:
    with refuses("no term", layer=1):
        collective(Call(kind), [buffers({0}, 1), buffers({0}, 2)], range(2), rules())


def test_experts_buffers_are_never_gathered() -> None:
    with refuses("not gathered", layer=1):
        collective(Call(OpKind.ALL_GATHER), [buffers({0}, 1), buffers({0}, 2)], range(2), rules())


def summed(term: int, *, over: tuple[str, ...] = ("ffn",)) -> list[Spec]:
    """Experts' results of two ranks, both terms of a sum."""
    both = Space(STEP, 1, (("expert", 2), ("ffn", 2)))
    forms = [form_of(Kind.ACTIVATION, 2, 0, both, slices=(("expert", 1 << i),), term=Term(over, term)) for i in (0, 1)]
    return [Spec(form, 0b11) for form in forms]


def test_terms_of_a_sum_are_exchanged_and_stay_terms() -> None:
    """Of an all_to_all everything is linear: the sum of what went home is what the sum would have been there."""
    for term in (0b01, 0b10):
        home = exchanged(summed(term))
        assert [spec.form.term for spec in home] == [Term(("ffn",), term)] * 2
        assert [(spec.form.slices, spec.cells) for spec in home] == [((), 0b01), ((), 0b10)]


def test_terms_of_other_slices_are_not_exchanged() -> None:
    with refuses("other values", layer=2):
        exchanged([summed(0b01)[0], summed(0b10)[1]])


def test_what_has_met_some_keys_alone_is_not_exchanged() -> None:
    with refuses("not exchanged", layer=2):
        exchanged(summed(0b01, over=KEY))


def test_without_experts_there_is_nothing_to_exchange() -> None:
    whole = [Spec(form_of(Kind.ACTIVATION, 1, 0, Space(STEP)), 1 << m) for m in range(2)]
    with refuses("not exchanged", layer=1):
        collective(Call(OpKind.ALL_TO_ALL), whole, range(2), rules_of(Sizes.puzzle(4).signatures, Space(STEP)))


def test_buffers_of_some_experts_for_all_are_as_many_as_of_all_experts_for_some() -> None:
    sizes = Sizes.mixture(1)
    assert sizes.elements(buffers({0, 1}, 1)) == sizes.elements(buffers({0}))
