"""Values in other numbers than layers compute in: how they move and sum, and what they are refused for."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import Rank, Strategy, trace
from shardlab.simulate.timeline.timeline import traffic
from shardlab.strategies.ddp import ddp
from tests.check.casting_programs import RIGHT, gradients_in_half
from tests.language.tapes import Lines, refused
from tests.support.interpreter import judge
from tests.support.refusing import Told, told


@pytest.mark.parametrize("program_of", RIGHT)
def test_what_is_cast_for_the_way_is_accepted_and_right(program_of: Strategy) -> None:
    program = trace(program_of, 2, 2, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_a_value_has_the_bytes_of_what_it_was_cast_to() -> None:
    whole, half = (traffic(check(trace(program, 2, 2, 2)))[0].weights for program in (ddp, gradients_in_half))
    assert half == whole / 2


def loaded(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([0])


def passed(rank: Rank) -> None:
    loaded(rank)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])


def computed_in_half(rank: Rank) -> None:
    loaded(rank)
    rank.forward(0, rank.activations[0], rank.cast(rank.weights[0], "bfloat16"))


def loss_in_half(rank: Rank) -> None:
    passed(rank)
    rank.loss(rank.cast(rank.activations[1], "float16"))


def unequal_sum(rank: Rank) -> None:
    passed(rank)
    grad = rank.loss(rank.activations[1])
    made, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    rank.add(rank.cast(made, "float64"), rank.zero_gradient(0))


def tokens(rank: Rank) -> None:
    loaded(rank)
    rank.cast(rank.activations[0], "bfloat16")


def state(rank: Rank) -> None:
    loaded(rank)
    rank.cast(rank.opt_states[0], "bfloat16")


def updated(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    total, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    weight, _ = rank.update(0, total, rank.weights[0], rank.opt_states[0])
    rank.cast(weight, "bfloat16")


def unknown(rank: Rank) -> None:
    loaded(rank)
    rank.cast(rank.weights[0], "bf16")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (computed_in_half, told("other dtypes", layer=0)),
        (loss_in_half, told("other dtypes", layer=1)),
        (unequal_sum, told("other dtypes", layer=0)),
        (tokens, told("wrong kind", layer=0)),
        (state, told("wrong kind", layer=0)),
        (updated, told("wrong step", layer=0)),
        (unknown, told("other dtypes", layer=0)),
    ],
)
def test_what_would_round_or_mix_numbers_is_refused(lines: Lines, said: Told) -> None:
    refused(lines, said, layers=1)
