"""The executor does what the tape says: no more buffers, no copies where none are needed, nothing left alive."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.check import ChannelModel, check
from shardlab.check.in_place import ending_ops
from shardlab.execute.executor import FIRST_STEPS, GRAPHS, Executor, StepInputs
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.execute.tape_analysis import Analysis
from shardlab.execute.update_ops import sum_of_squares
from shardlab.language import Mesh, OpKind, Rank, Refused, Strategy, UserError, trace
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.check.offloading_programs import CARRIED, rounded_on_its_way
from tests.support.ranks import Ranks
from tests.train import user_programs

World = Callable[[int], Ranks]
MODEL = GPT(layers=3, hidden_size=16, heads=2, seq_len=8)


def analysis(name: str, ranks: int, layers: int, microbatches: int) -> Analysis:
    entry = STRATEGIES[name]
    return Analysis(check(trace(entry.program, entry.mesh(ranks), layers, microbatches)), 0)


def test_fsdp_lives_in_one_gather_buffer() -> None:
    result = analysis("fsdp", 4, 6, 4)
    assert result.slots == 1


def test_strategies_with_whole_weights_need_no_gather_buffer() -> None:
    result = analysis("ddp", 4, 3, 4)
    assert result.slots == 0
    assert not result.halved


def test_gradients_accumulate_in_the_backward_that_makes_them() -> None:
    result = analysis("grad-accum", 1, 2, 4)
    adds = [at for at, op in enumerate(result.tape) if op.kind is OpKind.ADD]
    assert len(adds) == 2 * 3
    assert set(result.in_place.fused) == set(adds)


def test_all_reduce_works_in_place_when_nobody_reads_its_input_again() -> None:
    result = analysis("ddp", 4, 3, 4)
    assert {at for at, op in enumerate(result.tape) if op.kind is OpKind.ALL_REDUCE} <= result.in_place.first_input


def analysis_of(function: Strategy, ranks: int, layers: int, microbatches: int) -> Analysis:
    return Analysis(check(trace(function, ranks, layers, microbatches)), 0)


def test_a_weight_that_is_gathered_may_go_between_the_halves() -> None:
    """Even if it is the same one in the forward pass and in the first half, which is given it anew."""
    result = analysis_of(user_programs.split_fsdp, 2, 3, 2)
    assert result.slots == 1
    assert len(result.halved) == 3
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
        inputs = rank.activations[l], rank.grad_activations[l + 1]
        rank.grad_activations[l] = rank.backward_input(l, *inputs, rank.weights.pop(("full", l)))
    for l in rank.layers:
        gradient = rank.backward_weight(l, rank.activations.pop(l), rank.grad_activations.pop(l + 1))
        total = await rank.reduce_scatter(gradient)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def test_a_new_weight_is_gathered_into_the_place_of_the_old_one() -> None:
    result = analysis_of(user_programs.zero_1, 2, 3, 2)
    gathers = [op.outputs[0] for op in result.tape if op.kind is OpKind.ALL_GATHER]
    assert result.kept_weights.arriving == set(gathers) == set(result.kept_weights.final)
    assert result.slots == 0


def ends_there(result: Analysis, root: int) -> int:
    """When the last value ends that lies in the memory of one."""
    ends = ending_ops(result.tape)
    return max(ends[number] for number in (root, *result.homes) if result.homes.get(number, number) == root)


@pytest.mark.parametrize("program", CARRIED)
def test_a_buffer_is_emptied_when_the_last_value_ends_that_lies_there(program: Strategy) -> None:
    """Also what an update has written there, and all slices."""
    result = analysis_of(program, 2, 2, 2)
    assert result.kept_weights.copied_updates
    for root, slot in result.slot.items():
        assert result.empties[ends_there(result, root)] == slot


def test_weight_halves_accumulate_where_they_are_made() -> None:
    result = analysis_of(user_programs.split, 2, 2, 6)
    adds = {at for at, op in enumerate(result.tape) if op.kind is OpKind.ADD}
    assert len(adds) == 2 * 2
    assert set(result.in_place.fused) == adds


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
    result = Analysis(check(trace(reads_the_sum_and_the_part, 2, 1, 2)), 0)
    reduces = [at for at, op in enumerate(result.tape) if op.kind is OpKind.ALL_REDUCE]
    assert [at in result.in_place.first_input for at in reduces] == [False, True]


def live_tensors_after_a_step(rank: int, strategy: Strategy, ranks: int) -> list[str]:
    """Kinds of the values that still have a tensor once a step has ended."""
    checked = check(trace(strategy, ranks, MODEL.sizes(2, 4), 4))
    corpus = Corpus.from_text(bytes(range(256)) * 8, MODEL.seq_len)
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


@pytest.mark.starts_ranks
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
    corpus = Corpus.from_text(bytes(range(256)) * 8, MODEL.seq_len)
    executor = Executor(
        checked,
        rank,
        MODEL,
        Batches(corpus, MODEL.seq_len, 2, 4, 0),
        Settings(optimizer=OptimizerConfig(schedule_steps=2, warmup_steps=1)),
    )
    state = executor.state
    measured: list[int] = []
    for instruction in executor.instructions:
        measured.append(sum(buffer.untyped_storage().nbytes() // buffer.itemsize for buffer in state.buffers))
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
    return measured, expected


@pytest.mark.starts_ranks
def test_gathered_weights_have_memory_from_their_gather_to_their_free_and_no_longer(ranks: World) -> None:
    for measured, expected in ranks(2).call(elements_in_buffers):
        assert measured == expected
        assert max(measured) > 0


def moved_by_tiny_steps(rank: int) -> float:
    """How far weights go in a rehearsal and a step of almost no length; the copy that is stepped came in bfloat16."""
    checked = check(trace(rounded_on_its_way, 2, MODEL.sizes(2, 4), 4))
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, MODEL.seq_len), MODEL.seq_len, 2, 4, 0)
    config = OptimizerConfig(learning_rate=1e-9, schedule_steps=2, warmup_steps=1)
    executor = Executor(checked, rank, MODEL, batches, Settings(optimizer=config))
    start = torch.cat([*executor.state.kept.values()])
    executor.rehearse(batches, executor.instructions)
    executor.step()
    return float((torch.cat([*executor.state.kept.values()]) - start).abs().max())


@pytest.mark.starts_ranks
def test_a_copy_that_was_rounded_on_its_way_does_not_round_what_is_kept(ranks: World) -> None:
    assert max(ranks(2).call(moved_by_tiny_steps)) < 1e-7


async def one_f_one_b_with_blocking_receives(rank: Rank) -> None:
    """The textbook's 1F1B of two stages: un-awaited sends cross with the receives."""
    stage, last = rank.index, rank.index == 1
    rank.weights[0], rank.opt_states[0] = rank.load_weights(stage)

    async def forward(m: int) -> None:
        value = await rank.recv(source=0, expect=("activations", 1, m)) if last else rank.load_batch([m])
        rank.activations["in", m] = value
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


