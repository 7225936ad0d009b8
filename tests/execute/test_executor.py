"""The executor does what the tape says: no more buffers, no copies where none are needed, nothing left alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardlab.check import ChannelModel, check
from shardlab.check.views import ends_of
from shardlab.data import Corpus
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.analysis import Analysis
from shardlab.models import GPT
from shardlab.program import OpKind, Rank, Refused, Strategy, trace
from shardlab.strategies import STRATEGIES
from shardlab.train.data import Batches
from tests.check.offloading_programs import CARRIED, rounded_on_its_way
from tests.support.ranks import Ranks
from tests.train import user_programs

World = Callable[[int], Ranks]
MODEL = GPT(layers=3, hidden_size=16, heads=2, seq_len=8)


def analysis(name: str, ranks: int, layers: int, microbatches: int) -> Analysis:
    entry = STRATEGIES[name]
    return Analysis(check(trace(entry.program, entry.mesh(ranks), layers, microbatches)), 0)


def test_fsdp_lives_in_one_gather_buffer() -> None:
    found = analysis("fsdp", 4, 6, 4)
    assert found.slots == 1


def test_strategies_with_whole_weights_need_no_gather_buffer() -> None:
    found = analysis("ddp", 4, 3, 4)
    assert found.slots == 0
    assert not found.halved


def test_gradients_accumulate_in_the_backward_that_makes_them() -> None:
    found = analysis("grad-accum", 1, 2, 4)
    adds = [at for at, op in enumerate(found.tape) if op.kind is OpKind.ADD]
    assert len(adds) == 2 * 3
    assert set(found.in_place.fused) == set(adds)


def test_all_reduce_works_in_place_when_nobody_reads_its_input_again() -> None:
    found = analysis("ddp", 4, 3, 4)
    assert {at for at, op in enumerate(found.tape) if op.kind is OpKind.ALL_REDUCE} <= found.in_place.first_input


def analysis_of(function: Strategy, ranks: int, layers: int, microbatches: int) -> Analysis:
    return Analysis(check(trace(function, ranks, layers, microbatches)), 0)


def test_a_weight_that_is_gathered_may_go_between_the_halves() -> None:
    """Even if it is the same one in the forward pass and in the first half, which is given it anew."""
    found = analysis_of(user_programs.split_fsdp, 2, 3, 2)
    assert found.slots == 1
    assert len(found.halved) == 3
    kept_whole = analysis_of(gathered_once, 2, 2, 2)
    assert len(kept_whole.halved) == 2
    assert analysis_of(user_programs.split, 2, 3, 2).slots == 0


async def gathered_once(rank: Rank) -> None:
    """One gather a layer, for both passes; the weight is freed before its second half."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.weights["full", l] = await rank.all_gather(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights["full", l])
    last = len(rank.layers)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        given = rank.activations[l], rank.grad_activations[l + 1]
        rank.grad_activations[l] = rank.backward_input(l, *given, rank.weights.pop(("full", l)))
    for l in rank.layers:
        gradient = rank.backward_weight(l, rank.activations.pop(l), rank.grad_activations.pop(l + 1))
        total = await rank.reduce_scatter(gradient)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def test_a_new_weight_is_gathered_into_the_place_of_the_old_one() -> None:
    found = analysis_of(user_programs.zero_1, 2, 3, 2)
    gathers = [op.outputs[0] for op in found.tape if op.kind is OpKind.ALL_GATHER]
    assert found.kept.arrives == set(gathers) == set(found.kept.final)
    assert found.slots == 0


def ends_there(found: Analysis, root: int) -> int:
    """When the last value ends that lies in the memory of one."""
    ends = ends_of(found.tape)
    return max(ends[number] for number in (root, *found.homes) if found.homes.get(number, number) == root)


@pytest.mark.parametrize("program", CARRIED)
def test_a_buffer_is_emptied_when_the_last_value_ends_that_lies_there(program: Strategy) -> None:
    """Also what an update has written there, and all slices."""
    found = analysis_of(program, 2, 2, 2)
    assert found.kept.carried
    for root, slot in found.slot.items():
        assert found.empties[ends_there(found, root)] == slot


