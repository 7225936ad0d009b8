"""What every model is: a list of layers, from tokens to logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlab.common.errors import UserError
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.layer_graph import Layer, LayerDefinition, build_layers
from shardlab.language.sizes import Sizes
from shardlab.models.attention import Attend
from shardlab.models.layer import Run, runs
from shardlab.models.layout import Kernel, LayerLayout, Pointwise
from shardlab.models.primitives import Add, DropoutSite, Embed, Lookup, Norm, Primitive, Scores, Step


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A language model, cut into the layers of a program. Activation l enters layer l.

    Attributes:
        layers: layers of the program.
        hidden_size: features of a token in the residual stream.
        vocab_size: how many different tokens there are (256: bytes).
        seq_len: tokens of a sequence, and the longest context.
        bias: whether linear maps and norms have a bias.
        dropout: probability that an element is dropped in training.
    """

    layers: int = 4
    hidden_size: int = 64
    vocab_size: int = 256
    seq_len: int = 64
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.at_least_one("layers", "hidden_size", "vocab_size", "seq_len")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it is a probability, from 0 up to but not including 1")

    def at_least_one(self, *names: str) -> None:
        """Refuse counts that are zero or negative."""
        for name in names:
            if (count := getattr(self, name)) < 1:
                raise UserError(f"{name} is {count}; a model needs at least 1")

    @cached_property
    @abstractmethod
    def runs(self) -> Sequence[Run]:
        """The layers, in order."""

    @abstractmethod
    def place(self, layer: int) -> str:
        """Where a layer of the program stands in the model, as a reader knows it: `block 31, feed-forward`."""

    def run(self, layer: int) -> Run:
        """What layer `layer` computes."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return self.runs[layer]

    def layout(self, layer: int) -> LayerLayout:
        """Where the layer's parameters lie in its flat buffer."""
        return self.run(layer).layout

    def activation_shape(self, index: int, rows: int = 1) -> tuple[int, ...]:
        """Shape of activation `index` for a microbatch of `rows` sequences: int64 tokens at first, logits at last.

        What attention has mixed, as an op of its own, comes with the log-sum-exp of each head's scores.
        """
        if index == 0:
            return (rows, self.seq_len)
        before = self.run(index - 1)
        if before.attend is not None:
            attend = before.attend.primitive
            assert isinstance(attend, Attend)
            return (rows, self.seq_len, attend.hidden_size + attend.heads)
        return before.shape(before.outputs[0], rows)

    def is_buffers(self, index: int) -> bool:
        """Whether activation `index` is the experts' buffers, (experts, capacity, features)."""
        before = self.run(index - 1) if index else None
        return before is not None and before.attend is None and "expert" in before.indices(before.outputs[0])

    def saved_elements(self, layer: int) -> int:
        """Elements that are kept between the layer's forward and backward, for one sequence in training.

        Beyond the layer's inputs and its parameters; exactly what is measured on a CPU. All are of the
        compute dtype, but for attention's log-sum-exp (without dropout): it is float32 in half precision, so that
        `heads * block` elements count twice there. Not measured on a GPU: its kernels keep other statistics, and where
        it has no fused attention (float64) also T x T matrices.
        """
        return self.run(layer).saved(1)

    def saved_for_weight(self, layer: int) -> int:
        """Elements that are left of that between the halves of a split backward pass, for one sequence.

        With the gradients that the first half leaves for the second, beyond that of the layer's output. So it is from
        the second time on: in the first, it is not yet known what the second half reads, and all stays.
        """
        return self.run(layer).saved_for_weight(1)

    def forward_flops(self, layer: int) -> int:
        """FLOPs of the layer's matrix products for one sequence; a backward pass takes twice as many."""
        return self.run(layer).flops()

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """What the layer's forward pass asks of a device.

        Args:
            layer: its number.
            sequences: of the microbatches that are computed together.
            tokens: of each sequence that are here, at most `seq_len`.
            slices: that the layer's parameters are cut into, if they are cut; one of them is computed.
        """
        return self.run(layer).kernels(sequences, tokens, slices)

    def attention_after(self, layer: int) -> Attend:
        """The attention that mixes what a layer makes of queries, keys and values, as an op of its own."""
        attend = self.run(layer).attend
        assert attend is not None, f"attention is no op of its own after layer {layer}"
        assert isinstance(attend.primitive, Attend)
        return attend.primitive

    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, seen: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        """What queries that layer `layer` made ask, when they meet keys and values: for models cut for `cp`.

        Args:
            layer: its number.
            sequences: of the microbatches that are computed together.
            queries, keys: tokens of each sequence.
            seen: the part of the pairs of queries and keys in which the query comes no earlier than the key.
            slices: that heads are cut into.
        """
        return self.attention_after(layer).kernels_between(sequences, queries, keys, seen, {"head": slices})

    @property
    def logits(self) -> int:
        """Scores of a token, those of padding included."""
        return self.activation_shape(self.layers)[-1]

    def loss_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """Cross-entropy of one of `slices` slices of the vocabulary; its backward kernels make the logits' gradient.

        A LOSS op does both at once. Where the vocabulary is sliced, LOSS_STATS is the first and LOSS the second.
        """
        logits = sequences * tokens * self.logits // slices
        return (Pointwise("cross_entropy", logits, 2 * logits),)

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """The parameters of the first layer that this other layer computes with as well, by name: a tied embedding."""
        return self.run(layer).borrows

    @cached_property
    def carried_features(self) -> dict[Kind, int]:
        """Features of a token in each kind of value that is carried from layer to layer beside the activations."""
        found = {Kind.RESIDUAL: 0, Kind.ROUTING: 0}
        for run in self.runs:
            for kind, names in run.carried_outputs.items():
                found[kind] = sum(run.shape(name, 1)[-1] for name in names)
        return found

    def microbatch_elements(self, index: int, rows: int) -> int:
        """Elements of activation `index` for a microbatch of `rows` sequences."""
        return math.prod(self.activation_shape(index, rows))

    def microbatch_saved(self, layer: int, rows: int) -> int:
        """`saved_elements` for a microbatch of `rows` sequences."""
        return self.run(layer).saved(rows)

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(self.layout(layer).parameter_count for layer in range(self.layers))

    @property
    def parameter_tensors(self) -> int:
        """How many tensors these are."""
        return sum(len(self.layout(layer).parameters) for layer in range(self.layers))

    @cached_property
    def signatures(self) -> tuple[Layer, ...]:
        """What each layer takes and makes."""
        written: list[LayerDefinition] = []
        for run in self.runs:
            written.append((run.name, [step.primitive.node for step in run.steps], run.cut))
            if run.attend is not None:
                written.append(("attention", [run.attend.primitive.node], ()))
        return build_layers(written, tied=bool(self.borrowed(self.layers - 1)) and self.layers > 1)

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """Where blocks begin, and where the last one ends; none if each layer is a block."""
        return ()

    @property
    def attention_features(self) -> tuple[int, int]:
        """Features of a token's queries, and of its keys and values, where layers make them for others to mix."""
        layer = next((layer for layer in range(self.layers) if self.run(layer).attend), None)
        if layer is None:
            return (0, 0)
        attend = self.attention_after(layer)
        return attend.hidden_size, 2 * attend.kv_width

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Elements of every value in a program whose microbatches are `rows` sequences.

        The optimizer state is AdamW's two moments. Activation 0 counts its tokens as elements (they are int64); its
        gradient, which does not exist, has the same entry. A sliced layer's entries are of all its slices together.
        """
        if rows < 1:
            raise UserError(f"a microbatch of {rows} sequences is empty; it needs at least 1")
        weights = tuple(self.layout(layer).numel for layer in range(self.layers))
        carried = self.carried_features
        return Sizes(
            weights=weights,
            opt_states=tuple(2 * elements for elements in weights),
            matrices=tuple(self.layout(layer).matrix_count for layer in range(self.layers)),
            activations=tuple(self.microbatch_elements(i, rows) for i in range(self.layers + 1)),
            saved=tuple(self.microbatch_saved(layer, rows) for layer in range(self.layers)),
            saved_for_weight=tuple(self.run(layer).saved_for_weight(rows) for layer in range(self.layers)),
            keeps_input=tuple(run.keeps_input for run in self.runs),
            saves_residual=tuple(run.saves_residual for run in self.runs),
            element_bytes=dict.fromkeys(Kind, element_bytes),
            signatures=self.signatures,
            blocks=self.block_bounds,
            weight_blocks=tuple(tuple(sorted({block for block, _ in run.parameters()})) for run in self.runs),
            tied=bool(self.borrowed(self.layers - 1)),
            stats=3 * rows * self.seq_len,
            residual=rows * self.seq_len * carried[Kind.RESIDUAL],
            routing=rows * self.seq_len * carried[Kind.ROUTING],
            queries=rows * self.seq_len * self.attention_features[0],
            keys_values=rows * self.seq_len * self.attention_features[1],
        )


# Models of which a program's layer is a whole block.


@dataclass(frozen=True, kw_only=True)
class Blocks(Model):
    """A model with one block in each layer.

    The embedding belongs to layer 0, the final norm and the head to layer `layers - 1`.
    """

    @abstractmethod
    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        """What every block computes: each part's name for a reader, and its primitives."""

    @property
    def positions(self) -> bool:
        """Whether positions are learned."""
        return False

    @property
    def rms(self) -> bool:
        """Whether norms are RMSNorms."""
        return False

    @property
    def epsilon(self) -> float:
        """What norms add to the variance, or to the mean square."""
        return 1e-5

    @property
    def has_tied_head(self) -> bool:
        """Whether the head computes with the token embedding."""
        return False

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All primitives, in order."""
        first, last, drops = 0, self.layers - 1, self.dropout > 0
        tokens, hidden_size = self.seq_len, self.hidden_size
        lookup = Lookup(tokens=tokens, hidden_size=hidden_size, vocab_size=self.vocab_size)
        embed = Embed(tokens=tokens, hidden_size=hidden_size, positions=self.positions, drops=drops)
        found = [Step(lookup, first, "embedding"), Step(embed, first, "embedding")]
        parts = self.block_parts()
        for block in range(self.layers):
            found += [Step(each, block, f"block {block}, {name}") for name, part in parts for each in part]
        scores = Scores(
            tokens=tokens, name="lm_head", outputs=self.vocab_size, inputs=hidden_size, bias=False,
            out_index="vocab", in_index="width", tied=self.has_tied_head,
        )  # fmt: skip
        return (*found, Step(self.norm_of("ln_f"), last, "head"), Step(scores, last, "head"))

    def norm_of(self, name: str) -> Norm:
        """A norm of the residual stream."""
        return Norm(
            tokens=self.seq_len, name=name, hidden_size=self.hidden_size, rms=self.rms, bias=self.bias, eps=self.epsilon
        )

    def add(self, site: DropoutSite, bias: str = "") -> Add:
        """A sum of a branch with the residual stream; `bias` names that of the linear map before it."""
        drops, bias = self.dropout > 0, bias if self.bias else ""
        return Add(tokens=self.seq_len, hidden_size=self.hidden_size, bias=bias, drops=drops, site=site)

    @cached_property
    def runs(self) -> Sequence[Run]:
        blocks = [step.block for step in self.steps]
        return runs(self.steps, [blocks.index(block) for block in range(1, self.layers)])

    def place(self, layer: int) -> str:
        return f"block {layer}"

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """Name what a layer borrows, as `Model.borrowed` does, without making all layers: there may be more than memory
        holds."""
        return ("wte.weight",) if self.has_tied_head and 0 < layer == self.layers - 1 else ()

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Sizes for programs of whole blocks, as `Model.sizes` gives them.

        Raises:
            UserError: when the last block computes with a weight of the first one, as no program of whole blocks can.
        """
        if self.borrowed(self.layers - 1):
            raise UserError(
                f"tied embeddings are one parameter of two layers, but whole blocks share none: of {self.layers}, the "
                "first holds the embedding and the last the head; run it by a plan, such as zero-3 or --pp 2, or by a "
                "program whose ranks have all layers, such as fsdp, set layers to 1, or leave the embeddings untied"
            )
        return super().sizes(rows, element_bytes)


# How many parameters a model has, as trainers report it.


POSITIONS = "wpe.weight"
"""The parameter that holds learned position embeddings."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model; a tied embedding counts once.

    Attributes:
        parameters: all.
        decayed, decayed_tensors: those on which weight decay acts, and in how many tensors they are.
        not_decayed, not_decayed_tensors: the others.
        without_positions: all but position embeddings, as nanoGPT's `get_num_params` counts.
    """

    parameters: int
    decayed: int
    decayed_tensors: int
    not_decayed: int
    not_decayed_tensors: int
    without_positions: int


def count_parameters(model: Model) -> ParameterCounts:
    """Count a model's parameters.

    >>> from shardlab.models import find_model
    >>> count_parameters(find_model("gpt2")).without_positions
    123653376
    """
    every = [each for layer in range(model.layers) for each in model.layout(layer).parameters]
    decayed = [each.numel for each in every if each.decayed]
    others = [each.numel for each in every if not each.decayed]
    positions = sum(each.numel for each in every if each.name == POSITIONS)
    total = sum(decayed) + sum(others)
    return ParameterCounts(total, sum(decayed), len(decayed), sum(others), len(others), total - positions)