def test_values_without_tensors_run_on_no_backend() -> None:
    checked = check(trace(sends_an_optimizer_state, 2, 1, 2))
    assert checked.backends() == []
    corpus = Corpus.from_text(bytes(range(256)) * 8, 8)
    with pytest.raises(Refused, match=r"rank 0, op \d+ send to rank 1: an optimizer state stays"):
        Executor(checked, 0, GPT(layers=1, hidden_size=16, heads=2, seq_len=8), Batches(corpus, 8, 2, 4, 0), Settings())


def test_a_backend_that_would_hang_is_refused_before_anything_is_started() -> None:
    checked = check(trace(one_f_one_b_with_blocking_receives, 2, 2, 4))
    assert checked.models[ChannelModel.RENDEZVOUS] is None
    assert checked.backends() == ["gloo"]
    corpus = Corpus.from_text(bytes(range(256)) * 8, MODEL.seq_len)
    with pytest.raises(Refused, match=r"on nccl this program can hang: deadlock: rank \d waits"):
        Executor(checked, 0, MODEL, Batches(corpus, 8, 2, 4, 0), Settings(), backend="nccl")


# A captured step has the numbers of one that the host issues.
#
# There is no CUDA here. A recorded graph does what a CUDA graph would: it keeps what torch's kernels were given, and
# gives the same tensors to the same kernels again. So a number that the host has put into a step shows in the next
# one.


STEPS = FIRST_STEPS + 5

SMALL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=256)
CLIPPED = OptimizerConfig(learning_rate=1e-2, clip=0.5, warmup_steps=2, schedule_steps=STEPS)


