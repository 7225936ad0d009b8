"""How large each value is: a table of elements, filled by the puzzles' constants or by a real model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shardlab.program.values import Kind, Spec

PUZZLE_HIDDEN = 512
PUZZLE_LENGTH = 256


class LayerKind(Enum):
    """What a layer makes of its input when tensor parallelism slices the model.

    - WHOLE: not for slicing; activation to activation.
    - NORM: (residual, branch) to (residual, normalised); parameters replicated, any slice of the sequence alone.
    - SLICED: normalised to branch; every parameter sliced, the result a partial sum over the slices (of the last
      layer: a slice of the logits).
    """

    WHOLE = "whole"
    NORM = "norm"
    SLICED = "sliced"


@dataclass(frozen=True)
class Sizes:
    """Elements of every value of a model, whole layers and single microbatches.

    Attributes:
        weights: elements of layer l's parameters (its gradient has as many).
        opt_states: elements of layer l's optimizer state.
        activations: elements of activation l for one microbatch, l = 0 .. layers (its gradient has as many).
        saved: elements that autograd keeps between forward and backward of layer l for one microbatch,
            beyond the layer's input.
        saved_for_weight: what is left of that between the two halves of a split backward pass, with the gradients that
            the first half keeps for the second, beyond those of the layer's output (empty: as much as `saved`).
        element_bytes: bytes of one element, by kind.
        kinds: each layer's kind (empty: all WHOLE).
        residual: elements of the residual stream for one microbatch, which NORM layers hand on beside the activations.
    """

    weights: tuple[int, ...]
    opt_states: tuple[int, ...]
    activations: tuple[int, ...]
    saved: tuple[int, ...]
    saved_for_weight: tuple[int, ...] = ()
    element_bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 4))
    kinds: tuple[LayerKind, ...] = ()
    residual: int = 0

    @property
    def layers(self) -> int:
        return len(self.weights)

    @classmethod
    def puzzle(cls, layers: int) -> Sizes:
        """The LLM Training Puzzles' layer: a 512 x 512 matrix, 256 tokens a microbatch, nothing saved by autograd."""
        square = PUZZLE_HIDDEN * PUZZLE_HIDDEN
        return cls(
            weights=(square,) * layers,
            opt_states=(square,) * layers,
            activations=(PUZZLE_HIDDEN * PUZZLE_LENGTH,) * (layers + 1),
            saved=(0,) * layers,
        )

    def elements(self, spec: Spec) -> int:
        """Elements of a value: its share of the layer, or its microbatches' rows."""
        kind, layer, holds = spec.kind, spec.layer, spec.holds
        if kind is Kind.ACTIVATION or kind is Kind.GRAD_ACTIVATION:
            return self.activations[layer] * holds.mask.bit_count()
        if kind is Kind.SAVED:
            return self.saved[layer] * holds.mask.bit_count()
        if kind is Kind.SAVED_FOR_WEIGHT:
            return (self.saved_for_weight or self.saved)[layer] * holds.mask.bit_count()
        if kind is Kind.SCALAR:
            return 1
        whole = (self.opt_states if kind is Kind.OPT_STATE else self.weights)[layer]
        return -(-whole * holds.mask.bit_count() // holds.of)

    def bytes(self, spec: Spec) -> int:
        return self.elements(spec) * self.element_bytes[spec.kind]
