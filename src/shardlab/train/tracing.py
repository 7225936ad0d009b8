"""Executors that wrap the executor of a training: traced, profiled, and with a batch ramp.

`TracedExecutor` (`train --trace`) times each op in a few early steps, and measures the memory of a few more.
`ProfiledExecutor` (`train --profile-steps`) runs torch.profiler over a few steps, and labels each op by name.
`RampedExecutor` is the executor that a training uses: it holds one executor for each number of microbatches, wraps it
if needed, and chooses one for each step.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from shardlab.check import Checked
from shardlab.check.in_place import KeptWeights
from shardlab.common.text import listed
from shardlab.draw.trace_events import save_trace_events
from shardlab.execute.executor import Executor
from shardlab.execute.recording import ComputeClock, OpTimer, clock_offset, step_with_memory
from shardlab.execute.state import State
from shardlab.execute.tape_analysis import Shapes
from shardlab.execute.update_ops import Instruction
from shardlab.language import Holds, Op, OpKind, UserError
from shardlab.language.rules.kinds import bits
from shardlab.language.tape import MemoryRecord, RankRecord
from shardlab.models import Model
from shardlab.simulate.timeline.measured import rank_file, write_rank, write_trace
from shardlab.train.history import writing
from shardlab.train.job import Job, Tracing, job_as_dict
from shardlab.train.run import TrainingRun


class TracedExecutor:
    """Executor that records some of one rank's steps.

    Each rank writes its own file after every recorded step, even if the step fails. `finish` gathers all ranks' records
    on rank 0, which writes trace.json. Then each rank removes its own file.

    Args:
        executor: executor of the rank's steps.
        job: job, which the trace records.
        folder: folder of the run.
        tracing: steps that are recorded.
    """

    def __init__(self, executor: Executor, job: Job, folder: Path, tracing: Tracing) -> None:
        self._executor = executor
        self._job = job_as_dict(job)
        self._folder = folder
        self._tracing = tracing
        self._recorder = OpTimer(executor)
        self._record = RankRecord(executor.state.rank, steps=self._recorder.steps)
        self._merged = False

    @property
    def state(self) -> State:
        """The rank's tensors."""
        return self._executor.state

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        tracing, step = self._tracing, self._executor.state.step
        if step == tracing.steps:
            self.finish()
        if not tracing.warm_up <= step < tracing.steps:
            return self._executor.step()
        if step == tracing.warm_up:
            device, ranks = self._executor.state.settings.device, dist.get_world_size()
            self._record.offset, self._record.bound = clock_offset(self._record.rank, ranks, device)
            self._folder.mkdir(parents=True, exist_ok=True)  # hosts without a shared disk lack the folder
        try:
            if step < tracing.warm_up + tracing.timed_steps:
                dist.barrier()
                return self._recorder.step()
            self._record.memory = MemoryRecord()
            return step_with_memory(self._executor, self._record.memory)
        finally:
            self._write()

    def finish(self) -> None:
        """Merge the records of all ranks into one file, which trace viewers can open.

        All ranks call this together. A second call does nothing.
        """
        if self._merged or not self._record.steps:
            return
        self._merged = True
        rank = self._record.rank
        records: list[RankRecord] | None = [self._record] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(self._record, records)
        if records is not None:
            by_rank = {record.rank: record for record in records}
            with writing(self._folder / "trace.json") as path:
                measurement = write_trace(self._folder, self._job, self._executor.state.checked, by_rank)
                save_trace_events({"measured": (measurement.timeline, measurement.counters)}, path)
        dist.barrier()  # no rank may remove its own file before the merged one exists
        rank_file(self._folder, rank).unlink(missing_ok=True)

    def _write(self) -> None:
        with writing(rank_file(self._folder, self._record.rank)):
            write_rank(self._folder, self._job, self._executor.state.checked.program.fingerprint(), self._record)


class ProfiledExecutor:
    """Executor that profiles some steps with torch.profiler. Each rank writes `profile-RANK.json` for Perfetto.

    In the other steps, each op costs one comparison more.

    Args:
        executor: executor of the rank's steps, whose instructions are wrapped.
        steps: first step that is profiled, and the first that no longer is.
        folder: folder of the run.
        memory: whether to record every allocation as well.

    Attributes:
        inner: executor that runs the steps; a `TracedExecutor` may take the place of `executor`.
    """

    def __init__(self, executor: Executor, steps: tuple[int, int], folder: Path, *, memory: bool = False) -> None:
        self._state = executor.state
        self._steps = range(*steps)
        self._folder = folder
        self._memory = memory
        self._on_gpu = executor.state.settings.device.type == "cuda"
        self._profile: profile | None = None
        plain = zip(executor.state.tape, executor.instructions, strict=True)
        executor.instructions[:] = [self._annotate(self._name(op), instruction) for op, instruction in plain]
        self.inner: Executor | TracedExecutor = executor

    @property
    def state(self) -> State:
        """The rank's tensors."""
        return self._state

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        step = self._state.step
        if step not in self._steps:
            return self.inner.step()
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
            self._profile = profile(activities=activities, profile_memory=self._memory)
            self._profile.start()
            if self._memory and self._on_gpu:
                torch.cuda.memory._record_memory_history()  # pyright: ignore[reportPrivateUsage]  # its documented name
        with record_function(f"step {step}"):
            loss = self.inner.step()
        if step + 1 == self._steps.stop:
            self._profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)  # hosts without a shared disk lack the folder
            with writing(self._folder / f"profile-{self._state.rank}.json") as path:
                self._profile.export_chrome_trace(str(path))
            self._profile = None
            if self._memory and self._on_gpu:
                with writing(self._folder / f"memory-{self._state.rank}.pickle") as path:
                    torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]
                torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]
        return loss

    def _annotate(self, name: str, instruction: Instruction) -> Instruction:
        def run() -> None:
            if self._profile is None:
                return instruction()
            with record_function(name):
                return instruction()

        return run

    def _name(self, op: Op) -> str:
        """Return the name of an op as in trace.json, such as `forward 0 (layer 3)`."""
        output = self._state.specs[op.outputs[0]] if op.outputs else None
        microbatches = f" {listed(bits(output.microbatches))}" if output is not None and output.microbatches else ""
        return op.kind.row.hyphenated + microbatches + (f" (layer {op.layer})" if op.layer >= 0 else "")


