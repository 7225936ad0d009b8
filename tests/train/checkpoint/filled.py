"""Ranks' states, all in one process, filled with values that tell their place in the whole model."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.collect import slices_of
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.execute.state import State
from shardlab.language import OpKind
from shardlab.language.precision import find_precision
from shardlab.models import Parameter
from shardlab.models.tensors.dropout import make_generator
from shardlab.models.tensors.weights import read_range
from shardlab.train.checkpoint.contents import (
    EXACT,
    WEIGHTS,
    KeptRange,
    Snapshot,
    chunks_of,
    describe_layers,
    kept_ranges,
    updates_of,
)
from shardlab.train.checkpoint.read import CONFIG, STATE, Checkpoint
from shardlab.train.checkpoint.write import Disk, commit, folder_of, write_shard
from shardlab.train.job import Job


@cache
def whole(kind: str, block: int, parameter: Parameter) -> Tensor:
    """All matrices of a parameter, in numbers that every precision of 16 bits has."""
    *experts, rows, columns = (*parameter.shape, 1) if len(parameter.shape) == 1 else parameter.shape
    drawn = torch.empty(experts[0] if experts else 1, rows, columns)
    return drawn.uniform_(generator=make_generator(f"{kind} {parameter.name}", 0, block)).bfloat16().float()


class Known:
    """Values that fill a model's parameters. Exact copies and weights are equal, since one is rounded to the other."""

    def __init__(self, kind: str) -> None:
        self._kind = WEIGHTS if kind == EXACT else kind

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        return torch.float32

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        return whole(self._kind, block, parameter)[matrix][rows][:, columns]


def states_of(job: Job, optimizer: OptimizerConfig | None = None) -> list[State]:
    """The states of all ranks, with nothing in them that could be trained on."""
    checked, model = job.checked(), job.cut

    def nothing(layer: int, length: int, ranges: Any, dtype: torch.dtype) -> Tensor:
        return torch.full((sum(stop - start for start, stop in ranges),), torch.nan, dtype=dtype)

    settings = Settings(job.seed, job.numbers, optimizer=optimizer or OptimizerConfig(), initial=nothing)
    states = [
        State(checked, rank, model, job.micro_batch_size, settings, None) for rank in range(len(checked.program.tapes))
    ]
    for state in states:  # as the executor's instructions do
        for key in slices_of(checked, state.rank, OpKind.UPDATE):
            state.optimizer(*key)
    return states


def fill(states: list[State]) -> list[State]:
    """Fill all that ranks keep, as after 3 updates."""
    for state in states:
        for key in slices_of(state.checked, state.rank, OpKind.UPDATE):
            state.optimizer(*key).make_moments(3)
        for piece in kept_ranges(state):
            piece.tensor.detach().copy_(known(state, piece))
        state.step = 3
    return states


def known(state: State, piece: KeptRange) -> Tensor:
    """Return the values that fill a range."""
    length, dtype = state.shapes.flat[piece.layer], piece.tensor.dtype
    return read_range(Known(piece.kind), state.model, piece.layer, length, piece.start, piece.stop, dtype)


def saved(states: list[State], run: Path, disk: Disk | None = None) -> Checkpoint:
    """The checkpoint that the ranks write together."""
    disk, folder = disk or Disk(), folder_of(run / "checkpoints", states[0].step)
    for state in states:
        taken = Snapshot(state).take()
        note = {"tensors": {name: len(tensor) for name, tensor in taken.items()}, "updates": updates_of(state)}
        write_shard(disk, folder, state.rank, chunks_of(taken), note)
    first = states[0]
    words = {
        "step": first.step,
        "loss_scale": [first.loss_scale.scale, first.loss_scale.calm],
        "layers": describe_layers(first.model, first.shapes.flat),
    }
    commit(disk, folder, len(states), {STATE: json.dumps(words), CONFIG: ""}, keep=2)
    return Checkpoint.open(folder).verify()


def numbers(name: str) -> Any:
    """A precision."""
    return find_precision(name)
