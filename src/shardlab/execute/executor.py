"""Executor of one rank's tape. Every op becomes a call that is prepared once and repeated in every step.

No code here depends on the strategy. The tape that was checked is the tape that runs: communication starts in tape
order and is waited for at the tape's WAIT, and a value is dropped at its FREE. `Executor` runs the calls one by one;
`StepGraph` captures a whole step as one CUDA graph and replays it.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.execute.communication_ops import START, START_TOGETHER, once
from shardlab.execute.compute_ops import COMPUTE
from shardlab.execute.optimizers.settings import want_scalable
from shardlab.execute.progress import begin_tape
from shardlab.execute.requirements import want_compilable, want_step_graph
from shardlab.execute.settings import GradientObserver, Sampler, Settings
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Communicator, Groups, Wait
from shardlab.execute.update_ops import Instruction
from shardlab.language import Op, OpKind
from shardlab.language.ops import COLLECTIVES
from shardlab.models import Model
from shardlab.models.tensors.attention import to_device


class Executor:
    """Executor of one rank's tape, on a default process group that already exists.

    Args:
        checked: the checked program. Its rank r runs in the process of rank r.
        rank: number of this rank.
        model: the model.
        batches: source of the batches.
        settings: settings of the run, such as its seed, precision, device and optimizer.
        backend: backend of the process group, such as "gloo". The program must be able to run on it.
        observer: function that is called with every gradient before its update.
        groups: process groups that exist already; new ones are added (see `Communicator`).
        weights_of: state of another program. Its weights and optimizer states are used instead of new ones (None:
            create them). This program is the forward half of the other one, or has another number of microbatches.

    Attributes:
        state: the rank's tensors.
        batches: source of the batches.
        links: the rank's communication.
        instructions: one call for each op of the tape.
        graph: runner that captures and replays steps; None if all steps run op by op.

    Raises:
        Refused: if the program cannot run on this backend.
        UserError: if the precision is float16 and the program computes no norm of the gradient; if the settings ask for
            compiled layers or captured steps, and these are not possible.
    """

    def __init__(
        self,
        checked: Checked,
        rank: int,
        model: Model,
        batches: Sampler,
        settings: Settings,
        backend: str = "gloo",
        observer: GradientObserver | None = None,
        groups: Groups | None = None,
        weights_of: State | None = None,
    ) -> None:
        why_not = checked.why_not(backend)
        if why_not is not None:
            raise why_not
        if checked.trains:
            want_scalable(settings.precision, checked)
            muon = settings.optimizer.optimizer == "muon"
            assert muon == checked.program.sizes.whole_matrices, (
                "a program is traced for the optimizer that it runs with"
            )
        if settings.compile:
            want_compilable(checked, settings.device.type)
        if settings.cuda_graph:
            want_step_graph(checked, model, settings.precision, settings.optimizer, settings.device.type)
        self.state = State(checked, rank, model, batches.micro_batch_size, settings, observer, weights_of)
        self.batches = batches
        self._microbatches = checked.program.microbatches
        self.links = Communicator(checked.program, rank, groups)
        self._waits: dict[int, Wait] = {}
        self.instructions = [self._prepare(index, op) for index, op in enumerate(self.state.tape)]
        self.graph = StepGraph(self.state) if settings.cuda_graph else None

    def step(self) -> Tensor:
        """Run one optimizer step.

        Returns:
            (2,) float64, on the rank's device: the loss summed over the tokens that this rank reports, and the number
            of these tokens. Each token of the step is reported by one rank.
        """
        state = self.state
        self._run(self.batches, self.instructions, self.graph)
        if state.settings.precision.scaled:
            state.loss_scale.update(state.finite)
        state.step += 1
        return state.loss

    def rehearse(self, batches: Sampler, instructions: Sequence[Instruction]) -> None:
        """Run the tape on other batches, without dropout and updates, and restore the state.

        Args:
            batches: source of the batches.
            instructions: calls that replace those of the executor, one for each op.
        """
        state = self.state
        old_values = state.loss, state.finite, state.not_finite
        state.rehearses = True
        try:
            self._run(batches, instructions)
        finally:
            state.rehearses = False
            state.loss, state.finite, state.not_finite = old_values

    def _run(self, batches: Sampler, instructions: Sequence[Instruction], graph: StepGraph | None = None) -> None:
        state = self.state
        words, base = begin_tape(state.step, len(instructions), evaluates=not state.checked.trains)
        state.batch = {m: batches.microbatch(state.step, m) for m in state.microbatches}
        state.tokens = batches.counted(state.step, self._microbatches)
        state.rate = state.settings.optimizer.rate(state.step)

        def run() -> None:
            state.begin()
            for index, instruction in enumerate(instructions, base):
                words[0] = index
                instruction()
            if not state.rehearses:
                state.keep()

        run() if graph is None else graph.run(run)
        words[0] = base + len(instructions)

    def _prepare(self, index: int, op: Op) -> Instruction:
        waits, handle = self._waits, op.handle
        if op.kind is OpKind.WAIT:
            return lambda: waits.pop(handle)()
        if op.kind in COMPUTE:
            return COMPUTE[op.kind](self.state, index, op)
        if op.batch >= 0 and op.kind in COLLECTIVES:
            return self._prepare_together(index, op)
        start = START[op.kind](self.state, self.links, index, op)
        return lambda: waits.__setitem__(handle, start())

    def _prepare_together(self, index: int, op: Op) -> Instruction:
        """Prepare an op of a batch of collectives that run as one. The last op of the batch starts all of them."""
        waits, batch = self._waits, self.state.analysis.buckets.batches[op.batch]
        if index != batch[-1]:
            return lambda: None
        ops = [self.state.tape[other] for other in batch]
        start = START_TOGETHER[op.kind](self.state, self.links, ops)
        handles = [other.handle for other in ops]

        def run() -> None:
            waits.update(dict.fromkeys(handles, once(start())))

        return run


FIRST_STEPS = 3
"""Number of steps with an update that run op by op before the capture. They open connections, and allocate optimizer
states and memory that is reused."""


class DeviceGraph(Protocol):
    """Sequence of device operations that can be repeated with the same memory."""

    def capture(self, ops: Callable[[], None]) -> None:
        """Record the device operations of the call `ops()` without running them."""
        ...

    def replay(self) -> None:
        """Run the recorded operations."""
        ...


class CudaGraph:
    """CUDA graph (torch.cuda.CUDAGraph), which includes NCCL's communication."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, ops: Callable[[], None]) -> None:
        """Record the device operations of the call `ops()` without running them."""
        with torch.cuda.graph(
            self._graph, capture_error_mode="thread_local"
        ):  # NCCL's watchdog thread queries events during the capture
            ops()

    def replay(self) -> None:
        """Run the recorded operations."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[], DeviceGraph]] = {"cuda": CudaGraph}
"""Graph classes by the type of the device."""


class StepInputs:
    """Inputs of a captured step. Their device memory does not change from step to step.

    Attributes:
        batch: tokens and targets, by microbatch.
        tokens: number of targets that count, ().
        rate: learning rate, ().
    """

    def __init__(self, state: State) -> None:
        device = state.settings.device
        self.batch = {
            m: (torch.empty_like(tokens, device=device), torch.empty_like(targets, device=device))
            for m, (tokens, targets) in state.batch.items()
        }
        self.tokens = torch.zeros((), dtype=state.exact, device=device)
        self.rate = torch.zeros((), dtype=torch.float32, device=device)  # AdamW's fused kernel reads this dtype

    def fill(self, state: State) -> None:
        """Copy the inputs of a step from the host."""
        for m, buffers in self.batch.items():
            for buffer, tensor in zip(buffers, state.batch[m], strict=True):
                buffer.copy_(to_device(buffer.device, tensor))
        self.tokens.fill_(state.tokens)
        self.rate.fill_(state.rate)


class StepGraph:
    """Runner of an executor's steps. The first few run op by op. The next one is captured, and replayed from then on.

    Args:
        state: the rank's tensors. In a captured step, numbers such as the norm stay on the device.

    Attributes:
        replays: number of steps that were replayed.
    """

    def __init__(self, state: State) -> None:
        self.replays = 0
        self._state = state
        self._eager_steps = FIRST_STEPS
        self._graph: DeviceGraph | None = None
        self._inputs: StepInputs | None = None
        self._loss = state.loss
        self._squared_norm: float | Tensor = math.nan

    def run(self, ops: Callable[[], None]) -> None:
        """Run a step: op by op, by calling `ops`, or as a replay. The state already has the step's batch."""
        state = self._state
        if self._eager_steps:
            ops()
            self._eager_steps -= state.finite  # only an update allocates the optimizer state, and an overflow skips it
            return
        if self._inputs is None:
            self._inputs = StepInputs(state)
        self._inputs.fill(state)
        if self._graph is None:
            self._graph = self._capture(ops, self._inputs)
        self._graph.replay()
        self.replays += 1
        state.loss = self._loss.clone()
        if isinstance(self._squared_norm, Tensor):
            state.squared_norm = float(self._squared_norm)
            state.finite = math.isfinite(state.squared_norm)

    def _capture(self, ops: Callable[[], None], inputs: StepInputs) -> DeviceGraph:
        state = self._state
        graph = GRAPHS[state.settings.device.type]()
        old_inputs = state.batch, state.tokens, state.rate
        state.captured = True
        state.batch, state.tokens, state.rate = inputs.batch, inputs.tokens, inputs.rate
        try:
            graph.capture(ops)
        finally:
            state.captured = False
            state.batch, state.tokens, state.rate = old_inputs
        self._loss, self._squared_norm = state.loss, state.squared_norm
        return graph
