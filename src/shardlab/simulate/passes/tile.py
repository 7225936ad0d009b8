"""The pass `tile`: a layer that is too large for a device is computed in tiles, one after the other.

This is memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.3), written as tensor parallelism on
one rank. A tile is a slice of a layer's parameters. It computes a term (a partial sum) of the layer's result. Each tile
is gathered for its pass and freed after it, and its gradient is reduced before that of the next tile is computed. So a
rank has the whole parameters of only one tile at a time.

`TiledTape` walks over a rank's tape and repeats each op on a cut layer for each tile. Gathers of weights, and
recomputations, are deferred until a tile is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from shardlab.check import Checked
from shardlab.language import Holds, Kind, Op, OpKind, Program, Spec
from shardlab.language.rules.kinds import bits, mask_of
from shardlab.language.rules.layer_graph import Layer
from shardlab.simulate.passes.reorder import CannotApply, Tapes

FREE, WAIT, ADD, UPDATE, LOSS_STATS = OpKind.FREE, OpKind.WAIT, OpKind.ADD, OpKind.UPDATE, OpKind.LOSS_STATS
FORWARD, RECOMPUTE, BACKWARD, BACKWARD_INPUT = (
    OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.BACKWARD_INPUT
)  # fmt: skip
ALL_GATHER, REDUCE_SCATTER = OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER
LOADS = frozenset({OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE, OpKind.ZERO_GRADIENT})
COMPUTE_WITH_WEIGHTS = frozenset({FORWARD, RECOMPUTE, BACKWARD, BACKWARD_INPUT})
SLICED = frozenset({Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT, Kind.DIRECTION, Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""Kinds of values that are separate for each tile of a layer."""


def tile(checked: Checked, tiles: int) -> Tapes:
    """Compute each layer that can be cut in `tiles` tiles, one after the other.

    Raises:
        CannotApply: if layers cannot be cut into these tiles, the program was not traced for them, or no layer is
            gathered.
    """
    program = checked.program
    cut = [layer for layer in program.sizes.signatures if layer.cut]
    if not all(map(_makes_terms, cut)):
        raise CannotApply("no tiles are made of experts, of layers around attention between slices, or of columns")
    if not cut or program.sizes.tiles != tiles:
        raise CannotApply(f"the program was not traced for layers in {tiles} tiles")
    tiled_tapes = [TiledTape(tape, checked.specs[rank], program) for rank, tape in enumerate(program.tapes)]
    if not any(tiled.gathers for tiled in tiled_tapes):
        raise CannotApply("no layer that can be cut is gathered for its use, so ranks keep these layers whole")
    return [tiled.tape for tiled in tiled_tapes]


def _makes_terms(layer: Layer) -> bool:
    """Return whether each slice of a layer computes a term of the result, or logits, from the whole input."""
    takes_own_tokens = any(node.takes_own for node in layer.nodes) and "vocab" not in layer.cut
    return layer.recomputed and not takes_own_tokens and not layer.routes and "expert" not in layer.cut


