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
    matrices: list[WholeMatrix] = []
    for offset, parameter in zip(layout.offsets, wholes, strict=True):
        if parameter.hidden_matrix:
            begins_by_slices: dict[tuple[int, ...], list[int]] = {}  # slices that have pieces of the same matrices
            for slice, numbers in enumerate(slices):
                others = tuple(number for index, number in numbers.items() if index not in parameter.indices[-2:])
                begins_by_slices.setdefault(others, []).append(slice * (length // layout.slices) + offset)
            for begins in begins_by_slices.values():
                matrices += _matrices(parameter, run.pieces, begins)
    return matrices


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


def kept_elements(model: Model, layer: int, rows: int, settings: SavedActivations, element: int) -> int:
    """Return how many elements of a layer are kept for a microbatch of `rows` sequences, beyond the layer's input.

    `element` is the size of an activation's element in bytes.
    """
    run = model.run(layer)
    if settings.again == PER_OP:
        return sum(_every_second(primitive, settings, rows) for primitive in run.primitives) + _residuals(run, rows)
    if settings.again:
        return _kept_beside_recomputed(run, model.recomputed(layer, settings.again), rows, settings, element)
    dropped = sum(_dropped(primitive, settings, element, rows) for primitive in run.primitives)
    return max(0, run.saved(rows, settings.made_again) - int(dropped))


def saves_residual(model: Model, layer: int, settings: SavedActivations) -> bool:
    """Return whether the kept elements of a layer include the residual stream that the layer outputs."""
    run = model.run(layer)
    if settings.again == PER_OP:
        return run.saves_residual and _residuals(run, 1) > 0
    if settings.again:
        recomputation = model.recomputed(layer, settings.again)
        return run.saves_residual and run.read("s", len(run.steps)) in _kept_tensors(run, recomputation)
    return run.saves_residual


def kept_activations(model: Model, rows: int, settings: SavedActivations, slices: int) -> tuple[int, ...]:
    """Return how many elements are kept of the activation that enters each layer.

    Sequence parallelism cuts the activations into `slices` slices.
    """
    sizes = [model.microbatch_elements(index, rows) for index in range(model.layers + 1)]
    for layer, run in enumerate(model.runs):
        recomputes_modules = bool(settings.again) and settings.again != PER_OP
        needed = recomputes_modules and layer > 0 and model.recomputed(layer, settings.again).keeps_input
        if "s" in run.inputs[1:] or isinstance(run.primitives[0], Embed):
            sizes[layer] *= settings.branch or needed
        elif recomputes_modules and layer and not needed:
            sizes[layer] = 0
        elif run.cut and layer and model.run(layer - 1).attend is None:
            sizes[layer] = 0 if settings.again == PER_OP else sizes[layer] // (1 if settings.gathered else slices)
    return tuple(sizes)


def _kept_tensors(run: Run, recomputation: LayerRecomputation) -> frozenset[Made]:
    """Return the tensors kept of a layer whose blocks are partly recomputed."""
    whole_steps = (number for number in range(len(run.steps)) if number not in recomputation.inside)
    return recomputation.kept.union(*(needed(run.primitives, number) for number in whole_steps))


def _kept_beside_recomputed(
    run: Run, recomputation: LayerRecomputation, rows: int, settings: SavedActivations, element: int
) -> int:
    """Return how many elements of a partly recomputed layer are kept."""
    primitives = [primitive for number, primitive in enumerate(run.primitives) if number not in recomputation.again]
    elements = sum(
        primitive.keeps_beside(rows) - _dropped(primitive, settings, element, rows) for primitive in primitives
    )
    return max(0, int(elements) + run.elements(_kept_tensors(run, recomputation), rows))


def _matrices(parameter: Parameter, pieces: Mapping[str, int], begins: Sequence[int]) -> Iterator[WholeMatrix]:
    """Yield the matrices of a parameter, one for each expert and section, given the first element of each slice."""
    *experts, rows, width = parameter.sliced(pieces).shape
    columns, dim = parameter.shape[-1], int(width < parameter.shape[-1])
    top = 0
    for _ in range(math.prod(experts)):
        for height in parameter.sections or (parameter.shape[-2],):
            yield WholeMatrix(parameter.name, (height, columns), dim, tuple(begin + top * width for begin in begins))
            top += height * rows // parameter.shape[-2]


def _dropped(primitive: Primitive, settings: SavedActivations, element: int, rows: int) -> float:
    """Return how many more elements of a primitive autograd keeps than a framework with these settings."""
    if isinstance(primitive, Activate) and settings.activated and primitive.activation in GATED:
        return -rows * primitive.tokens * primitive.hidden
    if isinstance(primitive, ExpertActivate) and settings.activated and primitive.activation in GATED:
        return -primitive.router.places(rows * primitive.tokens) * primitive.hidden
    if isinstance(primitive, Projection) and settings.copied:
        return -2 * rows * primitive.tokens * primitive.kv_width
    narrower = 1 - settings.mask / element if settings.mask and not isinstance(primitive, Embed) else 0.0
    return narrower * primitive.mask(rows)


def _every_second(primitive: Primitive, settings: SavedActivations, rows: int) -> int:
    """Return how many elements of a primitive per-op recomputation keeps: queries and values, gates, and attention's
    result.
    """
    tokens = rows * primitive.tokens
    if isinstance(primitive, Projection):
        return tokens * (primitive.width + primitive.kv_width)
    if isinstance(primitive, LatentProjection):
        return tokens * (primitive.features("q") + primitive.sizes.heads * primitive.sizes.value_dim)
    if isinstance(primitive, Attend):
        return tokens * primitive.result_width
    if isinstance(primitive, Activate):
        return tokens * primitive.hidden
    if isinstance(primitive, Scores):
        return tokens * primitive.inputs
    if isinstance(primitive, Linear):
        return tokens * primitive.outputs if settings.unread and primitive.in_index == "ffn" else 0
    if isinstance(primitive, Norm) and primitive.name == "ln_f":
        return primitive.keeps_beside(rows)
    return primitive.mask(rows) if isinstance(primitive, Embed) else 0


def _residuals(run: Run, rows: int) -> int:
    """Return how many elements of the residual stream a layer computes that enter a block, at the norm before
    attention.
    """
    norms = [norm for norm in run.primitives[1:] if isinstance(norm, Norm) and norm.name == "ln_1"]
    return sum(rows * norm.tokens * norm.hidden_size for norm in norms)
