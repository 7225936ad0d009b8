"""The tensors behind the specs: how long a layer's flat buffer is, and what shape each value has."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.check import Checked
from shardlab.check.rooms import cuts_of
from shardlab.models import LayerLayout, Model
from shardlab.program import Holds, Kind, Spec, UserError
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.layer import GRADIENT_OF
from shardlab.rules.pieces import bits
from shardlab.rules.spec import pieces_share, share_of

OF_GRADIENT = {gradient: kind for kind, gradient in GRADIENT_OF.items()}
"""By the kind of a gradient, the kind of value whose gradient it is: both have one shape."""


class Shapes:
    """Shapes of a program's values when it trains `model` on microbatches of `rows` sequences.

    Every layer's flat buffer is padded so that it splits evenly into every number of slices that any value is cut into.
    """

    def __init__(self, checked: Checked, model: Model, rows: int, flat: list[int] | None = None) -> None:
        """Find the lengths of all layers' flat buffers, unless they are given."""
        cuts = cuts_of(checked.specs)
        self.model = model
        self.rows = rows
        self._sizes = checked.program.sizes
        self.layouts = [model.layout(layer) for layer in range(model.layers)]
        self.flat = flat or [layout.padded(cuts[layer]) for layer, layout in enumerate(self.layouts)]

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
        microbatches = spec.microbatches.bit_count()
        rows = microbatches * self.rows
        carried = self.model.carried_features.get(OF_GRADIENT.get(spec.kind, spec.kind))
        if carried is not None:
            return (rows, len(self.tokens(spec)), carried)
        first, *others = self.model.activation_shape(spec.layer, self.rows)
        if self.model.is_buffers(spec.layer):
            return (int(microbatches * first * pieces_share(spec.form)), *others)
        features = others[1:]
        if spec.kind in (Kind.QUERIES, Kind.GRAD_QUERIES):
            features = [self.model.attention_features[0]]
        if spec.kind in (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES):
            features = [self.model.attention_features[1]]
        if spec.kind is Kind.STATS:
            return (rows, len(self.tokens(spec)), 3 * spec.pieces(self._sizes.scores_index).bit_count())
        if spec.form.slices:
            features = [int(features[0] * share_of(spec.form))]
        return (rows, len(self.tokens(spec)), *features)

    def sections(self, spec: Spec) -> tuple[int, ...]:
        """Features of each section of a value that is cut by heads: each section has a part of every head."""
        attend = self.model.attention_after(spec.layer - (spec.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION)))
        if spec.kind in (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES):
            return attend.kv_width, attend.kv_width
        queries = spec.kind in (Kind.QUERIES, Kind.GRAD_QUERIES)
        return (attend.hidden_size,) if queries else (attend.hidden_size, attend.heads)

    def tokens(self, spec: Spec) -> Sequence[int]:
        """The tokens of each sequence that a value holds, ascending; a range where they follow one another.

        Raises:
            UserError: when sequences do not divide into the program's slices.
        """
        slices, block = spec.form.space.sequence, self.model.seq_len
        if spec.whole_sequences:
            return range(block)
        if block % slices:
            raise UserError(
                f"sequences of {block} tokens do not divide into {slices} slices (remainder {block % slices}); choose "
                f"a block that is a multiple of {slices} ({self._sizes.slices_per_rank} slices for each "
                "context-parallel rank, times the tensor-parallel ranks)"
            )
        held = self.slices(spec)
        first, last = held[0] * block // slices, (held[-1] + 1) * block // slices
        if len(held) == held[-1] + 1 - held[0]:
            return range(first, last)
        return [token for token in range(first, last) if token * slices // block in held]

    def slices(self, spec: Spec) -> list[int]:
        """The slices of each sequence that a value holds; the check sees to it that they are those of every one."""
        return sorted({cell % spec.form.space.sequence for cell in bits(spec.cells)})

    def positions(self, whole: Spec, part: Spec) -> Sequence[int]:
        """Where the tokens of a part stand among those of a value; a range where they follow one another."""
        places = {token: place for place, token in enumerate(self.tokens(whole))}
        found = [places[token] for token in self.tokens(part)]
        run = range(found[0], found[-1] + 1)
        return run if len(run) == len(found) else found

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
