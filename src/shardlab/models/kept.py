"""What a GPU's kernels keep for the backward pass, where it is not what autograd keeps on a CPU.

Autograd's own count (`Model.saved_elements`) is measured on a CPU. On a GPU a dropout mask is one byte an element
(Korthikanti et al. 2022, arXiv 2205.05198, eq. 1: 34 sbh + 5 a s^2 b bytes a layer in half precision, masks of a byte
included), and a framework may hold a value once that our programs hold twice, or compute some of it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.blocks import Blocks
from shardlab.models.halves import Body, Halves, Norm, Output, Projection
from shardlab.models.model import Model
from shardlab.models.parts import Attention, Embedding, FeedForward, Part


@dataclass(frozen=True)
class SavedActivations:
    """Choices of what is kept.

    Attributes:
        mask: bytes of an element of a dropout mask (0: as wide as an activation).
        branch: whether the branch that a norm of half-blocks adds to the residual stays until its backward pass.
        gathered: whether a body's input that sequence parallelism has gathered stays so; otherwise a slice of it does
            (Korthikanti et al. 2022, section 4.2.2).
        activated: whether an activation function that is run as several kernels keeps what is between them.
        per_op: whether of each block only its input, attention's result and every second product are kept, and all
            else is computed again (torchtitan's selective activation checkpointing,
            torchtitan/distributed/activation_checkpoint.py: every second product by `_get_custom_policy`).
        unread: whether of these products also those stay that no backward pass reads (the feed-forward's last), as
            they do where no compiler sees that.
    """

    mask: float = 0.0
    branch: bool = True
    gathered: bool = True
    activated: bool = False
    per_op: bool = False
    unread: bool = False


AUTOGRAD = SavedActivations()
"""As measured on a CPU."""


def kept_elements(model: Model, layer: int, rows: int, kept: SavedActivations, element: int) -> int:
    """Elements of `element` bytes that are kept of a layer for a microbatch of `rows` sequences, beyond its input."""
    saved = model.microbatch_saved(layer, rows)
    if kept == AUTOGRAD:
        return saved
    if isinstance(model, Halves):
        half = model.half(layer)
        if kept.per_op:
            return rows * _every_second_of_half(half, kept)
        part = half.before if isinstance(half, Norm) else half.part
        return max(0, saved - int(rows * _less(part, kept, element, _what(half))))
    assert isinstance(model, Blocks)
    if kept.per_op:
        return rows * sum(_every_second(part, kept) for part in model.parts(layer))
    return max(0, saved - int(rows * sum(_less(part, kept, element, "all") for part in model.parts(layer))))


def _what(half: Norm | Body) -> str:
    if isinstance(half, Norm):
        return "norm"
    return "none" if isinstance(half, Projection | Output) else "body"


def kept_activations(model: Model, rows: int, kept: SavedActivations, slices: int) -> tuple[int, ...]:
    """Elements that stay of each activation that enters a layer; `slices`: into how many sequence parallelism cuts."""
    sizes = [model.microbatch_elements(index, rows) for index in range(model.layers + 1)]
    if not isinstance(model, Halves):
        return tuple(sizes)
    for layer, half in enumerate(model.halves):
        if isinstance(half, Norm):
            sizes[layer] *= kept.branch
        elif not isinstance(half, Output) and layer:
            sizes[layer] = 0 if kept.per_op else sizes[layer] // (1 if kept.gathered else slices)
    return tuple(sizes)


def _less(part: Part, kept: SavedActivations, element: int, what: str) -> float:
    """Elements of a part that are not kept, or (below zero) that are kept in addition."""
    less = 0.0
    narrower = (1 - kept.mask / element) if kept.mask and part.drops else 0.0
    if what in ("all", "norm") and not isinstance(part, Embedding):
        less += narrower * part.stream
    if what in ("all", "body"):
        if isinstance(part, Attention):
            less += narrower * part.heads * part.block**2
        elif isinstance(part, FeedForward) and kept.activated and part.activation == "swiglu":
            less -= part.block * part.hidden
    return less


def _every_second_of_half(half: Norm | Body, kept: SavedActivations) -> int:
    if isinstance(half, Norm):
        return half.before.stream if isinstance(half.after, Attention) else 0
    return _every_second(half.part, kept)


def _every_second(part: Part, kept: SavedActivations) -> int:
    """Of a part, of its products (queries, keys, values, output; gate, up, down) the odd ones."""
    if isinstance(part, Attention):
        return part.block * (part.width + part.kv_width) + part.stream
    if isinstance(part, FeedForward):
        return part.block * part.hidden + kept.unread * part.stream
    return part.saved()
