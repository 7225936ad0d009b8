"""The figures of a priced step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.check import check
from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, trace
from shardlab.language.precision import find_precision
from shardlab.models import GPT, find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.estimate import Estimate, estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.recipe import Kernels, Recipe, find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.memory import CATEGORIES, RankMemory, live_memory, memory_in_bytes
from shardlab.simulate.timeline.run import memory_counters
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.simulate.timeline.fakes import FakePrices
from tests.simulate.timeline.runs import ROWS, SQUARE


def of_program(name: str, ranks: int, layers: int, microbatches: int, prices: FakePrices | None = None) -> Estimate:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(ranks), entry.puzzle(ranks, layers), microbatches))
    return estimate(checked, prices or FakePrices())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_moment_of_a_rank_is_compute_exposed_communication_or_idle(name: str) -> None:
    entry = STRATEGIES[name]
    result = of_program(name, entry.ranks, entry.default_layers(entry.ranks), 4)
    assert result.compute_share + result.exposed_share + result.idle_share == pytest.approx(1)
    assert min(result.compute_share, *result.exposed.values(), result.idle_share) >= 0


async def awaits_at_once(rank: Rank) -> None:
    """Data parallelism without overlap."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
    total = await rank.all_reduce(grad_weight, axis="dp_shard")
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def test_communication_that_compute_waits_for_is_exposed_by_kind_and_axis() -> None:
    result = estimate(check(trace(awaits_at_once, 2, 1, 2)), FakePrices())
    reduction = 0.25 + 4 * SQUARE / 2**20 + 2 / 8
    assert result.step == 4 + reduction  # forward, loss, backward, update
    assert result.exposed == {("all_reduce", "dp_shard"): reduction / result.step}
    assert result.compute_share == 4 / result.step
    assert result.idle_share == pytest.approx(0)


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
    result = estimate(check(trace(one_is_idle, 2, 1, 2)), FakePrices())
    assert result.peaks[1].bytes == 0
    assert result.peaks[1].cause == "a rank without ops"
    assert result.idle_share == pytest.approx(0.5)


def test_waiting_for_others_is_idle_time_and_not_exposed() -> None:
    result = of_program("gpipe", 4, 4, 8, FakePrices(start=-0.5))  # an activation is half a MiB: messages take no time
    assert result.exposed_share == pytest.approx(0, abs=1e-6)
    assert result.idle_share == pytest.approx(1 - result.compute_share, abs=1e-6)
    assert result.idle_share > 0.2


def test_messages_are_named_by_the_axis_along_which_they_go() -> None:
    result = estimate(fold(Plan(Mesh(pp=2, dp_shard=4)), Sizes.puzzle(4), 16), FakePrices())
    assert ("message", "pp") in result.exposed


def test_a_peak_names_its_rank_op_layer_and_microbatch() -> None:
    result = of_program("gpipe", 4, 4, 4)
    assert result.peak.bytes == max(peak.bytes for peak in result.peaks)
    assert result.peak.rank == result.peaks.index(result.peak)
    assert result.peak.op is OpKind.BACKWARD
    assert result.peak.cause == f"backward of layer {result.peak.layer}, microbatch 0"
    assert sum(result.peak.by_category.values()) == result.peak.bytes


def test_counters_reach_the_peak_and_rise_in_time() -> None:
    result = of_program("fsdp", 4, 4, 4)
    for counter, memory in zip(memory_counters(result.traced, result.times), result.memory, strict=True):
        times = [time for time, _ in counter]
        assert times == sorted(set(times))
        assert max(times) <= result.step
        assert max(sum(live.values()) for _, live in counter) <= memory.peak
        assert max(sum(live.values()) for _, live in counter) >= max(memory.before_ops[-10:])


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
    separate, in_backward = (
        of_program("1f1b", 2, 2, 4, FakePrices(adds_in_backward=adds)).times for adds in (False, True)
    )
    program = of_program("1f1b", 2, 2, 4).traced.program
    sums = [at for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.ADD and op.layer >= 0]
    assert {separate.ends[0][at] - separate.starts[0][at] for at in sums} == {1}
    assert {in_backward.ends[0][at] - in_backward.starts[0][at] for at in sums} == {0}


