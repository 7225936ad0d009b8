"""A rank's tape on torch.distributed: every op becomes one call, prepared once and replayed every step.

There is no code for any strategy here. What was checked is what runs: communication starts in tape order and is
waited for where the tape waits, and a value is dropped where the tape frees it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab.check import Checked
from shardlab.execute.bucket import START_TOGETHER, once
from shardlab.execute.capturing import want_step_graph
from shardlab.execute.communication import START
from shardlab.execute.communicator import Communicator, Groups, Wait
from shardlab.execute.compiling import want_compilable
from shardlab.execute.compute import COMPUTE, Instruction
from shardlab.execute.loss_scale import want_scalable
from shardlab.execute.progress import begin_tape
from shardlab.execute.settings import GradientObserver, Sampler, Settings
from shardlab.execute.state import State
from shardlab.execute.step_graph import StepGraph
from shardlab.models import Model
from shardlab.program import Op, OpKind
from shardlab.program.ops import COLLECTIVES


class Executor:
    """Runs one rank's tape step after step, on a default process group that already exists.

    Args:
        checked: the program; its rank numbers are those of the processes.
        rank: whose tape.
        model, batches: what is trained on what.
        settings: seed, dtype, device, optimizer.
        backend: of the process group; the program must pass its channel model.
        observer: sees every gradient before its update.
        groups: where process groups are kept for further programs (see `Communicator`).
        of: the state of another program, whose weights this one computes with, and whose optimizer states it steps: of
            the one that it is the forward half of, or that takes other microbatches.

    Attributes:
        state: the rank's tensors.
        batches: what is trained on.
        links: the rank's communication.
        instructions: one call for each op of the tape.
        graph: what captures and replays steps, if that is asked for.

    Raises:
        Refused: when the program cannot run on this backend.
        UserError: in float16, when the program computes no norm; when layers are to be compiled, or steps captured, and
            cannot be.
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
        of: State | None = None,
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
        self.state = State(checked, rank, model, batches.micro_batch_size, settings, observer, of)
        self.batches = batches
        self._microbatches = checked.program.microbatches
        self.links = Communicator(checked.program, rank, groups)
        self._waits: dict[int, Wait] = {}
        self.instructions = [self._prepare(at, op) for at, op in enumerate(self.state.tape)]
        self.graph = StepGraph(self.state) if settings.cuda_graph else None

    def step(self) -> Tensor:
        """Run one optimizer step.

        Returns:
            (2,) float64, on the rank's device: the loss summed over the tokens that this rank reports, and their
            number; each token of the step is reported by one rank.
        """
        state = self.state
        self._run(self.batches, self.instructions, self.graph)
        if state.settings.precision.scaled:
            state.loss_scale.after(state.finite)
        state.step += 1
        return state.loss

    def rehearse(self, batches: Sampler, instructions: Sequence[Instruction]) -> None:
        """Run the tape on other batches, without dropout, and leave everything as it was.

        Args:
            instructions: in place of the executor's own, one for each op.
        """
        state = self.state
        before = state.loss, state.finite, state.not_finite
        state.rehearses = True
        try:
            self._run(batches, instructions)
        finally:
            state.rehearses = False
            state.loss, state.finite, state.not_finite = before

    def _run(self, batches: Sampler, instructions: Sequence[Instruction], graph: StepGraph | None = None) -> None:
        state = self.state
        words, base = begin_tape(state.step, len(instructions), evaluates=not state.checked.trains)
        state.batch = {m: batches.microbatch(state.step, m) for m in state.microbatches}
        state.tokens = batches.counted(state.step, self._microbatches)
        state.rate = state.settings.optimizer.rate(state.step)

        def run() -> None:
            state.begin()
            for at, instruction in enumerate(instructions, base):
                words[0] = at
                instruction()
            if not state.rehearses:
                state.keep()

        run() if graph is None else graph.run(run)
        words[0] = base + len(instructions)

    def _prepare(self, at: int, op: Op) -> Instruction:
        waits, handle = self._waits, op.handle
        if op.kind is OpKind.WAIT:
            return lambda: waits.pop(handle)()
        if op.kind in COMPUTE:
            return COMPUTE[op.kind](self.state, at, op)
        if op.batch >= 0 and op.kind in COLLECTIVES:
            return self._prepare_together(at, op)
        start = START[op.kind](self.state, self.links, at, op)
        return lambda: waits.__setitem__(handle, start())

    def _prepare_together(self, at: int, op: Op) -> Instruction:
        """Collectives of one batch start with its last op, as one."""
        waits, together = self._waits, self.state.analysis.buckets.batches[op.batch]
        if at != together[-1]:
            return lambda: None
        ops = [self.state.tape[other] for other in together]
        start = START_TOGETHER[op.kind](self.state, self.links, ops)
        handles = [other.handle for other in ops]

        def run() -> None:
            waits.update(dict.fromkeys(handles, once(start())))

        return run
