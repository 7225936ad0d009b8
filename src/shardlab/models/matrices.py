"""Two further counts of a model: the whole matrices that Muon updates, and the activations that frameworks keep.

`matrices_of` finds the whole matrices in a layer's flat buffer. `SavedActivations` describes the tensors that a
framework keeps for the backward pass, and `kept_elements` counts them. Shardlab's own count (`Run.saved`) is
measured on a CPU. Autograd, which other frameworks use, also keeps the outputs of activation functions. On a GPU a
dropout mask takes one byte an element (Korthikanti et al. 2022, arXiv 2205.05198, eq. 1: 34 sbh + 5 a s^2 b bytes a
layer in half precision, with masks of one byte). A framework may also keep one copy of a value of which Shardlab's
programs keep two, or recompute some values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlab.language.recompute_names import PER_OP
from shardlab.models.attention import Attend, LatentProjection, Projection
from shardlab.models.layer import Made, Run, needed
from shardlab.models.layout import LayerLayout, Matmul, Parameter
from shardlab.models.mixture import ExpertActivate
from shardlab.models.model import Model
from shardlab.models.primitives import GATED, Activate, Embed, Linear, Norm, Primitive, Scores
from shardlab.models.recomputation import LayerRecomputation

ITERATIONS = 5
"""Iterations of Newton-Schulz (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""


class WholeMatrix(NamedTuple):
    """Matrix that Muon updates as a whole: a parameter, a section of a parameter, or the matrix of one expert.

    Attributes:
        name: name of the parameter.
        shape: shape of the whole matrix.
        dim: dim along which the pieces in the layer's slices are concatenated.
        starts: first element of each piece in the buffer. Pieces are contiguous and equally large.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    starts: tuple[int, ...]

    @property
    def piece(self) -> tuple[int, int]:
        """Shape of a piece."""
        rows, columns = self.shape
        return (rows // len(self.starts), columns) if self.dim == 0 else (rows, columns // len(self.starts))

    @property
    def size(self) -> int:
        """Elements of a piece."""
        rows, columns = self.piece
        return rows * columns

    def kernels(self) -> tuple[Matmul, ...]:
        """Return the kernels that orthogonalize it: three products in each iteration."""
        short, long = sorted(self.shape)
        return (Matmul(short, short, long), Matmul(short, short, short), Matmul(short, long, short)) * ITERATIONS


def matrices_of(run: Run, length: int) -> list[WholeMatrix]:
    """Return a layer's matrices, given its flat buffer's length in elements.

    Queries, keys and values have one matrix each.
    """
    layout = run.layout
    wholes = LayerLayout(parameter for _, parameter in run.parameters()).parameters
    slices = [run.numbers(slice) for slice in range(layout.slices)]
    found: list[WholeMatrix] = []
    for offset, parameter in zip(layout.offsets, wholes, strict=True):
        if parameter.hidden_matrix:
            together: dict[tuple[int, ...], list[int]] = {}  # slices that have pieces of the same matrices
            for slice, numbers in enumerate(slices):
                others = tuple(number for index, number in numbers.items() if index not in parameter.indices[-2:])
                together.setdefault(others, []).append(slice * (length // layout.slices) + offset)
            for begins in together.values():
                found += _matrices(parameter, run.pieces, begins)
    return found


@dataclass(frozen=True)
class SavedActivations:
    """Choices of a framework about the activations that it keeps for the backward pass.

    Attributes:
        mask: bytes of one element of a dropout mask (0: the bytes of an activation's element).
        branch: whether a branch is kept until the backward pass of the layer that adds it to the residual stream and
            normalises the sum.
        gathered: whether the gathered input of a tensor-parallel layer is kept under sequence parallelism. Otherwise a
            slice of it is kept (Korthikanti et al. 2022, section 4.2.2).
        activated: whether an activation function that runs as several kernels keeps its intermediate results.
        again: the recomputation inside blocks, by a name of `shardlab.language.recompute_names` ("": none).
        unread: whether per-op recomputation keeps a product even if no backward pass reads it (the feed-forward's last
            product). A compiler would drop it.
        copied: whether keys and values are copied into one tensor, and both copies are kept.
        made_again: whether inputs that only products read are recomputed instead of kept, as in Shardlab's executor.
    """

    mask: float = 0.0
    branch: bool = True
    gathered: bool = True
    activated: bool = False
    again: str = ""
    unread: bool = False
    copied: bool = False
    made_again: bool = False


AUTOGRAD = SavedActivations()
"""Activations that autograd saves on a CPU, if norms and activation functions are kernels that save their inputs."""

EXECUTOR = SavedActivations(made_again=True)
"""Activations that Shardlab's executor keeps, as measured on a CPU (see `shardlab.models.tensors.backward`)."""


def kept_elements(model: Model, layer: int, rows: int, kept: SavedActivations, element: int) -> int:
    """Return how many elements of a layer are kept for a microbatch of `rows` sequences, beyond the layer's input.

    `element` is the size of an activation's element in bytes.
    """
    run = model.run(layer)
    if kept.again == PER_OP:
        return sum(_every_second(each, kept, rows) for each in run.primitives) + _residuals(run, rows)
    if kept.again:
        return _kept_beside_recomputed(run, model.recomputed(layer, kept.again), rows, kept, element)
    dropped = sum(_dropped(each, kept, element, rows) for each in run.primitives)
    return max(0, run.saved(rows, kept.made_again) - int(dropped))


def saves_residual(model: Model, layer: int, kept: SavedActivations) -> bool:
    """Return whether the kept elements of a layer include the residual stream that the layer outputs."""
    run = model.run(layer)
    if kept.again == PER_OP:
        return run.saves_residual and _residuals(run, 1) > 0
    if kept.again:
        found = model.recomputed(layer, kept.again)
        return run.saves_residual and run.read("s", len(run.steps)) in _kept_tensors(run, found)
    return run.saves_residual


def kept_activations(model: Model, rows: int, kept: SavedActivations, slices: int) -> tuple[int, ...]:
    """Return how many elements are kept of the activation that enters each layer.

    Sequence parallelism cuts the activations into `slices` slices.
    """
    sizes = [model.microbatch_elements(index, rows) for index in range(model.layers + 1)]
    for layer, run in enumerate(model.runs):
        named = bool(kept.again) and kept.again != PER_OP
        needed = named and layer > 0 and model.recomputed(layer, kept.again).keeps_input
        if "s" in run.inputs[1:] or isinstance(run.primitives[0], Embed):
            sizes[layer] *= kept.branch or needed
        elif named and layer and not needed:
            sizes[layer] = 0
        elif run.cut and layer and model.run(layer - 1).attend is None:
            sizes[layer] = 0 if kept.again == PER_OP else sizes[layer] // (1 if kept.gathered else slices)
    return tuple(sizes)


def _kept_tensors(run: Run, found: LayerRecomputation) -> frozenset[Made]:
    """Return the tensors kept of a layer whose blocks are partly recomputed."""
    outside = (number for number in range(len(run.steps)) if number not in found.inside)
    return found.kept.union(*(needed(run.primitives, number) for number in outside))


def _kept_beside_recomputed(
    run: Run, found: LayerRecomputation, rows: int, kept: SavedActivations, element: int
) -> int:
    """Return how many elements of a partly recomputed layer are kept."""
    primitives = [each for number, each in enumerate(run.primitives) if number not in found.again]
    beside = sum(each.keeps_beside(rows) - _dropped(each, kept, element, rows) for each in primitives)
    return max(0, int(beside) + run.elements(_kept_tensors(run, found), rows))


def _matrices(parameter: Parameter, pieces: Mapping[str, int], begins: Sequence[int]) -> Iterator[WholeMatrix]:
    """Yield the matrices of a parameter, one for each expert and section, given the first element of each slice."""
    *experts, rows, width = parameter.sliced(pieces).shape
    columns, dim = parameter.shape[-1], int(width < parameter.shape[-1])
    top = 0
    for _ in range(math.prod(experts)):
        for height in parameter.sections or (parameter.shape[-2],):
            yield WholeMatrix(parameter.name, (height, columns), dim, tuple(begin + top * width for begin in begins))
            top += height * rows // parameter.shape[-2]


def _dropped(primitive: Primitive, kept: SavedActivations, element: int, rows: int) -> float:
    """Return how many more elements of a primitive autograd keeps than a framework with these settings."""
    if isinstance(primitive, Activate) and kept.activated and primitive.activation in GATED:
        return -rows * primitive.tokens * primitive.hidden
    if isinstance(primitive, ExpertActivate) and kept.activated and primitive.activation in GATED:
        return -primitive.router.places(rows * primitive.tokens) * primitive.hidden
    if isinstance(primitive, Projection) and kept.copied:
        return -2 * rows * primitive.tokens * primitive.kv_width
    narrower = 1 - kept.mask / element if kept.mask and not isinstance(primitive, Embed) else 0.0
    return narrower * primitive.mask(rows)


def _every_second(primitive: Primitive, kept: SavedActivations, rows: int) -> int:
    """Return how many elements of a primitive per-op recomputation keeps: queries and values, gates, and attention's
    result.
    """
    each = rows * primitive.tokens
    if isinstance(primitive, Projection):
        return each * (primitive.width + primitive.kv_width)
    if isinstance(primitive, LatentProjection):
        return each * (primitive.features("q") + primitive.sizes.heads * primitive.sizes.value_dim)
    if isinstance(primitive, Attend):
        return each * primitive.result_width
    if isinstance(primitive, Activate):
        return each * primitive.hidden
    if isinstance(primitive, Scores):
        return each * primitive.inputs
    if isinstance(primitive, Linear):
        return each * primitive.outputs if kept.unread and primitive.in_index == "ffn" else 0
    if isinstance(primitive, Norm) and primitive.name == "ln_f":
        return primitive.keeps_beside(rows)
    return primitive.mask(rows) if isinstance(primitive, Embed) else 0


def _residuals(run: Run, rows: int) -> int:
    """Return how many elements of the residual stream a layer computes that enter a block, at the norm before
    attention.
    """
    norms = [each for each in run.primitives[1:] if isinstance(each, Norm) and each.name == "ln_1"]
    return sum(rows * each.tokens * each.hidden_size for each in norms)
