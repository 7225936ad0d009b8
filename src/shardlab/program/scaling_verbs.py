"""The verbs that change the numbers of a value: plain calls."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import partial

from shardlab.program.ops import OpKind
from shardlab.program.tracing import RankContext
from shardlab.program.values import Value
from shardlab.rules import sums
from shardlab.rules.factor import Factor, factor_of
from shardlab.rules.pieces import mask_of


class ScalingVerbs(RankContext):
    """Gradients multiplied by numbers that are known, or cancel; values in numbers of fewer bytes, or of more."""

    def scale(self, value: Value, by: Factor | Fraction | int) -> Value:
        """A gradient times a rational, or times token counts: those of `tokens`, multiplied and divided.

        Gradients are shares of the step's mean: each microbatch's loss is weighted by its share of the tokens. One that
        was scaled is summed with others that were scaled alike, and is used by an update when all factors cancel.
        Gradients of a weight from the same microbatches may be summed in shares: two halves are all of it.
        """
        spec = self._read(value, "scale")
        if by.__class__ is not Factor:
            if not isinstance(by, int | Fraction) or not by:
                remedy = "give a Fraction that is not 0, or token counts"
                self.refuse("wrong factor", spec.about("scale"), f"{by!r} was given", remedy)
            by = factor_of(by)
        assert isinstance(by, Factor)
        return self._made_of([value], OpKind.SCALE, partial(sums.scale, spec, by), factor=by)

    def cast(self, value: Value, dtype: str = "") -> Value:
        """A copy of a value in other numbers: in fewer bytes to be moved, in more of them to be summed.

        Layers compute in the numbers of a kind, so what was cast is cast back before; a weight's gradient in any dtype
        is good for a norm and an update.

        Args:
            value: a weight, an activation or a gradient.
            dtype: torch's name of them, as `bfloat16`; nothing for those of its kind, as the run's precision says.
        """
        spec = self._read(value, "cast")
        return self._made_of([value], OpKind.CAST, partial(sums.cast, spec, dtype), dtype=dtype)

    def tokens(self, microbatches: Iterable[int] | None = None) -> Factor:
        """How many tokens of some microbatches count in the loss, as a factor (None: those of the whole step).

        The number is known when a step runs; while the program is traced it is a symbol.
        """
        numbers = list(self.microbatches) if microbatches is None else list(microbatches)
        if not numbers or not set(numbers) <= set(self.microbatches):
            remedy = f"give one or more of the microbatches 0-{len(self.microbatches) - 1}"
            self.refuse("unknown microbatch", "tokens", f"{numbers} was given", remedy)
        return factor_of(1, ((mask_of(numbers), 1),))
