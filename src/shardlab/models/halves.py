"""Half-blocks: a model cut where tensor and context parallelism communicate, between parts' bodies and norms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardlab.errors import UserError
from shardlab.models.blocks import Blocks
from shardlab.models.cut import CutModel, place_of
from shardlab.models.kernels import Kernel
from shardlab.models.layout import LayerLayout, Parameter
from shardlab.models.moe import MoE
from shardlab.models.parts import Attention, Part
from shardlab.program.sizes import LayerKind


@dataclass(frozen=True)
class Norm:
    """(residual, branch) to (residual, normalised): the end of one part and the beginning of the next.

    It adds the bias that the bodies' slices leave out (after the embedding: the positions), drops out, adds the
    residual and normalises. Every token goes its own way, so that any slice of the sequence can be computed alone.

    Attributes:
        before, after: the parts that it lies between.
        block_before, block_after: the blocks that hold them.
    """

    before: Part
    after: Part
    block_before: int
    block_after: int

    def sources(self) -> list[tuple[int, Parameter]]:
        """Its parameters, each with the block that holds it in the whole model."""
        added = [p for p in self.before.parameters() if p.name == self.before.added]
        norm = [p for p in self.after.parameters() if p.name.startswith(self.after.norm_name)]
        return [(self.block_before, p) for p in added] + [(self.block_after, p) for p in norm]

    @property
    def place(self) -> str:
        return f"norm of {place_of(self.after, self.block_after)}"

    def saved(self) -> int:
        """The residual that it hands on, what the norm keeps of each token, and dropout's mask."""
        return self.before.stream + self.after.norm_stats + self.before.drops * self.before.stream

    def saved_for_weight(self) -> int:
        """Without the mask; with the gradient of what is added, if anything is."""
        added = any(p.name == self.before.added for p in self.before.parameters())
        return self.before.stream + self.after.norm_stats + added * self.before.stream

    def flops(self) -> int:
        return 0

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        return (*self.before.added_kernels(sequences, tokens), *self.after.norm_kernels(sequences, tokens))


@dataclass(frozen=True)
class Body:
    """Normalised input to branch: what a part computes, without norm, last bias, dropout and residual.

    A slice of its parameters computes a term of the branch: the branch is the sum over slices. The head's slices
    compute slices of the logits instead.

    Attributes:
        part: whose body it is.
        block: that holds it.
    """

    part: Part
    block: int

    def sources(self) -> list[tuple[int, Parameter]]:
        """Its parameters, each with the block that holds it in the whole model."""
        return [(self.block, p) for p in self.part.parameters() if p.cut is not None]

    @property
    def place(self) -> str:
        return place_of(self.part, self.block)

    def saved(self) -> int:
        return self.part.body_saved()

    def saved_for_weight(self) -> int:
        return self.part.body_saved_for_weight()

    def flops(self) -> int:
        return self.part.flops()

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        return self.part.body_kernels(sequences, tokens, slices)


@dataclass(frozen=True)
class Projection(Body):
    """Normalised input to queries, keys and values: the first of the two layers that an attention's body is cut into.

    What queries, keys and values mix lies between the two, and has no parameters.
    """

    part: Attention

    def sources(self) -> list[tuple[int, Parameter]]:
        return [source for source in super().sources() if source[1].name.startswith("attn.c_attn")]

    @property
    def place(self) -> str:
        return place_of(self.part, self.block, "'s queries, keys and values")

    def saved(self) -> int:
        return 0

    def flops(self) -> int:
        return 2 * self.part.stream * (self.part.width + 2 * self.part.kv_width)

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        return self.part.projection_kernels(sequences, tokens, slices)


@dataclass(frozen=True)
class Output(Body):
    """What attention has mixed to the branch: the second of the two."""

    part: Attention

    def sources(self) -> list[tuple[int, Parameter]]:
        return [source for source in super().sources() if source[1].name.startswith("attn.c_proj")]

    @property
    def place(self) -> str:
        return place_of(self.part, self.block, "'s output")

    def saved(self) -> int:
        return 0

    def flops(self) -> int:
        return 2 * self.part.stream * self.part.width

    def kernels(self, sequences: int, tokens: int, slices: int) -> tuple[Kernel, ...]:
        return self.part.output_kernels(sequences, tokens, slices)


