"""Verbs on single values: load, slice, concatenate, scale, cast, and copies to the host's memory or the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from shardlab.common.errors import Refused, about_layer
from shardlab.common.text import number_text
from shardlab.language.collective_calls import MemberNames
from shardlab.language.ops import OpKind
from shardlab.language.rules import arithmetic, collectives, refusals
from shardlab.language.rules.kinds import MOST_SLICES, WHOLE, Factor, Holds, Kind, factor_of, mask_of
from shardlab.language.rules.refusals import require_place
from shardlab.language.rules.spec import Spec, form_of
from shardlab.language.tape import TIED_HEAD, TIED_HEAD_REMEDY, Op
from shardlab.language.tracing import Tracer
from shardlab.language.values import Handle, Value, Wait, argument_text


class CopyHandle(Handle[Value]):
    """Handle of a copy in flight. It waits for no other rank."""

    __slots__ = ()

    def __init__(self, rank: Tracer, value: Value, spec: Spec) -> None:
        self._begin(rank, rank.make(spec), value, ready=True)

    def waits_for(self) -> Wait:
        raise AssertionError("a copy is ready at once")


class ValueVerbs(Tracer):
    """Verbs that load, slice, concatenate, scale and cast values, and copy them to or from the device.

    All but copies are plain calls that return a value. Copies start at once and return a handle.
    """

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
            place: where the value lies at the start and the end of each step: "host", "disk", or "" for the device.

        Raises:
            Refused: for a slice that does not exist or was loaded before, for a layer that uses another layer's weight,
                and for an unknown place.
        """
        return self._load(OpKind.LOAD_WEIGHT, Kind.WEIGHT, layer, shard, of, place)

    def load_opt_state(self, layer: int, shard: int = 0, of: int = 1, *, place: str = "") -> Value:
        """Load this step's optimizer state of a layer. It may be a smaller slice than the weight.

        A layer whose optimizer state no rank loads is frozen: it is neither updated nor part of the norm.

        Args:
            shard, of: slice `shard`, counted from 0, of `of` equal slices of the layer's flat parameters.
            place: as in `load_weight`.

        Raises:
            Refused: as `load_weight` does.
        """
        return self._load(OpKind.LOAD_OPT_STATE, Kind.OPT_STATE, layer, shard, of, place)

    def load_batch(self, microbatches: Iterable[int], slices: Iterable[int] | None = None) -> Value:
        """Load activation 0, the input rows of some microbatches.

        Args:
            microbatches: numbers of the microbatches.
            slices: numbers of the slices of these microbatches' sequences (None: whole sequences). A sequence has `tp`
                slices, or with context parallelism 2 x `cp` x `tp` (the sizes may set another number than 2).

        Raises:
            Refused: for an empty list, and for a microbatch or slice that does not exist or is named twice.
        """
        total = len(self.microbatches)
        if isinstance(microbatches, int):
            remedy = f"give a list: load_batch([{microbatches}])"
            self.refuse("unknown microbatch", "load_batch", f"the number {microbatches} was given", remedy)
        numbers = list(microbatches)
        if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= n < total for n in numbers):
            remedy = f"give one or more of the microbatches 0-{total - 1}, each once"
            self.refuse("unknown microbatch", "load_batch", f"{numbers} was given", remedy)
        holds = Holds(mask_of(numbers), total)
        count = self._rules.space.sequence
        cells = holds.refined(total * count)
        if slices is not None:
            indices = list(slices)
            if not indices or len(set(indices)) < len(indices) or not all(0 <= s < count for s in indices):
                remedy = f"give one or more of the slices 0-{count - 1}, each once"
                self.refuse("unknown slice", "load_batch", f"{numbers}, {indices} was given", remedy)
            holds = cells = Holds(mask_of(m * count + s for m in numbers for s in indices), total * count)
        value = self.make(Spec(form_of(Kind.ACTIVATION, 0, 0, self._rules.space, WHOLE), cells.mask))
        self.ops.append(Op(OpKind.LOAD_BATCH, 0, (), (value.number,), holds=holds))
        return value

    def zero_gradient(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """Make a zero gradient of a weight, which sums no microbatch.

        A rank without a microbatch passes it to a reduction in which other ranks pass their gradients.

        Args:
            shard, of: slice `shard`, counted from 0, of `of` equal slices of the layer's flat parameters.
        """
        holds = self._slice_of_weights(OpKind.ZERO_GRADIENT.value, layer, shard, of)
        value = self.make(Spec(form_of(Kind.GRAD_WEIGHT, layer, 0, self._rules.space, holds)))
        self.ops.append(Op(OpKind.ZERO_GRADIENT, layer, (), (value.number,), holds=holds))
        return value

    def slice(self, value: Value, index: int, of: int) -> Value:
        """Cut one of several equal slices out of a value: of its parameters, or of its tokens.

        Tokens are cut as in `reduce_scatter`: along the sequence if the mesh cuts sequences, otherwise the batch is cut
        into whole microbatches. A value that was concatenated from `of` pieces is cut into these pieces, which may be
        unequal. The slice is a view of the value's memory, which is freed when both are; only tokens that are not
        contiguous in this memory are copied.

        Args:
            value: a weight, an optimizer state, an activation or a gradient.
            index: number of the slice, from 0.
            of: the number of slices.

        Raises:
            Refused: for a slice that does not exist, for a scalar, and for tokens that do not divide.
        """
        spec = self._read(value, "slice")
        if index.__class__ is not int or of.__class__ is not int:
            fault = f"slice {argument_text(index)} of {argument_text(of)} was asked for"
            self.refuse("unknown slice", spec.about("slice"), fault, "give whole numbers")
        try:
            part = collectives.slice_of(spec, index, of)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(part)
        self.ops.append(Op(OpKind.SLICE, part.layer, (value.number,), (output.number,), holds=Holds(1 << index, of)))
        self._done_with(value)
        return output

    def concatenate(self, values: Iterable[Value]) -> Value:
        """Concatenate pieces of one value on this rank, in new memory, as `all_gather` does across ranks.

        Args:
            values: the pieces, in any order: each piece records its position.

        Raises:
            Refused: for an empty list, and as `all_gather` does.
        """
        inputs = [values] if isinstance(values, Value) else list(values)
        if not inputs:
            self.refuse("wrong number", "concatenate", "no value was given", "give the pieces")
        specs = [self._read(value, "concatenate") for value in inputs]
        names = MemberNames(range(len(specs)), "piece")
        rule = partial(collectives.gather, specs[0].about("concatenate"), specs, names)
        return self._record(inputs, OpKind.CONCATENATE, rule)

    def scale(self, value: Value, by: Factor | Fraction | int) -> Value:
        """Multiply a gradient by a rational number, or by token counts.

        Gradients are shares of the step's mean: each microbatch's loss is weighted by its share of the tokens. Two
        scaled gradients can be added if they have the same factor. They can also be added if they sum the same
        microbatches: their factors are then added, so that two halves give the whole. `update` accepts a gradient only
        after all factors have cancelled.

        Args:
            value: a gradient.
            by: an integer, a Fraction, or a product or quotient of `tokens` results.

        Raises:
            Refused: for any other kind of value, for a factor of 0, and for a factor that would make gradients overflow
                or vanish.
        """
        spec = self._read(value, "scale")
        if by.__class__ is not Factor:
            if not isinstance(by, int | Fraction) or not by:
                remedy = "give a Fraction that is not 0, or token counts"
                self.refuse("wrong factor", spec.about("scale"), f"{argument_text(by)} was given", remedy)
            by = factor_of(by)
        assert isinstance(by, Factor)
        return self._record([value], OpKind.SCALE, partial(arithmetic.scale, spec, by), factor=by)

    def tokens(self, microbatches: Iterable[int] | None = None) -> Factor:
        """Return how many tokens of some microbatches count in the loss, as a factor for `scale`.

        The factor is a symbol: the number is only known when a step runs.

        Args:
            microbatches: their numbers (None: all microbatches of the step).
        """
        numbers = list(self.microbatches) if microbatches is None else list(microbatches)
        if not numbers or not set(numbers) <= set(self.microbatches):
            remedy = f"give one or more of the microbatches 0-{len(self.microbatches) - 1}"
            self.refuse("unknown microbatch", "tokens", f"{numbers} was given", remedy)
        return factor_of(1, ((mask_of(numbers), 1),))

    def cast(self, value: Value, dtype: str = "") -> Value:
        """Copy a value into another dtype, such as a smaller one for communication or a larger one for a sum.

        The run's precision sets the dtype in which a layer reads each kind of value, so a weight or an activation must
        be cast back before a layer reads it. `norm` and `update` take a weight's gradient in any dtype.

        Args:
            value: a weight, an activation or a gradient.
            dtype: torch's name, such as `bfloat16`; "" for the dtype of the value's kind.
        """
        spec = self._read(value, "cast")
        return self._record([value], OpKind.CAST, partial(arithmetic.cast, spec, dtype), dtype=dtype)

    def offload(self, value: Value, to: str = "host") -> Handle[Value]:
        """Copy a value to the host's memory or to the disk, so that its memory on the device can be freed.

        The copy can be kept and reloaded. In the host's memory, the host's processors can also add gradients of weights
        and update weights whose optimizer states lie there too. The values that a layer saved with an activation are
        not copied; the backward pass computes them again.

        Args:
            value: a weight, an optimizer state, an activation or a gradient, on the device.
            to: "host" for the host's memory, or "disk" for a file.

        Raises:
            Refused: for another place, for a scalar, statistics or a term of a sum, for a value that is not on the
                device, and for a weight's gradient that would go to the disk.
        """
        return self._copy(OpKind.OFFLOAD, value, lambda spec: refusals.offload(spec, to), to)

    def reload(self, value: Value) -> Handle[Value]:
        """Copy a value from the host's memory or the disk to the device.

        Raises:
            Refused: for a value that is on the device.
        """
        return self._copy(OpKind.RELOAD, value, refusals.reload)

    def _load(self, kind: OpKind, value_kind: Kind, layer: int, shard: int, of: int, place: str) -> Value:
        name = kind.value
        holds = self._slice_of_weights(name, layer, shard, of)
        key = (value_kind, layer, holds)
        if key in self._load_ops:
            fault = f"the same slice was loaded by op {self._load_ops[key]} already"
            self.refuse("loaded twice", about_layer(name, layer), fault, "load each slice once")
        if place:
            try:
                require_place(about_layer(name, layer), place)
            except Refused as refusal:
                raise refusal.at(self.index, len(self.ops)) from None
        self._load_ops[key] = len(self.ops)
        if value_kind is Kind.OPT_STATE:
            self._world.trained |= self.sizes.layers_of_weight(layer)
        value = self.make(Spec(form_of(value_kind, layer, 0, self._rules.space, holds, place=place)))
        self.ops.append(Op(kind, layer, (), (value.number,), holds=holds, place=place))
        return value

    def _slice_of_weights(self, name: str, layer: int, shard: int, of: int) -> Holds:
        """Return one of the equal slices of a layer's own weights, after a check that it exists."""
        self._check_layer(name, layer)
        about = about_layer(name, layer)
        if self.sizes.weight_of(layer) != layer:
            self.refuse("tied weight", about, TIED_HEAD, TIED_HEAD_REMEDY)
        if not isinstance(shard, int) or not isinstance(of, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            fault = f"shard {argument_text(shard)} of {argument_text(of)} was asked for"
            self.refuse("unknown slice", about, fault, "give whole numbers")
        if not 0 <= shard < of <= MOST_SLICES:
            fault = f"shard {number_text(shard)} of {number_text(of)} does not exist"
            self.refuse("unknown slice", about, fault, collectives.numbering_of_parts("shard", of, MOST_SLICES))
        return Holds(1 << shard, of)

    def _record(self, values: Sequence[Value], kind: OpKind, rule: Callable[[], Spec], **fields: Any) -> Value:
        """Record an op on this rank with one output, whose spec the rule derives.

        Args:
            fields: further fields of the op.
        """
        try:
            spec = rule()
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(spec)
        inputs = tuple([value.number for value in values])
        self.ops.append(Op(kind, spec.layer, inputs, (output.number,), **fields))
        self._done_with(*values)
        return output

    def _copy(self, kind: OpKind, value: Value, rule: Callable[[Spec], Spec], to: str = "") -> Handle[Value]:
        """Issue a copy to or from the device."""
        spec = self._read(value, kind.value)
        try:
            copy_spec = rule(spec)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        handle = CopyHandle(self, value, copy_spec)
        op = Op(kind, spec.layer, (value.number,), (handle.result.number,), handle.number, place=to)
        self._issue(op, handle, value)
        return handle
