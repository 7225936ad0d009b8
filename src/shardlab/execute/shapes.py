"""The tensors behind the specs: how long a layer's flat buffer is, and what shape each value has."""

from __future__ import annotations

import math
from collections import defaultdict

from shardlab.check import Checked
from shardlab.models import LayerLayout, Model
from shardlab.program import Holds, Kind, Spec, UserError
from shardlab.program.values import ROW_KINDS, bits


class Shapes:
    """Shapes of a program's values when it trains `model` on microbatches of `rows` sequences.

    Every layer's flat buffer is padded so that it splits evenly into every number of slices that any value is cut into.
    """

    def __init__(self, checked: Checked, model: Model, rows: int) -> None:
        cuts: dict[int, int] = defaultdict(lambda: 1)
        for specs in checked.specs:
            for kind, layer, holds, *_ in specs.values():
                if kind not in ROW_KINDS and kind is not Kind.SCALAR:
                    cuts[layer] = math.lcm(cuts[layer], holds.of)
        self.model = model
        self.rows = rows
        self._sizes = checked.program.sizes
        self.layouts = [model.layout(layer) for layer in range(model.layers)]
        self.flat = [layout.padded(cuts[layer]) for layer, layout in enumerate(self.layouts)]

    def layout_of_weight(self, layer: int) -> LayerLayout:
        """The layout of the weight that a layer computes with, and of its gradient."""
        return self.layouts[self._sizes.weight_of(layer)]

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Shape of a value's tensor: its slices or its microbatches' rows, one after the other."""
        if spec.kind in ROW_KINDS:
            return self._row_shape(spec)
        if spec.kind is Kind.SCALAR:
            return (1,)
        return (self.flat[spec.layer] // spec.holds.of * spec.holds.pieces,)

    def _row_shape(self, spec: Spec) -> tuple[int, ...]:
        rows = spec.microbatches.bit_count() * self.rows
        tokens, *features = self.model.activation_shape(
            1 if spec.kind in (Kind.RESIDUAL, Kind.GRAD_RESIDUAL) else spec.layer
        )
        if spec.kind is Kind.STATS:
            return ((spec.sums.bit_count() or spec.grid.width) * rows, tokens, 3)
        if spec.sums and spec.layer == self.model.layers:
            features = [features[0] * spec.sums.bit_count() // spec.grid.width]
        return (rows, len(self.tokens(spec)), *features)

    def tokens(self, spec: Spec) -> range:
        """The tokens of each sequence that a value holds.

        Raises:
            UserError: when sequences do not divide into the program's slices.
        """
        slices, block = spec.grid.sequence, self.model.block
        if spec.whole_sequences:
            return range(block)
        if block % slices:
            raise UserError(
                f"sequences of {block} tokens do not divide into {slices} slices (remainder {block % slices}); choose "
                "a block that is a multiple of the tensor-parallel ranks"
            )
        held = sorted({piece % slices for piece in bits(spec.holds.mask)})
        return range(held[0] * block // slices, (held[-1] + 1) * block // slices)

    def ranges(self, layer: int, holds: Holds) -> list[tuple[int, int]]:
        """Where a value's slices lie in the layer's flat buffer, as (start, stop), in order."""
        size = self.flat[layer] // holds.of
        runs: list[tuple[int, int]] = []
        for piece in bits(holds.mask):
            start, stop = piece * size, (piece + 1) * size
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return runs

    def places(self, layer: int, holds: Holds, wanted: Holds) -> list[tuple[int, int]]:
        """Where some slices lie in the tensor of a value that holds these and perhaps more, as (start, stop)."""
        places: list[tuple[int, int]] = []
        at = 0
        for start, stop in self.ranges(layer, holds):
            for begin, end in self.ranges(layer, wanted):
                if start <= begin and end <= stop:
                    places.append((at + begin - start, at + end - start))
            at += stop - start
        return places