@dataclass(frozen=True, init=False)
class Halves(CutModel):
    """A model in half-blocks: bodies (even layers) and norms (odd ones), from the embedding's body to the head's.

    For context parallelism, and for selective recomputation, an attention's body is cut in two, and what lies between
    is an op of its own (`context`); every layer then computes any tokens alone.

    Each body is cut into `slices` for tensor parallelism; its flat buffer holds one run after the other. The
    vocabulary is padded to a multiple of them: rows of zeros, and logits of -inf.

    >>> Halves(GPT(layers=2), slices=4).layers
    11

    Attributes:
        whole, slices: see `CutModel`; every body is sliced.
        context: whether attention's bodies are cut in two.
    """

    context: bool

    def __init__(self, whole: Blocks, slices: int = 1, *, context: bool = False) -> None:
        attentions = sum(isinstance(part, Attention) for part in whole.body) if context else 0
        halves = 2 * (2 + whole.layers * len(whole.body)) - 1
        super().__init__(whole, slices, halves + whole.layers * attentions)
        object.__setattr__(self, "context", context)
        if isinstance(whole, MoE):
            raise UserError(
                "half-blocks, which tp, cp, selective recomputation and tied embeddings need, do not cut mixtures of "
                "experts; leave these out, and use ep"
            )
        for part in whole.body:
            for name, count in part.sliceable().items():
                if count % slices:
                    raise UserError(
                        f"{count} {name} do not divide into {slices} tensor-parallel slices (remainder "
                        f"{count % slices}); choose {name} that are a multiple of the slices, or fewer slices"
                    )

    @cached_property
    def units(self) -> list[tuple[int, Part]]:
        """All parts in order, each with its block."""
        blocks = range(self.whole.layers)
        return [(block, part) for block in blocks for part in self.whole.parts(block)]

    @cached_property
    def halves(self) -> list[Norm | Body]:
        """What the layers compute."""
        halves: list[Norm | Body] = []
        for place, (block, part) in enumerate(self.units):
            if place:
                block_before, before = self.units[place - 1]
                halves.append(Norm(before, part, block_before, block))
            if self.context and isinstance(part, Attention):
                halves += [Projection(part, block), Output(part, block)]
            else:
                halves.append(Body(part, block))
        return halves

    def half(self, layer: int) -> Norm | Body:
        """What layer `layer` computes."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return self.halves[layer]

    def layout(self, layer: int) -> LayerLayout:
        slices = 1 if isinstance(self.half(layer), Norm) else self.slices
        return LayerLayout((p.sliced(slices) for _, p in self.half(layer).sources()), slices)

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """A tied head has no parameter but the embedding's."""
        return () if self.half(layer).sources() else tuple(p.name for p in self.layout(0).parameters)

    @property
    def padded_vocabulary(self) -> int:
        """Logits of all slices together."""
        return -(-self.vocabulary // self.slices) * self.slices

    def first_token(self, slice: int) -> int:
        """The first token of the vocabulary whose embedding and logit belong to a slice."""
        return self.padded_vocabulary // self.slices * slice

    def activation_shape(self, index: int) -> tuple[int, ...]:
        """Shape of activation `index` for one sequence; a norm's input is the branch (the residual is as large).

        What attention has mixed comes with the log-sum-exp of each head's scores.
        """
        assert 0 <= index <= self.layers, f"activation {index} of {self.layers} layers"
        if index == 0:
            return (self.block,)
        if index == self.layers:
            return (self.block, self.padded_vocabulary)
        half = self.half(index)
        return (self.block, self.width + (half.part.heads if isinstance(half, Output) else 0))

    @property
    def attention_features(self) -> tuple[int, int]:
        """Features of a token's queries, and of its keys and values; 0 where there is no attention of its own."""
        part = next((half.part for half in self.halves if isinstance(half, Projection)), None)
        return (0, 0) if part is None else (part.width, 2 * part.kv_width)

    def saved_elements(self, layer: int) -> int:
        return self.half(layer).saved()

    def saved_for_weight(self, layer: int) -> int:
        return self.half(layer).saved_for_weight()

    def forward_flops(self, layer: int) -> int:
        return self.half(layer).flops()

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return self.half(layer).kernels(sequences, tokens, slices)

    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, seen: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        half = self.half(layer)
        assert isinstance(half, Projection), f"layer {layer} makes no queries"
        return half.part.mixing_kernels(sequences, queries, keys, seen, slices)

    @property
    def logits(self) -> int:
        return self.padded_vocabulary

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """Each block's first norm, and at last the head's."""
        first: dict[int, int] = {}
        for layer, half in enumerate(self.halves[:-2]):
            if isinstance(half, Norm):
                first.setdefault(half.block_after, layer)
        return *first.values(), self.layers - 2

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        body = LayerKind.TOKENWISE if self.context else LayerKind.SLICED
        kinds: dict[type, LayerKind] = {Norm: LayerKind.NORM, Projection: LayerKind.PROJECT, Output: LayerKind.ROW}
        return tuple([kinds.get(type(half), body) for half in self.halves])
