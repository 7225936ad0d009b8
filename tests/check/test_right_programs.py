"""Unusual programs that are right pass, and give the numbers of one device; what is wrong about freezing is refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.common.errors import About
from shardlab.language import Mesh, Program, Rank, Refused, Strategy, Value, trace
from shardlab.language.rules.arithmetic import add, scale
from shardlab.language.rules.kinds import ONE, Factor, Kind, bits, factor_of
from shardlab.language.rules.spec import Space, Spec, form_of
from shardlab.models import GPT, Blocks, MoE
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.check import empty_programs as empty
from tests.check import right_programs as right
from tests.check import scaling_programs as programs
from tests.language.tapes import alone
from tests.support.interpreter import judge
from tests.support.passing import is_right_everywhere
from tests.support.ranks import Ranks
from tests.support.refusing import ExpectedRefusal, refusal, refusal_by, refuses, require_refusal

World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SMALL = GPT(layers=3, hidden_size=16, heads=2, seq_len=8, vocab_size=40, dropout=0.1)
CUT = GPT(layers=2, hidden_size=16, heads=2, seq_len=16, vocab_size=40, dropout=0.1)
MIXTURE = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, capacity_factor=0.7, dropout=0.1)

PROGRAMS: dict[str, tuple[Strategy, Mesh | int, int, Blocks]] = {
    "terms_added_by_hand": (right.terms_added_by_hand, Mesh(tp=2), 2, CUT),
    "logits_gathered": (right.logits_gathered, Mesh(tp=2), 2, CUT),
    "experts_interleaved_batch": (right.experts_interleaved_batch, Mesh(ep=2), 2, MIXTURE),
    "auxiliary_loss_scaled": (right.auxiliary_loss_scaled, Mesh(ep=2), 2, MIXTURE),
    "striped_context": (right.striped_context, Mesh(cp=2), 1, CUT),
    "fine_tuned": (right.fine_tuned, 2, 3, SMALL),
    "fine_tuned_in_shards": (right.fine_tuned_in_shards, 2, 3, SMALL),
    "kept_in_parts": (right.kept_in_parts, 2, 3, SMALL),
}
"""Each with its mesh, the layers that it is judged with, and the model that it is verified on."""


def traced(name: str) -> Program:
    strategy, mesh, layers, _ = PROGRAMS[name]
    return trace(strategy, mesh, layers, 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass_and_give_one_devices_numbers(name: str) -> None:
    is_right_everywhere(traced(name))


@pytest.mark.starts_ranks
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_two_processes_its_numbers_are_those_of_one_device(ranks: World, name: str) -> None:
    strategy = f"{Path(right.__file__)}:{name}"
    verdict = ranks(2).call(verify_rank, CPU, Job(strategy, 2, 4, PROGRAMS[name][-1], 2, "fp64"), 3)[0]
    assert verdict.ok, verdict


# Layers without parameters, and ranks without ops.


def test_layers_without_parameters_are_moved_and_stepped_as_others() -> None:
    job = Job(f"{empty.__file__}:layers_without_parameters", 2, 4, MIXTURE, 2)
    program = trace(empty.layers_without_parameters, Mesh(tp=2), job.sizes, 4)
    assert 0 in program.sizes.weights
    is_right_everywhere(program)


@pytest.mark.parametrize("program", [empty.last_rank_is_idle, empty.first_rank_is_idle])
def test_a_rank_may_have_nothing_to_do(program: Strategy) -> None:
    traced = trace(program, 3, 2, 4)
    assert [] in traced.tapes
    is_right_everywhere(traced)


# Freezing.


@pytest.mark.parametrize(("name", "frozen"), [("fine_tuned", (0, 1)), ("fine_tuned_in_shards", (1,))])
def test_a_layer_without_optimizer_states_is_frozen(name: str, frozen: tuple[int, ...]) -> None:
    assert check(traced(name)).frozen == frozen


def test_a_program_that_trains_all_layers_freezes_none() -> None:
    assert check(traced("striped_context")).frozen == ()


async def gradients(rank: Rank, place: int = 0, of: int = 1) -> None:
    """Every layer's gradient of the whole batch, reduced over the ranks, from weights that are gathered."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, place, of)
        rank.weights["full", l] = await rank.all_gather(rank.weights[l]) if of > 1 else rank.weights[l]
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights["full", l])
    gradient = rank.loss(rank.activations[len(rank.layers)])
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations[l], gradient, rank.weights.pop(("full", l)))
        rank.grad_weights[l] = await rank.all_reduce(grad_weight)


def updated(rank: Rank, l: int, *norm: Value) -> None:
    rank.weights[l], rank.opt_states[l] = rank.update(
        l, rank.grad_weights[l], rank.weights[l], rank.opt_states[l], *norm
    )


async def half_of_a_layer_frozen(rank: Rank) -> None:
    await gradients(rank, rank.index, rank.world)
    for l in rank.layers:
        if l or rank.index:
            rank.opt_states[l] = rank.load_opt_state(l, rank.index, rank.world)
            updated(rank, l)


