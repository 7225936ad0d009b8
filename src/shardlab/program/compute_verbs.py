"""The verbs that compute: plain calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import overload

from shardlab.errors import Refused
from shardlab.program.place import Place
from shardlab.program.tape import NO_WEIGHT, Op, OpKind
from shardlab.program.value import Value
from shardlab.rules import update
from shardlab.rules.kind import Kind
from shardlab.rules.pieces import WHOLE, Holds, mask_of
from shardlab.rules.spec import Spec, form_of

Values = tuple[Value, ...]


class ComputeVerbs(Place):
    """Loading, forward and backward passes, sums, updates.

    A layer takes as many values as it has inputs. Given one value, a verb gives one; given a tuple, it gives a tuple.
    """

    def load_weights(self, layer: int, shard: int = 0, of: int = 1) -> tuple[Value, Value]:
        """This step's weight and optimizer state of a layer: slice `shard` of `of` equal ones."""
        return self.load_weight(layer, shard, of), self.load_opt_state(layer, shard, of)

    def load_weight(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's weight alone."""
        return self._load(OpKind.LOAD_WEIGHT, Kind.WEIGHT, layer, shard, of)

    def load_opt_state(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's optimizer state alone; its slice may be smaller than the weight's.

        A layer of which no rank loads one is frozen: its weight stays as it is, and it counts in no norm.
        """
        return self._load(OpKind.LOAD_OPT_STATE, Kind.OPT_STATE, layer, shard, of)

    def _load(self, kind: OpKind, what: Kind, layer: int, shard: int, of: int) -> Value:
        name = kind.value
        self._check_layer(name, layer)
        if self.sizes.weight_of(layer) != layer:
            self.refuse(f"{name}(layer {layer}): {NO_WEIGHT}")
        if not isinstance(shard, int) or not isinstance(of, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse(f"{name}(layer {layer}): shard {shard!r} of {of!r} was asked for; give whole numbers.")
        if not 0 <= shard < of:
            self.refuse(f"{name}(layer {layer}): shard {shard} of {of} does not exist; shards count from 0.")
        holds = Holds(1 << shard, of)
        key = (what, layer, holds)
        if key in self._loaded:
            self.refuse(f"{name}(layer {layer}): the same slice was loaded by op {self._loaded[key]} already.")
        self._loaded[key] = len(self.ops)
        if what is Kind.OPT_STATE:
            self._world.trained |= self.sizes.layers_of_weight(layer)
        value = self.make(Spec(form_of(what, layer, 0, self._rules.space, holds)))
        self.ops.append(Op(kind, layer, (), (value.number,), holds=holds))
        return value

    def load_batch(self, microbatches: Iterable[int], slices: Iterable[int] | None = None) -> Value:
        """Activation 0 of some microbatches: the input rows; of their sequences only some slices, if these are named.

        In how many slices sequences are counted is the mesh's matter: two for each context-parallel rank.
        """
        numbers = list(microbatches)
        total = len(self.microbatches)
        if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= n < total for n in numbers):
            self.refuse(f"load_batch({numbers}): give one or more of the microbatches 0-{total - 1}, each once.")
        holds = Holds(mask_of(numbers), total)
        count = self._rules.space.sequence
        cells = holds.refined(total * count)
        if slices is not None:
            chosen = list(slices)
            if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= s < count for s in chosen):
                self.refuse(
                    f"load_batch({numbers}, {chosen}): give one or more of the slices 0-{count - 1}, each once."
                )
            holds = cells = Holds(mask_of(m * count + s for m in numbers for s in chosen), total * count)
        value = self.make(Spec(form_of(Kind.ACTIVATION, 0, 0, self._rules.space, WHOLE), cells.mask))
        self.ops.append(Op(OpKind.LOAD_BATCH, 0, (), (value.number,), holds=holds))
        return value

    @overload
    def forward(self, layer: int, inputs: Value, weight: Value, *, save: bool = True) -> Value: ...
    @overload
    def forward(self, layer: int, inputs: Values, weight: Value, *, save: bool = True) -> Values: ...

    def forward(self, layer: int, inputs: Value | Values, weight: Value, *, save: bool = True) -> Value | Values:
        """Activation l through layer l: activation l + 1, and what else the layer takes and makes.

        What autograd needs for the backward pass is kept with the first input; with `save=False` it is not, and
        `backward` computes it again, or the layer itself must be computed again before that.
        """
        self._check_layer("forward", layer)
        read = inputs if isinstance(inputs, tuple) else (inputs,)
        rules = self._rules.layers[layer]
        try:
            made, saved = rules.forward([self._read(value) for value in read], self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        first = read[0]
        outputs = [self.make(spec) for spec in made]
        numbers = [value.number for value in outputs]
        if save:
            first.saved, first.saved_form = len(self._values), saved[0]
            numbers.append(first.saved)
            self._values.append(saved)
        given = (first.number, weight.number, *[value.number for value in read[1:]])
        self.ops.append(Op(OpKind.FORWARD, layer, given, tuple(numbers)))
        self._done_with(weight, *read)
        if isinstance(inputs, tuple):
            return tuple(outputs)
        if len(outputs) > 1:
            self.refuse(f"forward(layer {layer}): this layer makes {len(outputs)} values; give its inputs as a tuple.")
        return outputs[0]

    def loss(self, activation: Value, stats: Value | None = None) -> Value:
        """The gradient of the loss with respect to the last activation.

        Slices of it take the gathered `loss_stats` of all slices as well, and give these slices of the gradient.
        """
        read = (activation,) if stats is None else (activation, stats)
        return self._one(OpKind.LOSS, len(self.layers), read, update.loss)

    def loss_stats(self, logits: Value) -> Value:
        """What the loss needs of some slices of the logits: all_gather it over the ranks that have the others."""
        return self._one(OpKind.LOSS_STATS, len(self.layers), (logits,), update.loss_stats)

    def _one(self, kind: OpKind, layer: int, read: Values, rule: Callable[..., Spec]) -> Value:
        """An op that makes one value of the values that it reads."""
        try:
            made = rule(layer, *[self._read(value) for value in read])
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(kind, layer, tuple([value.number for value in read]), (output.number,)))
        self._done_with(*read)
        return output

    @overload
    def backward(self, layer: int, activation: Value, gradients: Value, weight: Value) -> tuple[Value, Value]: ...
    @overload
    def backward(self, layer: int, activation: Value, gradients: Values, weight: Value) -> Values: ...

    def backward(self, layer: int, activation: Value, gradients: Value | Values, weight: Value) -> Values:
        """The first input, the gradients of the outputs and the weight: (weight's gradient, the inputs' gradients)."""
        made, _, inputs, read = self._backward("backward", layer, activation, gradients, weight)
        outputs = tuple([self.make(spec) for spec in made])
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, tuple([value.number for value in outputs])))
        self._done_with(*read)
        return outputs

    @overload
    def backward_input(self, layer: int, activation: Value, gradients: Value, weight: Value) -> Value: ...
    @overload
    def backward_input(self, layer: int, activation: Value, gradients: Values, weight: Value) -> Values: ...

    def backward_input(self, layer: int, activation: Value, gradients: Value | Values, weight: Value) -> Value | Values:
        """The half of `backward` that the layer below waits for: the gradients of the inputs.

        The other half, `backward_weight`, reads the same activation and gradient: keep both in their stores until then.
        """
        made, half, inputs, read = self._backward("backward_input", layer, activation, gradients, weight)
        outputs = [self.make(spec) for spec in made[1:]]
        activation.saved_for_weight = len(self._values)
        self._values.append(half)
        numbers = [value.number for value in outputs]
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, (*numbers, activation.saved_for_weight)))
        self._done_with(*read)
        return tuple(outputs) if isinstance(gradients, tuple) else outputs[0]

    def _backward(
        self, op: str, layer: int, activation: Value, gradients: Value | Values, weight: Value
    ) -> tuple[list[Spec], Spec, tuple[int, ...], list[Value]]:
        """What both halves make, what the first leaves for the second, and the values that are read."""
        self._check_layer(op, layer)
        given = gradients if isinstance(gradients, tuple) else (gradients,)
        rules = self._rules.layers[layer]
        try:
            spec, read = self._read(activation), self._read(weight)
            made, follows = rules.backward(spec, [self._read(gradient) for gradient in given], read, op)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if given[0] is gradients and len(made) > 2:
            self.refuse(f"{op}(layer {layer}): this layer read {len(made) - 1} values; give the gradients as a tuple.")
        saved = activation.saved
        if saved < 0:
            if not rules.layer.recomputed:
                self.refuse(
                    f"{op}(layer {layer}): no forward has come before it for {spec}; a layer that takes or makes "
                    "several values is not recomputed."
                )
            saved = len(self._values)
            self._values.append(Spec(follows.saved, spec.cells))
            self.ops.append(Op(OpKind.RECOMPUTE, layer, (activation.number, weight.number), (saved,)))
        elif activation.saved_form is not follows.saved:
            self.refuse(f"{op}(layer {layer}): the forward pass was by other slices of the layer than {weight.spec}.")
        activation.saved = -1
        numbers = (activation.number, given[0].number, weight.number, saved, *[value.number for value in given[1:]])
        return made, Spec(follows.half, spec.cells), numbers, [activation, weight, *given]

    def backward_weight(self, layer: int, activation: Value, gradient: Value) -> Value:
        """The other half of `backward`, at any time after `backward_input`: the weight's gradient.

        Args:
            activation, gradient: the first input, and the gradient of the first output.
        """
        self._check_layer("backward_weight", layer)
        spec, given = self._read(activation), self._read(gradient)
        half = activation.saved_for_weight
        if half < 0:
            self.refuse(
                f"backward_weight(layer {layer}): no backward_input has come before it for {activation.spec}; "
                "that leaves what this half needs."
            )
        saved = self._values[half]
        assert isinstance(saved, Spec), "what autograd keeps is known by its spec alone"
        try:
            made = self._rules.layers[layer].backward_weight(spec, [given], saved)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        grad_weight = self.make(made)
        activation.saved_for_weight = -1
        self.ops.append(
            Op(OpKind.BACKWARD_WEIGHT, layer, (activation.number, gradient.number, half), (grad_weight.number,))
        )
        self._done_with(activation, gradient)
        return grad_weight

    def add(self, a: Value, b: Value) -> Value:
        """The sum of two weight gradients, of two scalars, or of two terms of one value; also written `a + b`.

        Terms are what slices of a layer make, and what queries (or keys and values) have met in two parts.
        """
        try:
            made = update.add_two(self._read(a), self._read(b))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.ADD, made[0].layer, (a.number, b.number), (output.number,)))
        self._done_with(a, b)
        return output

    def norm(self, layer: int, gradient: Value) -> Value:
        """The sum of the squares of a finished gradient, a scalar: this layer's, or slice's, part of the model's.

        Add the parts up over layers, and over the ranks that have others; `update` takes the whole.
        """
        self._check_layer("norm", layer)
        return self._one(OpKind.NORM, layer, (gradient,), partial(update.norm, len(self.layers)))

    def update(
        self, layer: int, gradient: Value, weight: Value, opt_state: Value, norm: Value | None = None
    ) -> tuple[Value, Value]:
        """The optimizer's step on a slice: the new (weight, optimizer state). The old ones end here, in place.

        Weight and gradient may hold more than the state's slice; the new weight is that slice alone. With the squared
        `norm` of the whole model's gradient, the gradient is clipped to the optimizer's limit, and the update is left
        out if the norm is not finite.
        """
        self._check_layer("update", layer)
        read = (gradient, weight, opt_state) if norm is None else (gradient, weight, opt_state, norm)
        try:
            made = self._rules.update(layer, [self._read(value) for value in read], self._world.trained)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        self._end_in_place(weight)
        self._end_in_place(opt_state)
        new_weight, new_state = self.make(made[0]), self.make(made[1])
        inputs = tuple([value.number for value in read])
        self.ops.append(Op(OpKind.UPDATE, layer, inputs, (new_weight.number, new_state.number)))
        self._done_with(gradient, *read[3:])
        return new_weight, new_state
