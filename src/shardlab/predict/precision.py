"""Numbers that a model is trained in, and so how many bytes each kind of value has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.errors import find
from shardlab.program import Kind, Sizes


@dataclass(frozen=True)
class Precision:
    """Bytes of what a rank keeps, and the dtype that it computes in.

    Attributes:
        name: how it is asked for.
        compute: torch's name of the dtype of products of matrices.
        parameters, gradients: bytes of an element; gathers move parameters, reductions gradients.
        optimizer: bytes of a parameter's optimizer state, a copy of the parameter in float32 included if there is one.
        activations: bytes of an element, also of what autograd keeps.
        copy: whether the optimizer's state has such a copy, so that an update does not read the parameter itself.
        source: where it is described.
    """

    name: str
    compute: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    copy: bool
    source: str

    def sizes(self, sizes: Sizes) -> Sizes:
        """A model's sizes with these bytes: its optimizer state counts two elements for each parameter."""
        bytes = dict.fromkeys(Kind, self.activations)
        bytes |= {Kind.WEIGHT: self.parameters, Kind.GRAD_WEIGHT: self.gradients, Kind.OPT_STATE: self.optimizer // 2}
        bytes |= {Kind.SCALAR: 4, Kind.STATS: 4}
        return replace(sizes, element_bytes=bytes)

    @property
    def moved_by_update(self) -> int:
        """Bytes that AdamW moves for each parameter: gradient in, state in and out, parameter out (in, if no copy)."""
        return self.gradients + 2 * self.optimizer + (1 if self.copy else 2) * self.parameters


_MIXED = "Micikevicius et al. 2018, arXiv 1710.03740; bytes: Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1"

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32", 4, 4, 8, 4, False, "AdamW's two moments"),
        Precision("bf16", "bfloat16", 2, 2, 12, 2, True, _MIXED),
        Precision("bf16-fp32-grads", "bfloat16", 2, 4, 12, 2, True, f"{_MIXED}; gradients summed in float32"),
        Precision("fp16", "float16", 2, 2, 12, 2, True, _MIXED),
    )
}
"""Every precision by name."""


def find_precision(name: str) -> Precision:
    """The precision of that name, in any case of letters.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    return find(PRECISIONS, name, "precision")
