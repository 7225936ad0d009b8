"""Precisions of training: the dtype and the bytes of each kind of value, for each optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardlab.common.errors import find_by_name
from shardlab.language.rules.kinds import Kind, bytes_of
from shardlab.language.sizes import Sizes

Optimizer = Literal["adamw", "sgd", "lion", "muon"]
"""Names of the optimizers."""

MOMENTS_PER_PARAMETER: dict[Optimizer, int] = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1}
"""Moments that each optimizer keeps of a parameter. Muon leaves vectors to AdamW, which keeps two."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of the values that a rank keeps and computes, by torch's names.

    Attributes:
        name: the name that a user gives.
        compute: of matrix products.
        parameters, gradients: of weights and of their gradients. Gathers move parameters, and reductions move
            gradients.
        activations: of activations, and of what layers keep.
        state: of each of the optimizer's moments, and of its copy of the parameters.
        copy: whether the optimizer has a copy, from which the parameters are rounded. An update then does not read
            them.
        optimizer: bytes of optimizer state per parameter, with the copy, for AdamW (see `under`).
        source: where the precision is described.
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
        """Return the dtype of a kind of value.

        Statistics, and scalars in flight, have at least 32 bits. Directions have the dtype in which Muon makes them
        orthogonal.
        """
        if kind is Kind.WEIGHT:
            return self.parameters
        if kind is Kind.GRAD_WEIGHT:
            return self.gradients
        if kind is Kind.DIRECTION:
            return "float64" if self.state == "float64" else "bfloat16"
        return self.state if kind in (Kind.OPT_STATE, Kind.STATS, Kind.SCALAR) else self.activations

    def bytes(self, kind: Kind) -> int:
        """Return the bytes of one element. An optimizer state counts two elements per parameter."""
        return self.optimizer // 2 if kind is Kind.OPT_STATE else int(bytes_of(self.dtype(kind)))

    def under(self, optimizer: Optimizer, *, ema: bool = False) -> Precision:
        """Return this precision with the state that an optimizer keeps per parameter (Muon: per parameter of a matrix).

        Args:
            ema: whether the average of the parameters is part of the state.
        """
        lacking = MOMENTS_PER_PARAMETER["adamw"] - MOMENTS_PER_PARAMETER[optimizer] - ema
        return replace(self, optimizer=self.optimizer - lacking * int(bytes_of(self.state)))

    @property
    def parameters_in_copy(self) -> Precision:
        """This precision if the optimizer's copy is the only one, from which parameters are rounded when they are used.

        A parameter and its state then take `bytes(WEIGHT)` less together. It is the state that counts less.
        """
        return replace(self, optimizer=self.optimizer - self.bytes(Kind.WEIGHT)) if self.copy else self

    def sizes(self, sizes: Sizes, optimizer: Optimizer = "adamw", *, ema: bool = False, clips: bool = True) -> Sizes:
        """Return a model's sizes with the bytes of this precision and an optimizer's state.

        Args:
            ema: as in `under`.
            clips: as in `Sizes`.
        """
        mine = self.under(optimizer, ema=ema)
        states, each = sizes.opt_states, {kind: mine.bytes(kind) for kind in Kind}
        if optimizer == "muon":  # counted in elements of the state's dtype
            each[Kind.OPT_STATE] = number = int(bytes_of(self.state))
            pairs = zip(sizes.weights, sizes.matrices, strict=True)
            states = tuple(mine.optimizer * weight // number + weight - matrices for weight, matrices in pairs)
        return replace(sizes, opt_states=states, element_bytes=each, whole_matrices=optimizer == "muon", clips=clips)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, because gradients have a narrow range."""
        return self.gradients == "float16"

    @property
    def moved_by_update(self) -> int:
        """Bytes that an update moves per parameter: gradient in, state in and out, parameter out (and in without a
        copy).
        """
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
    """Return the precision of a name, in any case of letters.

    Raises:
        UserError: for an unknown name, with the nearest one.
    """
    return find_by_name(PRECISIONS, name, "precision")


def precision_for_dtype(compute: str) -> Precision:
    """Return the first precision whose matrix products are in a dtype."""
    return next(precision for precision in PRECISIONS.values() if precision.compute == compute)


FP32, FP64 = PRECISIONS["fp32"], PRECISIONS["fp64"]