async def frozen_on_one_rank_alone(rank: Rank) -> None:
    await gradients(rank)
    for l in rank.layers:
        if l or rank.index:
            rank.opt_states[l] = rank.load_opt_state(l)
            updated(rank, l)


async def all_frozen(rank: Rank) -> None:
    await gradients(rank)


async def frozen_and_not_kept(rank: Rank) -> None:
    await gradients(rank)
    del rank.weights[0]
    rank.opt_states[1] = rank.load_opt_state(1)
    updated(rank, 1)


async def frozen_squares_in_the_norm(rank: Rank) -> None:
    await gradients(rank)
    rank.scalars["norm"] = rank.norm(0, rank.grad_weights[0]) + rank.norm(1, rank.grad_weights[1])
    rank.opt_states[1] = rank.load_opt_state(1)
    updated(rank, 1, rank.scalars["norm"])


async def trained_squares_not_in_the_norm(rank: Rank) -> None:
    """Each rank trains a layer; rank 0 clips by its own before it is known that the other is trained."""
    await gradients(rank)
    l = rank.index
    rank.opt_states[l] = rank.load_opt_state(l)
    norm = rank.norm(l, rank.grad_weights[l])
    updated(rank, l, norm + rank.norm(0, rank.grad_weights[0]) if l else norm)
    rank.weights[1 - l] = await rank.exchange(rank.weights[l], to=1 - l, source=1 - l)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (half_of_a_layer_frozen, refusal_by("never updated", layer=0)),
        (frozen_on_one_rank_alone, refusal_by("never updated", layer=0)),
        (all_frozen, refusal_by("never updated", layer=0)),
        (
            frozen_and_not_kept,
            refusal_by("frozen and not kept", layer=0),
        ),
        (
            frozen_squares_in_the_norm,
            refusal_by("frozen in the norm", layer=1),
        ),
        (trained_squares_not_in_the_norm, refusal_by("partial norm", layer=0, missing=(1,))),
    ],
)
def test_mistakes_about_freezing_are_refused(strategy: Strategy, expected: ExpectedRefusal) -> None:
    program = trace(strategy, 2, 2, 4)
    require_refusal(refusal(program), expected)
    assert not judge(program).right


def test_a_norm_that_lacks_a_layer_known_to_be_trained_is_refused_at_its_line() -> None:
    async def strategy(rank: Rank) -> None:
        await gradients(rank)
        for l in rank.layers:
            rank.opt_states[l] = rank.load_opt_state(l)
        updated(rank, 1, rank.norm(1, rank.grad_weights[1]))

    with refuses("partial norm", layer=1, missing=(0,)):
        trace(strategy, 2, 2, 4)


# Factors on contributions: a mean that is one passes, whoever divides; what does not cancel is told.


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
        (programs.never_divided, 2, refusal_by("scaled gradient", layer=0)),
        (programs.divided_twice, 2, refusal_by("scaled gradient", layer=0)),
        (programs.a_mean_of_shares, 2, refusal_by("scaled gradient", layer=0)),
        (programs.means_of_means, 2, refusal_by("other factors", layer=0)),
        (programs.divided_at_each_step, 1, refusal_by("other factors", layer=0)),
        (programs.halves_of_different_microbatches, 2, refusal_by("scaled gradient", layer=0)),
        (programs.shares_of_less_than_all, 2, refusal_by("scaled gradient", layer=0)),
        (programs.shares_that_vanish, 2, refusal_by("other factors", layer=0)),
        (programs.shares_of_some_microbatches, 2, refusal_by("counted twice", layer=0, doubled=(0,))),
        (programs.one_share_is_all, 2, refusal_by("other factors", layer=0)),
    ],
)
def test_factors_that_do_not_cancel_are_refused_with_the_factor(
    program_of: Strategy, ranks: int, words: ExpectedRefusal
) -> None:
    with pytest.raises(Refused) as refusal:
        trace(program_of, ranks, 1, 4)
    require_refusal(refusal.value, words)


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
        (2, refusal_by("wrong kind", layer=0)),
        (0, refusal_by("wrong factor", layer=0)),
        (0.5, refusal_by("wrong factor", layer=0)),
    ):
        with pytest.raises(Refused) as refusal:
            lines(by)
        require_refusal(refusal.value, words)


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
    require_refusal(refusal.value, refusal_by("wrong factor", layer=0))
    assert len(str(refusal.value)) < 300


def test_factors_that_cancel_at_every_moment_are_not_refused() -> None:
    def scale(rank: Rank) -> None:
        value = rank.scale(rank.zero_gradient(0), Fraction(1, 2**60))
        value = rank.scale(rank.scale(value, 2**60), rank.tokens() * 2**60)
        rank.cast(rank.cast(rank.scale(value, Fraction(1, 2**60) / rank.tokens()), "float16"))

    alone(scale)
