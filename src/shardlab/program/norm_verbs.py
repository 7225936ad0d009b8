"""The verbs of layers that carry a residual: norms of half-blocks, and dense layers between experts."""

from __future__ import annotations

from shardlab.program.compute_verbs import ComputeVerbs
from shardlab.program.sizes import CARRYING
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
        self._want_carrying("forward_norm", layer)
        given = (branch,) if residual is None else (branch, residual)
        normalised, *handed_on = self.forward(layer, given, weight, save=save)
        return handed_on[0] if handed_on else None, normalised

    def backward_norm(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """A norm's backward pass: the gradients of (its weight, its branch, the residual that it was given).

        `gradient` is that of activation l + 1, `grad_residual` that of the residual that it has handed on.
        """
        self._want_carrying("backward_norm", layer)
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward(layer, branch, given, weight)
        return made[0], made[1], made[2] if len(made) > 2 else None

    def backward_norm_input(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """The half of `backward_norm` that others wait for; `backward_weight` is the other half."""
        self._want_carrying("backward_norm_input", layer)
        given = (gradient,) if grad_residual is None else (gradient, grad_residual)
        made = self.backward_input(layer, branch, given, weight)
        return made[0], made[1] if len(made) > 1 else None

    def _want_carrying(self, verb: str, layer: int) -> None:
        """Refuse these verbs for a layer that carries no residual: the plain ones are for it."""
        self._check_layer(verb, layer)
        if (kind := self.sizes.kind(layer)) not in CARRYING:
            plain = verb.replace("_norm", "")
            self.refuse(f"{verb}(layer {layer}): this layer is {kind.value} and carries no residual; use {plain}.")

    forward_dense, backward_dense, backward_dense_input = forward_norm, backward_norm, backward_norm_input
