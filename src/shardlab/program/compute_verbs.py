"""The verbs that compute: plain calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shardlab.program import attention, experts, sliced, transfer
from shardlab.program.errors import Refused
from shardlab.program.place import Place
from shardlab.program.sizes import CARRYING, LayerKind
from shardlab.program.tape import Op, OpKind
from shardlab.program.value import Value
from shardlab.program.values import Holds, Kind, Spec, mask_of


class ComputeVerbs(Place):
    """Loading, forward and backward passes, sums, updates."""

    def load_weights(self, layer: int, shard: int = 0, of: int = 1) -> tuple[Value, Value]:
        """This step's weight and optimizer state of a layer: slice `shard` of `of` equal ones."""
        return self.load_weight(layer, shard, of), self.load_opt_state(layer, shard, of)

    def load_weight(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's weight alone."""
        return self._load(OpKind.LOAD_WEIGHT, Kind.WEIGHT, layer, shard, of)

    def load_opt_state(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's optimizer state alone; its slice may be smaller than the weight's."""
        return self._load(OpKind.LOAD_OPT_STATE, Kind.OPT_STATE, layer, shard, of)

    def _load(self, kind: OpKind, what: Kind, layer: int, shard: int, of: int) -> Value:
        name = kind.value
        self._check_layer(name, layer)
        if self.sizes.weight_of(layer) != layer:
            self.refuse(f"{name}(layer {layer}): {transfer.NO_WEIGHT}")
        if not isinstance(shard, int) or not isinstance(of, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse(f"{name}(layer {layer}): shard {shard!r} of {of!r} was asked for; give whole numbers.")
        if not 0 <= shard < of:
            self.refuse(f"{name}(layer {layer}): shard {shard} of {of} does not exist; shards count from 0.")
        holds = Holds(1 << shard, of)
        key = (what, layer, holds)
        if key in self._loaded:
            self.refuse(f"{name}(layer {layer}): the same slice was loaded by op {self._loaded[key]} already.")
        self._loaded[key] = len(self.ops)
        value = self.make(Spec(what, layer, holds))
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
        count = self._grid.sequence
        pieces = holds.refined(total * count)
        if slices is not None:
            chosen = list(slices)
            if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= s < count for s in chosen):
                self.refuse(
                    f"load_batch({numbers}, {chosen}): give one or more of the slices 0-{count - 1}, each once."
                )
            holds = pieces = Holds(mask_of(m * count + s for m in numbers for s in chosen), total * count)
        value = self.make(Spec(Kind.ACTIVATION, 0, pieces, 0, 0, self._grid))
        self.ops.append(Op(OpKind.LOAD_BATCH, 0, (), (value.number,), holds=holds))
        return value

    def forward(self, layer: int, activation: Value, weight: Value, *, save: bool = True) -> Value:
        """Activation l through layer l: activation l + 1.

        What autograd needs for the backward pass is kept with the input activation; with `save=False` it is not,
        and `backward` computes it again.
        """
        self._check_layer("forward", layer)
        spec = self._read(activation)
        rule = transfer.forward if self._all_whole else self._rule("forward", layer, forward=True)
        try:
            made = rule(layer, spec, self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        number = output.number
        if save:
            outputs = (number, number + 1)
            self._values.append(None)
            activation.saved, activation.saved_slices = number + 1, made.sums
        else:
            outputs = (number,)
        self.ops.append(Op(OpKind.FORWARD, layer, (activation.number, weight.number), outputs))
        self._done_with(weight, activation)
        return output

    def loss(self, activation: Value, stats: Value | None = None) -> Value:
        """The gradient of the loss with respect to the last activation.

        Slices of it take the gathered `loss_stats` of all slices as well, and give these slices of the gradient.
        """
        read = (activation,) if stats is None else (activation, stats)
        specs = [self._read(value) for value in read]
        try:
            if self._grid.width > 1 or stats is not None:
                made = sliced.loss(len(self.layers), specs[0], specs[1] if stats is not None else None)
            else:
                made = transfer.loss(len(self.layers), specs[0])
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.LOSS, made.layer, tuple([value.number for value in read]), (output.number,)))
        self._done_with(*read)
        return output

    def loss_stats(self, logits: Value) -> Value:
        """What the loss needs of some slices of the logits: all_gather it over the ranks that have the others."""
        try:
            made = sliced.loss_stats(len(self.layers), self._read(logits))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.LOSS_STATS, made.layer, (logits.number,), (output.number,)))
        self._done_with(logits)
        return output

    def backward(self, layer: int, activation: Value, gradient: Value, weight: Value) -> tuple[Value, Value]:
        """Activation l, the gradient of activation l + 1 and the weight: (weight's gradient, activation l's)."""
        self._check_layer("backward", layer)
        rule = transfer.backward if self._all_whole else self._rule("backward", layer, forward=False)
        try:
            specs = rule(layer, self._read(activation), self._read(gradient), self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        saved = self._saved(layer, activation, weight, specs[1].sums)
        grad_weight, grad_activation = self.make(specs[0]), self.make(specs[1])
        inputs = (activation.number, gradient.number, weight.number, saved)
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, (grad_weight.number, grad_activation.number)))
        self._done_with(activation, gradient, weight)
        return grad_weight, grad_activation

    def backward_input(self, layer: int, activation: Value, gradient: Value, weight: Value) -> Value:
        """The half of `backward` that the layer below waits for: the gradient of activation l.

        The other half, `backward_weight`, reads the same activation and gradient: keep both in their stores until then.
        """
        self._check_layer("backward_input", layer)
        rule = transfer.backward if self._all_whole else self._rule("backward_input", layer, forward=False)
        try:
            specs = rule(layer, self._read(activation), self._read(gradient), self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        saved = self._saved(layer, activation, weight, specs[1].sums)
        grad_activation = self.make(specs[1])
        activation.saved_for_weight, activation.half_slices = grad_activation.number + 1, specs[1].sums
        self._values.append(None)
        inputs = (activation.number, gradient.number, weight.number, saved)
        outputs = (grad_activation.number, activation.saved_for_weight)
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, outputs))
        self._done_with(activation, gradient, weight)
        return grad_activation

    def backward_weight(self, layer: int, activation: Value, gradient: Value) -> Value:
        """The other half of `backward`, at any time after `backward_input`: the weight's gradient."""
        self._check_layer("backward_weight", layer)
        specs = self._read(activation), self._read(gradient)
        try:
            if self.kinds[layer] is LayerKind.WHOLE:
                made = transfer.backward_weight(layer, *specs)
            elif self.kinds[layer] is LayerKind.EXPERTS:
                made = experts.backward_weight(layer, *specs, activation.half_slices)
            elif self.kinds[layer] is LayerKind.PROJECT:
                made = attention.project_backward_weight(layer, *specs, activation.half_slices)
            else:
                slices = activation.half_slices
                made = sliced.backward_weight(layer, len(self.layers), *specs, slices, self.kinds)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if activation.saved_for_weight < 0:
            self.refuse(
                f"backward_weight(layer {layer}): no backward_input has come before it for {activation.spec}; "
                "that leaves what this half needs."
            )
        grad_weight = self.make(made)
        inputs = (activation.number, gradient.number, activation.saved_for_weight)
        activation.saved_for_weight = -1
        self.ops.append(Op(OpKind.BACKWARD_WEIGHT, layer, inputs, (grad_weight.number,)))
        self._done_with(activation, gradient)
        return grad_weight

    def _rule(self, op: str, layer: int, *, forward: bool) -> Callable[..., Any]:
        """What a layer's kind makes of its inputs; refuses the verbs that are not for it."""
        rule = self._rules.get((op, layer))
        if rule is None:
            rule = self._rules[op, layer] = self._find_rule(op, layer, forward=forward)
        return rule

    def _find_rule(self, op: str, layer: int, *, forward: bool) -> Callable[..., Any]:
        kind = self.kinds[layer]
        meant = next((each for each in CARRYING if each.value in op), None)
        if meant is not (kind if kind in CARRYING else None):
            use = f"_{kind.value}" if kind in CARRYING else ""
            self.refuse(f"{op}(layer {layer}): this layer is {kind.value}; use forward{use} and backward{use}.")
        if (kind is LayerKind.PROJECT) != ("project" in op):
            which = "makes queries, keys and values: use project" if kind is LayerKind.PROJECT else "makes no queries"
            self.refuse(f"{op}(layer {layer}): this layer {which}.")
        if kind is LayerKind.EXPERTS:
            return experts.forward if forward else experts.backward
        if kind is LayerKind.WHOLE:
            return transfer.forward if forward else transfer.backward
        return partial(sliced.forward if forward else sliced.backward, layers=len(self.layers), kinds=self.kinds)

    def _saved(self, layer: int, activation: Value, weight: Value, slices: int) -> int:
        """What autograd saved from an activation's forward, for its backward; computed again if nothing was."""
        saved = activation.saved
        if saved >= 0 and activation.saved_slices != slices:
            self.refuse(
                f"backward(layer {layer}): the forward pass was by other slices of the layer than {weight.spec}."
            )
        if saved < 0:
            saved = len(self._values)
            self._values.append(None)
            self.ops.append(Op(OpKind.RECOMPUTE, layer, (activation.number, weight.number), (saved,)))
        activation.saved = -1
        return saved

    def _save_of(self, activation: Value, slices: int) -> int:
        """The number of what autograd keeps of an activation's forward pass by some slices of the layer."""
        activation.saved, activation.saved_slices = len(self._values), slices
        self._values.append(None)
        return activation.saved

    def add(self, a: Value, b: Value) -> Value:
        """The sum of two weight gradients, of two scalars, or of what queries (or keys and values) have met in two
        parts; also written `a + b`."""
        try:
            made = transfer.add(self._read(a), self._read(b))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.ADD, made.layer, (a.number, b.number), (output.number,)))
        self._done_with(a, b)
        return output

    def norm(self, layer: int, gradient: Value) -> Value:
        """The sum of the squares of a finished gradient, a scalar: this layer's, or slice's, part of the model's.

        Add the parts up over layers, and over the ranks that have others; `update` takes the whole.
        """
        self._check_layer("norm", layer)
        try:
            made = transfer.norm(layer, len(self.layers), self._read(gradient), self._cells)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.NORM, layer, (gradient.number,), (output.number,)))
        self._done_with(gradient)
        return output

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
        specs = [self._read(value) for value in read]
        try:
            made = transfer.update(layer, specs[0], specs[1], specs[2], self._cells, *specs[3:])
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        self._end_in_place(weight)
        self._end_in_place(opt_state)
        new_weight, new_state = self.make(made[0]), self.make(made[1])
        inputs = tuple([value.number for value in read])
        self.ops.append(Op(OpKind.UPDATE, layer, inputs, (new_weight.number, new_state.number)))
        self._done_with(gradient, *read[3:])
        return new_weight, new_state
