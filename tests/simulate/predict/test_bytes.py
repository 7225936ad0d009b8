"""Memory in bytes and by what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.check import check
from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, trace
from shardlab.language.precision import find_precision
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.timeline.memory import CATEGORIES, RankMemory, live_memory, memory_in_bytes
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.simulate.timeline.runs import ROWS, SQUARE

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
        assert real.peak >= max(real.before)
        assert all(bytes <= 4 * elements for bytes, elements in zip(real.before, counted, strict=True))


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


def test_gathered_weights_are_told_from_those_that_are_kept() -> None:
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
    most = [max(live) for live in zip(*memory.counters[:first_update], strict=True)]
    states = categories(tuple(most))
    held = states["parameters"] + states["gradients"] + states["optimizer"]
    one_layer = 2 * PARAMETERS / LAYERS  # whole gradients: one is reduced while the next is made
    assert held / GB == pytest.approx(published, abs=0.05 + 2 * one_layer / GB)


def test_precisions_say_how_many_bytes_each_kind_has() -> None:
    sizes = find_precision("bf16-fp32-grads").sizes(Sizes.puzzle(1))
    bytes = {kind: sizes.element_bytes[kind] for kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.ACTIVATION)}
    assert bytes == {Kind.WEIGHT: 2, Kind.GRAD_WEIGHT: 4, Kind.ACTIVATION: 2}
    doubled = replace(sizes, opt_states=(2 * sizes.weights[0],))
    checked = check(trace(STRATEGIES["single"].program, 1, doubled, 1))
    (memory,) = memory_in_bytes(checked)
    assert categories(memory.by_category)["optimizer"] == 12 * SQUARE
