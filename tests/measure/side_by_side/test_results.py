"""Ratios are of neighbouring steps; losses that differ, or are no numbers, do not agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardlab.language import UserError
from shardlab.measure.side_by_side.pytorch import stages_of
from shardlab.measure.side_by_side.results import PAIRS, SIZES, Comparison, Side, find_pairs, ratios, spread_of

FOUND = Comparison(
    ours=Side([1.0, 10.0, 3.0], [0.5, 0.5, 0.5], 90),
    theirs=Side([2.0, 20.0, 6.0], [0.75, 0.75, 0.75], 100),
    plain=Side([0.5, 5.0, 1.5], [0.25, 0.25, 0.25], 50),
    our_losses=[4.0, 3.0],
    their_losses=[4.0, 3.0],
)


def test_ratios_are_of_neighbouring_steps_so_that_noise_cancels() -> None:
    assert FOUND.ratio == (0.5, 0.5, 0.5)
    assert ratios(FOUND.ours, FOUND.plain) == (2.0, 2.0, 2.0)


def test_a_step_is_what_the_plain_step_computes_overhead_and_waiting() -> None:
    assert FOUND.ours.parts(FOUND.plain) == (0.25, 0.25, 2.5)
    assert FOUND.theirs.parts(FOUND.plain) == (0.25, 0.5, 5.25)


def test_memory_is_a_ratio_of_peaks() -> None:
    assert FOUND.memory == 0.9


@pytest.mark.parametrize(
    ("losses", "agrees"),
    [
        ([4.0, 3.0], True),
        ([4.0, 3.0002], True),
        ([4.0, 3.001], False),
        ([4.0, math.nan], False),
        ([math.nan] * 2, False),
    ],
)
def test_losses_agree_to_one_in_ten_thousand_or_no_time_counts(losses: list[float], agrees: bool) -> None:
    assert replace(FOUND, our_losses=losses).agrees is agrees


def test_one_figure_has_no_spread() -> None:
    assert spread_of([3.0]) == (3.0, 3.0, 3.0)


# Pairs: by name, with sizes that suit them, and with a reason where they cannot be run.


def test_the_small_model_has_4_9_million_parameters_and_2048_tokens_a_step() -> None:
    assert SIZES["small"].model.parameter_count == 4_902_912
    assert SIZES["small"].tokens == 2048
    assert (SIZES["overhead"].model.hidden_size, SIZES["overhead"].model.layers) == (32, 24)


def test_an_unknown_pair_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no pair with a strategy 'zero-4'; did you mean zero-"):
        find_pairs(("zero-4",))


def test_without_names_all_pairs_are_meant() -> None:
    assert find_pairs(()) == list(PAIRS.values())


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
