"""Precisions of training: dtype and bytes of each kind of value, for each optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardlab.common.errors import UserError, find_by_name
from shardlab.language.rules.kinds import Kind, bytes_of
from shardlab.language.sizes import Sizes

Optimizer = Literal["adamw", "sgd", "lion", "muon"]
"""Names of the optimizers."""

MOMENTS_PER_PARAMETER: dict[Optimizer, int] = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1}
"""Number of moments that each optimizer keeps for a parameter. Muon's is for matrices; vectors have AdamW's two."""


WIDE = "-fp32-grads"
"""Suffix of the names of precisions in which only the gradients are in float32."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of the values that a rank keeps and computes, by torch's names.

    Attributes:
        name: name of the precision in options and files.
        compute: dtype of matrix products.
        parameters, gradients: dtype of weights, which gathers move, and of their gradients, which reductions move.
        activations: dtype of activations, and of the values that layers save.
        state: dtype of each of the optimizer's moments, and of its copy of the parameters.
        copy: whether the optimizer keeps a copy of the parameters, from which the weights are rounded. An update then
            does not read the weights.
        optimizer: bytes of the optimizer's state per parameter, including the copy: AdamW's, unless `with_optimizer`
            has set those of another optimizer.
        source: where the precision is described.
        instead: name of the precision to train in, if this one is only for predictions ("": this one can train).
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
    instead: str = ""

    def dtype(self, kind: Kind) -> str:
        """Return the dtype of a kind of value.

        Statistics, and scalars while they are communicated, have at least 32 bits. Directions have the dtype in which
        Muon orthogonalizes them.
        """
        if kind is Kind.WEIGHT:
            return self.parameters
        if kind is Kind.GRAD_WEIGHT:
            return self.gradients
        if kind is Kind.DIRECTION:
            return "float64" if self.state == "float64" else "bfloat16"
        if kind in (Kind.STATS, Kind.SCALAR):
            return "float64" if self.state == "float64" else "float32"
        return self.state if kind is Kind.OPT_STATE else self.activations

    def bytes(self, kind: Kind) -> int:
        """Return the bytes of one element. An optimizer state counts two elements per parameter."""
        return self.optimizer // 2 if kind is Kind.OPT_STATE else int(bytes_of(self.dtype(kind)))

    def with_optimizer(self, optimizer: Optimizer, *, ema: bool = False) -> Precision:
        """Return this precision with an optimizer's bytes of state per parameter (Muon: per parameter of a matrix).

        Args:
            ema: whether the state includes the moving average of the parameters.
        """
        missing_moments = MOMENTS_PER_PARAMETER["adamw"] - MOMENTS_PER_PARAMETER[optimizer] - ema
        return replace(self, optimizer=self.optimizer - missing_moments * int(bytes_of(self.state)))

    def with_gradients_of(self, bytes: int) -> Precision:
        """Return this precision with gradients of 2 or 4 bytes per element.

        A precision whose parameters do not have 2 bytes is returned unchanged.
        """
        if bytes_of(self.parameters) != 2:
            return self
        name = self.name.removesuffix(WIDE) + WIDE * (bytes == 4)
        precision = replace(self, name=name, gradients="float32" if bytes == 4 else self.parameters)
        return PRECISIONS.get(name, precision)

    @property
    def parameters_in_copy(self) -> Precision:
        """This precision if parameters are kept only in the optimizer's copy, and rounded to weights on each use.

        A parameter and its state together then take `bytes(WEIGHT)` less; the difference is subtracted from the state.
        """
        return replace(self, optimizer=self.optimizer - self.bytes(Kind.WEIGHT)) if self.copy else self

    def sizes(self, sizes: Sizes, optimizer: Optimizer = "adamw", *, ema: bool = False, clips: bool = True) -> Sizes:
        """Return a model's sizes with the bytes of this precision and an optimizer's state.

        Args:
            ema: whether the state includes the moving average of the parameters.
            clips: whether the optimizer clips the norm of the model's gradient.
        """
        precision = self.with_optimizer(optimizer, ema=ema)
        states, element_bytes = sizes.opt_states, {kind: precision.bytes(kind) for kind in Kind}
        if optimizer == "muon":  # counted in elements of the state's dtype
            element_bytes[Kind.OPT_STATE] = number = int(bytes_of(self.state))
            pairs = zip(sizes.weights, sizes.matrices, strict=True)
            states = tuple(precision.optimizer * weight // number + weight - matrices for weight, matrices in pairs)
        return replace(
            sizes, opt_states=states, element_bytes=element_bytes, whole_matrices=optimizer == "muon", clips=clips
        )

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
_FP8 = "Micikevicius et al. 2022, arXiv 2209.05433: products with parameters alone; all else as bf16"
_TF32 = "docs.pytorch.org/docs/stable/notes/cuda.html: products of matrices in TensorFloat-32; all else as fp32"
_MX = "Rouhani et al. 2023, arXiv 2310.10537: a scale for each 32 elements; all else as fp8"


def _uniform(name: str, dtype: str, source: str = "one dtype for all") -> Precision:
    return Precision(name, dtype, dtype, dtype, dtype, dtype, False, int(2 * bytes_of(dtype)), source)


def _mixed(name: str, compute: str, gradients: str, source: str = _MIXED) -> Precision:
    return Precision(name, compute, compute, gradients, compute, "float32", True, 12, source)


def _predicted(name: str, compute: str, base: Precision, source: str) -> Precision:
    """Return a precision for predictions: a base precision with another dtype of matrix products."""
    return replace(base, name=name, compute=compute, source=source, instead=base.name)


_BF16, _BF16_FP32 = (
    _mixed("bf16", "bfloat16", "bfloat16"),
    _mixed("bf16-fp32-grads", "bfloat16", "float32", f"{_MIXED}; gradients summed in float32"),
)
_BF16_STATE = _uniform("bf16-params", "bfloat16", "PyTorch's AdamW, whose moments have the dtype of the parameters")
_FP32 = _uniform("fp32", "float32")

PRECISIONS = {
    precision.name: precision
    for precision in (
        _FP32,
        _predicted("tf32", "tfloat32", _FP32, _TF32),
        _BF16,
        _BF16_FP32,
        _BF16_STATE,
        replace(_BF16_STATE, name="bf16-params-fp32-grads", gradients="float32"),
        _mixed("fp16", "float16", "float16"),
        _predicted("fp8", "float8", _BF16, _FP8),
        _predicted("fp8-fp32-grads", "float8", _BF16_FP32, _FP8),
        _predicted("mxfp8", "mxfloat8", _BF16, _MX),
        _predicted("mxfp8-fp32-grads", "mxfloat8", _BF16_FP32, _MX),
        _uniform("fp64", "float64"),
    )
}
"""Every precision by name."""


def find_precision(name: str) -> Precision:
    """Return the precision with this name, ignoring case.

    Raises:
        UserError: for an unknown name, with the nearest one.
    """
    return find_by_name(PRECISIONS, name, "precision")


def find_runnable_precision(name: str) -> Precision:
    """Return the precision with this name, if `train` and `verify` can compute in it.

    Raises:
        UserError: for an unknown name, and for a precision that is only for predictions.
    """
    precision = find_precision(name)
    if precision.instead:
        raise UserError(
            f"{precision.name} is a precision of predictions, for simulate and plan; train and verify do not compute "
            f"in it: give them {precision.instead}"
        )
    return precision


def precision_for_dtype(compute: str) -> Precision:
    """Return the first precision whose matrix products have this dtype."""
    return next(precision for precision in PRECISIONS.values() if precision.compute == compute)


BF16, FP32, FP64 = (PRECISIONS[name] for name in ("bf16", "fp32", "fp64"))