class TiledTape:
    """Tape of one rank, with ops on cut layers repeated for each tile.

    Attributes:
        tape: the new tape.
        gathers: whether tiles are gathered for their use.
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], program: Program) -> None:
        self.tape: list[Op] = []
        self.gathers = False
        self._specs, self._tp = specs, program.mesh.tp
        self._tiles, self._layers = range(program.sizes.tiles), program.sizes.signatures
        self._directed = program.sizes.directed.__contains__
        self._values = max(specs, default=-1) + 1
        self._handles = max((op.handle for op in tape), default=-1) + 1
        self._tiled: dict[int, tuple[int, ...]] = {}  # value to its tiles
        self._awaited: dict[int, tuple[int, ...]] = {}  # handle to the tiles' handles (empty: awaited already)
        self._deferred_gathers: dict[int, Op] = {}  # weight to its gather, done for each use of a tile
        self._recomputes: dict[int, Op] = {}  # saved activation to its RECOMPUTE, done before a tile's backward
        self._freed: set[int] = set()  # weights that only deferred gathers still read
        self._reduced: set[int] = set()  # gradients whose tiles are reduced immediately
        self._readers: dict[int, list[Op]] = defaultdict(list)
        for op in tape:
            for number in op.inputs if op.kind is not FREE else ():
                self._readers[number].append(op)
        self._is_deferred = cache(self._only_computes)
        for op in tape:
            self._put(op)

    def _put(self, op: Op) -> None:
        kind = op.kind
        if kind is WAIT:
            self.tape += [op._replace(handle=handle) for handle in self._awaited.get(op.handle, (op.handle,))]
        elif kind is FREE:
            self._free_tiles(op.inputs[0])
        elif not any(map(self._is_cut, (*op.inputs, *op.outputs))):
            self.tape.append(op)
        elif kind is ALL_GATHER and self._is_deferred(op.outputs[0]):
            self._deferred_gathers[op.outputs[0]], self._awaited[op.handle] = op, ()
            self.gathers = True
        elif kind is RECOMPUTE:
            self._recomputes[op.outputs[0]] = op
        elif kind is not REDUCE_SCATTER or op.inputs[0] not in self._reduced:
            REWRITTEN.get(kind, TiledTape.put_each)(self, op)

    def put_each(self, op: Op) -> None:
        """Append an op once for each tile."""
        for t in self._tiles:
            self._put_one(op, t)

    def put_forward(self, op: Op) -> None:
        """Append a forward pass: each tile computes a term of the result, or its slice of the logits."""
        (x, weight), (output, *saved_values), total = op.inputs, op.outputs, -1
        for t in self._tiles:
            tile, logits = self._gathered(weight, t), self._is_cut(output)
            partial = self._new_tile(output, t) if logits else self._new()
            outputs = (partial, *(self._new_tile(number, t) for number in saved_values))
            self.tape.append(op._replace(inputs=(x, tile), outputs=outputs))
            self._release(weight, tile)
            total = partial if logits or not t else self._sum(total, partial, output, t)

    def put_backward(self, op: Op) -> None:
        """Append a backward pass: each tile computes a term of the input's gradient.

        In a BACKWARD, it also computes its weight gradient. In a BACKWARD_INPUT, it saves a value for its
        BACKWARD_WEIGHT instead.
        """
        (x, gradient, weight, saved_value), total, whole = op.inputs, -1, op.kind is BACKWARD
        gradient_weight, output = op.outputs if whole else op.outputs[::-1]
        tokens = not self._specs[output].layer  # of tokens there is no gradient to sum
        for t in self._tiles:
            tile, tile_saved = self._gathered(weight, t), self._new_tile(saved_value, t)
            if saved_value in self._recomputes:
                self.tape.append(self._recomputes[saved_value]._replace(inputs=(x, tile), outputs=(tile_saved,)))
            tile_gradient, last = self._new_tile(gradient_weight, t), t == self._tiles[-1]
            term = output if tokens and last else self._new()
            outputs = (tile_gradient, term) if whole else (term, tile_gradient)
            self.tape.append(op._replace(inputs=(x, self._tile_of(gradient, t), tile, tile_saved), outputs=outputs))
            self._release(weight, tile)
            if whole:
                self._reduce(gradient_weight, t)
            if tokens and not last:
                self._free(term)
            total = term if tokens or not t else self._sum(total, term, output, t)

    def put_backward_weight(self, op: Op) -> None:
        """Append the weight half of a backward pass: each tile computes its weight gradient."""
        for t in self._tiles:
            self._put_one(op, t)
            self._reduce(op.outputs[0], t)

    def put_norm(self, op: Op) -> None:
        """Append a norm: the squares of all tiles are summed."""
        total = -1
        for t in self._tiles:
            tile_norm = self._new()
            self.tape.append(op._replace(inputs=(self._tile_of(op.inputs[0], t),), outputs=(tile_norm,)))
            total = self._sum(total, tile_norm, op.outputs[0], t) if t else tile_norm

    def put_update(self, op: Op) -> None:
        """Append an update of each tile.

        If the optimizer needs whole matrices (Muon), the tiles' directions are joined first.
        """
        if not self._directed(op.layer):
            self.put_each(op)
            return
        gradient, weight, opt_state, *others = op.inputs
        directions = [number for number in others if self._specs[number].kind is Kind.DIRECTION]
        norm = [number for number in others if number not in directions]
        tiles = self._tiled[directions[0]] if directions else [self._new() for _ in self._tiles]
        for t in self._tiles if not directions else ():
            read = (self._tile_of(gradient, t), self._tile_of(opt_state, t), *norm)
            self.tape.append(Op(OpKind.DIRECTION, op.layer, read, (tiles[t],)))
        direction = self._join(tiles, op.layer, self._new())
        for tile_direction in tiles if not directions else ():
            self._free(tile_direction)
        self.put_each(op._replace(inputs=(gradient, weight, opt_state, *norm, direction)))
        self._free(direction)

    def put_loss(self, op: Op) -> None:
        """Append a loss for the logits of each tile, from statistics of all tiles: those on the tape, or new ones."""
        logits, *given_stats = op.inputs
        stats = given_stats[0] if given_stats else self._stats(logits, op.layer, self._new())
        self.put_each(op._replace(inputs=(logits, stats)))
        if not given_stats:
            self._free(stats)

    def put_loss_stats(self, op: Op) -> None:
        """Append the statistics of logits: those of all tiles are joined."""
        self._stats(op.inputs[0], op.layer, op.outputs[0])

    # Tiles of values

    def _is_cut(self, number: int) -> bool:
        """Return whether a value is cut into tiles: it belongs to a layer's parameters, or is the logits."""
        spec, layers = self._specs[number], self._layers
        if spec.kind in SLICED:
            return bool(layers[spec.layer].cut)
        logits = spec.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION) and spec.layer == len(layers)
        return logits and bool(layers[-1].cut)

    def _only_computes(self, number: int) -> bool:
        """Return whether only passes of layers read a gathered weight, directly or after further gathers."""
        spec = self._specs[number]
        return (
            spec.kind is Kind.WEIGHT
            and not spec.step
            and all(
                op.kind in COMPUTE_WITH_WEIGHTS or (op.kind is ALL_GATHER and self._is_deferred(op.outputs[0]))
                for op in self._readers[number]
            )
        )

    def _tile_of(self, number: int, t: int) -> int:
        """Return a tile of a value, or the value itself if all tiles share it."""
        return self._tiled[number][t] if number in self._tiled else number

    def _new_tile(self, number: int, t: int) -> int:
        """Return a tile of a cut value. The first call numbers all its tiles."""
        if number not in self._tiled:
            self._tiled[number] = tuple([self._new() for _ in self._tiles])
        return self._tiled[number][t]

    def _new(self) -> int:
        self._values += 1
        return self._values - 1

    def _free_tiles(self, number: int) -> None:
        """Free a value's tiles. If deferred gathers still read them, free them after the gathers."""
        if any(op.inputs[0] == number for op in self._deferred_gathers.values()):
            self._freed.add(number)
            return
        gather = self._deferred_gathers.pop(number, None)
        if gather is not None:
            if gather.inputs[0] in self._freed:
                self._free_tiles(gather.inputs[0])
        elif number not in self._reduced:
            for tile in self._tiled.get(number, (number,)):
                self._free(tile)

    def _free(self, number: int) -> None:
        self.tape.append(Op(FREE, -1, (number,)))

    # Ops of one tile

    def _put_one(self, op: Op, t: int) -> None:
        holds, handle = op.holds, op.handle
        if holds is not None and op.kind in LOADS:
            holds = self._slice(holds, t)
        if handle >= 0:
            if handle not in self._awaited:
                self._awaited[handle] = tuple(range(self._handles, self._handles + len(self._tiles)))
                self._handles += len(self._tiles)
            handle = self._awaited[handle][t]
        inputs = tuple([self._tile_of(number, t) for number in op.inputs])
        outputs = tuple([self._new_tile(number, t) for number in op.outputs])
        self.tape.append(op._replace(inputs=inputs, outputs=outputs, handle=handle, holds=holds))

    def _slice(self, holds: Holds, t: int) -> Holds:
        """Return tile `t` of some slices of a layer. Each tensor-parallel rank's slice has separate tiles."""
        fine, tiles = holds.refined(math.lcm(holds.of, self._tp)), len(self._tiles)
        size = fine.of // self._tp
        return Holds(mask_of((p // size * tiles + t) * size + p % size for p in bits(fine.mask)), fine.of * tiles)

    def _gathered(self, number: int, t: int) -> int:
        """Return a tile of a weight. If the tape gathers the weight, gather the tile now."""
        op = self._deferred_gathers.get(number)
        if op is None:
            return self._tile_of(number, t)
        source, tile = self._gathered(op.inputs[0], t), self._new()
        self._communicate(op, source, tile)
        self._release(op.inputs[0], source)
        return tile

    def _release(self, number: int, tile: int) -> None:
        """Free a tile of a weight if it was gathered for one use."""
        if number in self._deferred_gathers:
            self._free(tile)

    def _reduce(self, gradient: int, t: int) -> None:
        """Reduce a tile's gradient if the reduction is its only use on the tape."""
        readers = self._readers[gradient]
        if [op.kind for op in readers] != [REDUCE_SCATTER]:
            return
        (op,), tile = readers, self._new_tile(gradient, t)
        self._communicate(op, tile, self._new_tile(op.outputs[0], t))
        self._free(tile)
        self._reduced.add(gradient)
        self._awaited[op.handle] = ()

    def _communicate(self, op: Op, source: int, result: int) -> None:
        """Issue a collective, and wait for it."""
        handle = self._handles
        self._handles += 1
        self.tape += [
            op._replace(inputs=(source,), outputs=(result,), handle=handle, batch=-1),
            Op(WAIT, -1, handle=handle),
        ]

    def _sum(self, total: int, term: int, output: int, t: int) -> int:
        """Add a term to the sum of the terms before it. The last sum gets the number that the tape uses."""
        result = output if t == self._tiles[-1] else self._new()
        self.tape.append(Op(ADD, self._specs[output].layer, (total, term), (result,)))
        self._free(total)
        self._free(term)
        return result

    def _stats(self, logits: int, layer: int, output: int) -> int:
        tile_stats = [self._new() for _ in self._tiles]
        self.tape += [Op(LOSS_STATS, layer, (self._tile_of(logits, t),), (tile_stats[t],)) for t in self._tiles]
        self._join(tile_stats, layer, output)
        for number in tile_stats:
            self._free(number)
        return output

    def _join(self, tiles: Sequence[int], layer: int, output: int) -> int:
        self.tape.append(Op(OpKind.CONCATENATE, layer, tuple(tiles), (output,)))
        return output


REWRITTEN: Mapping[OpKind, Callable[[TiledTape, Op], None]] = {
    FORWARD: TiledTape.put_forward,
    BACKWARD: TiledTape.put_backward,
    BACKWARD_INPUT: TiledTape.put_backward,
    OpKind.BACKWARD_WEIGHT: TiledTape.put_backward_weight,
    OpKind.NORM: TiledTape.put_norm,
    UPDATE: TiledTape.put_update,
    OpKind.LOSS: TiledTape.put_loss,
    LOSS_STATS: TiledTape.put_loss_stats,
}
"""Methods for ops that are not simply repeated for each tile."""
