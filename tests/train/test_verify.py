"""Every strategy on real processes gives one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlab.execute import Executor
from shardlab.execute.optimizer import Slice
from shardlab.models import GPT, MLP, Model
from shardlab.program import Mesh
from shardlab.strategies import Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.csv_schedule import Form
from shardlab.train import verify
from shardlab.train.cases import SHARDINGS
from shardlab.train.job import Job
from shardlab.train.verify import TOLERANCE, Verdict, verify_rank
from tests.strategies.csv_files import csv_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SIZES = [  # strategy, ranks, layers, microbatches
    ("single", 1, 3, 1),
    ("single", 1, 3, 4),
    ("grad-accum", 1, 2, 3),
    ("ddp", 2, 3, 2),
    ("ddp", 4, 2, 8),
    ("wsdp", 2, 2, 4),
    ("wsdp", 3, 3, 3),
    ("fsdp", 2, 4, 6),
    ("fsdp", 3, 2, 6),
    ("fsdp", 4, 3, 4),
    ("pipeline", 2, 4, 3),
    ("pipeline", 4, 4, 1),
    ("gpipe", 2, 2, 5),
    ("gpipe", 4, 8, 4),
    ("1f1b", 4, 5, 3),
    ("1f1b", 2, 2, 5),
    ("zb-h2", 4, 4, 2),
    ("dualpipe-v", 2, 6, 3),
    ("interleaved-1f1b", 2, 4, 5),
    ("breadth-first", 2, 5, 2),
    ("pipeline-fsdp", 4, 4, 4),
    ("pipeline-fsdp", 2, 2, 2),
]


def small_gpt(layers: int, dropout: float = 0.0) -> GPT:
    return GPT(layers=layers, width=16, heads=2, block=8, dropout=dropout)


def verdict_of(
    world: World, strategy: str | Plan, ranks: int, microbatches: int, model: Model, steps: int = 3
) -> Verdict:
    job = Job(strategy, ranks, microbatches, model, 2, torch.float64)
    return world(ranks).call(verify_rank, CPU, job, steps)[0]


@pytest.mark.parametrize(("strategy", "count", "layers", "microbatches"), SIZES)
def test_strategies_give_the_numbers_of_one_device(
    ranks: World, strategy: str, count: int, layers: int, microbatches: int
) -> None:
    verdict = verdict_of(ranks, strategy, count, microbatches, small_gpt(layers))
    assert verdict.ok, verdict
    assert verdict.weight_error <= TOLERANCE


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_an_imported_schedule_gives_the_numbers_of_one_device(
    ranks: World, tmp_path: Path, name: str, sharding: str, form: Form
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(csv_of(SCHEDULES[name], 2, 3, SCHEDULES[name].stages_per_rank or 1, form=form))
    plan = replace(SHARDINGS[sharding], mesh=Mesh(pp=2, dp_shard=2), schedule=str(file))
    assert verdict_of(ranks, plan, 4, 6, small_gpt(5), steps=2).ok


def test_a_schedule_of_ones_own_gives_the_numbers_of_one_device(ranks: World) -> None:
    file = Path(__file__).parents[2] / "examples" / "my_schedule.py"
    plan = Plan(Mesh(pp=2, dp_replicate=2), f"{file}:one_at_a_time")
    assert verdict_of(ranks, plan, 4, 4, small_gpt(3, dropout=0.1), steps=2).ok


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "gpipe", "pipeline-fsdp"])
def test_dropout_draws_the_same_masks_under_every_strategy(ranks: World, strategy: str) -> None:
    assert verdict_of(ranks, strategy, 4, 4, small_gpt(4, dropout=0.2)).ok


@pytest.mark.parametrize("strategy", ["fsdp", "gpipe"])
def test_the_mlp_trains_under_the_same_strategies(ranks: World, strategy: str) -> None:
    assert verdict_of(ranks, strategy, 2, 4, MLP(layers=4, width=16, block=8)).ok


OVERLAPPED = '''
async def losses_computed_twice(rank):
    """Both ranks compute microbatch 0, and one of them its loss twice; only rank 0's gradient of it is used."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in ([0, 1] if rank.index == 0 else [2, 0]):
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        if m == 0:
            rank.loss(rank.activations[last])
        gradient = rank.loss(rank.activations.pop(last))
        if rank.index == 1 and m == 0:
            continue
        for l in reversed(rank.layers):
            new, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights[l] + new if l in rank.grad_weights else new
    for l in rank.layers:
        gradient = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


