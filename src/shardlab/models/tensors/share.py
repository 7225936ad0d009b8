"""Which share of a layer, and of a step, a rank computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from shardlab.language.rules.kinds import WHOLE, Holds


@dataclass(frozen=True)
class Share:
    """Which share of a layer, and of a step, is computed.

    Attributes:
        pieces: for each index that the parameters given are cut along, (number of the piece, how many there are).
        tokens: which of the sequence's tokens the inputs are of, ascending (None: all).
        microbatches: how many the input's rows are, with equally many rows each; each is routed by itself.
        of_step: how many the step has; each has an equal share of the tokens that are routed.
        experts: the experts that tokens are sent to, or come back from: any of so many equal parts of all.
        gradient_scale: by what the gradients given to the layer's backward pass are multiplied: the scale of losses in
            float16, and the program's own factor. A gradient that a primitive adds itself is multiplied by it too.
    """

    pieces: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    tokens: Sequence[int] | None = None
    microbatches: int = 1
    of_step: int = 1
    experts: Holds = WHOLE
    gradient_scale: float | Tensor = 1.0

    def piece(self, index: str) -> tuple[int, int]:
        """(number of the piece, how many there are) of an index."""
        return self.pieces.get(index, (0, 1))

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What two equal shares have in common, whatever their gradients are multiplied by, to be looked up by."""
        tokens = self.tokens if self.tokens is None or isinstance(self.tokens, range) else tuple(self.tokens)
        pieces = tuple(sorted(self.pieces.items()))
        return pieces, tokens, self.microbatches, self.of_step, self.experts


ALL = Share()
"""The whole layer."""
