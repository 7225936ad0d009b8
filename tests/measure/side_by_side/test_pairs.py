"""Pairs: by name, with sizes that suit them, and with a reason where they cannot be run."""

from __future__ import annotations

import pytest

from shardlab.measure.side_by_side.pairs import PAIRS, SIZES, pairs_named
from shardlab.measure.side_by_side.pipeline import stages_of
from shardlab.program import UserError


def test_the_small_model_has_4_9_million_parameters_and_2048_tokens_a_step() -> None:
    assert SIZES["small"].model.parameter_count == 4_902_912
    assert SIZES["small"].tokens == 2048
    assert (SIZES["overhead"].model.hidden_size, SIZES["overhead"].model.layers) == (32, 24)


def test_an_unknown_pair_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no pair with a strategy 'zero-4'; did you mean zero-"):
        pairs_named(("zero-4",))


def test_without_names_all_pairs_are_meant() -> None:
    assert pairs_named(()) == list(PAIRS.values())


def test_a_rank_of_several_stages_gets_stages_of_one_length() -> None:
    pair = PAIRS["interleaved-1f1b"]
    assert pair.sized(SIZES["small"], 2).model.layers == 8
    assert pair.sized(SIZES["overhead"], 4).model.layers == 24
    assert PAIRS["1f1b"].sized(SIZES["small"], 4).model.layers == 6


def test_stages_lie_as_our_plan_has_them() -> None:
    size = PAIRS["zb-v"].sized(SIZES["small"], 2)
    assert stages_of(PAIRS["zb-v"], size, 2, 0) == {0: range(2), 3: range(6, 8)}
    assert stages_of(PAIRS["interleaved-1f1b"], size, 2, 0) == {0: range(2), 2: range(4, 6)}
    assert stages_of(PAIRS["1f1b"], SIZES["small"], 4, 3) == {3: range(4, 6)}


@pytest.mark.parametrize(
    ("name", "ranks", "why_not"),
    [
        ("hsdp", 2, "two replicas of two shards need 4 ranks"),
        ("ddp", 3, "16 sequences do not divide among 3 ranks"),
        ("tensor-parallel", 8, "4 heads do not divide among 8 ranks"),
        ("gpipe", 8, "6 layers do not reach 8 stages"),
        ("hsdp", 4, ""),
    ],
)
def test_what_cannot_be_run_says_why(name: str, ranks: int, why_not: str) -> None:
    assert PAIRS[name].why_not(SIZES["small"], ranks).startswith(why_not)
    assert bool(PAIRS[name].why_not(SIZES["small"], ranks)) is bool(why_not)