from shardlab.program import Mesh


def scattered_twice_mesh(ranks):
    return Mesh(dp_replicate=2, dp_shard=ranks // 2)


async def scattered_twice(rank):
    """A hierarchical all-reduce: scattered along one axis, then along the other, and gathered back."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        half = await rank.reduce_scatter(grad_weight, axis="dp_shard")
        quarter = await rank.reduce_scatter(half, axis="dp_replicate")
        half = await rank.all_gather(quarter, axis="dp_replicate")
        rank.grad_weights[l] = await rank.all_gather(half, axis="dp_shard")
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def ring(rank):
    """An all-reduce by hand: what travels is added to only once it has been sent."""
    last, world = len(rank.layers), rank.world
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights["total"], gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        rank.grad_weights["piece"] = rank.grad_weights["total"]
        for _ in range(world - 1):
            rank.send(rank.grad_weights["piece"], to=(rank.index + 1) % world)
            rank.grad_weights["piece"] = await rank.recv(source=(rank.index - 1) % world)
            rank.grad_weights["total"] = rank.grad_weights["total"] + rank.grad_weights["piece"]
        del rank.grad_weights["piece"]
        gradient_sum = rank.grad_weights.pop("total")
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient_sum, rank.weights[l], rank.opt_states[l])


async def sent_while_it_accumulates(rank):
    """Each microbatch's gradient is exchanged at once, un-awaited, while the next one is added to the first."""
    peer, last, arriving = 1 - rank.index, len(rank.layers), {l: [] for l in rank.layers}
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        gradient = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            rank.grad_weights["new"], gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            arriving[l].append(rank.exchange(rank.grad_weights["new"], to=peer, source=peer))
            new = rank.grad_weights["new"]
            rank.grad_weights[l] = rank.grad_weights[l] + new if l in rank.grad_weights else new
    del rank.grad_weights["new"]
    for l in rank.layers:
        for handle in arriving[l]:
            rank.grad_weights[l] = rank.grad_weights[l] + await handle
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def prefetched(rank):
    """FSDP that gathers the next layer while it computes on this one, and recomputes in the backward pass."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.world - 1 - rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())
    coming = rank.all_gather(rank.weights[0])
    for l in rank.layers:
        full = await coming
        if l + 1 < last:
            coming = rank.all_gather(rank.weights[l + 1])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full, save=False)
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        full = await rank.all_gather(rank.weights[l])
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, full)
        rank.grad_weights[l] = await rank.all_reduce(grad_weight)
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def crossing(rank):
    """Two ranks that swap halves of the batch by crossing messages before they train data parallel."""
    other = 1 - rank.index
    last = len(rank.layers)
    mine, theirs = ([0, 1], [2, 3]) if rank.index == 0 else ([2, 3], [0, 1])
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations["mine"] = rank.load_batch(mine)
    rank.activations["here", 0] = await rank.exchange(
        rank.activations.pop("mine"), to=other, source=other, expect=("activations", 0, theirs)
    )
    for l in rank.layers:
        rank.activations["here", l + 1] = rank.forward(l, rank.activations["here", l], rank.weights[l])
    rank.activations["there"] = await rank.exchange(
        rank.activations["here", 1], to=other, source=other, expect=("activations", 1, mine)
    )
    gradient = rank.loss(rank.activations.pop(("here", last)))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(("here", l)), gradient, rank.weights[l])
        rank.grad_weights[l] = await rank.all_reduce(grad_weight)
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def gathered_gradients(rank):
    """Reduce-scatter then all-gather in place of an all-reduce, and batches gathered from single microbatches."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = await rank.all_gather(rank.load_batch([len(rank.microbatches) - 1 - rank.index]))
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l], gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def sent_weights(rank):
    """Rank 0 owns the weights and sends them to rank 1 each step; gradients come back and are added."""
    last = len(rank.layers)
    if rank.index == 0:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
            await rank.send(rank.weights[l], to=1)
    else:
        for l in rank.layers:
            rank.weights[l] = await rank.recv(source=0)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l], gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
    for l in rank.layers:
        if rank.index == 1:
            await rank.send(rank.grad_weights.pop(l), to=0)
        else:
            rank.grad_weights[l] = rank.grad_weights[l] + await rank.recv(source=1)
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
            )
