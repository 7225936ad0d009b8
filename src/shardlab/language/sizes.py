"""Sizes of values: the elements and bytes of each value of a model.

`Sizes` holds what a program needs to know about a model: the elements of each layer's values, and each layer's
signature. `shardlab.models` fills it from the shapes of real models. The second half of this file builds the models of
the LLM Training Puzzles, in which every layer is one matrix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardlab.language.mesh import Mesh
from shardlab.language.rules.kinds import ROW_KINDS, Kind, bytes_of
from shardlab.language.rules.layer_graph import Layer, LayerDefinition, Node, build_layers
from shardlab.language.rules.spec import Space, Spec

PUZZLE_HIDDEN = 512
PUZZLE_LENGTH = 256


@dataclass(frozen=True)
class Sizes:
    """Elements of every value of a model: of whole layers, and of one microbatch.

    Attributes:
        weights: elements of layer l's parameters, and of their gradient.
        opt_states: elements of layer l's optimizer state.
        matrices: elements of layer l's parameters that Muon updates (empty: not needed).
        whole_matrices: whether the optimizer is Muon, which computes the update of a matrix from the whole matrix.
        clips: whether the optimizer clips the norm of the model's gradient; the puzzles' optimizer does not.
        activations: elements of activation l, and of its gradient, for one microbatch, l = 0 .. layers.
        saved: elements that layer l keeps between forward and backward for one microbatch, beyond the layer's input.
        saved_for_weight: elements that layer l keeps between the two halves of a split backward pass for one
            microbatch: the part of `saved` that the second half reads, and the gradients that the first half leaves for
            it, beyond the gradient of the layer's output (empty: as many as `saved`).
        keeps_input: whether layer l keeps its input for the backward pass (empty: it does).
        saves_residual: whether `saved[l]` includes the residual stream that layer l outputs (empty: never).
        element_bytes: bytes of one element, by kind.
        signatures: primitives, inputs and outputs of each layer (empty: each layer computes an activation from an
            activation and a weight that is not sliced).
        tied: whether the last of several layers, the head, shares the weight of the first one, the embedding;
            `weights[-1]` is then 0.
        residual: elements of one microbatch's residual stream, if layers pass it on beside the activations.
        routing: elements of a router's output for one microbatch.
        blocks: the first layer of each block, then the end of the last block. Needed if blocks consist of several
            layers, or if embedding and head are layers (empty: each layer is a block).
        weight_blocks: indices of the model's blocks whose parameters layer l has (empty: layer l is block l).
        stats: elements of the loss statistics of one slice of the logits, for one microbatch.
        queries, keys_values: elements of the results of a layer that projects (`Layer.projects`), for one microbatch.
        slices_per_rank: slices of every sequence for each context-parallel rank.
        tiles: slices of each tensor-parallel rank's part of a layer. The rank may compute them one after the other (see
            `shardlab.simulate.passes.tile`).
        flops: FLOPs of layer l's forward pass for one microbatch (empty: 2 for each parameter and each of 256 tokens).
        attend_flops: FLOPs of causal attention as a separate op (ATTEND), for one microbatch.
    """

    weights: tuple[int, ...]
    opt_states: tuple[int, ...]
    activations: tuple[int, ...]
    saved: tuple[int, ...]
    saved_for_weight: tuple[int, ...] = ()
    element_bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 4))
    signatures: tuple[Layer, ...] = ()
    residual: int = 0
    routing: int = 0
    stats: int = 0
    blocks: tuple[int, ...] = ()
    queries: int = 0
    keys_values: int = 0
    tied: bool = False
    slices_per_rank: int = 2
    tiles: int = 1
    matrices: tuple[int, ...] = ()
    whole_matrices: bool = False
    clips: bool = False
    keeps_input: tuple[bool, ...] = ()
    saves_residual: tuple[bool, ...] = ()
    weight_blocks: tuple[tuple[int, ...], ...] = ()
    flops: tuple[float, ...] = ()
    attend_flops: float = 0.0

    def __post_init__(self) -> None:
        if not self.signatures:
            object.__setattr__(self, "signatures", whole_layers(len(self.weights)))

    @property
    def layers(self) -> int:
        return len(self.weights)

    @property
    def block_count(self) -> int:
        """Number of blocks: the layers of the model before blocks were cut into several layers."""
        if self.weight_blocks:
            return len({block for blocks in self.weight_blocks for block in blocks})
        return len(self.blocks) - 1 if self.blocks else self.layers

    @cached_property
    def forward_flops(self) -> tuple[float, ...]:
        """FLOPs of each layer's forward pass for one microbatch, without attention that is a separate op."""
        return self.flops or tuple(2.0 * PUZZLE_LENGTH * elements for elements in self.weights)

    @cached_property
    def block_flops(self) -> float:
        """FLOPs of the forward pass of one microbatch through the model, divided by the number of blocks."""
        attends = sum(layer.projects for layer in self.signatures)
        return (sum(self.forward_flops) + attends * self.attend_flops) / max(1, self.block_count)

    def with_copies(self, layer: int, copies: int) -> Sizes:
        """Return the sizes with `copies` times one layer's parameters, so that each of `copies` slices counts as the
        layer.
        """

        def enlarged(name: str) -> tuple[int, ...]:
            elements: tuple[int, ...] = getattr(self, name)
            return (*elements[:layer], elements[layer] * copies, *elements[layer + 1 :]) if elements else ()

        return replace(self, **{name: enlarged(name) for name in ("weights", "opt_states", "matrices")})

    @classmethod
    def puzzle(cls, layers: int) -> Sizes:
        """Return the sizes of the LLM Training Puzzles' model.

        A layer is a matrix of 512 x 512. A microbatch has 256 tokens. Layers keep nothing for the backward pass.
        """
        return _puzzle_sizes(whole_layers(layers))

    @classmethod
    def of_puzzle(cls, layers: int, mesh: Mesh) -> Sizes:
        """Return the puzzles' model with this number of layers, or of blocks if the mesh slices layers."""
        if mesh.ep > 1:
            return cls.expert_blocks(layers) if mesh.tp > 1 or mesh.cp > 1 else cls.mixture(layers)
        if mesh.cp > 1:
            return cls.context_blocks(layers)
        return cls.half_blocks(layers) if mesh.tp > 1 else cls.puzzle(layers)

    @classmethod
    def half_blocks(cls, blocks: int, *, tied: bool = False) -> Sizes:
        """Return the puzzles' model in half-blocks, for tensor parallelism.

        A block is an attention and an MLP of one matrix each, and a norm, which is a vector, before each of the two. An
        embedding comes before the blocks and a head after them; they share one matrix if they are `tied`.
        """
        layers = half_block_layers(blocks, tied=tied)
        return _puzzle_sizes(layers, tuple(range(1, len(layers) - 1, 4)), tied=tied)

    @classmethod
    def columns(cls, layers: int) -> Sizes:
        """Return the puzzles' model cut by columns: each slice of a matrix makes a slice of its output."""
        return _puzzle_sizes(column_layers(layers))

    @classmethod
    def mixture(cls, blocks: int) -> Sizes:
        """Return the puzzles' model with experts: in each block one matrix, and one matrix for all experts."""
        sizes = _puzzle_sizes(mixture_layers(blocks), vectors=False)
        return replace(sizes, weight_blocks=tuple((min(layer // 2, blocks - 1),) for layer in range(sizes.layers)))

    @classmethod
    def context_blocks(cls, blocks: int) -> Sizes:
        """Return the puzzles' model in half-blocks, for context parallelism.

        The attention of a block is two layers. Selective recomputation computes the values between the two again.
        """
        layers = context_block_layers(blocks)
        norms = tuple(l for l, layer in enumerate(layers) if layer.carries)
        return replace(_puzzle_sizes(layers, norms), queries=ROWS, keys_values=2 * ROWS)

    @classmethod
    def expert_blocks(cls, blocks: int) -> Sizes:
        """Return blocks of an attention and a mixture of experts, for expert parallelism beside tensor or context
        parallelism.

        The layer that combines the experts' results has no parameters.
        """
        layers = expert_block_layers(blocks)
        norms = [l for l, layer in enumerate(layers) if layer.carries]
        sizes = _puzzle_sizes(layers, (*norms[:-1:2], norms[-1]))
        return replace(sizes, queries=ROWS, keys_values=2 * ROWS, routing=PUZZLE_LENGTH)

    def space(self, mesh: Mesh, microbatches: int) -> Space:
        """Return the numbers of pieces into which a mesh divides the values of a program.

        Heads are counted in pieces of 1 / `cp` of a tensor-parallel slice, since an `all_to_all` along `cp` exchanges
        slices of sequences for such pieces.
        """
        cuts, uses = self.cuts(mesh), 2 if self.tied else 1
        if not cuts:
            return Space(microbatches, uses=uses)
        slices = mesh.tp * (self.slices_per_rank * mesh.cp if mesh.cp > 1 else 1)
        pieces = {index: count * (mesh.cp if index == "head" else 1) for index, count in cuts.items()}
        return Space(microbatches, slices, tuple(pieces.items()), uses)

    def cuts(self, mesh: Mesh) -> dict[str, int]:
        """Return the number of slices of each index along which a mesh cuts this model's parameters."""
        indices = sorted({index for layer in self.signatures for index in layer.cut})
        return {index: mesh.ep * mesh.cp if index == "expert" else mesh.tp * self.tiles for index in indices}

    @cached_property
    def scores_index(self) -> str:
        """Name of the index along which the logits may be cut."""
        return self.signatures[-1].cut[0]

    @cached_property
    def directed(self) -> frozenset[int]:
        """Layers with matrices whose update needs the whole matrix. Updating a slice of one needs a direction."""
        return frozenset(l for l, elements in enumerate(self.matrices) if elements and self.whole_matrices)

    def weight_of(self, layer: int) -> int:
        """Return the layer whose weight `layer` computes with: its own, or 0 for a head tied to the embedding."""
        return 0 if self.tied and layer == self.layers - 1 else layer

    def layers_of_weight(self, layer: int) -> int:
        """Return the layers that compute with a layer's weight, as a bit set."""
        return 1 << layer | (1 << self.layers - 1 if self.tied and layer == 0 else 0)

    def elements(self, spec: Spec) -> int:
        """Return the elements of a value on one rank."""
        form = spec.form
        kind, layer = form.kind, form.layer
        if kind in ROW_KINDS:
            return self._row_elements(spec)
        if kind is Kind.SCALAR:
            return 1
        whole = (self.opt_states if kind is Kind.OPT_STATE else self.weights)[layer]
        return -(-whole * form.holds.mask.bit_count() // form.holds.of)

    def bytes(self, spec: Spec) -> int:
        """Return the bytes of a value on one rank."""
        dtype = spec.form.dtype
        return self.elements(spec) * (int(bytes_of(dtype)) if dtype else self.element_bytes[spec.kind])

    def _row_elements(self, spec: Spec) -> int:
        form = spec.form
        kind, layer, space = form.kind, form.layer, form.space
        if kind is Kind.STATS:
            pieces = spec.pieces(self.scores_index).bit_count()
            return -(-self.stats * pieces * spec.cells.bit_count() // space.sequence)
        if kind is Kind.RESIDUAL or kind is Kind.GRAD_RESIDUAL:
            per_microbatch = self.residual
        elif kind is Kind.ROUTING or kind is Kind.GRAD_ROUTING:
            per_microbatch = self.routing
        elif kind is Kind.QUERIES or kind is Kind.GRAD_QUERIES:
            per_microbatch = self.queries
        elif kind is Kind.KEYS_VALUES or kind is Kind.GRAD_KEYS_VALUES:
            per_microbatch = self.keys_values
        elif kind is Kind.SAVED:
            per_microbatch = self.saved[layer]
        elif kind is Kind.SAVED_FOR_WEIGHT:
            per_microbatch = (self.saved_for_weight or self.saved)[layer]
        else:
            per_microbatch = self.activations[layer]
        elements, divisor = per_microbatch * spec.cells.bit_count(), space.sequence
        for index, pieces in form.slices:
            elements *= pieces.bit_count()
            divisor *= space.count(index)
        return -(-elements // divisor)


SQUARE, ROWS = PUZZLE_HIDDEN * PUZZLE_HIDDEN, PUZZLE_HIDDEN * PUZZLE_LENGTH
"""Elements of the puzzles' matrix, and of its activation for one microbatch."""

ATTEND_FLOPS = 2.0 * PUZZLE_LENGTH**2 * PUZZLE_HIDDEN
"""FLOPs of causal attention for one microbatch of the puzzles: two products over half of all pairs of tokens."""


_MATRIX = Node("matrix", {"x": "width"}, {"x": "width"}, {"w": "width in"}, atomic=True)
_NORM = Node("norm", {"s": "width"}, {"x": "width"}, {"w": "width"}, whole=frozenset({"width"}))
_ADD = Node("add", {"x": "width", "s": "width"}, {"s": "width"})
_EMBED = Node("embed", {"x": "width"}, {"s": "width"})
_LOOKUP = Node("lookup", {"x": ""}, {"x": "width"}, {"w": "vocab width"}, atomic=True)
_SCORES = Node("scores", {"x": "width"}, {"x": "vocab"}, {"w": "vocab width"}, takes_own=True)
_UP = Node("linear", {"x": "width"}, {"x": "ffn"}, {"w1": "ffn width"})
_DOWN = Node("linear", {"x": "ffn"}, {"x": "width"}, {"w2": "width ffn"})
_PROJECT = Node("projection", {"x": "width"}, {"q": "head", "kv": "head"}, {"w1": "head width"})
_ATTEND = Node("attend", {"q": "head", "kv": "head"}, {"x": "head"}, mixes_tokens=True, atomic=True)
_OUTPUT = Node("linear", {"x": "head"}, {"x": "width"}, {"w2": "width head"})
_DISPATCH = Node("dispatch", {"x": "width"}, {"x": "expert width"}, deals=frozenset({"expert"}), mixes_tokens=True)
_EXPERTS = Node("experts", {"x": "expert width"}, {"x": "expert width"}, {"w": "expert width in"})
_COMBINE = Node("combine", {"x": "expert width"}, {"x": "width"})
_ROUTE = Node(
    "route", {"x": "width"}, {"gates": ""}, {"w": "choice width"}, frozenset({"width"}), mixes_tokens=True, affine=True
)
_EXPERTS_UP = Node("experts", {"x": "expert width"}, {"x": "expert ffn"}, {"w1": "expert ffn width"})
_EXPERTS_DOWN = Node("experts", {"x": "expert ffn"}, {"x": "expert width"}, {"w2": "expert width ffn"})
_GATED = Node("combine", {"x": "expert width", "gates": ""}, {"x": "width"}, whole=frozenset({"width"}))
_COLUMNS = [
    Node("column", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"}, takes_own=True),
    Node("column", {"x": "ffn"}, {"x": "width"}, {"w": "width ffn"}, takes_own=True),
]

_FIRST_NORM: LayerDefinition = ("norm", (_EMBED, _NORM), ())
_LATER_NORM: LayerDefinition = ("norm", (_ADD, _NORM), ())
_EMBEDDING: LayerDefinition = ("embedding", (_LOOKUP,), ("vocab",))
_ATTENTION: list[LayerDefinition] = [
    ("projection", (_PROJECT,), ("head",)),
    ("attention", (_ATTEND,), ()),
    ("output", (_OUTPUT,), ("head",)),
]
_HEAD: LayerDefinition = ("head", (_SCORES,), ("vocab",))


def whole_layers(layers: int) -> tuple[Layer, ...]:
    """Build layers of one unsliced matrix each."""
    return build_layers([("whole", (_MATRIX,), ())] * layers)


def column_layers(layers: int) -> tuple[Layer, ...]:
    """Build layers of one matrix each. Slice i of the matrix computes slice i of the output features."""
    return build_layers([("column", (_COLUMNS[l % 2],), ("width" if l % 2 else "ffn",)) for l in range(layers)])


def half_block_layers(blocks: int, *, tied: bool = False) -> tuple[Layer, ...]:
    """Build an embedding, the attention and the feed-forward of each block, a head, and the norms between them."""
    attention: LayerDefinition = ("attention", (_PROJECT, _ATTEND, _OUTPUT), ("head",))
    feed_forward: LayerDefinition = ("feed-forward", (_UP, _DOWN), ("ffn",))
    return build_layers(_between_norms([_EMBEDDING, *([attention, feed_forward] * blocks), _HEAD]), tied=tied)


def context_block_layers(blocks: int) -> tuple[Layer, ...]:
    """Build an embedding, an attention in two layers for each block, a head, and the norms between them.

    The op that mixes tokens comes between the two layers of an attention.
    """
    return build_layers(_between_norms([_EMBEDDING, *([_ATTENTION] * blocks), _HEAD]))


def expert_block_layers(blocks: int) -> tuple[Layer, ...]:
    """Build an embedding, two layers of attention and three of experts for each block, a head, and norms between."""
    mixture: list[LayerDefinition] = [
        ("routing", (_ROUTE, _DISPATCH), ()),
        ("experts", (_EXPERTS_UP, _EXPERTS_DOWN), ("expert", "ffn")),
        ("combining", (_GATED,), ()),
    ]
    return build_layers(_between_norms([_EMBEDDING, *([_ATTENTION, mixture] * blocks), _HEAD]))


def mixture_layers(blocks: int) -> tuple[Layer, ...]:
    """Build alternating layers: layers without experts, which add, normalize and dispatch, and layers of experts."""
    first: LayerDefinition = ("non-expert", (_EMBED, _NORM, _DISPATCH), ())
    later: LayerDefinition = ("non-expert", (_COMBINE, _ADD, _NORM, _DISPATCH), ())
    last: LayerDefinition = ("non-expert", (_COMBINE, _ADD, _NORM), ())
    experts: LayerDefinition = ("experts", (_EXPERTS,), ("expert",))
    return build_layers([first, experts, *(layer for _ in range(blocks - 1) for layer in (later, experts)), last])


def _layer_flops(layer: Layer, elements: int) -> float:
    """Return the FLOPs of a layer for one microbatch: of its matrix, and of its attention.

    Embedding and head count as 0, so that the model cut into half-blocks takes as long as the uncut one.
    """
    if elements != SQUARE or layer.name in ("embedding", "head"):
        return 0.0
    return 2.0 * PUZZLE_LENGTH * SQUARE + ATTEND_FLOPS * any(node.name == "attend" for node in layer.nodes)


def _parameters(layer: Layer, *, vectors: bool) -> int:
    """Return the elements of a layer's weight: a matrix, a vector for a norm, or none."""
    if not any(node.weights for node in layer.nodes):
        return 0
    return PUZZLE_HIDDEN if layer.carries and vectors else SQUARE


def _puzzle_sizes(
    layers: tuple[Layer, ...], blocks: tuple[int, ...] = (), *, tied: bool = False, vectors: bool = True
) -> Sizes:
    """Return the sizes of the puzzles' layers. Each has a matrix, but norms have a vector if `vectors`."""
    sizes = tuple(_parameters(layer, vectors=vectors) for layer in layers)
    weights = (*sizes[:-1], 0) if tied else sizes
    return Sizes(
        weights=weights,
        opt_states=weights,
        matrices=tuple(elements if elements == SQUARE else 0 for elements in weights),
        activations=(ROWS,) * (len(layers) + 1),
        saved=(0,) * len(layers),
        signatures=layers,
        blocks=blocks,
        weight_blocks=tuple(
            (max(0, bisect_right(blocks[:-1], l) - 1),) if elements else () for l, elements in enumerate(weights)
        )
        if blocks
        else (),
        residual=ROWS if any(layer.carries for layer in layers) else 0,
        stats=3 * PUZZLE_LENGTH if any(layer.cut for layer in layers) else 0,
        tied=tied,
        flops=tuple(_layer_flops(layer, elements) for layer, elements in zip(layers, sizes, strict=True)),
        attend_flops=ATTEND_FLOPS,
    )


def _between_norms(bodies: Sequence[LayerDefinition | list[LayerDefinition]]) -> list[LayerDefinition]:
    """Return layers with a norm before each except the first. A list of layers counts as one: it has no norm inside."""
    definitions: list[LayerDefinition] = []
    for number, body in enumerate(bodies):
        if number:
            definitions.append(_FIRST_NORM if number == 1 else _LATER_NORM)
        definitions += body if isinstance(body, list) else [body]
    return definitions
