"""The verbs of a model in half-blocks, which tensor parallelism cuts: norms, and the loss over slices."""

from __future__ import annotations

from shardlab.program import sliced
from shardlab.program.compute_verbs import ComputeVerbs
from shardlab.program.errors import Refused
from shardlab.program.tape import Op, OpKind
from shardlab.program.value import Value
from shardlab.program.values import Spec


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
        return self._carry_forward("forward_norm", layer, residual, branch, weight, save=save)

    def _carry_forward(
        self, op: str, layer: int, residual: Value | None, branch: Value, weight: Value, *, save: bool = True
    ) -> tuple[Value | None, Value]:
        self._check_layer(op, layer)
        self._rule(op, layer, forward=True)
        read = (branch, weight) if residual is None else (branch, weight, residual)
        specs = [self._read(value) for value in read]
        try:
            after, what = self.sizes.next_carrying(layer), self.kinds[layer].value
            made, handed_on = sliced.norm_forward(layer, after, *specs, what=what)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        carried = None if handed_on is None else self.make(handed_on)
        outputs = (output.number,) if carried is None else (output.number, carried.number)
        if save:
            outputs = (*outputs, self._save_of(branch, 0))
        self.ops.append(Op(OpKind.FORWARD, layer, tuple([value.number for value in read]), outputs))
        self._done_with(*read)
        return carried, output

    def backward_norm(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """A norm's backward pass: the gradients of (its weight, its branch, the residual that it was given).

        `gradient` is that of activation l + 1, `grad_residual` that of the residual that it has handed on.
        """
        return self._carry_backward("backward_norm", layer, branch, gradient, grad_residual, weight)

    def _carry_backward(
        self, op: str, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        specs, inputs, read = self._norm_backward(op, layer, branch, gradient, grad_residual, weight)
        made = [self.make(spec) for spec in specs]
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, tuple([value.number for value in made])))
        self._done_with(*read)
        return made[0], made[1], made[2] if len(made) > 2 else None

    def backward_norm_input(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """The half of `backward_norm` that others wait for; `backward_weight` is the other half."""
        return self._carry_backward_input("backward_norm_input", layer, branch, gradient, grad_residual, weight)

    def _carry_backward_input(
        self, op: str, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        specs, inputs, read = self._norm_backward(op, layer, branch, gradient, grad_residual, weight)
        made = [self.make(spec) for spec in specs[1:]]
        branch.saved_for_weight, branch.half_slices = len(self._values), 0
        self._values.append(None)
        outputs = (*(value.number for value in made), branch.saved_for_weight)
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, outputs))
        self._done_with(*read)
        return made[0], made[1] if len(made) > 1 else None

    def _norm_backward(
        self, op: str, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[tuple[Spec, ...], tuple[int, ...], list[Value]]:
        self._check_layer(op, layer)
        self._rule(op, layer, forward=False)
        extra = [] if grad_residual is None else [grad_residual]
        read = [branch, gradient, weight, *extra]
        given = [self._read(value) for value in read]
        try:
            after, what = self.sizes.next_carrying(layer), self.kinds[layer].value
            specs = sliced.norm_backward(layer, after, *given, what=what)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if branch.saved < 0:
            got = f"no forward_{self.kinds[layer].value} has come before it for {given[0]}"
            self.refuse(f"{op}(layer {layer}): {got}; it is not recomputed.")
        saved, branch.saved = branch.saved, -1
        inputs = (branch.number, gradient.number, weight.number, saved, *[value.number for value in extra])
        return specs, inputs, read