'''


@pytest.mark.parametrize(
    ("function", "count", "microbatches"),
    [
        ("losses_computed_twice", 2, 3),
        ("scattered_twice", 4, 4),
        ("ring", 2, 2),
        ("sent_while_it_accumulates", 2, 4),
        ("prefetched", 2, 4),
        ("prefetched", 4, 4),
        ("crossing", 2, 4),
        ("gathered_gradients", 4, 4),
        ("sent_weights", 2, 4),
    ],
)
def test_what_a_user_writes_gives_the_numbers_of_one_device(
    ranks: World, tmp_path: Path, function: str, count: int, microbatches: int
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OVERLAPPED)
    verdict = verdict_of(ranks, f"{file}:{function}", count, microbatches, small_gpt(3, dropout=0.1))
    assert verdict.ok, verdict


USER = Path(__file__).with_name("user_programs.py")

NEW_PROGRAMS = [
    ("zero_1", 2, 4),
    ("zero_1", 3, 3),
    ("zero_2", 2, 4),
    ("zero_2_in_turned_order", 3, 3),
    ("partly_sharded", 4, 4),
    ("split", 2, 4),
    ("split_fsdp", 2, 4),
    ("split_fsdp", 3, 3),
    ("split_fsdp_recomputed", 2, 2),
    ("split_pipeline", 3, 2),
]


@pytest.mark.parametrize(("function", "count", "microbatches"), NEW_PROGRAMS)
def test_halves_and_slices_and_clipping_give_the_numbers_of_one_device(
    ranks: World, function: str, count: int, microbatches: int
) -> None:
    verdict = verdict_of(ranks, f"{USER}:{function}", count, microbatches, small_gpt(3, dropout=0.1))
    assert verdict.ok, verdict


@pytest.mark.parametrize("function", ["zero_1", "split", "split_fsdp"])
def test_a_model_of_one_layer_and_one_without_biases_have_halves_and_slices(ranks: World, function: str) -> None:
    for model in (
        GPT(layers=1, width=16, heads=2, block=8, tied=True),
        GPT(layers=2, width=16, heads=2, block=8, bias=False),
        MLP(layers=2, width=16, block=8),
    ):
        verdict = verdict_of(ranks, f"{USER}:{function}", 2, 2, model)
        assert verdict.ok, (model, verdict)


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_at_any_norm_clipping_gives_the_numbers_of_one_device(ranks: World, clip: float) -> None:
    """The larger one clips nothing."""
    job = Job("zero-3", 2, 4, small_gpt(2), 2, torch.float64)
    verdict = ranks(2).call(verify_rank, CPU, job, 3, None, clip)[0]
    assert verdict.ok, verdict


def without_clipping(rank: int, job: Job) -> Verdict | None:
    """The same, but what updates do with the norm is left out."""

    def update(self: Slice, gradient: torch.Tensor, step: int, squared_norm: float | None = None) -> None:
        plain(self, gradient, step)

    plain = Slice.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slice, "update", update)
        return verify_rank(rank, CPU, job, 3)


def test_clipping_left_out_is_noticed(ranks: World) -> None:
    """Adam divides a gradient's scale out, but not where it differs from step to step."""
    job = Job(f"{USER}:zero_1", 2, 4, small_gpt(2), 2, torch.float64)
    verdict = ranks(2).call(without_clipping, job)[0]
    assert verdict.gradient_error > TOLERANCE
    assert verdict.weight_error > 1e-8


def wrong_on_one_replica(rank: int, job: Job) -> Verdict | None:
    """The same, but one rank's weights move by themselves before they are compared."""

    class Disturbed(Executor):
        def step(self) -> torch.Tensor:
            loss = super().step()
            if rank == 1:
                next(iter(self.state.kept.values()))[0] += 1e-6
            return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Executor", Disturbed)
        return verify_rank(rank, CPU, job, 1)


def test_a_replica_that_drifts_is_noticed(ranks: World) -> None:
    job = Job("ddp", 2, 2, small_gpt(2), 2, torch.float64)
    verdict = ranks(2).call(wrong_on_one_replica, job)[0]
    assert not verdict.ok
    assert verdict.weight_error > 1e-8
    assert verdict.gradient_error <= TOLERANCE


def test_a_wrong_number_is_not_ok() -> None:
    assert not Verdict(0.0, 2e-12, 0, 0.0, 0).ok
    assert not Verdict(0.0, float("inf"), 0, 0.0, 0).ok
