"""The verbs of attention over sequences that are cut, for context parallelism."""

from __future__ import annotations

from shardlab.errors import Refused
from shardlab.program.norm_verbs import NormVerbs
from shardlab.program.tape import Op, OpKind
from shardlab.program.value import Value
from shardlab.rules import attention
from shardlab.rules.kind import Kind


class AttentionVerbs(NormVerbs):
    """Queries that meet chunks of keys and values, in any order, and the way back."""

    def project(self, layer: int, activation: Value, weight: Value, *, save: bool = True) -> tuple[Value, Value]:
        """A PROJECT layer, on any tokens: their (queries, keys and values), or the heads of the weight's slices."""
        made = self.forward(layer, (activation,), weight, save=save)
        if len(made) != 2 or made[0].spec.kind is not Kind.QUERIES:
            self.refuse(f"project(layer {layer}): this layer makes no queries, keys and values; use forward.")
        return made[0], made[1]

    def attend(self, layer: int, queries: Value, keys_values: Value) -> Value:
        """Queries of layer l that meet these keys and values: activation l + 1, or the part of it that they make.

        Parts of other keys and values are added with `+`. The sum is complete, and can be used, when the queries have
        met every slice of the sequence up to their own last one, each once.
        """
        return self._one(OpKind.ATTEND, layer, (queries, keys_values), attention.attend)

    def attend_backward(
        self, layer: int, queries: Value, keys_values: Value, attended: Value, gradient: Value
    ) -> tuple[Value, Value]:
        """What one chunk gives to the gradients of (the queries, these keys and values); add the parts up with `+`.

        `attended` is the complete activation l + 1, `gradient` its gradient. A chunk's gradient is complete when all
        queries from its own first slice on have met it, wherever they are.
        """
        read = (queries, keys_values, attended, gradient)
        try:
            q, kv, a, g = (self._read(value) for value in read)
            specs = attention.attend_backward(layer, q, kv, a, g)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        made = self.make(specs[0]), self.make(specs[1])
        numbers = tuple([value.number for value in read])
        self.ops.append(Op(OpKind.ATTEND_BACKWARD, layer, numbers, (made[0].number, made[1].number)))
        self._done_with(*read)
        return made

    def backward_project(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> tuple[Value, Value]:
        """A PROJECT layer's backward pass: the gradients of (its weight, activation l)."""
        own, made = self.backward(layer, activation, (grad_queries, grad_keys_values), weight)
        return own, made

    def backward_project_input(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> Value:
        """The half that gives activation l's gradient; `backward_weight(l, activation, grad_queries)` is the other."""
        return self.backward_input(layer, activation, (grad_queries, grad_keys_values), weight)[0]
