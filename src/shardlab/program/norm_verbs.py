"""The verbs of layers that carry a residual: norms of half-blocks, and dense layers between experts."""

from __future__ import annotations

from shardlab.program.compute_verbs import ComputeVerbs
from shardlab.program.sizes import CARRYING
from shardlab.program.value import Value


class NormVerbs(ComputeVerbs):
    """Verbs of layers that carry the residual from one norm to the next."""

    def forward_norm(
        self, layer: int, residual: Value | None, branch: Value, weight: Value, *, save: bool = True
    ) -> tuple[Value | None, Value]:
        """Add the residual to a branch, and normalise the sum.

        Args:
            residual: what the norm before has handed on (None: this is the first norm).
            branch: activation l.
            weight: the norm's weight.
            save: keep what autograd needs. Otherwise the norm must be computed again before its backward pass.

        Returns:
            The residual for the next norm (None: this is the last one), and the normalised activation l + 1.

        Raises:
            Refused: for a layer that carries no residual, and as `forward` does.
        """
        self._want_carrying("forward_norm", layer)
        given = (branch,) if residual is None else (branch, residual)
        normalised, *handed_on = self.forward(layer, given, weight, save=save)
        return handed_on[0] if handed_on else None, normalised

    def backward_norm(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """Compute a norm's backward pass.

        Args:
            branch: activation l, as in the forward pass.
            gradient: the gradient of activation l + 1.
            grad_residual: the gradient of the residual that the norm has handed on (None: it is the last one).
            weight: the norm's weight.

        Returns:
            The gradients of the weight, of the branch, and of the residual that the norm was given (None: it is the
            first).

        Raises:
            Refused: for a layer that carries no residual, and as `backward` does.
        """
        self._want_carrying("backward_norm", layer)
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward(layer, branch, given, weight)
        return made[0], made[1], made[2] if len(made) > 2 else None

    def backward_norm_input(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """Compute the first half of `backward_norm`; `backward_weight` is the second.

        Args:
            branch, gradient, grad_residual, weight: as in `backward_norm`.

        Returns:
            The gradients of the branch, and of the residual that the norm was given (None: it is the first).

        Raises:
            Refused: as `backward_norm` does.
        """
        self._want_carrying("backward_norm_input", layer)
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward_input(layer, branch, given, weight)
        return made[0], made[1] if len(made) > 1 else None

    def _want_carrying(self, verb: str, layer: int) -> None:
        """Refuse a layer that carries no residual: the plain verbs are for it."""
        self._check_layer(verb, layer)
        if (kind := self.sizes.kind(layer)) not in CARRYING:
            plain = verb.replace("_norm", "")
            self.refuse(f"{verb}(layer {layer}): this layer is {kind.value} and carries no residual; use {plain}.")

    forward_dense, backward_dense, backward_dense_input = forward_norm, backward_norm, backward_norm_input
