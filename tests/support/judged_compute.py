"""Effects of compute ops on a rank's memory, for the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardlab.language import Op, OpKind
from tests.support.interpreter_collectives import combined, number_of, scattered_columns, scattered_rows
from tests.support.interpreter_rank import JudgedRank, elements_of
from tests.support.one_device import direction as direction_of
from tests.support.one_device import initial, matrix_directions, squares, update_slice
from tests.support.pieces import PRIME, Array, BrokenTape, Piece, owned, summed
from tests.support.toy_network import Network

PLACE = {OpKind.LOAD_WEIGHT: 0, OpKind.LOAD_OPT_STATE: 1}
"""Index of the weight and of its optimizer state among a layer's initial arrays."""


def load(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    positions = elements_of(op)
    if op.layer not in network.weights or not positions:
        raise BrokenTape(f"there are no slices {op.holds} of layer {op.layer}")
    if (op.kind, op.layer, positions) in rank.load_places:
        raise BrokenTape("the same slice is loaded twice")
    rank.load_places[op.kind, op.layer, positions] = op.place
    is_weight = op.kind is OpKind.LOAD_WEIGHT
    data = rank.weights.buffers[op.layer, positions] if is_weight else initial(op.layer)[1][list(positions)]
    rank.write(op.outputs[0], Piece(positions, data))


def load_batch(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    if op.holds is None or op.holds.of < 1 or op.holds.of % microbatches or op.holds.mask >> op.holds.of:
        raise BrokenTape("there are no such microbatches")
    pieces = tuple(i for i in range(op.holds.of) if op.holds.mask >> i & 1)
    rank.write(op.outputs[0], network.batch(pieces, op.holds.of // microbatches))


def forward(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    read = [rank.read(number) for number in op.inputs]
    outputs, ctx = network.layer(op.layer).forward(read)
    outputs = owned(outputs, read[0])
    if op.holds is not None and op.kind is OpKind.FORWARD:
        outputs[0] = scattered_columns(outputs[0], op.holds.of)[_place(op)]
    if op.kind is OpKind.RECOMPUTE:
        outputs = []
    elif not len(outputs) <= len(op.outputs) <= len(outputs) + 1:
        raise BrokenTape("a layer makes another number of values")
    for number, piece in zip(op.outputs, outputs, strict=False):
        rank.write(number, piece)
    for number in op.outputs[len(outputs) :]:
        rank.keep(rank.saved_data, number, op.inputs[0], ctx, op.layer, read[1].positions)


def _place(op: Op) -> int:
    """Index of the part, among equal parts, that an op names."""
    mask, parts = op.holds or (0, 0)
    if mask not in {1 << place for place in range(parts)}:
        raise BrokenTape("there is no such part")
    return mask.bit_length() - 1


def attend(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    queries, keys_values = (rank.read(number) for number in op.inputs)
    rank.write(op.outputs[0], *owned([network.attend(op.layer, queries, keys_values)], queries))


def attend_backward(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    queries, keys_values, attended, gradient = (rank.read(number) for number in op.inputs)
    outputs = network.attend_backward(op.layer, queries, keys_values, attended, gradient)
    for number, piece, read in zip(op.outputs, outputs, (queries, keys_values), strict=True):
        rank.write(number, *owned([piece], read))


def loss_stats(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    read = rank.read(op.inputs[0])
    rank.write(op.outputs[0], *owned([network.stats(read)], read))


def loss(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    read = [rank.read(number) for number in op.inputs]
    rank.write(op.outputs[0], *owned([network.loss(read)], read[0]))


def backward(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    """Run a whole backward pass, or the half for the input's gradient."""
    activation, gradient, weight, saved_number, *others = op.inputs
    layer, read = network.layer(op.layer), [rank.read(n) for n in (activation, gradient, weight, *others)]
    outputs, ctx = layer.backward_input(read, rank.take(rank.saved_data, saved_number, activation, op.layer))
    outputs = owned(outputs, read[0])
    if op.kind is OpKind.BACKWARD:
        numbers = op.outputs
        outputs = [layer.backward_weight(read[0], read[1], ctx), *outputs]
    else:
        *numbers, last = op.outputs
        rank.keep(rank.halves, last, activation, ctx, op.layer, read[2].positions)
    for number, piece in zip(numbers, outputs, strict=True):
        rank.write(number, piece)


def backward_weight(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    activation, gradient, half = op.inputs
    read = [rank.read(number) for number in (activation, gradient)]
    ctx = rank.take(rank.halves, half, activation, op.layer)
    rank.write(op.outputs[0], network.layer(op.layer).backward_weight(read[0], read[1], ctx))


def norm(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    gradient = rank.read(op.inputs[0])
    if gradient.data.ndim != 1:
        raise BrokenTape("rows are given where a gradient is wanted")
    part = np.array([squares(op.layer, gradient.positions, gradient.data)], np.int64)
    rank.write(op.outputs[0], Piece((), part))


def add(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    rank.write(op.outputs[0], summed([rank.read(number) for number in op.inputs]))


def scale(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    piece = rank.read(op.inputs[0])
    rank.write(op.outputs[0], replace(piece, data=piece.data * number_of(op, microbatches) % PRIME))


def cast(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    """Cast a value: numbers stay exact here, but the copy of a weight is no view of the rank's weights."""
    piece = rank.read(op.inputs[0])
    rank.write(op.outputs[0], replace(piece, data=piece.data.copy()))


def zero_gradient(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    positions = elements_of(op)
    if op.layer not in network.weights or not positions:
        raise BrokenTape(f"there are no slices {op.holds} of layer {op.layer}")
    rank.write(op.outputs[0], Piece(positions, np.zeros(len(positions), np.int64)))


def slice_(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    """Slice parameters as a view, which later writes change as well, and rows as a copy, since no op writes rows."""
    piece, place = rank.read(op.inputs[0]), _place(op)
    parts = op.holds.of if op.holds else 1
    if piece.data.ndim == 2:
        rank.write(op.outputs[0], scattered_rows(piece, parts, network.sequence)[place])
        return
    size, rest = divmod(len(piece.positions), parts)
    if rest or not piece.positions:
        raise BrokenTape("the value has no such slices")
    cut = slice(place * size, (place + 1) * size)
    rank.write(op.outputs[0], Piece(piece.positions[cut], piece.data[cut]))


def concatenate(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    pieces = [rank.read(number) for number in op.inputs]
    if any(not piece.positions for piece in pieces):
        raise BrokenTape("a number is no piece")
    rank.write(op.outputs[0], combined(OpKind.ALL_GATHER, pieces, network.sequence)[0])


def _elements(value: Piece, positions: tuple[int, ...]) -> Array:
    """Some elements of a value."""
    places = {e: i for i, e in enumerate(value.positions)}
    if value.data.ndim != 1 or any(e not in places for e in positions):
        raise BrokenTape("the gradient, the weight or the direction lacks elements")
    return value.data[[places[e] for e in positions]]


def _squared(norms: Sequence[Piece]) -> int:
    if len(norms) > 1 or any(norm.data.shape != (1,) or norm.positions for norm in norms):
        raise BrokenTape("the norm is not a number")
    return sum(int(norm.data[0]) for norm in norms)


def _matrices(op: Op, network: Network) -> int:
    """Number of matrices that the optimizer updates as a whole."""
    if op.layer not in network.weights:
        raise BrokenTape("there is no such layer")
    return network.matrices[op.layer]


def direction(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    gradient, state, *norms = (rank.read(number) for number in op.inputs)
    if not _matrices(op, network):
        raise BrokenTape("elements have no direction")
    values = direction_of(op.layer, state.data, _elements(gradient, state.positions), _squared(norms))
    rank.write(op.outputs[0], Piece(state.positions, values))


def update(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    gradient, weight, state, *others = (rank.read(number) for number in op.inputs)
    directions = others[-1:] if others and others[-1].positions else []
    norms = others[: len(others) - len(directions)]
    parts, squared = [_elements(value, state.positions) for value in (gradient, weight)], _squared(norms)
    rank.clips = rank.clips or bool(norms)
    matrices = _matrices(op, network)
    if directions and not matrices:
        raise BrokenTape("elements have no direction")
    moves: Array | int = 0
    if matrices:
        own_direction = Piece(state.positions, direction_of(op.layer, state.data, parts[0], squared))
        whole = directions[0] if directions else own_direction
        if whole.data.ndim != 1:
            raise BrokenTape("the direction has rows")
        moves = _elements(
            Piece(whole.positions, matrix_directions(matrices, whole.positions, whole.data)), state.positions
        )
    new, new_state = update_slice(op.layer, parts[1], state.data, parts[0], squared, moves)
    rank.delete(op.inputs[1])
    rank.delete(op.inputs[2])
    new = rank.weights.step(op.layer, state, weight, new, rank.being_read())
    for number, data in zip(op.outputs, (new, new_state), strict=True):
        rank.write(number, Piece(state.positions, data))


def free(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
    rank.delete(op.inputs[0])


COMPUTE: dict[OpKind, Callable[[JudgedRank, Op, Network, int], None]] = {
    OpKind.LOAD_WEIGHT: load,
    OpKind.LOAD_OPT_STATE: load,
    OpKind.LOAD_BATCH: load_batch,
    OpKind.FORWARD: forward,
    OpKind.RECOMPUTE: forward,
    OpKind.ATTEND: attend,
    OpKind.ATTEND_BACKWARD: attend_backward,
    OpKind.LOSS_STATS: loss_stats,
    OpKind.LOSS: loss,
    OpKind.BACKWARD: backward,
    OpKind.BACKWARD_INPUT: backward,
    OpKind.BACKWARD_WEIGHT: backward_weight,
    OpKind.ADD: add,
    OpKind.NORM: norm,
    OpKind.SCALE: scale,
    OpKind.CAST: cast,
    OpKind.ZERO_GRADIENT: zero_gradient,
    OpKind.SLICE: slice_,
    OpKind.CONCATENATE: concatenate,
    OpKind.DIRECTION: direction,
    OpKind.UPDATE: update,
    OpKind.FREE: free,
}
"""Functions by kind of op; their arguments are the rank, the op, the network and the number of microbatches."""


# Which numbers values are in: torch computes with several of one dtype, and layers compute in their own.


_KEEPS = frozenset({OpKind.SCALE, OpKind.SLICE, OpKind.ADD, OpKind.CONCATENATE})
_OF_GRADIENTS = frozenset({OpKind.NORM, OpKind.DIRECTION, OpKind.UPDATE})
_ANY = {OpKind.CAST: 1, OpKind.FREE: 1} | dict.fromkeys(_OF_GRADIENTS, 1) | dict.fromkeys(_KEEPS, 99)
"""Number of an op's first inputs that may have any dtype."""


def output_dtype(rank: JudgedRank, op: Op) -> str | None:
    """Dtype of an op's result, from the values in memory (None: that of the kind)."""
    read = [rank.memory[number].dtype for number in op.inputs if number in rank.memory]
    if any(read[_ANY.get(op.kind, 0) :]):
        raise BrokenTape("a value is in other numbers than are computed in")
    if op.kind is OpKind.CAST:
        return op.dtype
    if op.kind not in _KEEPS:
        return None
    if len(set(read)) > 1:
        raise BrokenTape("values in other numbers are put together")
    return read[0] if read else ""


# Where values lie: a device computes with what it has, its host adds and updates what lies there.


_ON_HOST = {OpKind.ADD: 2, OpKind.NORM: 1, OpKind.UPDATE: 3, OpKind.CONCATENATE: 99}
"""Number of an op's first inputs that it reads from host memory, if all of them lie there."""

_PLACES = ("host", "disk")


def output_place(rank: JudgedRank, op: Op) -> str:
    """Memory in which the result of an op lies.

    Raises:
        BrokenTape: if an input lies in another memory than the op needs, or a copy between these memories is not
            possible.
    """
    read = [rank.memory[number].place for number in op.inputs if number in rank.memory]
    if op.kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE, OpKind.OFFLOAD):
        if op.place not in ("", *_PLACES) or (op.kind is OpKind.OFFLOAD and (any(read) or not op.place)):
            raise BrokenTape("there is no such place, or the value is there")
        return op.place
    if op.kind is OpKind.RELOAD:
        if not all(read):
            raise BrokenTape("a value is reloaded that is on the device")
        return ""
    if op.kind is OpKind.SLICE:
        return read[0] if read else ""
    host_count = _ON_HOST.get(op.kind, 0)
    if len(set(read[:host_count])) > 1 or "disk" in read[:host_count]:
        raise BrokenTape("values of several places are put together, or what is on the disk")
    if op.kind is not OpKind.FREE and any(read[host_count:]):
        raise BrokenTape("a value lies elsewhere than it is computed with")
    return "" if op.kind is OpKind.NORM or not read[:host_count] else read[0]
