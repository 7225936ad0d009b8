"""Factors on contributions: a mean that is one passes, whoever divides; what does not cancel is told."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.common.errors import About
from shardlab.language import Rank, Refused, Strategy, trace
from shardlab.language.rules.arithmetic import add, scale
from shardlab.language.rules.kinds import ONE, Factor, Kind, bits, factor_of
from shardlab.language.rules.spec import Space, Spec, form_of
from tests.check import scaling_programs as programs
from tests.language.tapes import alone
from tests.support.interpreter import judge
from tests.support.passing import is_right_everywhere
from tests.support.refusing import Told, tells, told

GRADIENT = Spec(form_of(Kind.GRAD_WEIGHT, 0, 0, Space(4)))


@pytest.mark.parametrize("program_of", programs.RIGHT)
def test_a_mean_that_is_really_a_mean_passes(program_of: Strategy) -> None:
    program = trace(program_of, 2, 2, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


@pytest.mark.parametrize("program_of", programs.SHARED, ids=lambda program: program.__name__)
def test_shares_of_the_same_gradients_add_up_to_each_once(program_of: Strategy) -> None:
    is_right_everywhere(trace(program_of, programs.SHARED[program_of], 2, 6))


@given(st.lists(st.tuples(st.integers(1, 15), st.sampled_from([Fraction(n, 6) for n in (-1, 1, 2, 3, 4, 6, 7)]))))
def test_a_sum_of_gradients_is_what_each_contribution_adds_up_to(shares: list[tuple[int, Fraction]]) -> None:
    """Whatever is accepted; and shares of the same contributions are, where nobody gives all."""
    specs = [scale(GRADIENT._replace(cells=cells), factor_of(ratio)) for cells, ratio in shares]
    if not specs:
        return
    expected = {cell: sum(r for mask, r in shares if mask >> cell & 1) for cell in range(4)}
    present = {cell for cell in range(4) if any(mask >> cell & 1 for mask, _ in shares)}
    try:
        total = add(About("add"), specs, ["a value"] * len(specs))
    except Refused:
        shared = all(mask == shares[0][0] and ratio != 1 for mask, ratio in shares)
        assert not shared or not expected[min(present)]
    else:
        assert present == set(bits(total.cells))
        assert {expected[cell] for cell in present} == {total.form.factor.ratio}


@pytest.mark.parametrize(
    ("program_of", "ranks", "words"),
    [
        (programs.never_divided, 2, told("scaled gradient", layer=0)),
        (programs.divided_twice, 2, told("scaled gradient", layer=0)),
        (programs.a_mean_of_shares, 2, told("scaled gradient", layer=0)),
        (programs.means_of_means, 2, told("other factors", layer=0)),
        (programs.divided_at_each_step, 1, told("other factors", layer=0)),
        (programs.halves_of_different_microbatches, 2, told("scaled gradient", layer=0)),
        (programs.shares_of_less_than_all, 2, told("scaled gradient", layer=0)),
        (programs.shares_that_vanish, 2, told("other factors", layer=0)),
        (programs.shares_of_some_microbatches, 2, told("counted twice", layer=0, doubled=(0,))),
        (programs.one_share_is_all, 2, told("other factors", layer=0)),
    ],
)
def test_what_does_not_cancel_is_refused_with_the_factor(program_of: Strategy, ranks: int, words: Told) -> None:
    with pytest.raises(Refused) as refusal:
        trace(program_of, ranks, 1, 4)
    tells(refusal.value, words)


def test_factors_are_one_object_each_and_cancel() -> None:
    tokens = factor_of(1, ((3, 1),))
    assert tokens / tokens is ONE
    assert 2 / tokens * tokens is factor_of(2)
    assert str(1 / tokens) == "1 / tokens of microbatches 0-1"
    assert str(tokens * tokens * 3) == "3 x (tokens of microbatches 0-1)^2"


def test_only_gradients_are_scaled_and_by_what_is_not_zero() -> None:
    def lines(by: object) -> None:
        def scale(rank: Rank) -> None:
            rank.scale(rank.load_weight(0) if by == 2 else rank.zero_gradient(0), cast(Fraction, by))

        alone(scale)

    for by, words in (
        (2, told("wrong kind", layer=0)),
        (0, told("wrong factor", layer=0)),
        (0.5, told("wrong factor", layer=0)),
    ):
        with pytest.raises(Refused) as refusal:
            lines(by)
        tells(refusal.value, words)


@pytest.mark.parametrize(
    ("factors", "dtype"),
    [
        ([10**400], ""),
        ([10**5000], ""),
        ([Fraction(10**5000 + 1, 10**5000)], ""),
        ([Fraction(1, 10**200), Fraction(1, 10**200)], ""),
        ([2**40, 2**40], ""),
        ([2**10], "float16"),
        ([factor_of(1, ((1, 5),))], ""),
    ],
)
def test_a_factor_by_which_gradients_would_overflow_or_be_lost_is_refused(
    factors: list[Factor | Fraction | int], dtype: str
) -> None:
    def scale(rank: Rank) -> None:
        value = rank.zero_gradient(0)
        for factor in factors:
            value = rank.scale(value, factor)
        rank.cast(value, dtype)

    with pytest.raises(Refused) as refusal:
        alone(scale)
    tells(refusal.value, told("wrong factor", layer=0))
    assert len(str(refusal.value)) < 300


def test_factors_that_cancel_at_every_moment_are_not_refused() -> None:
    def scale(rank: Rank) -> None:
        value = rank.scale(rank.zero_gradient(0), Fraction(1, 2**60))
        value = rank.scale(rank.scale(value, 2**60), rank.tokens() * 2**60)
        rank.cast(rank.cast(rank.scale(value, Fraction(1, 2**60) / rank.tokens()), "float16"))

    alone(scale)
