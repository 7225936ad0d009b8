"""What all parts of a layer have in common.

The tensor half (`shardlab.models.tensors`) computes the same parts; a test holds the two together. Everything
is counted for one sequence, with T = `block` tokens and C = `width`. Every part but `Embedding` maps (T, C)
onward and begins with a norm, which keeps the part's input; `saved` counts what is kept beyond that input.

Between its norm and its sum with the residual stream lies a part's *body*, which tensor parallelism slices as
Megatron-LM does (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the parameters that have a `cut` are the body's.

FLOPs are those of matrix products in the forward pass, an addition and a multiplication each (Narayanan et al.
2021, arXiv 2104.04473, appendix: 24 T C^2 + 4 T^2 C a layer, and 2 T C V for the logits). As there, attention
counts the whole T x T square although its upper half is masked; look-ups, norms, softmax, GELU and sums count 0.

Kernels are the same arithmetic for a device to price. There a fused attention counts only the pairs that it sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter


@dataclass(frozen=True)
class Part(ABC):
    """Some of a layer's arithmetic.

    Attributes:
        block: tokens of a sequence, T.
        width: features of a token, C.
        bias: whether linear maps and LayerNorms have a bias.
        drops: whether dropout is on, so that its masks are kept.
        rms: whether its norm is an RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), which has no bias.
        title: what a reader calls it.
        norm_name: of the norm that the part begins with (none: it has none).
        added: the parameter that is added to the body's result (none: nothing is).
    """

    title: ClassVar[str]
    norm_name: ClassVar[str] = ""
    added: ClassVar[str] = ""

    block: int
    width: int
    bias: bool
    drops: bool
    rms: bool = field(default=False, kw_only=True)

    @abstractmethod
    def parameters(self) -> list[Parameter]:
        """The parameters, named as in nanoGPT."""

    @abstractmethod
    def saved(self) -> int:
        """Elements that autograd keeps for the backward pass beyond the part's input and parameters."""

    def microbatch_saved(self, rows: int) -> int:
        """`saved` for a microbatch of `rows` sequences."""
        return rows * self.saved()

    @abstractmethod
    def saved_for_weight(self) -> int:
        """What is left of that between the halves of a split backward pass: the inputs of norms and linear maps and the
        gradients of their outputs; the part's input does not count.
        """

    def body_saved_for_weight(self) -> int:
        """The same for the body alone: what linear maps after the first one read, and the gradient of the first."""
        return 0

    @abstractmethod
    def body_saved(self) -> int:
        """Elements that autograd keeps for the body, beyond its input and parameters; slices share them equally."""

    @abstractmethod
    def flops(self) -> int:
        """FLOPs of the forward pass."""

    @abstractmethod
    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """The body's forward pass on `tokens` tokens of each of some sequences, with one of `slices` slices."""

    def kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """The whole part's forward pass: norm, body with its last bias, dropout, sum with the residual stream."""
        *body, last = self.body_kernels(sequences, tokens, slices)
        if self.has_added and isinstance(last, Matmul):
            last = last._replace(bias=True)
        return (*self.norm_kernels(sequences, tokens), *body, last, *self.residual_kernels(sequences, tokens))

    def norm_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """The norm that the part begins with."""
        elements = sequences * tokens * self.width
        return (Pointwise("rms_norm" if self.rms else "layer_norm", 2 * elements, 3 * elements),)

    def added_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """What half-blocks do after a body: add the bias that its slices left out, drop out, add the residual."""
        elements = sequences * tokens * self.width
        bias = (Pointwise("bias", 2 * elements, elements),) if self.has_added else ()
        return (*bias, *self.residual_kernels(sequences, tokens))

    def residual_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """Dropout and the residual's sum; on the way back the sum of what norm and residual give to the gradient."""
        elements = sequences * tokens * self.width
        return (Pointwise("residual", (3 + self.drops) * elements, (3 + 3 * self.drops) * elements),)

    @property
    def has_added(self) -> bool:
        """Whether there is a parameter that is added to the body's result."""
        return bool(self.added) and self.bias

    def sliceable(self) -> dict[str, int]:
        """What must divide by the number of slices, by name."""
        return {}

    @property
    def stream(self) -> int:
        """Elements of the residual stream, T C."""
        return self.block * self.width

    @property
    def norm_stats(self) -> int:
        """What a norm keeps of its tokens: 1/deviation, and a LayerNorm the mean."""
        return self.block * (1 if self.rms else 2)

    @property
    def norm_saved(self) -> int:
        """What a norm keeps, and its output, which is kept by the linear map that follows."""
        return self.norm_stats + self.stream

    def norm(self) -> list[Parameter]:
        ends = ("weight", "bias") if self.bias and not self.rms else ("weight",)
        return [Parameter(f"{self.norm_name}.{end}", (self.width,), False) for end in ends]

    def linear(self, name: str, outputs: int, inputs: int, cut: Cut) -> list[Parameter]:
        """A map whose slices make some of the outputs (cut along 0), or take some of the inputs (along 1)."""
        weight = Parameter(f"{name}.weight", (outputs, inputs), True, cut)
        bias = Parameter(f"{name}.bias", (outputs,), False, cut if cut.dim == 0 else None)
        return [weight, bias] if self.bias else [weight]
