"""Cutting of models into finer layers, so that programs can communicate between them and slice them over ranks.

`cut_for` decides how a mesh and a plan cut a model. `cut` splits the blocks around their bodies. A body is a run of
matrices that ranks compute in slices: all slices read one tensor, and each computes a term of one sum. `cut_at_tie`
turns the embedding and the head into separate layers. `cut` and `cut_at_tie` return a `CutModel`. `sampled` and
`Repeated`, at the end, describe a model with identical blocks by three of them: the first, one in the middle, and the
last. Leading blocks that differ from the others come before these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from shardlab.common.errors import UserError
from shardlab.language.mesh import Mesh
from shardlab.language.pass_names import require_half_blocks
from shardlab.language.rules.layer_graph import Layer
from shardlab.language.sizes import Sizes
from shardlab.models.architectures import MLP, MoE
from shardlab.models.attention import Attend, LatentProjection, Latents, Projection
from shardlab.models.layer import Run, closes, cut_indices, opens, runs, want_carried, want_cuttable
from shardlab.models.mixture import Combine, Dispatch, ExpertLinear, Place, Route
from shardlab.models.model import Blocks, Model
from shardlab.models.primitives import Linear, Lookup, Norm, Step

Matrix = Projection | LatentProjection | Linear | Lookup | ExpertLinear
"""Types of primitives whose parameters may be cut."""

SLICED = {"vocab", "head", "ffn", "expert"}
"""Indices that tp and ep cut."""


@dataclass(frozen=True, init=False)
class CutModel(Model):
    """Model cut into finer layers, some of which are sliced over ranks.

    `layers` counts the finer layers. All other fields of a model are those of `whole`.

    Attributes:
        whole: the model that is cut.
        has_blocks: whether the layers are the embedding, whole blocks and the head (see `cut_at_tie`).
        tiles: number of slices into which each tensor-parallel rank's part of a layer is divided.
    """

    whole: Blocks
    layer_runs: tuple[Run, ...] = field(repr=False)
    has_blocks: bool = False
    tiles: int = 1

    def __init__(self, whole: Blocks, layer_runs: Sequence[Run], *, has_blocks: bool = False, tiles: int = 1) -> None:
        common: dict[str, Any] = {field.name: getattr(whole, field.name) for field in fields(Model)}
        common["layers"] = len(layer_runs)
        super().__init__(**common)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "layer_runs", tuple(layer_runs))
        object.__setattr__(self, "has_blocks", has_blocks)
        object.__setattr__(self, "tiles", tiles)

    @cached_property
    def runs(self) -> Sequence[Run]:
        return self.layer_runs

    def place(self, layer: int) -> str:
        run = self.run(layer)
        last = run.steps[-1]
        matrices = [step for step in run.steps if isinstance(step.primitive, Matrix | Route)]
        if isinstance(last.primitive, Norm | Latents) and not matrices:
            return f"norm of {last.place}"
        if self.has_blocks and 0 < layer < self.layers - 1:
            return f"block {layer - 1}"
        if run.attend is not None:
            return f"{last.place}'s queries, keys and values"
        if run.inputs == ("x",) and layer and self.run(layer - 1).attend is not None:
            return f"{last.place}'s output"
        if all(isinstance(step.primitive, Route) for step in matrices):
            return f"{'routing' if matrices else 'sums'} of {last.place}"
        return next(step.place for step in reversed(matrices) if isinstance(step.primitive, Matrix))

    @property
    def parameter_count(self) -> int:
        return self.whole.parameter_count

    @property
    def leading_blocks(self) -> int:
        return self.whole.leading_blocks

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """First layer of each block, then the head's layer; empty if experts are separate layers."""
        if self.has_blocks:
            return tuple(range(1, self.layers))
        first: dict[str, int] = {}
        for layer, run in enumerate(self.runs):
            last = run.steps[-1]
            if isinstance(last.primitive, Norm | Latents):
                first.setdefault(last.place.split(",")[0], layer)
        return tuple(first.values())

    def first_token(self, slice: int) -> int:
        """Return the first token of the vocabulary in a slice of the embedding and the logits."""
        return self.logits // self.vocab_slices * slice

    @property
    def vocab_slices(self) -> int:
        """Number of slices of the vocabulary."""
        return self.run(self.layers - 1).pieces.get("vocab", 1)

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Return the elements of every value, as `Model.sizes` does, with the number of tiles."""
        return replace(super().sizes(rows, element_bytes), tiles=self.tiles)


def cut(
    model: Blocks,
    *,
    tp: int = 1,
    ep: int = 1,
    tiles: int = 1,
    attention_apart: bool = False,
    columns: bool = False,
    halves: bool = True,
) -> CutModel:
    """Cut a model at the points where programs communicate.

    The list of primitives is cut before and after each body. A body is a run of matrices whose slices read one tensor:
    a slice of its parameters computes a term of the branch (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section
    3). The sum with the residual stream and the next norm form a layer that every rank computes, whole or for a slice
    of the sequence. A mixture of experts is also cut before and after its experts. The vocabulary is padded to a
    multiple of the slices, by rows of zeros and logits of -inf.

    >>> from shardlab.models import GPT, MLP, MoE
    >>> cut(GPT(layers=2), tp=4).layers, cut(MLP(layers=2), tp=4, columns=True).layers, cut(MoE(layers=2), ep=2).layers
    (11, 9, 5)

    Args:
        tp: number of slices of every body.
        ep: number of slices of a mixture's experts, over the ranks of `ep` and `cp` together.
        tiles: number of tiles into which each slice of a body is divided.
        attention_apart: whether attention is an op between two layers. Every layer then treats tokens separately.
        columns: whether every matrix is a layer, cut along its output features.
        halves: whether a mixture of experts with a tied head is cut into half-blocks, instead of only around its
            experts.

    Raises:
        UserError: if the model does not divide, or cannot be cut in this way.
    """
    if min(tp, ep) < 1:
        raise UserError(f"a model was to be cut into {tp} x {ep} slices (tp x ep); give at least 1 of each")
    if tiles > 1 and (columns or attention_apart or isinstance(model, MoE)):
        raise UserError(
            f"layers were to be computed in {tiles} tiles, but none are made of experts, of layers around an attention "
            "that is a step of its own, or of columns; leave the pass tile out"
        )
    if columns:
        if not isinstance(model, MLP):
            raise UserError(
                f"column-parallel layers are matrices one after the other, but {type(model).__name__} has more than "
                "MLPs; train an MLP (--model mlp), or cut this model by tensor-parallel"
            )
        ends = [step.primitive for step in model.steps]
        breaks = sorted(
            {*_bodies(model.steps), *(n for n, primitive in enumerate(ends) if isinstance(primitive, Linear))}
        )
        return _sliced(model, runs(model.steps, breaks), dict.fromkeys(("ffn", "width", "vocab"), tp), columns=True)
    steps, pieces = model.steps, {"vocab": tp * tiles, "head": tp * tiles, "ffn": tp * tiles}
    if isinstance(model, MoE):
        steps, pieces = _placed_again(steps), {"expert": ep} | pieces
        # Attention belongs to the layers before experts.
        if tp == 1 and not attention_apart and not (model.tied and halves):
            ends = [1, len(steps) - 1] if model.tied else []
            blocks = [step.block for step in steps]
            ends += [blocks.index(block) for block in range(1, model.leading_blocks + 1) if block < model.layers]
            return _sliced(model, runs(steps, sorted([*_experts(steps), *ends])), {"expert": ep})
    want_cuttable(steps, pieces)
    breaks = set(_bodies(steps))
    if attention_apart:
        attends = [number for number, step in enumerate(steps) if isinstance(step.primitive, Attend)]
        breaks |= {*attends, *(number + 1 for number in attends)}
    return _sliced(model, runs(steps, sorted(breaks)), pieces, tiles=tiles)


def cut_at_tie(model: Blocks) -> CutModel:
    """Cut a model with a tied head so that embedding and head are separate layers, which share one matrix.

    The layers between them are whole blocks, and one activation passes between any two layers. Position embeddings
    belong to the first block, and the last norm to the last block.

    >>> from shardlab.models import GPT
    >>> cut_at_tie(GPT(layers=3, tied=True)).layers
    5
    """
    blocks = [step.block for step in model.steps]
    block_starts = [blocks.index(block) for block in range(1, model.layers)]
    return CutModel(model, runs(model.steps, [1, *block_starts, len(blocks) - 1]), has_blocks=True)


def cut_for(
    model: Blocks,
    mesh: Mesh,
    *,
    planned: bool = False,
    attention_apart: bool = False,
    ulysses: int = 1,
    columns: bool = False,
    tiles: int = 1,
) -> Model:
    """Return the model as the layers of a program. Layers are parts of blocks if the mesh slices them, or if the plan
    or a tied head needs it.

    Args:
        planned: whether the program follows a plan. If it does, and has a pipeline, a model with a tied head is cut
            into half-blocks.
        attention_apart: whether the plan needs attention as a separate op.
        ulysses: number of neighbouring ranks of `cp` among which the plan exchanges slices of sequences for heads.
        columns: whether the program needs every matrix as a layer, cut along its output features.
        tiles: number of tiles into which each rank divides a layer that can be cut.

    Raises:
        UserError: if the model does not divide, or if the program is not written for such layers.
    """
    require_half_blocks(tiles, planned=planned or mesh.tp > 1)
    if mesh.ep > 1 and not isinstance(model, MoE):
        raise UserError(
            f"the mesh has ep {mesh.ep}, which cuts mixtures of experts, but {type(model).__name__} has none; "
            "train a MoE, or set ep to 1"
        )
    tied = bool(model.borrowed(model.layers - 1))
    apart = mesh.cp > 1 or attention_apart
    if ulysses > 1:
        _want_heads(model, mesh.tp, ulysses)
    if mesh.ep > 1 or mesh.tp > 1 or apart or (tied and planned and mesh.pp > 1) or columns or tiles > 1:
        ep = mesh.ep * mesh.cp
        return cut(model, tp=mesh.tp, ep=ep, tiles=tiles, attention_apart=apart, columns=columns, halves=planned)
    return cut_at_tie(model) if tied and mesh.pp == 1 else model


T = TypeVar("T")

SAMPLED = 3
"""Number of blocks in a sample."""

BY_LAYER = ("weights", "opt_states", "matrices", "saved", "saved_for_weight", "keeps_input", "saves_residual", "flops")
"""Fields of `Sizes` that have one entry for each layer of any model."""


def sampled(model: Blocks) -> Blocks:
    """Return a model with the leading blocks and three of the other blocks.

    If there are no more blocks than these, or if the model's class defines `steps` or `runs` itself, so that blocks may
    differ, the result is the model with all blocks.
    """
    kind = type(model)
    has_equal_blocks = kind.steps is Blocks.steps and kind.runs is Blocks.runs
    return replace(model, layers=min(model.leading_blocks + SAMPLED, model.layers)) if has_equal_blocks else model


@dataclass(frozen=True)
class Repeated:
    """Map from the layers of a model to identical layers of a sample.

    Attributes:
        sample: the leading blocks and three others, cut into layers as the model is, or all blocks of the model.
        missing_blocks: number of blocks of the model that the sample leaves out.
    """

    sample: Model
    missing_blocks: int

    @cached_property
    def block_layers(self) -> int:
        """Number of layers of a middle block."""
        return sum(self._in_middle)

    @cached_property
    def first(self) -> int:
        """Number of the first layer of the sample's middle block."""
        return self._in_middle.index(True) if self.block_layers else 0

    @cached_property
    def _in_middle(self) -> list[bool]:
        return [run.steps[-1].block == self.sample.leading_blocks + 1 for run in self.sample.runs]

    @cached_property
    def sample_layers(self) -> tuple[int, ...]:
        """For each layer of the model, the identical layer of the sample; then the index of the sample's loss."""
        sampled, block_layers, first = self.sample.layers, self.block_layers, self.first
        repeated_layers = [first + layer % block_layers for layer in range(self.missing_blocks * block_layers)]
        return (*range(first + block_layers), *repeated_layers, *range(first + block_layers, sampled + 1))

    def place(self, layer: int) -> str:
        """Return the position of a layer in the model as text, as `Model.place` does."""
        sample_layer = self.sample_layers[layer]
        if sample_layer == layer:
            return self.sample.place(layer)
        blocks_later = (layer - sample_layer) // self.block_layers
        return re.sub(
            r"\bblock (\d+)", lambda match: f"block {int(match[1]) + blocks_later}", self.sample.place(sample_layer)
        )

    def sizes(self, sizes: Sizes) -> Sizes:
        """Return the sizes of the model, given those of its sample."""
        if not self.missing_blocks:
            return sizes
        layers, leading = self.sample_layers[:-1], self.sample.leading_blocks
        starts = [
            start + block * self.block_layers
            for start in sizes.blocks[leading:][:1]
            for block in range(self.missing_blocks)
        ]
        by_layer: dict[str, Any] = {name: _select(getattr(sizes, name), layers) for name in BY_LAYER}
        return replace(
            sizes,
            **by_layer,
            activations=_select(sizes.activations, self.sample_layers),
            signatures=_signatures(sizes.signatures, layers),
            weight_blocks=tuple(
                [
                    tuple([block + (layer - like) // self.block_layers for block in sizes.weight_blocks[like]])
                    for layer, like in enumerate(layers)
                ]
            ),
            blocks=(
                *sizes.blocks[:leading],
                *starts,
                *[start + self.missing_blocks * self.block_layers for start in sizes.blocks[leading:]],
            ),
        )


def _bodies(steps: Sequence[Step]) -> list[int]:
    """Return the steps at which bodies begin and end.

    A body begins with a step whose slices all read one tensor, and ends with a step whose slices are terms of a sum.
    The first step that mixes tokens and is not cut, such as routing, also begins a layer: it needs whole sequences.
    """
    return [
        number
        for number, (previous, step) in enumerate(pairwise(steps), 1)
        if closes(previous.primitive, SLICED) or opens(step.primitive, SLICED) or _mixes(step) > _mixes(previous)
    ]


def _mixes(step: Step) -> bool:
    """Return whether a primitive mixes tokens and is not cut into slices."""
    return step.primitive.mixes_tokens and not cut_indices(step.primitive, SLICED)


def _experts(steps: Sequence[Step]) -> list[int]:
    """Return the steps at which experts begin (after the dispatch of tokens) and end."""
    kinds = [(type(previous.primitive), type(step.primitive)) for previous, step in pairwise(steps)]
    return [
        number
        for number, (first, second) in enumerate(kinds, 1)
        if first is Dispatch or (first, second) == (ExpertLinear, Place)
    ]


def _placed_again(steps: Sequence[Step]) -> list[Step]:
    """Return the steps, with slots assigned again before each combine, since it is in another layer than the dispatch.

    Layers then pass on only the experts' numbers, which are exact in the compute dtype.
    """
    new_steps: list[Step] = []
    for step in steps:
        if isinstance(step.primitive, Combine):
            place = Place(tokens=step.primitive.tokens, router=step.primitive.router)
            new_steps.append(step._replace(primitive=place))
        new_steps.append(step)
    return new_steps


def _sliced(
    model: Blocks, layers: Sequence[Run], pieces: Mapping[str, int], *, columns: bool = False, tiles: int = 1
) -> CutModel:
    """Return these layers, each cut along the indices of its parameters, or along its output features if `columns`."""
    sliced_runs: list[Run] = []
    want_carried(layers)
    for run in layers:
        run_indices = {
            i for primitive in run.primitives for indices in primitive.node.weights.values() for i in indices.split()
        }
        if columns:
            matrix_outputs = [step.primitive.makes["x"] for step in run.steps if isinstance(step.primitive, Matrix)]
            run_indices = set(matrix_outputs[:1])
            if matrix_outputs:  # each slice outputs some features, and reads their part of a complete gradient
                own_steps = [step._replace(primitive=replace(step.primitive, takes_own=True)) for step in run.steps]
                run = replace(run, steps=tuple(own_steps))
        run_pieces = {index: count for index, count in pieces.items() if index in run_indices}
        for step in run.steps:
            for index, name, count in step.primitive.divides():
                if rest := count % run_pieces.get(index, 1):
                    parallelism = (
                        "column-parallel" if columns else "expert-parallel" if index == "expert" else "tensor-parallel"
                    )
                    slices = (
                        f"{run_pieces[index]} {parallelism} slices"
                        if tiles == 1
                        else f"{run_pieces[index]} slices, tiles of a rank,"
                    )
                    raise UserError(
                        f"{count} {name} do not divide into {slices} (remainder {rest}); choose {name} that are a "
                        "multiple of the slices, or fewer slices"
                    )
        previous = sliced_runs[-1] if sliced_runs else None
        sliced_runs.append(replace(run, pieces=run_pieces, name=_name(run, previous, bool(run_pieces))))
    return CutModel(model, sliced_runs, tiles=tiles)


def _name(run: Run, previous: Run | None, cut: bool) -> str:
    """Return the kind of a layer as text, for messages."""
    if not cut:
        first, last = run.steps[0].primitive, run.steps[-1].primitive
        if isinstance(first, Route):
            return "routing"
        return (
            "norm" if isinstance(last, Norm | Latents) else "combining" if isinstance(last, Combine) else "non-expert"
        )
    if run.attend is not None:
        return "projection"
    return "output" if previous is not None and previous.attend is not None else run.steps[-1].place.split(", ")[-1]


def _want_heads(model: Blocks, tp: int, ulysses: int) -> None:
    """Refuse heads that do not divide among the ranks that exchange them."""
    for step in model.steps:
        for index, name, count in step.primitive.divides():
            if index == "head" and count % (tp * ulysses):
                raise UserError(
                    f"{count} {name} do not divide among tp {tp} x cp {ulysses} ranks, which exchange slices of "
                    f"sequences for heads; choose {name} that are a multiple of {tp * ulysses}, context ring, or a "
                    "smaller ulysses_degree"
                )


def _select(values: Sequence[T], layers: Sequence[int]) -> tuple[T, ...]:
    return tuple([values[layer] for layer in layers]) if values else ()


@lru_cache(maxsize=64)
def _signatures(sampled: tuple[Layer, ...], sample_layer: tuple[int, ...]) -> tuple[Layer, ...]:
    """Return the signatures of all layers, given the sample's. Models of one shape share the objects."""
    return tuple([_renumber(sampled[number], layer - number) for layer, number in enumerate(sample_layer)])


def _renumber(layer: Layer, by: int) -> Layer:
    """Return a layer with its number increased by `by`. A tied layer keeps using the first layer's weight."""
    if not by:
        return layer
    inputs = tuple([port._replace(layer=port.layer + by) for port in layer.inputs])
    outputs = tuple([port._replace(layer=port.layer + by) for port in layer.outputs])
    return replace(layer, inputs=inputs, outputs=outputs, weight=layer.weight + (0 if layer.use else by))