def test_a_step_takes_what_its_recipe_says_beside_its_ops() -> None:
    step = Workload(
        Plan(Mesh(dp_shard=2)), GPT(), find_cluster("h100x2"), 2, 1, find_precision("bf16"), recipe=Recipe()
    )
    slow = replace(step, recipe=Recipe(kernels=Kernels(step_seconds=0.5)))
    assert slow.estimate().step == step.estimate().step + 0.5


# Memory in bytes and by what it is for.


SHARD = ("dp_shard",)


def memory_of(name: str, ranks: int, layers: int, microbatches: int, sizes: Sizes | None = None) -> list[RankMemory]:
    entry = STRATEGIES[name]
    return memory_in_bytes(check(trace(entry.program, entry.mesh(ranks), sizes or layers, microbatches)))


def categories(memory: tuple[int, ...]) -> dict[str, int]:
    return {category.value: bytes for category, bytes in zip(CATEGORIES, memory, strict=True)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_categories_of_a_peak_add_up_to_it(name: str) -> None:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks), 4))
    for memory in memory_in_bytes(checked, counters=True):
        assert sum(memory.by_category) == memory.peak
        assert memory.counters[memory.peak_op] == memory.by_category
        assert max(map(sum, memory.counters)) == memory.peak
        assert min(map(min, memory.counters)) >= 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_more_is_live_than_the_puzzles_count_and_while_an_op_runs_its_result_counts_too(name: str) -> None:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks), 4))
    for real, counted in zip(memory_in_bytes(checked), live_memory(checked), strict=True):
        assert real.peak >= max(real.before_ops)
        assert all(bytes <= 4 * elements for bytes, elements in zip(real.before_ops, counted, strict=True))


def test_a_peak_is_put_down_to_the_op_that_reaches_it() -> None:
    (memory,) = memory_of("single", 1, 2, 4)
    entry = STRATEGIES["single"]
    tape = check(trace(entry.program, 1, 2, 4)).program.tapes[0]
    op = tape[memory.peak_op]
    assert (op.kind, op.layer) == (OpKind.BACKWARD, 1)
    assert categories(memory.by_category) == {
        "parameters": 2 * 4 * SQUARE,
        "gradients": 4 * SQUARE,
        "optimizer": 2 * 4 * SQUARE,
        "activations": 4 * 4 * ROWS * 4,  # inputs of both layers, the output's gradient, and that of layer 1's input
        "gathered": 0,
        "communication": 0,
        "arena": 0,
    }


def test_gathered_weights_are_distinguished_from_those_that_are_kept() -> None:
    for memory in memory_of("fsdp", 4, 4, 4):
        shares = categories(memory.by_category)
        assert shares["parameters"] == 4 * 4 * SQUARE // 4
        assert shares["gathered"] % (4 * SQUARE) == 0
        assert shares["gathered"] > 0


def test_a_result_on_its_way_is_a_communication_buffer_until_it_is_awaited() -> None:
    async def reduces(rank: Rank) -> None:
        await STRATEGIES["fsdp"].program(rank)

    checked = check(trace(reduces, 4, 2, 4))
    (memory, *_) = memory_in_bytes(checked, counters=True)
    tape = checked.program.tapes[0]
    at = next(at for at, op in enumerate(tape) if op.kind is OpKind.REDUCE_SCATTER)
    wait = next(i for i, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == tape[at].handle)
    issued, arrived = categories(memory.counters[at]), categories(memory.counters[wait + 1])
    assert issued["communication"] == SQUARE  # a quarter of 4 bytes an element
    assert arrived["communication"] == 0


def test_an_all_reduce_writes_over_a_gradient_that_nobody_reads_any_more() -> None:
    memory = memory_of("ddp", 4, 1, 4)[0]
    assert categories(memory.by_category)["communication"] == 0
    assert categories(memory.by_category)["gradients"] == 4 * SQUARE


PARAMETERS, LAYERS, GB = 7_500_000_000, 100, 1e9
DATA = Mesh(dp_shard=64)

