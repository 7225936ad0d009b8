"""The verbs of layers that carry a residual: norms of half-blocks, and dense layers between experts."""

from __future__ import annotations

from shardlab.program.compute_verbs import ComputeVerbs
from shardlab.program.value import Value


class NormVerbs(ComputeVerbs):
    """Passes through norms, which carry the residual from one to the next."""

    def forward_norm(
        self, layer: int, residual: Value | None, branch: Value, weight: Value, *, save: bool = True
    ) -> tuple[Value | None, Value]:
        """A norm of a model in half-blocks: (the residual for the next norm, the normalised activation l + 1).

        The branch, activation l, is added to the residual that the norm before has handed on. The first norm is given
        no residual, the last one hands none on. With `save=False` nothing is kept for the backward pass; before that
        the norm must be computed again.
        """
        given = (branch,) if residual is None else (branch, residual)
        normalised, *handed_on = self.forward(layer, given, weight, save=save)
        return handed_on[0] if handed_on else None, normalised

    def backward_norm(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """A norm's backward pass: the gradients of (its weight, its branch, the residual that it was given).

        `gradient` is that of activation l + 1, `grad_residual` that of the residual that it has handed on.
        """
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward(layer, branch, given, weight)
        return made[0], made[1], made[2] if len(made) > 2 else None

    def backward_norm_input(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """The half of `backward_norm` that others wait for; `backward_weight` is the other half."""
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward_input(layer, branch, given, weight)
        return made[0], made[1] if len(made) > 1 else None

    forward_dense, backward_dense, backward_dense_input = forward_norm, backward_norm, backward_norm_input
