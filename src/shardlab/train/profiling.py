"""`train --profile-steps 10:13`: torch's own profile of a few steps, in which the tape's ops have their names."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from shardlab.execute import Executor
from shardlab.execute.compute import Instruction
from shardlab.execute.state import State
from shardlab.program import Op
from shardlab.rules.pieces import bits, listed
from shardlab.train.tracing import TracedExecutor
from shardlab.train.written import written


class ProfiledExecutor:
    """Takes an executor's steps, of which some are profiled; each rank writes `profile-RANK.json`, for Perfetto.

    Outside these steps an op costs a test more than before.

    Args:
        executor: of which all ops are named.
        steps: the first step that is profiled, and the one that no longer is.
        folder: of the run.
        memory: note every allocation as well.
    """

    def __init__(self, executor: Executor, steps: tuple[int, int], folder: Path, *, memory: bool = False) -> None:
        self._state = executor.state
        self._steps = range(*steps)
        self._folder = folder
        self._memory = memory
        self._on_gpu = executor.state.settings.device.type == "cuda"
        self._profile: profile | None = None
        plain = zip(executor.state.tape, executor.instructions, strict=True)
        executor.instructions[:] = [self._named(self._name(op), instruction) for op, instruction in plain]
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
            self._folder.mkdir(parents=True, exist_ok=True)  # on a host whose disk is its own there is none yet
            with written(self._folder / f"profile-{self._state.rank}.json") as path:
                self._profile.export_chrome_trace(str(path))
            self._profile = None
            if self._memory and self._on_gpu:
                with written(self._folder / f"memory-{self._state.rank}.pickle") as path:
                    torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]
                torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]
        return loss

    def _named(self, name: str, instruction: Instruction) -> Instruction:
        def run() -> None:
            if self._profile is None:
                return instruction()
            with record_function(name):
                return instruction()

        return run

    def _name(self, op: Op) -> str:
        """As in trace.json: `forward 0 (layer 3)`."""
        made = self._state.specs[op.outputs[0]] if op.outputs else None
        microbatches = f" {listed(bits(made.microbatches))}" if made is not None and made.microbatches else ""
        return op.kind.value.replace("_", "-") + microbatches + (f" (layer {op.layer})" if op.layer >= 0 else "")