def test_weight_halves_accumulate_where_they_are_made() -> None:
    found = analysis_of(user_programs.split, 2, 2, 6)
    adds = {at for at, op in enumerate(found.tape) if op.kind is OpKind.ADD}
    assert len(adds) == 2 * 2
    assert set(found.in_place.fused) == adds


async def reads_the_sum_and_the_part(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    rank.grad_weights["mine"], _ = rank.backward(0, rank.activations[0], gradient, rank.weights[0])
    rank.grad_weights["ours"] = await rank.all_reduce(rank.grad_weights["mine"])
    rank.grad_weights["again"] = await rank.all_reduce(rank.grad_weights["mine"])
    rank.weights[0], rank.opt_states[0] = rank.update(0, rank.grad_weights["ours"], rank.weights[0], rank.opt_states[0])


def test_all_reduce_copies_what_is_read_again() -> None:
    found = Analysis(check(trace(reads_the_sum_and_the_part, 2, 1, 2)), 0)
    reduces = [at for at, op in enumerate(found.tape) if op.kind is OpKind.ALL_REDUCE]
    assert [at in found.in_place.first_input for at in reduces] == [False, True]


def live_tensors_after_a_step(rank: int, strategy: Strategy, ranks: int) -> list[str]:
    """Kinds of the values that still have a tensor once a step has ended."""
    checked = check(trace(strategy, ranks, MODEL.sizes(2, 4), 4))
    corpus = Corpus.split(bytes(range(256)) * 8, MODEL.seq_len)
    executor = Executor(
        checked,
        rank,
        MODEL,
        Batches(corpus, MODEL.seq_len, 2, 4, 0),
        Settings(optimizer=OptimizerConfig(schedule_steps=2, warmup_steps=1)),
    )
    executor.step()
    specs = checked.specs[rank]
    values: list[Any] = executor.state.values
    return sorted({specs[number].kind.value for number, value in enumerate(values) if value is not None})


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "strategy",
    [*(STRATEGIES[name].program for name in ("ddp", "fsdp", "wsdp")), user_programs.zero_1, user_programs.split_fsdp],
)
def test_a_step_leaves_weights_and_optimizer_states_alone(ranks: World, strategy: Strategy) -> None:
    for kinds in ranks(2).call(live_tensors_after_a_step, strategy, 2):
        assert kinds == ["opt_states", "weights"]


