"""Every rank's slices of a layer, put together on one of them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import rooms
from shardlab.execute.update_ops import Instruction
from shardlab.language import Holds, Kind, OpKind, Program
from shardlab.language.rules.kinds import bits
from shardlab.language.tape import MemoryRecord


def collect(state: State, slices: Mapping[tuple[int, Holds], Tensor], layer: int, to: int) -> Tensor | None:
    """The complete flat buffer of a layer, on the CPU of rank `to`; None on the others. Every rank calls this.

    Args:
        slices: for each (layer, slices held) that this rank loads, the tensor of these slices.
    """
    mine, device = state.rank == to, state.settings.device
    dtype = torch_dtype(state.settings.precision.parameters)
    flat = torch.empty(state.shapes.flat[layer], dtype=dtype) if mine else None
    for source, holds in _owners(state.checked.program, layer):
        at = 0
        for start, stop in state.shapes.ranges(layer, holds):
            if source == state.rank:
                part = slices[layer, holds][at : at + stop - start]
                if flat is None:
                    dist.send(part.to(device), to)  # it may be kept on the host, where NCCL sends nothing
                else:
                    flat[start:stop] = part
            elif flat is not None:
                place = flat[start:stop]
                given = place if device.type == "cpu" else torch.empty_like(place, device=device)
                dist.recv(given, source)
                if given is not place:
                    place.copy_(given)
            at += stop - start
    return flat


def _owners(program: Program, layer: int) -> list[tuple[int, Holds]]:
    """Ranks and what they hold of a layer, the lowest ranks that together have it whole."""
    loaded = [
        (rank, op.holds)
        for rank, tape in enumerate(program.tapes)
        for op in tape
        if op.kind is OpKind.LOAD_WEIGHT and op.layer == layer and op.holds is not None
    ]
    of = math.lcm(*(holds.of for _, holds in loaded))
    have: set[int] = set()
    owners: list[tuple[int, Holds]] = []
    for rank, holds in loaded:
        pieces = set(bits(holds.refined(of).mask))
        if not pieces <= have:
            have |= pieces
            owners.append((rank, holds))
    return owners


# The memory that a real step takes, by torch's own accounts: tracked storages on a CPU, the allocator on a GPU.
#
# Tracking slows a step down, so steps are either timed (see `recording`) or measured here.


NAMED = ("parameters", "optimizer", "arena", "gathered", "gradients")
"""Categories that are told apart by the tensors that they hold; the rest is activations, with what layers keep."""


class Account(Protocol):
    """Who knows how many bytes are live."""

    def tracking(self) -> AbstractContextManager[object]:
        """Within this, bytes are counted."""
        ...

    def live(self) -> int:
        """Bytes now."""
        ...

    def peak(self) -> int:
        """The most bytes since tracking began."""
        ...


class TrackedStorages:
    """Every storage that torch makes while this tracks, and those that the rank had before, but for small sums' rooms:
    those stay, and the tracker sees them in one step and not in another.
    """

    def __init__(self, state: State) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker  # a second, with torch's compiler

        self._tracker = MemTracker()
        self._device = state.settings.device
        for _, tensors in _kept(state):
            self._tracker.track_external(*tensors)
        self._tracker.track_external(*(beside := rooms()))
        self._beside = sum(tensor.nbytes for tensor in beside)

    def tracking(self) -> AbstractContextManager[object]:
        return self._tracker

    def live(self) -> int:
        return self._total("current")

    def peak(self) -> int:
        return self._total("peak")

    def _total(self, moment: str) -> int:
        total = self._tracker.get_tracker_snapshot(moment).get(self._device, {}).get("Total", 0)
        return total - self._beside


class Allocator:
    """The allocator of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tracking(self) -> AbstractContextManager[object]:
        torch.cuda.reset_peak_memory_stats(self._device)
        return nullcontext()

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def step_with_memory(executor: Executor, record: MemoryRecord) -> Tensor:
    """Run a step as `Executor.step` does, filling `record` as it goes."""
    state = executor.state
    account: Account = Allocator(state.settings.device) if _on_gpu(state) else TrackedStorages(state)

    def around(at: int, instruction: Instruction) -> Instruction:
        def run() -> None:
            record.live[at] = _by_category(state, account.live())
            instruction()

        return run

    plain = executor.instructions
    executor.instructions = [around(at, instruction) for at, instruction in enumerate(executor.instructions)]
    try:
        with account.tracking():
            return executor.step()
    finally:
        executor.instructions = plain
        record.peak = account.peak()


def _on_gpu(state: State) -> bool:
    return state.settings.device.type == "cuda"


def _by_category(state: State, total: int) -> dict[str, int]:
    counted: set[int] = set()
    sizes: dict[str, int] = dict.fromkeys(NAMED, 0)
    for category, tensors in (*_kept(state), *_passing(state)):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == state.settings.device and storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                sizes[category] += storage.nbytes()
    return {**sizes, "activations": total - sum(sizes.values())}


def _kept(state: State) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """What outlives the step."""
    yield "parameters", state.kept.values()
    for part in state.opt_states.values():
        yield "parameters", part.weights
        yield "optimizer", part.exact
        yield "optimizer", part.moments
    yield "gathered", state.buffers
    yield "arena", [state.arena.whole]


def _passing(state: State) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Values of the tape that are no activations."""
    for number, value in enumerate(state.values):
        if isinstance(value, Tensor) and number in state.specs:
            kind = state.specs[number].kind
            if kind is Kind.WEIGHT or kind is Kind.GRAD_WEIGHT:
                yield ("gathered" if kind is Kind.WEIGHT else "gradients"), [value]
