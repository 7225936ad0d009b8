"""What a rank keeps from step to step, as ranges of its layers' flat buffers, and which rank writes each of them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.check.kept import Kept
from shardlab.execute.optimizer import Slice
from shardlab.execute.places import tensor_at
from shardlab.execute.state import State
from shardlab.program import Holds, OpKind
from shardlab.rules.pieces import bits
from shardlab.rules.place import DISK, HOST

Key = tuple[int, Holds]
"""(layer, slices)."""

WEIGHTS, EXACT = "weights", "exact"


class KeptRange(NamedTuple):
    """A range of a layer's flat buffer, in memory that outlives the step.

    Attributes:
        kind: what it is: weights, their exact copies, or a moment by the optimizer's name for it.
        layer: whose.
        start: its first element.
        tensor: (elements,), a view of the memory itself, wherever that is.
        key: the slices that it is a range of.
        place: where it is.
    """

    kind: str
    layer: int
    start: int
    tensor: Tensor
    key: Key
    place: str = ""

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + len(self.tensor)


def held(state: State) -> Iterator[KeptRange]:
    """Everything that a rank keeps; whatever a run is to have again when it is resumed stands here."""
    for key, tensor in state.kept.items():
        yield from _runs(state, WEIGHTS, key, [tensor], state.analysis.kept.places[key])
    homes = {(op.layer, op.holds): op.place for op in state.tape if op.kind is OpKind.LOAD_OPT_STATE}
    for key in stepped(state.checked, state.rank):
        part, place = optimizer_of(state, key), homes.get(key, "")
        if state.analysis.kept.owner(*key) is None:
            yield from _runs(state, WEIGHTS, key, part.weights)
        yield from _runs(state, EXACT, key, [part.lying(exact) for exact in part.exact], place)
        yield from _moments(state, key, part, place)


class Snapshot:
    """A copy of the ranges that a rank writes; every range has one writer among the ranks.

    What lies on the disk is copied there, all else into the host's memory. The copy's room is kept from one checkpoint
    to the next, since taking it would be most of the time.
    """

    def __init__(self, state: State) -> None:
        checked, every = state.checked, range(len(state.checked.program.tapes))
        self._state = state
        self._weights = _mine(state, [weight_keys(checked, rank) for rank in every])
        self._stepped = _mine(state, [stepped(checked, rank) for rank in every])
        self._buffers: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Copy the ranges as they are now; each by its name in the rank's file: kind, layer, first element."""
        taken: dict[str, Tensor] = {}
        for each in held(self._state):
            ranges = self._weights if each.kind == WEIGHTS else self._stepped
            for start, stop in ranges.get(each.key, ()):
                first, last = max(start, each.start), min(stop, each.stop)
                if first < last:
                    name, part = (
                        f"{each.kind}.{each.layer}.{first}",
                        each.tensor[first - each.start : last - each.start],
                    )
                    if name not in self._buffers:
                        where = DISK if each.place == DISK else HOST
                        self._buffers[name] = tensor_at(where, part.shape, part.dtype, torch.device("cpu"))
                    taken[name] = self._buffers[name].copy_(part)
        return taken


def weight_keys(checked: Checked, rank: int) -> list[Key]:
    """The slices of weights that a rank keeps: those that it loads, and those that only its optimizer has."""
    tape = checked.program.tapes[rank]
    loaded = [(op.layer, op.holds) for op in tape if op.kind is OpKind.LOAD_WEIGHT and op.holds is not None]
    kept = Kept(tape, checked.specs[rank])
    return [*dict.fromkeys(loaded), *(key for key in stepped(checked, rank) if kept.owner(*key) is None)]


def stepped(checked: Checked, rank: int) -> list[Key]:
    """The slices that a rank's updates step, each by an optimizer of its own."""
    specs = checked.specs[rank]
    updates = (op for op in checked.program.tapes[rank] if op.kind is OpKind.UPDATE)
    return list(dict.fromkeys((op.layer, specs[op.inputs[2]].holds) for op in updates))


def optimizer_of(state: State, key: Key) -> Slice:
    """The optimizer of some slices that this rank steps."""
    if key in state.opt_states:
        return state.opt_states[key]
    specs = state.specs
    updates = (op for op in state.tape if op.kind is OpKind.UPDATE)
    return state.optimizer(next(specs[op.inputs[2]] for op in updates if (op.layer, specs[op.inputs[2]].holds) == key))


def updates_of(state: State) -> int:
    """How many updates the optimizers of this rank have made: a step that is left out is none."""
    counts = [
        int(cast(float, kept["step"]))
        for key in stepped(state.checked, state.rank)
        for optimizer in optimizer_of(state, key).optimizers
        for kept in optimizer.state.values()
        if "step" in kept
    ]
    return max(counts, default=0)


def _runs(state: State, kind: str, key: Key, tensors: Iterable[Tensor], place: str = "") -> Iterator[KeptRange]:
    """The ranges of some slices, whose elements lie in tensors one after the other."""
    ranges = iter(state.shapes.ranges(*key))
    for tensor in tensors:
        while len(tensor):
            start, stop = next(ranges)
            yield KeptRange(kind, key[0], start, tensor[: stop - start], key, place)
            tensor = tensor[stop - start :]


def _moments(state: State, key: Key, part: Slice, place: str) -> Iterator[KeptRange]:
    """What the optimizers of a slice keep of each leaf, as long as the leaf."""
    starts = {leaf: start for start, leaf in part.leaves}
    for optimizer in part.optimizers:
        for leaf, kept in optimizer.state.items():
            for name, moment in kept.items():
                if isinstance(moment, Tensor) and moment.shape == leaf.shape:
                    yield KeptRange(name, key[0], starts[leaf], part.lying(moment).view(-1), key, place)


def _mine(state: State, keys: list[list[Key]]) -> dict[Key, list[tuple[int, int]]]:
    """For the slices of each key of this rank, the ranges that it writes of all that the ranks have.

    Of a piece that several ranks have, one of them writes: in turn, by the numbers of layer and piece.
    """
    mine: dict[Key, list[tuple[int, int]]] = {}
    for layer in range(state.model.layers):
        holders = [(rank, holds) for rank, theirs in enumerate(keys) for of, holds in theirs if of == layer]
        pieces = math.lcm(*(holds.of for _, holds in holders))
        having: list[list[tuple[int, Holds]]] = [[] for _ in range(pieces)]
        for rank, holds in holders:
            for piece in bits(holds.refined(pieces).mask):
                having[piece].append((rank, holds))
        size = state.shapes.flat[layer] // pieces
        for piece, those in enumerate(having):
            if those:
                rank, holds = those[(layer + piece) % len(those)]
                if rank == state.rank:
                    mine.setdefault((layer, holds), []).append((piece * size, (piece + 1) * size))
    return mine
