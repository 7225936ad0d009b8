"""Share of a layer, and of a step, that a rank computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from shardlab.language.rules.kinds import WHOLE, Holds


@dataclass(frozen=True)
class Share:
    """Share of a layer, and of a step, that is computed.

    Attributes:
        pieces: for each index along which the parameters are cut, (number of the piece, number of pieces).
        tokens: ascending positions of the inputs' tokens in the sequence (None: all).
        microbatches: number of microbatches in the input. Each has an equal number of rows, and is routed separately.
        step_microbatches: number of microbatches in the step; each has an equal share of the auxiliary loss.
        experts: the experts to which tokens are sent, or from which results come back, as parts of all experts.
        gradient_scale: factor of all gradients of the layer's backward pass: the loss scale of float16, and the
            program's own factor. A gradient that a primitive adds itself is also multiplied by this factor.
    """

    pieces: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    tokens: Sequence[int] | None = None
    microbatches: int = 1
    step_microbatches: int = 1
    experts: Holds = WHOLE
    gradient_scale: float | Tensor = 1.0

    def piece(self, index: str) -> tuple[int, int]:
        """Return (number of the piece, number of pieces) of an index; (0, 1) for an index that is not cut."""
        return self.pieces.get(index, (0, 1))

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Hashable key of all fields but the gradient scale."""
        tokens = self.tokens if self.tokens is None or isinstance(self.tokens, range) else tuple(self.tokens)
        pieces = tuple(sorted(self.pieces.items()))
        return pieces, tokens, self.microbatches, self.step_microbatches, self.experts


WHOLE_LAYER = Share()
"""Share of a rank that computes the whole layer."""
