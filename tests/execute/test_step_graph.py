"""A captured step has the numbers of one that the host issues.

There is no CUDA here. A recorded graph does what a CUDA graph would: it keeps what torch's kernels were given, and
gives the same tensors to the same kernels again. So a number that the host has put into a step shows in the next one.
"""

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

from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.step_graph import FIRST_STEPS, GRAPHS, StepInputs
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.program import Mesh, UserError
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan
from shardlab.train.data import Batches, Corpus
from shardlab.train.job import Job

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
        made = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, made))
        return made

    def capture(self, ops: Callable[[], None]) -> None:
        with self:
            ops()
        self._ran = True

    def replay(self) -> None:
        if self._ran:
            self._ran = False
            return
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPHS, "cpu", RecordedGraph)
    monkeypatch.setattr("shardlab.execute.capturing.CAPTURING", {"cpu"})


def executor(model: Blocks = SMALL, optimizer: OptimizerConfig = CLIPPED, **settings: Any) -> Executor:
    job = Job(Plan(Mesh()), 1, 2, model, 2)
    batches = Batches(Corpus.split(bytes(range(256)) * 8, model.seq_len), model.seq_len, 2, 2, 0)
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
    expected, found = trained(issued), trained(captured)
    assert captured.graph is not None
    assert captured.graph.replays == STEPS - FIRST_STEPS
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    rtol, atol = (1e-4, 1e-5) if precision == "fp32" else (2**-7, 2**-12)  # weights are rounded to 8 bits
    for ours, theirs in zip(found[2], expected[2], strict=True):
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
        kept = inputs.rate.clone(), [each.clone() for pair in inputs.batch.values() for each in pair]
        plain(inputs, state)
        if forgotten == "rate":
            inputs.rate.copy_(kept[0])
        else:
            for there, old in zip((each for pair in inputs.batch.values() for each in pair), kept[1], strict=True):
                there.copy_(old)

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
    before = [each.clone() for each in ours.state.kept.values()]
    ours.step()
    assert not ours.state.finite
    assert all(torch.equal(a, b) for a, b in zip(ours.state.kept.values(), before, strict=True))
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
