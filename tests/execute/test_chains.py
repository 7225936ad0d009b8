"""Chains: which layers compute as one, to the bit what they compute alone, in no more memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardlab.check import check
from shardlab.data import Corpus
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.analysis import Analysis
from shardlab.execute.chains import chains_of
from shardlab.execute.tracked_memory import TrackedStorages
from shardlab.models import GPT
from shardlab.models.llama import Llama
from shardlab.program import Rank, Strategy, trace
from shardlab.program.precision import FP32
from shardlab.train.data import Batches
from shardlab.train.job import Job
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=6, hidden_size=16, heads=2, seq_len=8)


def lengths(job: Job, rank: int = 0) -> list[int]:
    """Layers of each chain of a rank's tape."""
    found = Analysis(job.checked(), rank)
    return [len(chain.forwards) for chain in chains_of(found.tape, found.in_place, found.buckets, found.moved)]


def test_a_stage_is_a_chain_once_its_gradients_are_there() -> None:
    assert lengths(Job("gpipe", 2, 4, MODEL, 2)) == [3, 3, 3]
    assert lengths(Job("1f1b", 2, 4, MODEL, 2), rank=1) == [3, 3, 3]


def test_one_bucket_makes_the_whole_model_a_chain() -> None:
    assert lengths(Job("ddp", 2, 2, MODEL, 2)) == []
    assert lengths(Job("ddp", 2, 2, MODEL, 2, passes="bucket=1")) == [6]
    assert lengths(Job("ddp", 2, 2, MODEL, 2, passes="bucket=2")) == [3]  # waits are between the others


@pytest.mark.parametrize("strategy", ["fsdp", "zero-3", "zb-v"])
def test_weights_that_go_between_and_halves_make_none(strategy: str) -> None:
    assert lengths(Job(strategy, 2, 4, MODEL, 2)) == []


def looking_inside(*, forward: bool) -> Strategy:
    """One device, two microbatches; halfway through the second, somebody else reads what one layer hands on."""

    async def program(rank: Rank) -> None:
        last = len(rank.layers)
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        for m in rank.microbatches:
            x = rank.activations
            x[0] = rank.load_batch([m])
            for l in rank.layers:
                x[l + 1] = rank.forward(l, x[l], rank.weights[l])
                if l == 2 and m and forward:
                    rank.cast(x[l + 1], "bfloat16")
            gradients = rank.grad_activations
            gradients[last] = rank.loss(x.pop(last))
            for l in reversed(rank.layers):
                grad_weight, gradients[l] = rank.backward(l, x.pop(l), gradients.pop(l + 1), rank.weights[l])
                rank.accumulate(grad_weight)
                if l == 2 and m and not forward:
                    rank.cast(gradients[l], "bfloat16")
        for l in rank.layers:
            gradient = rank.grad_weights.pop(l)
            rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])

    return program


@pytest.mark.parametrize(("forward", "expected"), [(True, [3, 3]), (False, [2, 4])])
def test_a_chain_ends_where_somebody_else_reads_what_is_handed_on(forward: bool, expected: list[int]) -> None:
    found = Analysis(check(trace(looking_inside(forward=forward), 1, 6, 2)), 0)
    chains = chains_of(found.tape, found.in_place, found.buckets, found.moved)
    assert [len(chain.forwards) for chain in chains] == expected


async def adds_late(rank: Rank) -> None:
    """One device, three microbatches; layer 1's gradient of the second is added while the third runs backwards."""
    last, held = len(rank.layers), None
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        x, gradients = rank.activations, rank.grad_activations
        x[0] = rank.load_batch([m])
        for l in rank.layers:
            x[l + 1] = rank.forward(l, x[l], rank.weights[l])
        gradients[last] = rank.loss(x.pop(last))
        for l in reversed(rank.layers):
            grad_weight, gradients[l] = rank.backward(l, x.pop(l), gradients.pop(l + 1), rank.weights[l])
            if (l, m) == (1, 1):
                held = grad_weight
            else:
                rank.accumulate(grad_weight)
            if (l, m) == (3, 2) and held is not None:
                rank.accumulate(held)
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


def test_a_chain_ends_before_a_gradient_that_has_no_memory_yet_when_it_runs_backwards() -> None:
    found = Analysis(check(trace(adds_late, 1, 6, 3)), 0)
    chains = chains_of(found.tape, found.in_place, found.buckets, found.moved)
    layers = [[found.tape[at].layer for at in chain.forwards] for chain in chains]
    assert layers == [[*range(6)], [2, 3, 4, 5], [0, 1]]
    for chain in chains:
        assert [found.tape[at].layer for at in chain.backwards] == [found.tape[at].layer for at in chain.forwards[::-1]]


def trained(rank: int, job: Job, alone: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """Losses of some steps, weights after them, and the most bytes that were live in the last."""
    gc.collect()
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(0, FP32, CPU, OptimizerConfig()))
    if alone:
        executor.instructions = executor.alone
    losses = [executor.step() for _ in range(2)]
    account = TrackedStorages(executor.state)
    with account.tracking():
        losses.append(executor.step())
    return losses, [kept.clone() for kept in executor.state.kept.values()], account.peak()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("strategy", "passes", "model"),
    [
        ("gpipe", "none", MODEL),
        ("1f1b", "none", Llama(layers=6, hidden_size=16, heads=2, seq_len=8)),
        ("ddp", "bucket=1", MODEL),
    ],
)
def test_chains_compute_to_the_bit_what_layers_do_alone_in_no_more_memory(
    ranks: World, strategy: str, passes: str, model: GPT, dropout: float
) -> None:
    job = Job(strategy, 2, 4, model, 2, "fp32", passes=passes)
    both = [ranks(2).call(trained, job, alone) for alone in (True, False)]
    for (losses, weights, peak), (its, kept, its_peak) in zip(*both, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(losses + weights, its + kept, strict=True))
        assert its_peak <= 1.02 * peak
