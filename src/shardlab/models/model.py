"""Language models as lists of layers, from tokens to logits.

`Model` is the interface that all packages use: shapes, layouts, kernels, and the sizes of a program. `Blocks`, its
subclass, is the base of the architectures, with one whole block in each layer. `count_parameters`, at the end, counts
parameters as trainers report them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from shardlab.common.errors import UserError
from shardlab.common.fields import field_hints, read_value
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.layer_graph import Layer, LayerDefinition, build_layers
from shardlab.language.sizes import Sizes
from shardlab.models.attention import Attend
from shardlab.models.layer import Run, runs
from shardlab.models.layout import Kernel, LayerLayout, Pointwise
from shardlab.models.primitives import Add, DropoutSite, Embed, Lookup, Norm, Primitive, Scores, Step
from shardlab.models.recomputation import LayerRecomputation, Place, recomputed_in


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """Language model, divided into the layers of a program. Activation l enters layer l.

    Attributes:
        layers: number of layers of the program.
        hidden_size: features of a token in the residual stream.
        vocab_size: number of different tokens (256: bytes).
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

    def __new__(cls, *_: object, **__: object) -> Self:
        if cls is Model:
            raise UserError("Model is the base of all models; give one of shardlab.models, such as Llama(layers=4)")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.at_least_one("layers", "hidden_size", "vocab_size", "seq_len")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it is a probability, from 0 up to but not including 1")

    def at_least_one(self, *names: str) -> None:
        """Refuse counts that are zero or negative. None is accepted."""
        for name in names:
            if (count := getattr(self, name)) is not None and count < 1:
                raise UserError(f"{name} is {count}; a model needs at least 1")

    @cached_property
    @abstractmethod
    def runs(self) -> Sequence[Run]:
        """The model's layers, in order."""

    @abstractmethod
    def place(self, layer: int) -> str:
        """Return the position of a layer in the model as text, such as `block 31, feed-forward`."""

    def run(self, layer: int) -> Run:
        """Return a layer as a run of primitives."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return self.runs[layer]

    def layout(self, layer: int) -> LayerLayout:
        """Return the layout of a layer's parameters in its flat buffer."""
        return self.run(layer).layout

    def activation_shape(self, index: int, rows: int = 1) -> tuple[int, ...]:
        """Return the shape of an activation for a microbatch of `rows` sequences. Activation 0 is the tokens (int64).

        The output of attention as a separate op includes the log-sum-exp of each head's scores.
        """
        if index == 0:
            return (rows, self.seq_len)
        previous = self.run(index - 1)
        if previous.attend is not None:
            attend = previous.attend.primitive
            assert isinstance(attend, Attend)
            return (rows, self.seq_len, attend.result_width + attend.heads)
        return previous.shape(previous.outputs[0], rows)

    def is_buffers(self, index: int) -> bool:
        """Return whether activation `index` is the experts' buffers, (experts, capacity, features)."""
        previous = self.run(index - 1) if index else None
        return previous is not None and previous.attend is None and "expert" in previous.indices(previous.outputs[0])

    def forward_flops(self, layer: int) -> int:
        """Return the FLOPs of a layer's matrix products for one sequence. A backward pass takes twice as many."""
        return self.run(layer).flops()

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """Return the kernels of a layer's forward pass.

        Args:
            layer: number of the layer.
            sequences: sequences of the microbatches that are computed together.
            tokens: tokens of each sequence on this rank, at most `seq_len`.
            slices: number of slices of the layer's parameters, one of which is computed.
        """
        return self.run(layer).kernels(sequences, tokens, slices)

    def recomputed(self, layer: int, word: str) -> LayerRecomputation:
        """Return the recomputed primitives and the kept tensors of a layer, if all blocks are recomputed as `word`
        says.

        Args:
            layer: number of the layer.
            word: modules joined by +, or a policy (see `shardlab.models.recomputation`).
        """
        return recomputed_in(self.runs, self.steps_of_blocks, layer, word)

    @cached_property
    def steps_of_blocks(self) -> Mapping[int, tuple[Place, ...]]:
        """Positions of each block's primitives, in order. The embedding and the head belong to no block."""
        places_of: dict[int, list[Place]] = {}
        for layer, run in enumerate(self.runs):
            for number, step in enumerate(run.all_steps):
                if step.place.startswith("block"):
                    places_of.setdefault(step.block, []).append((layer, number))
        return {block: tuple(places) for block, places in places_of.items()}

    def attention_after(self, layer: int) -> Attend:
        """Return the attention after a layer whose queries, keys and values go to a separate op."""
        attend = self.run(layer).attend
        assert attend is not None, f"attention is no op of its own after layer {layer}"
        assert isinstance(attend.primitive, Attend)
        return attend.primitive

    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, visible_share: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        """Return the kernels of an ATTEND op: attention as a separate op after a layer.

        Args:
            layer: number of the layer that outputs the queries, keys and values.
            sequences: sequences of the microbatches that are computed together.
            queries, keys: numbers of queries and of keys of each sequence.
            visible_share: fraction of the (query, key) pairs whose query is not before the key.
            slices: number of slices of the heads.
        """
        return self.attention_after(layer).kernels_between(sequences, queries, keys, visible_share, {"head": slices})

    @property
    def logits(self) -> int:
        """Number of logits of a token, including the padding of the vocabulary."""
        return self.activation_shape(self.layers)[-1]

    def loss_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """Return the kernels of the cross-entropy, for one of `slices` equal slices of the vocabulary.

        Their backward kernels make the logits' gradient. A LOSS runs both. If the vocabulary is sliced, LOSS_STATS runs
        the forward kernels, and LOSS the backward kernels.
        """
        logits = sequences * tokens * self.logits // slices
        return (Pointwise("cross_entropy", logits, 2 * logits),)

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """Return the names of the first layer's parameters that a layer also uses: those of a tied embedding."""
        return self.run(layer).borrows

    @cached_property
    def carried_features(self) -> dict[Kind, int]:
        """Features of a token, for each kind of value that layers pass on beside the activations."""
        features = {Kind.RESIDUAL: 0, Kind.ROUTING: 0}
        for run in self.runs:
            for kind, names in run.carried_outputs.items():
                features[kind] = sum(run.shape(name, 1)[-1] for name in names)
        return features

    def microbatch_elements(self, index: int, rows: int) -> int:
        """Return the elements of activation `index` for a microbatch of `rows` sequences."""
        return math.prod(self.activation_shape(index, rows))

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(self.layout(layer).parameter_count for layer in range(self.layers))

    @property
    def parameter_tensors(self) -> int:
        """Number of parameter tensors."""
        return sum(len(self.layout(layer).parameters) for layer in range(self.layers))

    @cached_property
    def signatures(self) -> tuple[Layer, ...]:
        """Signature of each layer: its inputs and outputs, and its primitives as nodes."""
        definitions: list[LayerDefinition] = []
        for run in self.runs:
            definitions.append((run.name, [step.primitive.node for step in run.steps], run.cut))
            if run.attend is not None:
                definitions.append(("attention", [run.attend.primitive.node], ()))
        return build_layers(definitions, tied=bool(self.borrowed(self.layers - 1)) and self.layers > 1)

    @property
    def leading_blocks(self) -> int:
        """Number of blocks at the start that differ from the rest. The rest are identical."""
        return 0

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """First layer of each block, and the end of the last block; empty if each layer is a block."""
        return ()

    @property
    def attention_features(self) -> tuple[int, int]:
        """Features of a token's queries, and of its keys and values, if layers output them for attention as a separate
        op; otherwise (0, 0).
        """
        layer = next((layer for layer in range(self.layers) if self.run(layer).attend), None)
        if layer is None:
            return (0, 0)
        attend = self.attention_after(layer)
        return attend.width, attend.kv_width + attend.values_width

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Return the number of elements of every value in a program whose microbatches are `rows` sequences.

        The optimizer state is AdamW's two moments. The elements of activation 0 are tokens (int64), which have no
        gradient. The entries of a sliced layer cover all its slices.
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
            saved=tuple(run.saved(rows) for run in self.runs),
            saved_for_weight=tuple(run.saved_for_weight(rows) for run in self.runs),
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
            flops=tuple(rows * _flops(run.kernels(1, self.seq_len)) for run in self.runs),
            attend_flops=rows * self._attend_flops(),
        )

    def _attend_flops(self) -> float:
        """FLOPs of attention as a separate op, for one sequence; 0 if there is none."""
        attend = next((run.attend.primitive for run in self.runs if run.attend is not None), None)
        return _flops(attend.kernels(1, self.seq_len, {})) if attend is not None else 0.0


