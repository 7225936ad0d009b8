"""An MLP cut by columns: every matrix a layer of its own, whose slices make some features of its output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardlab.errors import UserError
from shardlab.models.cut import CutModel
from shardlab.models.feed_forward import activation_kernel
from shardlab.models.halves import Body, Halves, Norm
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter
from shardlab.models.mlp import MLP
from shardlab.models.model import Model
from shardlab.models.parts import Embedding, FeedForward
from shardlab.program.sizes import LayerKind


@dataclass(frozen=True)
class Matrix(Body):
    """One matrix of a part, cut by its outputs; the first of an MLP's two with the activation function.

    Attributes:
        name: the matrix's, without "weight" and "bias".
        outputs: features that it makes.
    """

    name: str
    outputs: int

    def sources(self) -> list[tuple[int, Parameter]]:
        cut = Cut(1) if isinstance(self.part, Embedding) else Cut(0)  # a look-up's outputs are the table's columns
        sources = [source for source in super().sources() if source[1].name.startswith(self.name)]
        return [(block, parameter._replace(cut=cut)) for block, parameter in sources]

    @property
    def activates(self) -> bool:
        return self.name == "mlp.c_fc"

    def saved(self) -> int:
        """What the activation function reads."""
        return self.activates * self.part.block * self.outputs

    def saved_for_weight(self) -> int:
        return self.saved()

    def flops(self) -> int:
        matrices = 2 if isinstance(self.part, FeedForward) else 1
        return self.part.flops() // matrices

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        rows, features = sequences * tokens, self.outputs // slices
        if isinstance(self.part, Embedding):  # as the part's own, but of some columns
            elements, matrix = rows * features, self.part.vocabulary * features
            return (Pointwise("embedding", 2 * elements, 3 * elements + matrix),)
        if not isinstance(self.part, FeedForward):
            return self.part.body_kernels(sequences, tokens, slices)
        if self.activates:
            made = Matmul(rows, features, self.part.width, bias=self.part.bias)
            return made, activation_kernel(self.part.activation, rows, features)
        return (Matmul(rows, features, self.part.hidden),)  # its bias is the norm's to add


@dataclass(frozen=True, init=False)
class Columns(Halves):
    """An MLP whose layers are its matrices, each cut by columns, and the norms between blocks, as in `Halves`.

    >>> Columns(MLP(layers=2), slices=4).layers
    9

    Raises:
        UserError: when the model has more than MLPs, or features do not divide.
    """

    def __init__(self, whole: Model, slices: int) -> None:
        if not isinstance(whole, MLP):
            raise UserError(
                f"column-parallel layers are matrices one after the other, but {type(whole).__name__} has more than "
                "MLPs; train an MLP (--model mlp), or cut this model by tensor-parallel"
            )
        for name, count in (("width", whole.width), ("hidden features", whole.hidden)):
            if count % slices:
                raise UserError(
                    f"{count} {name} do not divide into {slices} column-parallel slices (remainder {count % slices}); "
                    "choose a multiple of the slices, or fewer slices"
                )
        CutModel.__init__(self, whole, slices, 3 + 3 * whole.layers)
        object.__setattr__(self, "context", False)

    @cached_property
    def halves(self) -> list[Norm | Body]:
        halves: list[Norm | Body] = []
        for half in super().halves:
            if isinstance(half, Norm):
                halves.append(half)
            elif isinstance(half.part, FeedForward):
                halves.append(Matrix(half.part, half.block, "mlp.c_fc", half.part.hidden))
                halves.append(Matrix(half.part, half.block, "mlp.c_proj", self.width))
            elif isinstance(half.part, Embedding):
                halves.append(Matrix(half.part, half.block, "wte", self.width))
            else:
                halves.append(Matrix(half.part, half.block, "lm_head", self.vocabulary))
        return halves

    def activation_shape(self, index: int) -> tuple[int, ...]:
        before = self.half(index - 1) if 0 < index < self.layers else None
        if isinstance(before, Matrix):
            return (self.block, before.outputs)
        return super().activation_shape(index)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple([LayerKind.NORM if isinstance(half, Norm) else LayerKind.COLUMN for half in self.halves])
