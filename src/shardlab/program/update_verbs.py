"""The verbs that make one gradient of several, and a step of the optimizer of it: plain calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardlab.errors import Refused
from shardlab.program.ops import OpKind
from shardlab.program.rank_values import LoadingVerbs
from shardlab.program.tape import compute_op
from shardlab.program.values import Value
from shardlab.rules import sums, update
from shardlab.rules.spec import Spec

Values = tuple[Value, ...]

# named once: on Python 3.11 an enum's member is ten times as slow to look up as a global
ADD, UPDATE = OpKind.ADD, OpKind.UPDATE


class UpdateVerbs(LoadingVerbs):
    """Verbs that add gradients, and that update weights by them; refusals are as of `ComputeVerbs`."""

    def add(self, a: Value, b: Value) -> Value:
        """Add two weight gradients, two scalars, or two terms of one value; also written `a + b`.

        Terms are partial results: of slices of a layer, or of attention to some of the keys and values.

        Raises:
            Refused: for values of different layers, kinds or slices, and when a contribution would be counted twice.
        """
        try:
            made = sums.add_two(self._read(a, "add"), self._read(b, "add"))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(compute_op(ADD, made[0].layer, (a.number, b.number), (output.number,)))
        self._done_with(a, b)
        return output

    def accumulate(self, gradient: Value) -> None:
        """Add a weight's gradient to the one that `grad_weights` has of this weight, or put it there as the first.

        Raises:
            Refused: as `add` does.
        """
        layer, sums = self._read(gradient, "accumulate").layer, self.grad_weights
        sums[layer] = self.add(sums[layer], gradient) if layer in sums else gradient

    def norm(self, layer: int, gradient: Value) -> Value:
        """Compute the sum of the squares of a finished gradient: a scalar, one layer's or slice's part of the model's.

        Add the parts of all layers, and `all_reduce` them over the ranks that have others; `update` takes the sum.

        Raises:
            Refused: for a gradient that lacks a microbatch, and for what is no weight's gradient.
        """
        self._check_layer("norm", layer)
        return self._one(OpKind.NORM, layer, (gradient,), partial(update.norm, len(self.layers)))

    def wants_norm(self) -> bool:
        """Whether the optimizer may limit the norm of the whole gradient: of real models; the puzzles' has no limit."""
        return self._world.sizes.clips

    def wants_direction(self, layer: int) -> bool:
        """Whether the optimizer steps whole matrices of a layer, as Muon does: to update a slice takes a direction."""
        return layer in self._rules.directed

    def direction(self, layer: int, gradient: Value, opt_state: Value, norm: Value | None = None) -> Value:
        """Compute the way in which an optimizer would go with a finished gradient; of the optimizer state's slices.

        Muon goes along a momentum, and makes whole matrices of it orthogonal. Where ranks have slices of a layer,
        `all_gather` their directions, and give the whole to `update`. The optimizer state stays as it is.

        Args:
            gradient: of the optimizer state's slice, or of more.
            opt_state, norm: those that `update` is given.

        Raises:
            Refused: as `update` does, and where no direction is wanted (see `wants_direction`).
        """
        self._check_layer("direction", layer)
        read = (gradient, opt_state) if norm is None else (gradient, opt_state, norm)

        def rule(layer: int, *specs: Spec) -> Spec:
            return self._rules.direction(layer, specs, self._world.trained)

        return self._one(OpKind.DIRECTION, layer, read, rule)

    def update(
        self,
        layer: int,
        gradient: Value,
        weight: Value,
        opt_state: Value,
        norm: Value | None = None,
        direction: Value | None = None,
    ) -> tuple[Value, Value]:
        """Take the optimizer's step on one slice. The old weight and optimizer state end here, in place.

        Args:
            gradient, weight: of the optimizer state's slice, or of more.
            opt_state: this step's optimizer state.
            norm: the sum of squares of the whole model's gradient (None: no clipping). The gradient is clipped to the
                optimizer's limit; if the norm is not finite, weight and optimizer state stay as they are.
            direction: of whole matrices, where the optimizer steps these and the optimizer state is cut.

        Returns:
            The new weight, of the optimizer state's slice alone, and the new optimizer state.

        Raises:
            Refused: when a microbatch is missing from the gradient, for values of different layers, slices or steps,
                for a norm that lacks a part of the model, and for a part of a matrix without its direction.
        """
        self._check_layer("update", layer)
        read = (gradient, weight, opt_state, *(each for each in (norm, direction) if each is not None))
        try:
            specs = self._read_all(read, "update", layer)
            made = self._rules.update(layer, specs, self._world.trained)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        self._end_in_place(weight)
        self._end_in_place(opt_state)
        new_weight, new_state = self.make(made[0]), self.make(made[1])
        inputs = tuple([value.number for value in read])
        self.ops.append(compute_op(UPDATE, layer, inputs, (new_weight.number, new_state.number)))
        self._done_with(gradient, *read[3:])
        return new_weight, new_state

    def _one(self, kind: OpKind, layer: int, read: Values, rule: Callable[..., Spec]) -> Value:
        """Record an op that makes one value of the values that it reads."""
        verb = kind.row.name
        try:
            made = rule(layer, *self._read_all(read, verb, layer))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(compute_op(kind, layer, tuple([value.number for value in read]), (output.number,)))
        self._done_with(*read)
        return output
