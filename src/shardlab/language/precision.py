"""Numbers that a model is trained in: the dtype of each kind of value, and so its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardlab.common.errors import find
from shardlab.language.rules.kinds import Kind, bytes_of
from shardlab.language.sizes import Sizes

Optimizer = Literal["adamw", "sgd", "lion", "muon"]
"""What makes a step of a gradient."""

MOMENTS: dict[Optimizer, int] = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1}
"""How many numbers each keeps of a parameter; with Muon, AdamW keeps two of what is no matrix."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of what a rank keeps and computes, by torch's names.

    Attributes:
        name: how it is asked for.
        compute: of products of matrices.
        parameters, gradients: of weights and their gradients; gathers move the ones, reductions the others.
        activations: also of what layers keep.
        state: of each of the optimizer's moments, and of its copy of the parameters, if it has one.
        copy: whether it has: the parameters are rounded from it, and an update does not read them.
        optimizer: bytes of a parameter's optimizer state, with the copy; as it stands, AdamW's (see `under`).
        source: where it is described.
    """

    name: str
    compute: str
    parameters: str
    gradients: str
    activations: str
    state: str
    copy: bool
    optimizer: int
    source: str

    def dtype(self, kind: Kind) -> str:
        """The dtype of a kind of value; statistics, and scalars as they travel, are exact to 32 bits at least.

        Directions are in the numbers in which Muon makes them orthogonal.
        """
        if kind is Kind.WEIGHT:
            return self.parameters
        if kind is Kind.GRAD_WEIGHT:
            return self.gradients
        if kind is Kind.DIRECTION:
            return "float64" if self.state == "float64" else "bfloat16"
        return self.state if kind in (Kind.OPT_STATE, Kind.STATS, Kind.SCALAR) else self.activations

    def bytes(self, kind: Kind) -> int:
        """Bytes of an element; of the optimizer's state, which is counted as two, half of those of a parameter."""
        return self.optimizer // 2 if kind is Kind.OPT_STATE else int(bytes_of(self.dtype(kind)))

    def under(self, optimizer: Optimizer, *, ema: bool = False) -> Precision:
        """This precision with the bytes of state that an optimizer keeps of a parameter (Muon: of a matrix).

        Args:
            ema: whether the average of the parameters is part of it.
        """
        lacking = MOMENTS["adamw"] - MOMENTS[optimizer] - ema
        return replace(self, optimizer=self.optimizer - lacking * int(bytes_of(self.state)))

    def sizes(self, sizes: Sizes, optimizer: Optimizer = "adamw", *, ema: bool = False, clips: bool = True) -> Sizes:
        """A model's sizes with these bytes, and an optimizer's state; `ema` as in `under`, `clips` as in `Sizes`."""
        mine = self.under(optimizer, ema=ema)
        states, each = sizes.opt_states, {kind: mine.bytes(kind) for kind in Kind}
        if optimizer == "muon":  # counted in its own numbers
            each[Kind.OPT_STATE] = number = int(bytes_of(self.state))
            pairs = zip(sizes.weights, sizes.matrices, strict=True)
            states = tuple(mine.optimizer // number * weight + weight - matrices for weight, matrices in pairs)
        return replace(sizes, opt_states=states, element_bytes=each, whole_matrices=optimizer == "muon", clips=clips)

    @property
    def scaled(self) -> bool:
        """Whether gradients are so narrow in range that losses are scaled."""
        return self.gradients == "float16"

    @property
    def moved_by_update(self) -> int:
        """Bytes that an update moves a parameter: gradient in, state in and out, parameter out (in, if no copy)."""
        read_and_written = (1 if self.copy else 2) * self.bytes(Kind.WEIGHT)
        return self.bytes(Kind.GRAD_WEIGHT) + 2 * self.optimizer + read_and_written


_MIXED = "Micikevicius et al. 2018, arXiv 1710.03740; bytes: Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1"


def _alone(name: str, dtype: str) -> Precision:
    return Precision(name, dtype, dtype, dtype, dtype, dtype, False, int(2 * bytes_of(dtype)), "one dtype for all")


def _mixed(name: str, compute: str, gradients: str, source: str = _MIXED) -> Precision:
    return Precision(name, compute, compute, gradients, compute, "float32", True, 12, source)


PRECISIONS = {
    precision.name: precision
    for precision in (
        _alone("fp32", "float32"),
        _mixed("bf16", "bfloat16", "bfloat16"),
        _mixed("bf16-fp32-grads", "bfloat16", "float32", f"{_MIXED}; gradients summed in float32"),
        _mixed("fp16", "float16", "float16"),
        _alone("fp64", "float64"),
    )
}
"""Every precision by name."""


def find_precision(name: str) -> Precision:
    """The precision of that name, in any case of letters.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    return find(PRECISIONS, name, "precision")


def precision_in(compute: str) -> Precision:
    """The first precision whose products of matrices are in a dtype, by torch's name."""
    return next(precision for precision in PRECISIONS.values() if precision.compute == compute)


FP32, FP64 = PRECISIONS["fp32"], PRECISIONS["fp64"]
