"""Sizes of values: a table of elements, filled by the puzzles' constants or by a real model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from shardlab.program.mesh import Mesh
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.spec import Space, Spec

PUZZLE_HIDDEN = 512
PUZZLE_LENGTH = 256


class LayerKind(Enum):
    """Kinds of layer, by what they make of their input when tensor or expert parallelism slices the model.

    - WHOLE: not for slicing; activation to activation.
    - NORM: (residual, branch) to (residual, normalised); parameters replicated, any slice of the sequence alone.
    - SLICED: normalised to branch; every parameter sliced, the result a partial sum over the slices (of the last
      layer: a slice of the logits).
    - DENSE: (carried, combined) to (carried, dispatched); parameters replicated, one buffer for each expert made.
    - EXPERTS: dispatched to combined; parameters sliced by expert, each on its own buffers.
    - TOKENWISE: as SLICED, but each token alone, so that any slice of the sequence can be computed.
    - COLUMN: complete input to slices of the output, side by side: each slice of the matrix has some of its columns.
    - ROW: slices of the input, side by side, to terms of the output: the matrix's slices have the rows for these.
    - PROJECT: as COLUMN, with two outputs, queries and keys and values, cut by heads; the next layer is a ROW and reads
      what attention mixes of them. COLUMN, ROW and PROJECT take each token alone.
    """

    WHOLE = "whole"
    NORM = "norm"
    SLICED = "sliced"
    DENSE = "dense"
    EXPERTS = "experts"
    TOKENWISE = "tokenwise"
    COLUMN = "column"
    ROW = "row"
    PROJECT = "project"

    __hash__ = object.__hash__  # kinds are looked up in sets on the hot path


CARRYING = frozenset({LayerKind.NORM, LayerKind.DENSE})
"""Layers that hand a residual to the next one of their kind, beside the activation."""

PARTED = frozenset(LayerKind) - {LayerKind.WHOLE, *CARRYING}
"""Layers whose parameters are sliced over `tp` or `ep`."""

SLICE, HEAD, EXPERT = "slice", "head", "expert"
"""Indices along which parameters are cut: features side by side, attention's heads, experts."""


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
        residual: elements of what NORM and DENSE layers hand on beside the activations, for one microbatch.
        blocks: where the blocks of half-blocks begin, each with a norm, and where the last one ends.
        stats: elements that the loss needs of one slice of the logits, for one microbatch.
        queries, keys_values: elements of a PROJECT layer's results, for one microbatch.
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
    blocks: tuple[int, ...] = ()
    queries: int = 0
    keys_values: int = 0
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
    def of_puzzle(cls, layers: int, mesh: Mesh) -> Sizes:
        """The puzzles' model with so many layers, or blocks where a mesh slices them."""
        if mesh.ep > 1:
            return cls.mixture(layers)
        if mesh.cp > 1:
            return cls.context_blocks(layers)
        return cls.half_blocks(layers) if mesh.tp > 1 else cls.puzzle(layers)

    @classmethod
    def half_blocks(cls, blocks: int, *, tied: bool = False) -> Sizes:
        """The puzzles' layer in half-blocks, for tensor parallelism: each body is a matrix, each norm a vector.

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
            blocks=tuple(range(1, layers - 1, 4)),
            tied=tied,
        )

    @classmethod
    def columns(cls, layers: int) -> Sizes:
        """The puzzles' layer cut by columns: each slice of its matrix makes a slice of its output."""
        return replace(cls.puzzle(layers), kinds=(LayerKind.COLUMN,) * layers, stats=3 * PUZZLE_LENGTH)

    @classmethod
    def mixture(cls, blocks: int) -> Sizes:
        """The same layer with experts, for expert parallelism: in each block a dense matrix, and one of all experts."""
        kinds = (*(LayerKind.DENSE, LayerKind.EXPERTS) * blocks, LayerKind.DENSE)
        weights = (PUZZLE_HIDDEN * PUZZLE_HIDDEN,) * len(kinds)
        return cls(
            weights=weights,
            opt_states=weights,
            activations=(PUZZLE_HIDDEN * PUZZLE_LENGTH,) * (len(kinds) + 1),
            saved=(0,) * len(kinds),
            kinds=kinds,
            residual=PUZZLE_HIDDEN * PUZZLE_LENGTH,
        )

    @classmethod
    def context_blocks(cls, blocks: int) -> Sizes:
        """The puzzles' layer in half-blocks, for context parallelism: a block's body is an attention, of two such
        layers.

        So it is for selective recomputation, which computes again what lies between the two.
        """
        norm, whole = LayerKind.NORM, LayerKind.TOKENWISE
        kinds = (whole, norm, *(LayerKind.PROJECT, LayerKind.ROW, norm) * blocks, whole)
        square, rows = PUZZLE_HIDDEN * PUZZLE_HIDDEN, PUZZLE_HIDDEN * PUZZLE_LENGTH
        weights = tuple(PUZZLE_HIDDEN if kind is norm else square for kind in kinds)
        return cls(
            weights=weights,
            opt_states=weights,
            activations=(rows,) * (len(kinds) + 1),
            saved=(0,) * len(kinds),
            kinds=kinds,
            residual=rows,
            queries=rows,
            keys_values=2 * rows,
            stats=3 * PUZZLE_LENGTH,
            blocks=tuple(layer for layer, kind in enumerate(kinds) if kind is norm),
        )

    def space(self, mesh: Mesh, microbatches: int) -> Space:
        """Pieces in which a program counts on a mesh: only half-blocks and experts are ever sliced.

        Each context-parallel rank has two slices of every sequence: an early one, and a late one (see `balanced`).
        """
        if LayerKind.EXPERTS in self.kinds:
            return Space(microbatches, 1, ((EXPERT, mesh.ep),))
        if not self.kinds:
            return Space(microbatches)
        slices = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
        return Space(microbatches, slices, ((HEAD, mesh.tp), (SLICE, mesh.tp)), 2 if self.tied else 1)

    def next_carrying(self, layer: int) -> int:
        """Find the first later layer that reads the residual that a norm or dense layer hands on (-1: none)."""
        return self._carrying_after[layer + 1]

    @cached_property
    def _carrying_after(self) -> list[int]:
        """For each place before a layer, and the one after the last, the first carrying layer from there on."""
        after = [-1]
        for layer in reversed(range(self.layers)):
            after.append(layer if self.kind(layer) in CARRYING else after[-1])
        return after[::-1]

    def weight_of(self, layer: int) -> int:
        """Find the layer whose weight a layer computes with: its own, or the one that it is tied to."""
        return 0 if self.tied and layer == self.layers - 1 else layer

    def layers_of_weight(self, layer: int) -> int:
        """Find the layers that compute with a layer's weight, as a bit set."""
        return 1 << layer | (1 << self.layers - 1 if self.tied and layer == 0 else 0)

    def kind(self, layer: int) -> LayerKind:
        """A layer's kind; WHOLE for one that does not exist."""
        return self.kinds[layer] if 0 <= layer < len(self.kinds) else LayerKind.WHOLE

    def elements(self, spec: Spec) -> int:
        """Elements of a value: its share of the layer, or its microbatches' rows, whole or sliced."""
        form = spec.form
        kind, layer = form.kind, form.layer
        if kind in ROW_KINDS:
            return self._row_elements(spec)
        if kind is Kind.SCALAR:
            return 1
        whole = (self.opt_states if kind is Kind.OPT_STATE else self.weights)[layer]
        return -(-whole * form.holds.mask.bit_count() // form.holds.of)

    def _row_elements(self, spec: Spec) -> int:
        form = spec.form
        kind, layer, space = form.kind, form.layer, form.space
        if kind is Kind.STATS:
            return -(-self.stats * spec.pieces(SLICE).bit_count() * spec.cells.bit_count() // space.sequence)
        if kind is Kind.RESIDUAL or kind is Kind.GRAD_RESIDUAL:
            each = self.residual
        elif kind is Kind.QUERIES or kind is Kind.GRAD_QUERIES:
            each = self.queries
        elif kind is Kind.KEYS_VALUES or kind is Kind.GRAD_KEYS_VALUES:
            each = self.keys_values
        elif kind is Kind.SAVED:
            each = self.saved[layer]
        elif kind is Kind.SAVED_FOR_WEIGHT:
            each = (self.saved_for_weight or self.saved)[layer]
        else:
            each = self.activations[layer]
        elements, of = each * spec.cells.bit_count(), space.sequence
        for index, pieces in form.slices:
            elements *= pieces.bit_count()
            of *= space.count(index)
        return -(-elements // of)

    def bytes(self, spec: Spec) -> int:
        return self.elements(spec) * self.element_bytes[spec.kind]
