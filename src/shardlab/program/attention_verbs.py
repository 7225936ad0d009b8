"""The verbs of attention over cut sequences, for context parallelism."""

from __future__ import annotations

from shardlab.errors import Refused
from shardlab.program.norm_verbs import NormVerbs
from shardlab.program.ops import OpKind
from shardlab.program.tape import Op
from shardlab.program.value import Value
from shardlab.rules import attention
from shardlab.rules.kind import Kind


class AttentionVerbs(NormVerbs):
    """Verbs of attention whose queries meet chunks of keys and values, in any order."""

    def project(self, layer: int, activation: Value, weight: Value, *, save: bool = True) -> tuple[Value, Value]:
        """Project an activation to queries, and to keys and values; each rank may have any tokens and heads.

        Args:
            activation: activation l.
            weight: the layer's weight, complete or some heads of it.
            save: as in `forward`.

        Returns:
            The queries, and the keys and values as one value; of the weight's heads.

        Raises:
            Refused: for a layer that makes no queries, and as `forward` does.
        """
        made = self.forward(layer, (activation,), weight, save=save)
        if len(made) != 2 or made[0].spec.kind is not Kind.QUERIES:
            self.refuse(f"project(layer {layer}): this layer makes no queries, keys and values; use forward.")
        return made[0], made[1]

    def attend(self, layer: int, queries: Value, keys_values: Value) -> Value:
        """Let queries meet one chunk of keys and values; the result is activation l + 1, or a part of it.

        Add the parts of other chunks with `+`. The sum is complete, and can be used, when the queries have met every
        slice of the sequence up to their own last one, each once.

        Raises:
            Refused: for queries and keys of different layers, microbatches or heads, and for a chunk that comes after
                all of the queries.
        """
        return self._one(OpKind.ATTEND, layer, (queries, keys_values), attention.attend)

    def attend_backward(
        self, layer: int, queries: Value, keys_values: Value, attended: Value, gradient: Value
    ) -> tuple[Value, Value]:
        """Compute what one chunk of keys and values adds to the gradients; add the parts with `+`.

        The gradient of a chunk is complete when all queries from its own first slice on have met it, on whatever rank.

        Args:
            queries, keys_values: as in `attend`.
            attended: activation l + 1, complete.
            gradient: its gradient.

        Returns:
            A part of the queries' gradient, and a part of the keys' and values'.

        Raises:
            Refused: as `attend` does, and when `attended` is not complete or its gradient is another's.
        """
        read = (queries, keys_values, attended, gradient)
        try:
            q, kv, a, g = [self._read(value, "attend_backward", layer) for value in read]
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
        """Compute the backward pass of `project`.

        Returns:
            The gradients of the weight and of activation l.

        Raises:
            Refused: as `backward` does; both given gradients must be complete.
        """
        own, made = self.backward(layer, activation, (grad_queries, grad_keys_values), weight)
        return own, made

    def backward_project_input(
        self, layer: int, activation: Value, grad_queries: Value, grad_keys_values: Value, weight: Value
    ) -> Value:
        """Compute the first half of `backward_project`: activation l's gradient.

        `backward_weight(l, activation, grad_queries)` is the second half.

        Raises:
            Refused: as `backward_project` does.
        """
        return self.backward_input(layer, activation, (grad_queries, grad_keys_values), weight)[0]