def elements_in_buffers(rank: int) -> tuple[list[int], list[int]]:
    """Elements of the gather buffers' storages: before each op of a step, and after it; with the expected ones."""
    entry = STRATEGIES["fsdp"]
    checked = check(trace(entry.program, entry.mesh(2), MODEL.sizes(2, 4), 4))
    corpus = Corpus.split(bytes(range(256)) * 8, MODEL.seq_len)
    executor = Executor(
        checked,
        rank,
        MODEL,
        Batches(corpus, MODEL.seq_len, 2, 4, 0),
        Settings(optimizer=OptimizerConfig(schedule_steps=2, warmup_steps=1)),
    )
    state = executor.state
    held: list[int] = []
    for instruction in executor.instructions:
        held.append(sum(buffer.untyped_storage().nbytes() // buffer.itemsize for buffer in state.buffers))
        if not state.batch:
            state.batch = {m: executor.batches.microbatch(0, m) for m in state.microbatches}
            state.tokens = executor.batches.counted(0, 4)
        instruction()
    expected: list[int] = []
    live = 0
    for op in state.tape:
        expected.append(live)
        if op.kind is OpKind.ALL_GATHER:
            live += state.shapes.flat[op.layer]
        if op.kind is OpKind.FREE and op.inputs[0] in state.analysis.slot:
            live -= state.shapes.flat[state.specs[op.inputs[0]].layer]
    return held, expected


@pytest.mark.xdist_group("ranks")
def test_gathered_weights_have_memory_from_their_gather_to_their_free_and_no_longer(ranks: World) -> None:
    for held, expected in ranks(2).call(elements_in_buffers):
        assert held == expected
        assert max(held) > 0


def moved_by_tiny_steps(rank: int) -> float:
    """How far weights go in a rehearsal and a step of almost no length; the copy that is stepped came in bfloat16."""
    checked = check(trace(rounded_on_its_way, 2, MODEL.sizes(2, 4), 4))
    batches = Batches(Corpus.split(bytes(range(256)) * 8, MODEL.seq_len), MODEL.seq_len, 2, 4, 0)
    config = OptimizerConfig(learning_rate=1e-9, schedule_steps=2, warmup_steps=1)
    executor = Executor(checked, rank, MODEL, batches, Settings(optimizer=config))
    before = torch.cat([*executor.state.kept.values()])
    executor.rehearse(batches, executor.instructions)
    executor.step()
    return float((torch.cat([*executor.state.kept.values()]) - before).abs().max())


@pytest.mark.xdist_group("ranks")
def test_a_copy_that_was_rounded_on_its_way_does_not_round_what_is_kept(ranks: World) -> None:
    assert max(ranks(2).call(moved_by_tiny_steps)) < 1e-7


async def one_f_one_b_with_blocking_receives(rank: Rank) -> None:
    """The textbook's 1F1B of two stages: un-awaited sends cross with the receives."""
    stage, last = rank.index, rank.index == 1
    rank.weights[0], rank.opt_states[0] = rank.load_weights(stage)

    async def forward(m: int) -> None:
        given = await rank.recv(source=0, expect=("activations", 1, m)) if last else rank.load_batch([m])
        rank.activations["in", m] = given
        rank.activations["out", m] = rank.forward(stage, rank.activations["in", m], rank.weights[0])
        if not last:
            rank.send(rank.activations.pop(("out", m)), to=1)

    async def backward(m: int) -> None:
        gradient = (
            rank.loss(rank.activations.pop(("out", m)))
            if last
            else await rank.recv(source=1, expect=("grad_activations", 1, m))
        )
        grad_weight, back = rank.backward(stage, rank.activations.pop(("in", m)), gradient, rank.weights[0])
        rank.grad_weights[0] = rank.grad_weights[0] + grad_weight if m else grad_weight
        if last:
            rank.send(back, to=0)

    if not last:
        await forward(0)
    for m in range(len(rank.microbatches) - (not last)):
        await forward(m + (not last))
        await backward(m)
    if not last:
        await backward(len(rank.microbatches) - 1)
    rank.weights[0], rank.opt_states[0] = rank.update(
        stage, rank.grad_weights.pop(0), rank.weights[0], rank.opt_states[0]
    )


async def sends_an_optimizer_state(rank: Rank) -> None:
    await reads_the_sum_and_the_part(rank)
    if rank.index == 0:
        await rank.send(rank.opt_states[0], to=1)
    else:
        rank.opt_states["theirs"] = await rank.recv(source=0)


def test_what_has_no_tensor_runs_on_no_backend() -> None:
    checked = check(trace(sends_an_optimizer_state, 2, 1, 2))
    assert checked.backends() == []
    corpus = Corpus.split(bytes(range(256)) * 8, 8)
    with pytest.raises(Refused, match=r"rank 0, op \d+ send to rank 1: an optimizer state stays"):
        Executor(checked, 0, GPT(layers=1, hidden_size=16, heads=2, seq_len=8), Batches(corpus, 8, 2, 4, 0), Settings())


def test_a_backend_that_would_hang_is_refused_before_anything_is_started() -> None:
    checked = check(trace(one_f_one_b_with_blocking_receives, 2, 2, 4))
    assert checked.models[ChannelModel.RENDEZVOUS] is None
    assert checked.backends() == ["gloo"]
    corpus = Corpus.split(bytes(range(256)) * 8, MODEL.seq_len)
    with pytest.raises(Refused, match=r"on nccl this program can hang: deadlock: rank \d waits"):
        Executor(checked, 0, MODEL, Batches(corpus, 8, 2, 4, 0), Settings(), backend="nccl")
