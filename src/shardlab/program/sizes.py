"""How large each value is: a table of elements, filled by the puzzles' constants or by a real model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shardlab.program.values import AUTOGRAD_KINDS, ONE, ROW_KINDS, Grid, Kind, Spec

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
        tied: whether the last of several half-blocks, the head, computes with the weight of the first one, the
            embedding, and has none of its own (`weights[-1]` is 0).
        residual: elements of the residual stream for one microbatch, which NORM layers hand on beside the activations.
        selective: the layers that selective recomputation computes again: the bodies of attention.
        stats: elements that the loss needs of one slice of the logits, for one microbatch.
    """

    weights: tuple[int, ...]
    opt_states: tuple[int, ...]
    activations: tuple[int, ...]
    saved: tuple[int, ...]
    saved_for_weight: tuple[int, ...] = ()
    element_bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 4))
    kinds: tuple[LayerKind, ...] = ()
    residual: int = 0
    stats: int = 0
    selective: tuple[int, ...] = ()
    tied: bool = False

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

    @classmethod
    def half_blocks(cls, blocks: int, *, tied: bool = False) -> Sizes:
        """The same layer in half-blocks, for tensor parallelism: each body is a matrix, each norm a vector.

        A block has two bodies, of attention and of an MLP; before and after the blocks are the embedding's and the
        head's, one matrix if they are `tied`.
        """
        bodies = 2 + 2 * blocks
        layers = 2 * bodies - 1
        square = PUZZLE_HIDDEN * PUZZLE_HIDDEN
        weights = tuple(square if layer % 2 == 0 else PUZZLE_HIDDEN for layer in range(layers))
        weights = (*weights[:-1], 0) if tied else weights
        return cls(
            weights=weights,
            opt_states=weights,
            activations=(PUZZLE_HIDDEN * PUZZLE_LENGTH,) * (layers + 1),
            saved=(0,) * layers,
            kinds=tuple(LayerKind.NORM if layer % 2 else LayerKind.SLICED for layer in range(layers)),
            residual=PUZZLE_HIDDEN * PUZZLE_LENGTH,
            stats=3 * PUZZLE_LENGTH,
            selective=tuple(range(2, layers - 1, 4)),
            tied=tied,
        )

    def grid(self, tensor_parallel: int, microbatches: int) -> Grid:
        """In what a program counts on so many tensor-parallel ranks: only layers of half-blocks are ever sliced."""
        tied = microbatches * tensor_parallel if self.tied else 0
        return Grid(tensor_parallel, tensor_parallel, tied) if self.kinds else ONE

    def weight_of(self, layer: int) -> int:
        """The layer whose weight a layer computes with: its own, or the one that it is tied to."""
        return 0 if self.tied and layer == self.layers - 1 else layer

    def kind(self, layer: int) -> LayerKind:
        """A layer's kind; WHOLE for one that does not exist."""
        return self.kinds[layer] if 0 <= layer < len(self.kinds) else LayerKind.WHOLE

    def elements(self, spec: Spec) -> int:
        """Elements of a value: its share of the layer, or its microbatches' rows, whole or sliced."""
        kind, layer, holds = spec.kind, spec.layer, spec.holds
        if kind in ROW_KINDS:
            return self._row_elements(spec)
        if kind is Kind.SCALAR:
            return 1
        whole = (self.opt_states if kind is Kind.OPT_STATE else self.weights)[layer]
        return -(-whole * holds.mask.bit_count() // holds.of)

    def _row_elements(self, spec: Spec) -> int:
        kind, layer, (sequence, width, _) = spec.kind, spec.layer, spec.grid
        if kind is Kind.STATS:
            each = self.stats * (spec.sums.bit_count() or width)
        elif kind is Kind.RESIDUAL or kind is Kind.GRAD_RESIDUAL:
            each = self.residual
        elif kind is Kind.SAVED:
            each = self.saved[layer]
        elif kind is Kind.SAVED_FOR_WEIGHT:
            each = (self.saved_for_weight or self.saved)[layer]
        else:
            each = self.activations[layer]
        elements = each * spec.holds.mask.bit_count()
        sliced = spec.sums and (kind in AUTOGRAD_KINDS or (layer == self.layers and kind is not Kind.STATS))
        if sliced:
            return -(-elements * spec.sums.bit_count() // (sequence * width))
        return elements if sequence == 1 else -(-elements // sequence)

    def bytes(self, spec: Spec) -> int:
        return self.elements(spec) * self.element_bytes[spec.kind]