ZERO = [
    # what is cut; GB of parameters, gradients and optimizer state on each of 64 ranks
    (Plan(DATA), 120.0),
    (Plan(DATA, shard_optimizer=SHARD), 31.4),
    (Plan(DATA, shard_optimizer=SHARD, shard_gradients=SHARD), 16.6),
    (Plan(DATA, shard_optimizer=SHARD, shard_gradients=SHARD, shard_parameters=SHARD), 1.9),
]
"""Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs, 12 bytes of optimizer state."""


@pytest.mark.parametrize(("plan", "published"), ZERO)
def test_model_states_take_what_the_zero_paper_says(plan: Plan, published: float) -> None:
    weights = (PARAMETERS // LAYERS,) * LAYERS
    sizes = Sizes(weights, tuple(2 * w for w in weights), (1,) * (LAYERS + 1), (0,) * LAYERS)
    sizes = find_precision("bf16").sizes(sizes)
    folded = fold(plan, sizes, 2 * 64)
    (memory,) = memory_in_bytes(folded, counters=True)
    first_update = next(at for at, op in enumerate(folded.program.tapes[0]) if op.kind is OpKind.UPDATE)
    largest = [max(live) for live in zip(*memory.counters[:first_update], strict=True)]
    states = categories(tuple(largest))
    state_bytes = states["parameters"] + states["gradients"] + states["optimizer"]
    one_layer = 2 * PARAMETERS / LAYERS  # whole gradients: one is reduced while the next is made
    assert state_bytes / GB == pytest.approx(published, abs=0.05 + 2 * one_layer / GB)


def test_precisions_say_how_many_bytes_each_kind_has() -> None:
    sizes = find_precision("bf16-fp32-grads").sizes(Sizes.puzzle(1))
    bytes = {kind: sizes.element_bytes[kind] for kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.ACTIVATION)}
    assert bytes == {Kind.WEIGHT: 2, Kind.GRAD_WEIGHT: 4, Kind.ACTIVATION: 2}
    doubled = replace(sizes, opt_states=(2 * sizes.weights[0],))
    checked = check(trace(STRATEGIES["single"].program, 1, doubled, 1))
    (memory,) = memory_in_bytes(checked)
    assert categories(memory.by_category)["optimizer"] == 12 * SQUARE


# Llama 3 405B on 16,384 H100 (arXiv 2407.21783, section 3.3.2 and table 4) holds what its tensors add up to.


TP, PP, TOKENS, HIDDEN, KEYS_VALUES, FFN = 8, 16, 8192, 16384, 2 * 1024, 53248
SLICED = 6 * HIDDEN + KEYS_VALUES + 3 * FFN
"""Features that a block keeps of a token where tp gathers again what its matrices read: the inputs of both norms and
their results, queries, keys and values, attention's result, gate, up and their product."""


def step(recipe: str) -> Forecast:
    """tp 8, pp 16, dp 128, 16 sequences for each data-parallel rank; gradients sharded, in float32."""
    shared = ("dp_shard",)
    plan = Plan(
        Mesh(pp=PP, dp_shard=128, tp=TP),
        schedule="interleaved-1f1b",
        stages_per_rank=4,
        sequence_parallel=True,
        shard_gradients=shared,
        shard_optimizer=shared,
    )
    model, cluster, precision = find_model("llama3-405b"), find_cluster("h100x16384"), find_precision("bf16-fp32-grads")
    return forecast(Workload(plan, model, cluster, 2048, 1, precision, recipe=find_recipe(recipe)))


def activations(result: Forecast) -> int:
    return max(result.peaks, key=lambda peak: peak.bytes).by_category["activations"]


def test_the_published_plan_fits_where_gathered_sequences_are_gathered_again() -> None:
    """All 16 microbatches of 8 blocks are kept at once: 64 GiB at 508 MiB a block."""
    result = step("megatron-core")
    assert result.memory.fits
    assert activations(result) == pytest.approx(PP * 8 * 2 * TOKENS * SLICED / TP, rel=0.02)


def test_it_does_not_fit_where_they_are_kept() -> None:
    """Each rank has a block's two gathered inputs whole: 448 MiB more. What SwiGLU makes is made again."""
    result = step("shardlab")
    assert not result.memory.fits
    whole = SLICED - FFN + 2 * (TP - 1) * HIDDEN
    assert activations(result) == pytest.approx(PP * 8 * 2 * TOKENS * whole / TP, rel=0.03)