class RecordedGraph(TorchDispatchMode):
    """Kernels and their tensors. What is noted has run, so the first replay does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []
        self._ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "a capture asks no device for a number"
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result

    def capture(self, ops: Callable[[], None]) -> None:
        with self:
            ops()
        self._ran = True

    def replay(self) -> None:
        if self._ran:
            self._ran = False
            return
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                new_result = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(new_result), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPHS, "cpu", RecordedGraph)
    monkeypatch.setattr("shardlab.execute.requirements.CAPTURING", {"cpu"})


def executor(model: Blocks = SMALL, optimizer: OptimizerConfig = CLIPPED, **settings: Any) -> Executor:
    job = Job(Plan(Mesh()), 1, 2, model, 2)
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, model.seq_len), model.seq_len, 2, 2, 0)
    return Executor(job.checked(), 0, job.cut, batches, Settings(optimizer=optimizer, **settings))


def trained(ours: Executor) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, squared norms and weights after all steps."""
    losses, norms = [], []
    for _ in range(STEPS):
        loss, tokens = ours.step()
        losses.append(float(loss / tokens))
        norms.append(ours.state.squared_norm)
    return losses, norms, list(ours.state.kept.values())


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("model", [SMALL, Llama(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=256)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replayed_steps_have_the_numbers_of_issued_ones(model: Blocks, precision: str) -> None:
    numbers = find_precision(precision)
    issued, captured = executor(model, precision=numbers), executor(model, precision=numbers, cuda_graph=True)
    expected, replayed = trained(issued), trained(captured)
    assert captured.graph is not None
    assert captured.graph.replays == STEPS - FIRST_STEPS
    assert replayed[0] == pytest.approx(expected[0], rel=1e-5)
    assert replayed[1] == pytest.approx(expected[1], rel=1e-4)
    rtol, atol = (1e-4, 1e-5) if precision == "fp32" else (2**-7, 2**-12)  # weights are rounded to 8 bits
    for ours, theirs in zip(replayed[2], expected[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("forgotten", ["batch", "rate"])
def test_a_number_that_the_host_keeps_back_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(executor())[0]
    plain = StepInputs.fill

    def fill(inputs: StepInputs, state: Any) -> None:
        if state.step == FIRST_STEPS:
            plain(inputs, state)
            return
        old_inputs = inputs.rate.clone(), [tensor.clone() for pair in inputs.batch.values() for tensor in pair]
        plain(inputs, state)
        if forgotten == "rate":
            inputs.rate.copy_(old_inputs[0])
        else:
            for current, old in zip(
                (tensor for pair in inputs.batch.values() for tensor in pair), old_inputs[1], strict=True
            ):
                current.copy_(old)

    monkeypatch.setattr(StepInputs, "fill", fill)
    assert trained(executor(cuda_graph=True))[0] != pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("recorded")
def test_a_replayed_step_whose_gradient_is_not_finite_is_left_out() -> None:
    ours = executor(cuda_graph=True)
    for _ in range(FIRST_STEPS + 1):
        ours.step()
    first = next(iter(ours.state.kept.values()))
    good = first.clone()
    first.fill_(math.inf)
    old_weights = [weight.clone() for weight in ours.state.kept.values()]
    ours.step()
    assert not ours.state.finite
    assert all(torch.equal(a, b) for a, b in zip(ours.state.kept.values(), old_weights, strict=True))
    first.copy_(good)
    ours.step()
    assert ours.state.finite
    assert not torch.equal(first, good)


@pytest.mark.usefixtures("recorded")
def test_steps_that_are_left_out_make_no_states_so_more_run_op_by_op() -> None:
    def losses(ours: Executor) -> list[float]:
        first = next(iter(ours.state.kept.values()))
        good = first.clone()
        first.fill_(math.inf)
        for _ in range(FIRST_STEPS):
            ours.step()
        first.copy_(good)
        return trained(ours)[0]

    captured = executor(cuda_graph=True)
    assert losses(captured) == pytest.approx(losses(executor()), rel=1e-5)
    assert captured.graph is not None
    assert captured.graph.replays == STEPS - FIRST_STEPS


@pytest.mark.parametrize(
    ("words", "model", "settings"),
    [
        ("dropout", GPT(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=256, dropout=0.1), {}),
        ("fp16", SMALL, {"precision": find_precision("fp16")}),
        ("--optimizer adamw", SMALL, {"optimizer": OptimizerConfig(optimizer="lion")}),
        ("--optimizer adamw", SMALL, {"optimizer": OptimizerConfig(ema=0.9)}),
        ("experts", Mixtral(layers=2, hidden_size=16, heads=2, vocab_size=256, seq_len=8, experts=4), {}),
    ],
)
@pytest.mark.usefixtures("recorded")
def test_a_step_that_the_host_has_a_part_in_is_refused(words: str, model: Blocks, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=words):
        executor(model, cuda_graph=True, **settings)


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(UserError, match="ranks compute on the CPU here; leave it out"):
        executor(cuda_graph=True)


# The norm of a gradient.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 3, (1 << 20) + 5])
def test_squares_are_summed_in_float64_and_the_gradient_stays(length: int, dtype: torch.dtype) -> None:
    gradient = torch.arange(length, dtype=dtype) / 1024
    copy = gradient.clone()
    squares = sum_of_squares(gradient)
    assert (squares.shape, squares.dtype) == ((1,), torch.float64)
    assert float(squares) == pytest.approx(float((copy.double() ** 2).sum()))
    assert torch.equal(gradient, copy)
