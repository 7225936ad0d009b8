"""The figures of a priced step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.check import check
from shardlab.language import Mesh, OpKind, Rank, Sizes, trace
from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.estimate import Estimate, estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.recipe import Kernels, Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.run import memory_counters
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.simulate.timeline.fakes import FakePrices
from tests.simulate.timeline.runs import SQUARE


def of_program(name: str, ranks: int, layers: int, microbatches: int, prices: FakePrices | None = None) -> Estimate:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(ranks), entry.puzzle(ranks, layers), microbatches))
    return estimate(checked, prices or FakePrices())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_moment_of_a_rank_is_compute_exposed_communication_or_bubble(name: str) -> None:
    entry = STRATEGIES[name]
    found = of_program(name, entry.ranks, entry.default_layers(entry.ranks), 4)
    assert found.compute_share + found.exposed_share + found.bubble_share == pytest.approx(1)
    assert min(found.compute_share, *found.exposed.values(), found.bubble_share) >= 0


async def awaits_at_once(rank: Rank) -> None:
    """Data parallelism without overlap."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
    total = await rank.all_reduce(grad_weight, axis="dp_shard")
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def test_communication_that_compute_waits_for_is_exposed_by_kind_and_axis() -> None:
    found = estimate(check(trace(awaits_at_once, 2, 1, 2)), FakePrices())
    reduction = 0.25 + 4 * SQUARE / 2**20 + 2 / 8
    assert found.step == 4 + reduction  # forward, loss, backward, update
    assert found.exposed == {("all_reduce", "dp_shard"): reduction / found.step}
    assert found.compute_share == 4 / found.step
    assert found.bubble_share == pytest.approx(0)


async def one_is_idle(rank: Rank) -> None:
    """One layer on the first rank alone."""
    if rank.index:
        return
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
    rank.weights[0], rank.opt_states[0] = rank.update(0, grad_weight, rank.weights[0], rank.opt_states[0])


def test_a_rank_that_does_nothing_holds_nothing() -> None:
    found = estimate(check(trace(one_is_idle, 2, 1, 2)), FakePrices())
    assert found.peaks[1].bytes == 0
    assert found.peaks[1].cause == "a rank without ops"
    assert found.bubble_share == pytest.approx(0.5)


def test_waiting_for_others_is_bubble_and_not_exposed() -> None:
    found = of_program("gpipe", 4, 4, 8, FakePrices(start=-0.5))  # an activation is half a MiB: messages take no time
    assert found.exposed_share == pytest.approx(0, abs=1e-6)
    assert found.bubble_share == pytest.approx(1 - found.compute_share, abs=1e-6)
    assert found.bubble_share > 0.2


def test_messages_are_told_by_the_axis_along_which_they_go() -> None:
    found = estimate(fold(Plan(Mesh(pp=2, dp_shard=4)), Sizes.puzzle(4), 16), FakePrices())
    assert ("message", "pp") in found.exposed


def test_a_peak_names_its_rank_op_layer_and_microbatch() -> None:
    found = of_program("gpipe", 4, 4, 4)
    assert found.peak.bytes == max(peak.bytes for peak in found.peaks)
    assert found.peak.rank == found.peaks.index(found.peak)
    assert found.peak.op is OpKind.BACKWARD
    assert found.peak.cause == f"backward of layer {found.peak.layer}, microbatch 0"
    assert sum(found.peak.by_category.values()) == found.peak.bytes


def test_counters_reach_the_peak_and_rise_in_time() -> None:
    found = of_program("fsdp", 4, 4, 4)
    for counter, memory in zip(memory_counters(found.traced, found.times), found.memory, strict=True):
        times = [time for time, _ in counter]
        assert times == sorted(set(times))
        assert max(times) <= found.step
        assert max(sum(live.values()) for _, live in counter) <= memory.peak
        assert max(sum(live.values()) for _, live in counter) >= max(memory.before[-10:])


def test_where_communication_takes_the_cores_time_nothing_is_hidden() -> None:
    """Compute and communication that take turns on one core take the sum of their times, however they overlap."""
    free, turns = (of_program("ddp", 2, 4, 2, FakePrices(contention=share)) for share in (0.0, 1.0))
    tape = turns.traced.program.tapes[0]
    work = sum(
        turns.times.ends[0][at] - turns.times.starts[0][at] for at, op in enumerate(tape) if op.kind is not OpKind.WAIT
    )
    assert free.step < work
    assert turns.step == pytest.approx(work)
    assert turns.exposed_share == pytest.approx(1 - turns.compute_share)


def test_a_sum_that_the_backward_pass_has_made_costs_nothing() -> None:
    apart, inside = (of_program("1f1b", 2, 2, 4, FakePrices(adds_in_backward=adds)).times for adds in (False, True))
    program = of_program("1f1b", 2, 2, 4).traced.program
    sums = [at for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.ADD and op.layer >= 0]
    assert {apart.ends[0][at] - apart.starts[0][at] for at in sums} == {1}
    assert {inside.ends[0][at] - inside.starts[0][at] for at in sums} == {0}


def test_a_step_takes_what_its_recipe_says_beside_its_ops() -> None:
    step = Workload(
        Plan(Mesh(dp_shard=2)), GPT(), find_cluster("h100x2"), 2, 1, find_precision("bf16"), recipe=Recipe()
    )
    slow = replace(step, recipe=Recipe(kernels=Kernels(step_seconds=0.5)))
    assert slow.estimate().step == step.estimate().step + 0.5
