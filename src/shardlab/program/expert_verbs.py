"""The verbs of a mixture of experts cut for expert parallelism: dense layers. Experts take `forward`, `backward`."""

from __future__ import annotations

from shardlab.program.norm_verbs import NormVerbs
from shardlab.program.value import Value


class ExpertVerbs(NormVerbs):
    """Passes through dense layers, which carry the residual stream and the routing from one to the next."""

    def forward_dense(
        self, layer: int, carried: Value | None, combined: Value, weight: Value
    ) -> tuple[Value | None, Value]:
        """A dense layer: (what the next dense layer is carried, the experts' buffers, activation l + 1).

        It is given what the dense layer before has carried on, and what the experts between made, activation l. The
        first one is given (None, tokens), the last one gives (None, logits).
        """
        return self._carry_forward("forward_dense", layer, carried, combined, weight)

    def backward_dense(
        self, layer: int, combined: Value, gradient: Value, grad_carried: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """Its backward pass: the gradients of (its weight, activation l, what it was carried).

        `gradient` is that of activation l + 1, `grad_carried` that of what it has carried on.
        """
        return self._carry_backward("backward_dense", layer, combined, gradient, grad_carried, weight)

    def backward_dense_input(
        self, layer: int, combined: Value, gradient: Value, grad_carried: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """The half of `backward_dense` that others wait for; `backward_weight` is the other half."""
        return self._carry_backward_input("backward_dense_input", layer, combined, gradient, grad_carried, weight)
