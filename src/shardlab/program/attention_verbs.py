"""The verbs of attention over cut sequences, for context parallelism."""

from __future__ import annotations

from shardlab.errors import Refused
from shardlab.program.compute_verbs import ComputeVerbs
from shardlab.program.ops import OpKind
from shardlab.program.tape import compute_op
from shardlab.program.values import Value


class AttentionVerbs(ComputeVerbs):
    """Verbs of attention whose queries meet chunks of keys and values, in any order."""

    def attend(self, layer: int, queries: Value, keys_values: Value) -> Value:
        """Let queries meet one chunk of keys and values; the result is activation l + 1, or a part of it.

        Add the parts of other chunks with `+`. The sum is complete, and can be used, when the queries have met every
        slice of the sequence up to their own last one, each once.

        Raises:
            Refused: for queries and keys of different layers, microbatches or heads, and for a chunk that comes after
                all of the queries.
        """
        return self._one(OpKind.ATTEND, layer, (queries, keys_values), self._rules.attend)

    def attend_backward(
        self, layer: int, queries: Value, keys_values: Value, attention_output: Value, gradient: Value
    ) -> tuple[Value, Value]:
        """Compute what one chunk of keys and values adds to the gradients; add the parts with `+`.

        The gradient of a chunk is complete when all queries from its own first slice on have met it, on whatever rank.

        Args:
            queries, keys_values: as in `attend`.
            attention_output: activation l + 1, complete.
            gradient: its gradient.

        Returns:
            A part of the queries' gradient, and a part of the keys' and values'.

        Raises:
            Refused: as `attend` does, and when `attention_output` is not complete or its gradient is another's.
        """
        read = (queries, keys_values, attention_output, gradient)
        try:
            q, kv, a, g = self._read_all(read, "attend_backward", layer)
            specs = self._rules.attend_backward(layer, q, kv, a, g)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        made = self.make(specs[0]), self.make(specs[1])
        numbers = tuple([value.number for value in read])
        self.ops.append(compute_op(OpKind.ATTEND_BACKWARD, layer, numbers, (made[0].number, made[1].number)))
        self._done_with(*read)
        return made
