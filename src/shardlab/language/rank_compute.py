"""Verbs that compute: passes of layers, attention, the loss, sums and updates. They are plain calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import overload

from shardlab.common.errors import Refused, about_layer
from shardlab.language.ops import OpKind
from shardlab.language.rules import arithmetic, optimizer_step
from shardlab.language.rules.kinds import Holds
from shardlab.language.rules.layer_rules import BackwardResult
from shardlab.language.rules.spec import Spec
from shardlab.language.tape import compute_op
from shardlab.language.tracing import Tracer
from shardlab.language.values import Value

Values = tuple[Value, ...]

Part = tuple[int, int]
"""(index from 0, number of equal parts) of a layer's experts."""

# named once, since Python 3.11 looks up an enum's member ten times as slowly as a global
FORWARD, RECOMPUTE = OpKind.FORWARD, OpKind.RECOMPUTE
BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
ADD, UPDATE = OpKind.ADD, OpKind.UPDATE


class ComputeVerbs(Tracer):
    """Verbs that compute passes of layers, attention to chunks of keys and values, the loss, sums, norms and updates.

    `forward` returns one value for one input, and a tuple if its inputs are a tuple. A layer with several inputs or
    several outputs needs the tuple. Every verb raises `Refused`, with the rank, the op and the line, for a value that
    was freed, that belongs to another rank or that is still a handle, and for a layer that does not exist.
    """

    @overload
    def forward(
        self, layer: int, inputs: Value, weight: Value, *, save: bool = True, part: Part | None = None
    ) -> Value: ...
    @overload
    def forward(
        self, layer: int, inputs: Values, weight: Value, *, save: bool = True, part: Part | None = None
    ) -> Values: ...

    def forward(
        self, layer: int, inputs: Value | Values, weight: Value, *, save: bool = True, part: Part | None = None
    ) -> Value | Values:
        """Compute a layer's outputs from its inputs: activation l + 1 from activation l.

        The values that the backward pass needs are saved with the first input, separately for each slice of the weight.

        Args:
            inputs: the layer's input; a tuple if it has several.
            weight: the layer's weight, complete or a slice along one of the layer's cut indices.
            save: save the values that the backward pass needs. Otherwise `backward` recomputes them, if the layer has
                one input and one output; for any other layer, call `forward` again before its backward pass.
            part: (which, of how many) equal parts of the experts. A layer that dispatches tokens to experts then
                outputs the buffers of this part only, for a program in which other ranks with the same tokens compute
                the other parts. The gradients of the layer's inputs and weight are then terms of a sum.

        Returns:
            The output; a tuple if `inputs` is a tuple.

        Raises:
            Refused: for a stale or incomplete weight, for inputs of another layer, for inputs that do not belong
                together, and for an input that is a term of a sum.
        """
        self._check_layer("forward", layer)
        operands = inputs if isinstance(inputs, tuple) else (inputs,)
        rules = self._rules.layers[layer]
        experts = None if part is None else self._expert_part(layer, part)
        try:
            specs = self._read_all(operands, "forward", layer)
            output_specs, saved_spec = rules.forward(specs, self._read(weight, "forward", layer), "forward", experts)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        first_input, start = operands[0], len(self._values)
        outputs = self._make_all(output_specs)
        if save:
            if first_input.saved_values is None:
                first_input.saved_values = {}
            first_input.saved_values[saved_spec[0]] = len(self._values)
            self._values.append(saved_spec)
        numbers = (first_input.number, weight.number)
        if len(operands) > 1:
            numbers += tuple([value.number for value in operands[1:]])
        self.ops.append(compute_op(FORWARD, layer, numbers, tuple(range(start, len(self._values))), experts))
        self._done_with(weight, *operands)
        if operands is inputs:
            return tuple(outputs)
        if len(outputs) > 1:
            fault = f"this layer makes {len(outputs)} values"
            self.refuse("wrong number", about_layer("forward", layer), fault, "give its inputs as a tuple")
        return outputs[0]

    @overload
    def backward(self, layer: int, activation: Value, gradients: Value, weight: Value) -> tuple[Value, Value]: ...
    @overload
    def backward(self, layer: int, activation: Value, gradients: Values, weight: Value) -> Values: ...

    def backward(self, layer: int, activation: Value, gradients: Value | Values, weight: Value) -> Values:
        """Compute a layer's backward pass.

        It consumes the values that `forward` saved. If `forward` saved none, it recomputes the layer first, which is
        possible if the layer has one input and one output.

        Args:
            activation: the first input of the forward pass.
            gradients: the gradient of the layer's output; a tuple if it has several.
            weight: the layer's weight, with the same slices as in the forward pass.

        Returns:
            The weight's gradient, then the gradient of each input.

        Raises:
            Refused: when no forward pass came before or it used other slices of the weight; for a stale or incomplete
                weight; and for a gradient of other microbatches or another layer, or one that is a term of a sum.
        """
        specs, _, inputs, operands = self._backward("backward", layer, activation, gradients, weight)
        start = len(self._values)
        outputs = tuple(self._make_all(specs))
        self.ops.append(compute_op(BACKWARD, layer, inputs, tuple(range(start, len(self._values)))))
        self._done_with(*operands)
        return outputs

    @overload
    def backward_input(self, layer: int, activation: Value, gradients: Value, weight: Value) -> Value: ...
    @overload
    def backward_input(self, layer: int, activation: Value, gradients: Values, weight: Value) -> Values: ...

    def backward_input(self, layer: int, activation: Value, gradients: Value | Values, weight: Value) -> Value | Values:
        """Compute the first half of a backward pass: the gradients of the inputs, which the layer below needs.

        `backward_weight` is the second half. It reads the same activation and gradient: keep both in their stores until
        then.

        Args:
            activation, gradients, weight: as in `backward`.

        Returns:
            The gradient of the input; a tuple if `gradients` is a tuple.

        Raises:
            Refused: as `backward` does.
        """
        specs, result, inputs, operands = self._backward("backward_input", layer, activation, gradients, weight)
        start = len(self._values)
        outputs = self._make_all(specs[1:])
        activation.saved_for_weight = len(self._values)
        self._values.append(Spec(result.half_form, activation.spec[1]))
        self.ops.append(compute_op(BACKWARD_INPUT, layer, inputs, tuple(range(start, len(self._values)))))
        self._done_with(*operands)
        return tuple(outputs) if isinstance(gradients, tuple) else outputs[0]

    def backward_weight(self, layer: int, activation: Value, gradient: Value) -> Value:
        """Compute the second half of a backward pass: the weight's gradient, at any time after `backward_input`.

        Args:
            activation: the first input of the forward pass.
            gradient: the gradient of the first output.

        Raises:
            Refused: when no `backward_input` of this activation came before, and for a gradient of other microbatches.
        """
        verb = "backward_weight"
        self._check_layer(verb, layer)
        activation_spec, grad_spec = self._read(activation, verb, layer), self._read(gradient, verb, layer)
        half = activation.saved_for_weight
        if half < 0:
            fault = f"no backward_input has come before it for {activation.spec}"
            self.refuse("no forward", about_layer(verb, layer), fault, "call it first: it saves the input of this half")
        half_spec = self._values[half]
        assert isinstance(half_spec, Spec), "what layers keep is known by its spec alone"
        try:
            output_spec = self._rules.layers[layer].backward_weight(activation_spec, [grad_spec], half_spec)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        grad_weight = self.make(output_spec)
        activation.saved_for_weight = -1
        numbers = (activation.number, gradient.number, half)
        self.ops.append(compute_op(BACKWARD_WEIGHT, layer, numbers, (grad_weight.number,)))
        self._done_with(activation, gradient)
        return grad_weight

    def attend(self, layer: int, queries: Value, keys_values: Value) -> Value:
        """Compute attention of queries to one chunk of keys and values: activation l + 1, or a part of it.

        Add the parts of other chunks with `+`. The sum can be used when it is complete: the queries have then met all
        slices of keys and values up to their own last slice, each exactly once.

        Raises:
            Refused: for queries and keys of different layers, microbatches or heads, and for a chunk that comes after
                all of the queries.
        """
        return self._compute(OpKind.ATTEND, layer, (queries, keys_values), self._rules.attend)

    def attend_backward(
        self, layer: int, queries: Value, keys_values: Value, attention_output: Value, gradient: Value
    ) -> tuple[Value, Value]:
        """Compute the part of the gradients that comes from one chunk of keys and values. Add the parts with `+`.

        The gradient of a chunk is complete when all queries from the chunk's first slice on have met it, on any rank.

        Args:
            queries, keys_values: as in `attend`.
            attention_output: activation l + 1, complete.
            gradient: the gradient of `attention_output`.

        Returns:
            A part of the queries' gradient, and a part of the keys' and values'.

        Raises:
            Refused: as `attend` does, and when `attention_output` is not complete or `gradient` is not its gradient.
        """
        operands = (queries, keys_values, attention_output, gradient)
        try:
            q, kv, a, g = self._read_all(operands, "attend_backward", layer)
            specs = self._rules.attend_backward(layer, q, kv, a, g)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        grads = self.make(specs[0]), self.make(specs[1])
        numbers = tuple([value.number for value in operands])
        self.ops.append(compute_op(OpKind.ATTEND_BACKWARD, layer, numbers, (grads[0].number, grads[1].number)))
        self._done_with(*operands)
        return grads

    def loss(self, activation: Value, stats: Value | None = None) -> Value:
        """Compute the gradient of the loss with respect to the last activation.

        Args:
            activation: the last layer's output, or slices of its vocabulary.
            stats: for slices, the `loss_stats` of all slices, gathered.

        Returns:
            The gradient, for the slices of `activation`.

        Raises:
            Refused: for another activation, for a term of a sum, and for slices without the statistics of all slices.
        """
        operands = (activation,) if stats is None else (activation, stats)
        return self._compute(OpKind.LOSS, len(self.layers), operands, optimizer_step.loss)

    def loss_stats(self, logits: Value) -> Value:
        """Compute the statistics of a slice of the logits that the loss needs: three numbers a token.

        `all_gather` the result over the ranks that have the other slices, and pass it to `loss`.

        Raises:
            Refused: for anything but slices of the last activation.
        """
        return self._compute(OpKind.LOSS_STATS, len(self.layers), (logits,), optimizer_step.loss_stats)

    def add(self, a: Value, b: Value) -> Value:
        """Add two weight gradients, two scalars, or two terms of one value; also written `a + b`.

        A term is a partial result of a slice of a layer, or of attention to some of the keys and values.

        Raises:
            Refused: for values of different layers, kinds or slices, and when a contribution would be counted twice.
        """
        try:
            spec = arithmetic.add_two(self._read(a, "add"), self._read(b, "add"))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(spec)
        self.ops.append(compute_op(ADD, spec[0].layer, (a.number, b.number), (output.number,)))
        self._done_with(a, b)
        return output

    def norm(self, layer: int, gradient: Value) -> Value:
        """Compute the sum of squares of a finished gradient, as a part of the squared norm of the model's gradient.

        Add the parts of all layers, and `all_reduce` the sum over the ranks that have other layers or slices. Pass the
        result to `update`.

        Raises:
            Refused: for a gradient that lacks a microbatch, and for any other kind of value.
        """
        self._check_layer("norm", layer)
        return self._compute(OpKind.NORM, layer, (gradient,), partial(optimizer_step.norm, len(self.layers)))

    def wants_norm(self) -> bool:
        """Return whether `update` needs a norm, because the optimizer may clip. The puzzles' optimizer never does."""
        return self._world.sizes.clips

    def direction(self, layer: int, gradient: Value, opt_state: Value, norm: Value | None = None) -> Value:
        """Compute the direction of an optimizer's step, for an optimizer such as Muon that updates whole matrices.

        Muon orthogonalizes the momentum of whole matrices. If ranks have slices of a layer, each computes the direction
        of its slice; `all_gather` the slices, and pass the result to `update`. The optimizer state does not change.

        Args:
            gradient: the layer's gradient, with at least the optimizer state's slice.
            opt_state, norm: the arguments for `update`.

        Raises:
            Refused: as `update` does, and if the update needs no direction (see `wants_direction`).
        """
        self._check_layer("direction", layer)
        operands = (gradient, opt_state) if norm is None else (gradient, opt_state, norm)

        def rule(layer: int, *specs: Spec) -> Spec:
            return self._rules.direction(layer, specs, self._world.trained)

        return self._compute(OpKind.DIRECTION, layer, operands, rule)

    def wants_direction(self, layer: int) -> bool:
        """Return whether `update` of a slice of this layer needs a direction, because Muon updates matrices whole."""
        return layer in self._rules.directed

    def update(
        self,
        layer: int,
        gradient: Value,
        weight: Value,
        opt_state: Value,
        norm: Value | None = None,
        direction: Value | None = None,
    ) -> tuple[Value, Value]:
        """Take the optimizer's step on one slice. It overwrites the old weight and optimizer state.

        Args:
            gradient, weight: the layer's gradient and weight, with at least the optimizer state's slice.
            opt_state: this step's optimizer state.
            norm: the sum of squares of the whole model's gradient (None: no clipping). The gradient is clipped to the
                optimizer's limit; if the norm is not finite, weight and optimizer state stay as they are.
            direction: the direction of whole matrices. Needed if the optimizer updates whole matrices and the optimizer
                state is a slice.

        Returns:
            The new weight, which has only the optimizer state's slice, and the new optimizer state.

        Raises:
            Refused: when a microbatch is missing from the gradient, for values of different layers, slices or steps,
                for a norm that lacks a part of the model, and for a slice of a matrix without its direction.
        """
        self._check_layer("update", layer)
        operands = (gradient, weight, opt_state, *(optional for optional in (norm, direction) if optional is not None))
        try:
            specs = self._read_all(operands, "update", layer)
            new_specs = self._rules.update(layer, specs, self._world.trained)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        self._end_in_place(weight)
        self._end_in_place(opt_state)
        new_weight, new_state = self.make(new_specs[0]), self.make(new_specs[1])
        inputs = tuple([value.number for value in operands])
        self.ops.append(compute_op(UPDATE, layer, inputs, (new_weight.number, new_state.number)))
        self._done_with(gradient, *operands[3:])
        return new_weight, new_state

    def _expert_part(self, layer: int, part: Part) -> Holds:
        """Return one of equal parts of the experts.

        Raises:
            Refused: when there is no such part.
        """
        number, of = part
        if not 0 <= number < of:
            fault = f"part {number} of {of} was asked for"
            self.refuse("unknown slice", about_layer("forward", layer), fault, "count parts from 0, below their number")
        return Holds(1 << number, of)

    def _backward(
        self, op: str, layer: int, activation: Value, gradients: Value | Values, weight: Value
    ) -> tuple[list[Spec], BackwardResult, tuple[int, ...], Values]:
        """Derive a backward pass.

        Returns:
            The specs of both halves' outputs, the forms of the pass's results, the numbers of the values that the op
            reads, and the values that the program passed.
        """
        self._check_layer(op, layer)
        output_grads = gradients if isinstance(gradients, tuple) else (gradients,)
        rules = self._rules.layers[layer]
        try:
            spec, weight_spec = self._read(activation, op, layer), self._read(weight, op, layer)
            specs, result = rules.backward(spec, self._read_all(output_grads, op, layer), weight_spec, op)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if output_grads[0] is gradients and len(specs) > 2:
            fault = f"this layer read {len(specs) - 1} values"
            self.refuse("wrong number", about_layer(op, layer), fault, "give the gradients as a tuple")
        saved_values = activation.saved_values or {}
        saved_number = saved_values.pop(result.saved_form, -1)
        if saved_values and saved_number < 0:
            fault = f"the forward pass was by other slices of the layer than {weight.spec} and its gradient"
            self.refuse("other forward", about_layer(op, layer), fault, "give the slices of the forward pass")
        if saved_number < 0:
            if not rules.layer.recomputed:
                fault = f"no forward has come before it for {spec}, and a layer of several values is not recomputed"
                self.refuse("no forward", about_layer(op, layer), fault, "call forward before it, with save=True")
            saved_number = len(self._values)
            self._values.append(Spec(result.saved_form, spec.cells))
            self.ops.append(compute_op(RECOMPUTE, layer, (activation.number, weight.number), (saved_number,)))
        numbers = (activation.number, output_grads[0].number, weight.number, saved_number)
        if len(output_grads) > 1:
            numbers += tuple([value.number for value in output_grads[1:]])
        return specs, result, numbers, (activation, weight, *output_grads)

    def _compute(self, kind: OpKind, layer: int, operands: Values, rule: Callable[..., Spec]) -> Value:
        """Record an op of a layer with one output, whose spec the rule derives from the inputs."""
        verb = kind.row.name
        try:
            spec = rule(layer, *self._read_all(operands, verb, layer))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(spec)
        self.ops.append(compute_op(kind, layer, tuple([value.number for value in operands]), (output.number,)))
        self._done_with(*operands)
        return output