KEPT_RESULTS = {OpKind.LOAD_WEIGHT: 0, OpKind.LOAD_OPT_STATE: 0, OpKind.UPDATE: 1}
"""Ops that load or update a value that a rank keeps from step to step, with the index of the value in their outputs."""


class RampedExecutor:
    """Executor that runs each step with the program for the step's number of microbatches.

    The programs share weights and optimizer states.

    Args:
        executors: executors by number of microbatches.
        run: settings of the run, with its batch ramp and the steps that are profiled or traced.
        step: number of the first step.

    Attributes:
        tracer: executor that records steps; None if the run is not traced.
    """

    def __init__(self, executors: Mapping[int, Executor], run: TrainingRun, step: int = 0) -> None:
        self._ramp, logging = run.config.train.ramp, run.config.logging
        self._executors: dict[int, Executor | TracedExecutor | ProfiledExecutor] = {**executors}
        self.tracer: TracedExecutor | None = None
        profiler = None
        if logging.profile_steps is not None:
            count = self._ramp.microbatches(logging.profile_steps[0])
            self._executors[count] = profiler = ProfiledExecutor(
                executors[count], logging.profile_steps, run.out, memory=logging.memory_snapshot
            )
        self._clocks = [ComputeClock(executor) for executor in executors.values()]
        first = self._ramp.microbatches(0)
        if logging.trace:
            job = replace(run.job, microbatches=first)
            self.tracer = TracedExecutor(executors[first], job, run.out, run.tracing)
            if profiler is not None and profiler is self._executors[first]:
                profiler.inner = self.tracer
            else:
                self._executors[first] = self.tracer
        self._last = self._executors[self._ramp.microbatches(step)]
        self.state.step = step

    @property
    def state(self) -> State:
        """The rank's tensors after the last step. `state.step` is the number of the next step."""
        return self._last.state

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        step = self.state.step
        self._last = self._executors[self._ramp.microbatches(step)]
        self.state.step = step
        return self._last.step()

    def read(self) -> tuple[float, float]:
        """Return the seconds of forward and backward passes since the last call."""
        forward, backward = zip(*(clock.read() for clock in self._clocks), strict=True)
        return sum(forward), sum(backward)


def require_same_slices(proofs: Mapping[int, Checked], model: Model) -> None:
    """Check that the programs of a batch ramp keep the same slices from step to step.

    Args:
        proofs: programs by number of microbatches.
        model: model of the programs.

    Raises:
        UserError: if two of them keep different slices.
    """
    first, *others = proofs
    for count in others:
        if _kept_slices(proofs[count], model) == _kept_slices(proofs[first], model):
            continue
        if _kept_slices(proofs[count], model, carried=False) == _kept_slices(proofs[first], model, carried=False):
            raise UserError(
                f"with {count} microbatches, other gathered weights are carried over to the next step than with "
                f"{first}, so they cannot follow one another in --batch-ramp; leave out the pass fuse-steps, or gather "
                "the same layers first with every number"
            )
        raise UserError(
            f"with {count} microbatches the strategy keeps other slices of weights than with {first}, or keeps them "
            "elsewhere, so they cannot follow one another in --batch-ramp; let it cut and offload weights in "
            "the same way with every number"
        )


def _kept_slices(
    checked: Checked, model: Model, *, carried: bool = True
) -> tuple[list[int], list[set[tuple[OpKind, int, Holds, str]]]]:
    """Return the lengths of the layers' buffers, and the slices of them that each rank keeps from step to step.

    Args:
        checked: the program.
        model: model of the program.
        carried: include the gathered weights that a step carries over to the next.
    """
    slices: list[set[tuple[OpKind, int, Holds, str]]] = []
    for tape, specs in zip(checked.program.tapes, checked.specs, strict=True):
        gathers = () if carried else {op.outputs[0] for op in tape if op.kind is OpKind.ALL_GATHER}
        gathered_keys = {key for number, key in KeptWeights(tape, specs).final.items() if number in gathers}
        forms = [(op.kind, specs[op.outputs[KEPT_RESULTS[op.kind]]].form) for op in tape if op.kind in KEPT_RESULTS]
        alone = [(kind, form) for kind, form in forms if (form.layer, form.holds) not in gathered_keys]
        slices.append({(kind, form.layer, form.holds, form.place) for kind, form in alone})
    return Shapes(checked, model, 1).flat, slices