def _flops(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.flops for kernel in kernels)


@dataclass(frozen=True, kw_only=True)
class Blocks(Model):
    """Model with one block in each layer: the base class of the architectures.

    The embedding belongs to layer 0, and the final norm and the head to layer `layers - 1`.
    """

    def __post_init__(self) -> None:
        for name, hint in field_hints(type(self)).items():
            read_value(hint, getattr(self, name), "", name)
        super().__post_init__()

    @abstractmethod
    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        """Parts of every block: each part's name for messages, and its primitives."""

    def leading_block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        """Parts of each of the `leading_blocks`, as in `block_parts`."""
        return self.block_parts()

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
        """Number that norms add to the variance, or to the mean square."""
        return 1e-5

    @property
    def has_tied_head(self) -> bool:
        """Whether the head uses the token embedding as its matrix."""
        return False

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All primitives, in order."""
        first, last, drops = 0, self.layers - 1, self.dropout > 0
        tokens, hidden_size = self.seq_len, self.hidden_size
        lookup = Lookup(tokens=tokens, hidden_size=hidden_size, vocab_size=self.vocab_size)
        embed = Embed(tokens=tokens, hidden_size=hidden_size, positions=self.positions, drops=drops)
        steps = [Step(lookup, first, "embedding"), Step(embed, first, "embedding")]
        leading, others = self.leading_block_parts(), self.block_parts()
        for block in range(self.layers):
            parts = leading if block < self.leading_blocks else others
            steps += [Step(primitive, block, f"block {block}, {name}") for name, part in parts for primitive in part]
        scores = Scores(
            tokens=tokens, name="lm_head", outputs=self.vocab_size, inputs=hidden_size, bias=False,
            out_index="vocab", in_index="width", tied=self.has_tied_head,
        )  # fmt: skip
        return (*steps, Step(self.norm_of("ln_f"), last, "head"), Step(scores, last, "head"))

    def norm_of(self, name: str) -> Norm:
        """Return a norm of the residual stream."""
        return Norm(
            tokens=self.seq_len, name=name, hidden_size=self.hidden_size, rms=self.rms, bias=self.bias, eps=self.epsilon
        )

    def add(self, site: DropoutSite, bias: str = "") -> Add:
        """Return the sum of a branch with the residual stream.

        `bias` is the name of the bias of the preceding linear map. The sum adds this bias.
        """
        drops, bias = self.dropout > 0, bias if self.bias else ""
        return Add(tokens=self.seq_len, hidden_size=self.hidden_size, bias=bias, drops=drops, site=site)

    @cached_property
    def runs(self) -> Sequence[Run]:
        blocks = [step.block for step in self.steps]
        return runs(self.steps, [blocks.index(block) for block in range(1, self.layers)])

    def place(self, layer: int) -> str:
        return f"block {layer}"

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """Return the same names as `Model.borrowed`, without building all layers, which may not fit into memory."""
        return ("wte.weight",) if self.has_tied_head and 0 < layer == self.layers - 1 else ()

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Return the sizes for programs of whole blocks, as `Model.sizes` does.

        Raises:
            UserError: if the head is tied to the embedding, which no program of whole blocks can compute.
        """
        if self.borrowed(self.layers - 1):
            raise UserError(
                f"tied embeddings are one parameter of two layers, but whole blocks share none: of {self.layers}, the "
                "first holds the embedding and the last the head; run it by a plan, such as zero-3 or --pp 2, or by a "
                "program whose ranks have all layers, such as fsdp, set layers to 1, or leave the embeddings untied"
            )
        return super().sizes(rows, element_bytes)


POSITIONS = "wpe.weight"
"""Name of the parameter that holds learned position embeddings."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model. A tied embedding counts once.

    Attributes:
        parameters: all parameters.
        decayed, decayed_tensors: number of parameters with weight decay, and number of their tensors.
        not_decayed, not_decayed_tensors: number of all other parameters, and number of their tensors.
        without_positions: all parameters except position embeddings, as nanoGPT's `get_num_params` counts.
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
    parameters = [parameter for layer in range(model.layers) for parameter in model.layout(layer).parameters]
    decayed = [parameter.numel for parameter in parameters if parameter.decayed]
    others = [parameter.numel for parameter in parameters if not parameter.decayed]
    positions = sum(parameter.numel for parameter in parameters if parameter.name == POSITIONS)
    total = sum(decayed) + sum(others)
    return ParameterCounts(total, sum(decayed), len(decayed), sum(others), len(others), total - positions)
