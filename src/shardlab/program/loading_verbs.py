"""The verbs that begin a step: what a rank loads of the weights, of the optimizer's state and of the batch."""

from __future__ import annotations

from collections.abc import Iterable

from shardlab.errors import Refused, of_layer
from shardlab.program.ops import OpKind
from shardlab.program.tape import LOAD_FIRST, NO_WEIGHT, Op
from shardlab.program.tracing import RankContext
from shardlab.program.values import Value
from shardlab.rules.kind import Kind
from shardlab.rules.pieces import MOST_SLICES, WHOLE, Holds, mask_of, number_text
from shardlab.rules.place import want_place
from shardlab.rules.spec import Spec, form_of


class LoadingVerbs(RankContext):
    """Verbs that make values of nothing: weights, optimizer states, batches, and gradients of no microbatch."""

    def load_weights(self, layer: int, shard: int = 0, of: int = 1, *, place: str = "") -> tuple[Value, Value]:
        """Load this step's weight and optimizer state of a layer.

        Args:
            shard, of: slice `shard`, counted from 0, of `of` equal slices of the layer's flat parameters.
            place: as in `load_weight`.

        Returns:
            The weight and the optimizer state.

        Raises:
            Refused: as `load_weight` does.
        """
        return self.load_weight(layer, shard, of, place=place), self.load_opt_state(layer, shard, of, place=place)

    def load_weight(self, layer: int, shard: int = 0, of: int = 1, *, place: str = "") -> Value:
        """Load this step's weight of a layer, or one slice of it.

        Args:
            shard, of: slice `shard`, counted from 0, of `of` equal slices of the layer's flat parameters.
            place: where it is kept from step to step, and so has to be when the step ends: "host", "disk", or the
                device.

        Raises:
            Refused: for a slice that does not exist or was loaded before, for a layer that uses another one's weight,
                and for a place that there is not.
        """
        return self._load(OpKind.LOAD_WEIGHT, Kind.WEIGHT, layer, shard, of, place)

    def load_opt_state(self, layer: int, shard: int = 0, of: int = 1, *, place: str = "") -> Value:
        """Load this step's optimizer state of a layer; its slice may be smaller than the weight's.

        A layer whose optimizer state no rank loads is frozen: its weight stays as it is, and no norm counts it.

        Args:
            shard, of: slice `shard`, counted from 0, of `of` equal slices of the layer's flat parameters.
            place: as in `load_weight`.

        Raises:
            Refused: as `load_weight` does.
        """
        return self._load(OpKind.LOAD_OPT_STATE, Kind.OPT_STATE, layer, shard, of, place)

    def _load(self, kind: OpKind, what: Kind, layer: int, shard: int, of: int, place: str) -> Value:
        name = kind.value
        holds = self._slice_of_weights(name, layer, shard, of)
        key = (what, layer, holds)
        if key in self._loaded:
            given = f"the same slice was loaded by op {self._loaded[key]} already"
            self.refuse("loaded twice", of_layer(name, layer), given, "load each slice once")
        if place:
            try:
                want_place(of_layer(name, layer), place)
            except Refused as refusal:
                raise refusal.at(self.index, len(self.ops)) from None
        self._loaded[key] = len(self.ops)
        if what is Kind.OPT_STATE:
            self._world.trained |= self.sizes.layers_of_weight(layer)
        value = self.make(Spec(form_of(what, layer, 0, self._rules.space, holds, place=place)))
        self.ops.append(Op(kind, layer, (), (value.number,), holds=holds, place=place))
        return value

    def _slice_of_weights(self, name: str, layer: int, shard: int, of: int) -> Holds:
        """One of the equal slices of a layer's own weights."""
        self._check_layer(name, layer)
        about = of_layer(name, layer)
        if self.sizes.weight_of(layer) != layer:
            self.refuse("tied weight", about, NO_WEIGHT, LOAD_FIRST)
        if not isinstance(shard, int) or not isinstance(of, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse("unknown slice", about, f"shard {shard!r} of {of!r} was asked for", "give whole numbers")
        if not 0 <= shard < of <= MOST_SLICES:
            given = f"shard {number_text(shard)} of {number_text(of)} does not exist"
            remedy = f"count shards from 0, below their number, which is {MOST_SLICES:,} at most"
            self.refuse("unknown slice", about, given, remedy)
        return Holds(1 << shard, of)

    def zero_gradient(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """A weight's gradient of no microbatch at all: zeros, of slice `shard` of `of` equal ones.

        A rank that has no microbatch gives it where others give theirs.
        """
        holds = self._slice_of_weights(OpKind.ZERO_GRADIENT.value, layer, shard, of)
        value = self.make(Spec(form_of(Kind.GRAD_WEIGHT, layer, 0, self._rules.space, holds)))
        self.ops.append(Op(OpKind.ZERO_GRADIENT, layer, (), (value.number,), holds=holds))
        return value

    def load_batch(self, microbatches: Iterable[int], slices: Iterable[int] | None = None) -> Value:
        """Load activation 0, the input rows of some microbatches.

        Args:
            microbatches: their numbers.
            slices: the slices of these microbatches' sequences (None: whole sequences). The mesh says how many there
                are: two for each context-parallel rank, or as the sizes say.

        Raises:
            Refused: for no microbatch or slice, for one that does not exist, and for one that is named twice.
        """
        numbers = list(microbatches)
        total = len(self.microbatches)
        if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= n < total for n in numbers):
            remedy = f"give one or more of the microbatches 0-{total - 1}, each once"
            self.refuse("unknown microbatch", "load_batch", f"{numbers} was given", remedy)
        holds = Holds(mask_of(numbers), total)
        count = self._rules.space.sequence
        cells = holds.refined(total * count)
        if slices is not None:
            chosen = list(slices)
            if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= s < count for s in chosen):
                remedy = f"give one or more of the slices 0-{count - 1}, each once"
                self.refuse("unknown slice", "load_batch", f"{numbers}, {chosen} was given", remedy)
            holds = cells = Holds(mask_of(m * count + s for m in numbers for s in chosen), total * count)
        value = self.make(Spec(form_of(Kind.ACTIVATION, 0, 0, self._rules.space, WHOLE), cells.mask))
        self.ops.append(Op(OpKind.LOAD_BATCH, 0, (), (value.number,), holds=holds))
        return value
