"""The verbs of attention over sequences that are cut, for context parallelism."""

from __future__ import annotations

from shardlab.program import attention
from shardlab.program.errors import Refused
from shardlab.program.norm_verbs import NormVerbs
from shardlab.program.tape import Op, OpKind
from shardlab.program.value import Value
from shardlab.program.values import Spec


class AttentionVerbs(NormVerbs):
    """Queries that meet blocks of keys and values, in any order, and the way back."""

    def project(self, layer: int, activation: Value, weight: Value, *, save: bool = True) -> tuple[Value, Value]:
        """A PROJECT layer, on any tokens: their (queries, keys and values), or the heads of the weight's slices.

        With `save=False` nothing is kept for the backward pass; before that the layer must be computed again.
        """
        self._check_layer("project", layer)
        self._rule("project", layer, forward=True)
        try:
            specs = attention.project(layer, self._read(activation), self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        made = [self.make(spec) for spec in specs]
        outputs = [value.number for value in made]
        if save:
            outputs.append(self._save_of(activation, specs[0].parts))
        self.ops.append(Op(OpKind.FORWARD, layer, (activation.number, weight.number), tuple(outputs)))
        self._done_with(activation, weight)
        return made[0], made[1]

    def attend(self, layer: int, queries: Value, keys_values: Value) -> Value:
        """Queries of layer l that meet these keys and values: activation l + 1, or the part of it that they make.

        Parts of other keys and values are added with `+`. The sum is complete, and can be used, when the queries have
        met every slice of the sequence up to their own last one, each once.
        """
        try:
            made = attention.attend(layer, self._read(queries), self._read(keys_values))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.ATTEND, layer, (queries.number, keys_values.number), (output.number,)))
        self._done_with(queries, keys_values)
        return output

    def attend_backward(
        self, layer: int, queries: Value, keys_values: Value, attended: Value, gradient: Value
    ) -> tuple[Value, Value]:
        """What one block gives to the gradients of (the queries, these keys and values); add the parts up with `+`.

        `attended` is the complete activation l + 1, `gradient` its gradient. A block's gradient is complete when all
        queries from its own first slice on have met it, wherever they are.
        """
        read = (queries, keys_values, attended, gradient)
        q, kv, a, g = (self._read(value) for value in read)
        try:
            specs = attention.attend_backward(layer, q, kv, a, g)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        made = [self.make(spec) for spec in specs]
        inputs, outputs = tuple([value.number for value in read]), tuple([value.number for value in made])
        self.ops.append(Op(OpKind.ATTEND_BACKWARD, layer, inputs, outputs))
        self._done_with(*read)
        return made[0], made[1]

    def backward_project(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> tuple[Value, Value]:
        """A PROJECT layer's backward pass: the gradients of (its weight, activation l)."""
        specs, inputs = self._backward_project(layer, activation, grad_queries, grad_keys_values, weight)
        made = [self.make(spec) for spec in specs]
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, tuple([value.number for value in made])))
        self._done_with(activation, grad_queries, grad_keys_values, weight)
        return made[0], made[1]

    def backward_project_input(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> Value:
        """The half that gives activation l's gradient; `backward_weight(l, activation, grad_queries)` is the other."""
        specs, inputs = self._backward_project(layer, activation, grad_queries, grad_keys_values, weight)
        made = self.make(specs[1])
        activation.saved_for_weight, activation.half_slices = len(self._values), specs[1].sums
        self._values.append(None)
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, (made.number, activation.saved_for_weight)))
        self._done_with(activation, grad_queries, grad_keys_values, weight)
        return made

    def _backward_project(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> tuple[tuple[Spec, Spec], tuple[int, ...]]:
        self._check_layer("backward_project", layer)
        self._rule("backward_project", layer, forward=False)
        a, q, kv, w = (self._read(value) for value in (activation, grad_queries, grad_keys_values, weight))
        try:
            specs = attention.project_backward(layer, a, q, kv, w)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if activation.saved < 0:
            self.refuse(f"backward_project(layer {layer}): no project has come before it for {a}.")
        if activation.saved_slices != specs[1].sums:
            self.refuse(f"backward_project(layer {layer}): the projection was by other slices than {w}.")
        saved, activation.saved = activation.saved, -1
        return specs, (activation.number, grad_queries.number, weight.number, saved, grad_keys_values.number)
