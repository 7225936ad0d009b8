"""Steps of one rank by several programs, one for each number of microbatches of a batch ramp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from shardlab.check import Checked
from shardlab.check.kept import Kept
from shardlab.execute import Executor
from shardlab.execute.compute_clock import ComputeClock
from shardlab.execute.shapes import Shapes
from shardlab.execute.state import State
from shardlab.models import Model
from shardlab.program import Holds, OpKind, UserError
from shardlab.train.profiling import ProfiledExecutor
from shardlab.train.run import TrainingRun
from shardlab.train.tracing import TracedExecutor

KEPT = {OpKind.LOAD_WEIGHT: 0, OpKind.LOAD_OPT_STATE: 0, OpKind.UPDATE: 1}
"""Ops that load or step what a rank keeps, and which of their results it is."""


class RampedExecutor:
    """Takes each step by the program that has its number of microbatches; weights and optimizer states are common.

    Args:
        executors: by number of microbatches.
        run: says which of them takes a step, and which steps are profiled or traced.
        step: the first one.

    Attributes:
        tracer: what records its steps, if they are traced.
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
        """The rank's tensors, as the last step has left them; its `step` is the one that comes next."""
        return self._last.state

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        step = self.state.step
        self._last = self._executors[self._ramp.microbatches(step)]
        self.state.step = step
        return self._last.step()

    def read(self) -> tuple[float, float]:
        """Seconds forward and backward since the last reading."""
        forward, backward = zip(*(clock.read() for clock in self._clocks), strict=True)
        return sum(forward), sum(backward)


def want_same_slices(proofs: Mapping[int, Checked], model: Model) -> None:
    """Refuse programs, by their numbers of microbatches, that would not find the tensors which the others keep.

    Raises:
        UserError: naming two of the numbers.
    """
    first, *others = proofs
    for count in others:
        if _kept(proofs[count], model) == _kept(proofs[first], model):
            continue
        if _kept(proofs[count], model, carried=False) == _kept(proofs[first], model, carried=False):
            raise UserError(
                f"with {count} microbatches other weights are carried from step to step, gathered already, than with "
                f"{first}, so they cannot follow one another in --batch-ramp; leave out the pass fuse-steps, or gather "
                "the same layers first, whatever their number"
            )
        raise UserError(
            f"with {count} microbatches the strategy keeps other slices of weights than with {first}, or keeps them "
            "elsewhere, so they cannot follow one another in --batch-ramp; let it cut and offload weights alike, "
            "whatever their number"
        )


def _kept(
    checked: Checked, model: Model, *, carried: bool = True
) -> tuple[list[int], list[set[tuple[OpKind, int, Holds, str]]]]:
    """How long the layers' buffers are, and what each rank keeps of them, and where.

    Args:
        carried: with the weights that a step leaves gathered.
    """
    kept: list[set[tuple[OpKind, int, Holds, str]]] = []
    for tape, specs in zip(checked.program.tapes, checked.specs, strict=True):
        gathers = () if carried else {op.outputs[0] for op in tape if op.kind is OpKind.ALL_GATHER}
        gathered = {key for number, key in Kept(tape, specs).final.items() if number in gathers}
        forms = [(op.kind, specs[op.outputs[KEPT[op.kind]]].form) for op in tape if op.kind in KEPT]
        alone = [(kind, form) for kind, form in forms if (form.layer, form.holds) not in gathered]
        kept.append({(kind, form.layer, form.holds, form.place) for kind, form in alone})
    return Shapes(checked, model, 1).flat, kept
