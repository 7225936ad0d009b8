"""A mixture-of-experts model cut where expert parallelism communicates: before and after every layer's experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlab.errors import UserError
from shardlab.models.cut import CutModel, place_of
from shardlab.models.kernels import Kernel
from shardlab.models.layout import LayerLayout, Parameter
from shardlab.models.mixture import Mixture
from shardlab.models.moe import MoE
from shardlab.models.parts import Part
from shardlab.program.sizes import LayerKind


@dataclass(frozen=True)
class Dense:
    """(carried, combined) to (carried, dispatched): from one mixture's experts to the next one's.

    It combines what the experts before gave with the residual stream, computes `parts`, and routes the result to the
    experts after. What is carried is (rows, T, C + 2 top_k): the residual stream, the gates, and the experts' numbers.

    Attributes:
        before: the mixture whose results it combines (None: the first layer, which reads tokens).
        parts: computed between: the embedding, attention, the head.
        after: the mixture that it routes to (None: the last layer, which makes logits).
        block: that holds its parameters.
    """

    before: Mixture | None
    parts: tuple[Part, ...]
    after: Mixture | None
    block: int

    def sources(self) -> list[tuple[int, Parameter]]:
        """Its parameters, each with the block that holds it in the whole model."""
        routing = [] if self.after is None else [*self.after.norm(), self.after.router()]
        return [(self.block, p) for p in (*(p for part in self.parts for p in part.parameters()), *routing)]

    @property
    def place(self) -> str:
        return place_of(self.parts[-1], self.block)

    def saved(self, rows: int) -> int:
        """Elements that autograd keeps beyond the inputs."""
        streams = len(self.parts) - (self.after is None) + (self.before is not None)  # what every norm reads
        elements = rows * streams * self.parts[0].stream + sum(rows * part.saved() for part in self.parts)
        if self.before is not None:
            part = self.before  # the places, and dropout's mask
            elements += rows * (part.block * part.top_k + part.drops * part.stream)
        if self.after is not None:
            elements += self.after.routing_saved(rows)
        return elements

    def flops(self) -> int:
        return sum(part.flops() for part in self.parts) + (self.after.router_flops() if self.after else 0)

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        """None of it is sliced."""
        before = () if self.before is None else self.before.combining_kernels(sequences, tokens)
        parts = (kernel for part in self.parts for kernel in part.kernels(sequences, tokens))
        after = () if self.after is None else self.after.routing_kernels(sequences, tokens)
        return (*before, *parts, *after)


@dataclass(frozen=True)
class Experts:
    """Buffers to buffers: some experts on the tokens that were dispatched to them.

    Attributes:
        part: whose experts they are.
        block: that holds them.
    """

    part: Mixture
    block: int

    def sources(self) -> list[tuple[int, Parameter]]:
        """Their parameters, each with the block that holds it in the whole model."""
        return [(self.block, p) for p in self.part.parameters() if p.cut is not None]

    @property
    def place(self) -> str:
        return place_of(self.part, self.block)

    def saved(self, rows: int) -> int:
        return self.part.experts_saved(rows)

    def flops(self) -> int:
        return self.part.experts_flops()

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        """On the buffers that so many sequences fill together."""
        return self.part.body_kernels(sequences, tokens, slices)


@dataclass(frozen=True, init=False)
class ExpertLayers(CutModel):
    """A mixture-of-experts model in dense layers (even) and experts (odd), the latter cut into `slices` for `ep`.

    >>> ExpertLayers(MoE(layers=2, experts=4), slices=2).layers
    5

    Attributes:
        whole: the model that is cut.
    """

    whole: MoE

    def __init__(self, whole: MoE, slices: int = 1) -> None:
        super().__init__(whole, slices, 2 * whole.layers + 1)
        if whole.tied:
            raise UserError(
                "tied embeddings need the embedding and the head in one layer, but expert parallelism has one in the "
                "first and the other in the last; leave the embeddings untied"
            )
        if whole.experts % slices:
            raise UserError(
                f"{whole.experts} experts do not divide among {slices} expert-parallel ranks (remainder "
                f"{whole.experts % slices}); choose experts that are a multiple of the ranks, or fewer ranks"
            )

    def half(self, layer: int) -> Dense | Experts:
        """What layer `layer` computes."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        whole, block = self.whole, layer // 2
        if layer % 2:
            return Experts(whole.mixture, block)
        before = whole.mixture if block else None
        if block == whole.layers:
            return Dense(before, (whole.head,), None, block - 1)
        attention, mixture = whole.body
        assert isinstance(mixture, Mixture)
        parts = (attention,) if block else (whole.embedding, attention)
        return Dense(before, parts, mixture, block)

    def layout(self, layer: int) -> LayerLayout:
        slices = self.slices if layer % 2 else 1
        return LayerLayout((p.sliced(slices) for _, p in self.half(layer).sources()), slices)

    @property
    def residual_width(self) -> int:
        return self.width + 2 * self.whole.top_k

    def is_buffers(self, index: int) -> bool:
        """Whether activation `index` is the experts' buffers, before or after they compute."""
        return 0 < index < self.layers

    def buffers_shape(self, rows: int) -> tuple[int, int, int]:
        """Of a microbatch of `rows` sequences: (experts, capacity, C)."""
        return self.whole.experts, self.whole.mixture.capacity(rows * self.block), self.width

    def activation_shape(self, index: int) -> tuple[int, ...]:
        """Shape of activation `index` for a microbatch of one sequence."""
        assert 0 <= index <= self.layers, f"activation {index} of {self.layers} layers"
        if self.is_buffers(index):
            return self.buffers_shape(1)
        return (self.block,) if index == 0 else (self.block, self.vocabulary)

    def microbatch_elements(self, index: int, rows: int) -> int:
        if self.is_buffers(index):
            return math.prod(self.buffers_shape(rows))
        return super().microbatch_elements(index, rows)

    def saved_elements(self, layer: int) -> int:
        return self.microbatch_saved(layer, 1)

    def saved_for_weight(self, layer: int) -> int:
        """A bound, not measured: all that was saved, and as much again for the gradients that meet parameters."""
        return 2 * self.saved_elements(layer)

    def microbatch_saved(self, layer: int, rows: int) -> int:
        return self.half(layer).saved(rows)

    def forward_flops(self, layer: int) -> int:
        return self.half(layer).flops()

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return self.half(layer).kernels(sequences, tokens, slices)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind.EXPERTS if layer % 2 else LayerKind.DENSE for layer in range(self.layers))
