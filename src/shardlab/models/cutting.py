"""Cutting a model: choosing where its list of primitives is cut into layers, and along which indices these are cut."""

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
from shardlab.models.attention import Attend, Projection
from shardlab.models.layer import Run, closes, cut_indices, opens, runs, want_carried, want_cuttable
from shardlab.models.mixture import Combine, Dispatch, ExpertLinear, Place, Route
from shardlab.models.model import Blocks, Model
from shardlab.models.primitives import Linear, Lookup, Norm, Primitive, Step

Matrix = Projection | Linear | Lookup | ExpertLinear
"""Primitives with parameters that may be cut."""

SLICED = {"vocab", "head", "ffn", "expert"}
"""The indices that tp and ep cut."""


@dataclass(frozen=True, init=False)
class CutModel(Model):
    """The blocks of another model, cut into finer layers, some of them sliced over ranks.

    Attributes:
        whole: the model that is cut; `layers` counts the finer layers, all other fields are its own.
        has_blocks: whether whole blocks are layers, between the embedding and the head (see `cut_at_tie`).
        tiles: slices of each tensor-parallel rank's part of a layer.
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
        if isinstance(last.primitive, Norm) and not matrices:
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
    def block_bounds(self) -> tuple[int, ...]:
        """Each block's first layer, and at last the head's; none where experts are layers."""
        if self.has_blocks:
            return tuple(range(1, self.layers))
        first: dict[str, int] = {}
        for layer, run in enumerate(self.runs):
            last = run.steps[-1]
            if isinstance(last.primitive, Norm):
                first.setdefault(last.place.split(",")[0], layer)
        return tuple(first.values())

    def first_token(self, slice: int) -> int:
        """The first token of the vocabulary whose embedding and logit belong to a slice."""
        return self.logits // self.vocab_slices * slice

    @property
    def vocab_slices(self) -> int:
        """Into how many slices the vocabulary is cut."""
        return self.run(self.layers - 1).pieces.get("vocab", 1)

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Elements of every value, as `Model.sizes` gives them, of layers that are cut into tiles."""
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
    """Cut a model where programs communicate.

    The list of primitives is cut before and after each part's body, between the matrices that its slices share: a body
    makes a term of the branch from a slice of its parameters (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053,
    section 3), and the sum with the residual stream and the next norm are a layer that every rank computes, or a slice
    of the sequence. A mixture of experts is cut before and after its experts too; where this is all that is cut, the
    layers before and after them reach as far as the next ones. The vocabulary is padded to a multiple of the slices:
    rows of zeros, and logits of -inf.

    >>> from shardlab.models import GPT, MLP, MoE
    >>> cut(GPT(layers=2), tp=4).layers, cut(MLP(layers=2), tp=4, columns=True).layers, cut(MoE(layers=2), ep=2).layers
    (11, 9, 5)

    Args:
        tp: slices of every body.
        ep: slices of a mixture's experts: the ranks of `ep` and `cp` together have as many.
        tiles: slices of each of the bodies' slices.
        attention_apart: whether attention lies between two layers, as an op of its own: then every layer computes any
            tokens alone.
        columns: whether every matrix is a layer of its own, cut along what it makes.
        halves: whether a mixture of experts with a tied head is cut into half-blocks, and not around its experts alone.

    Raises:
        UserError: when the model does not divide, or cannot be cut so.
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
        breaks = sorted({*_bodies(model.steps), *(n for n, each in enumerate(ends) if isinstance(each, Linear))})
        return _sliced(model, runs(model.steps, breaks), dict.fromkeys(("ffn", "width", "vocab"), tp), columns=True)
    steps, pieces = model.steps, {"vocab": tp * tiles, "head": tp * tiles, "ffn": tp * tiles}
    if isinstance(model, MoE):
        steps, pieces = _placed_again(steps), {"expert": ep} | pieces
        if tp == 1 and not attention_apart and not (model.tied and halves):  # attention is in layers before experts
            ends = [1, len(steps) - 1] if model.tied else []
            return _sliced(model, runs(steps, sorted([*_experts(steps), *ends])), {"expert": ep})
    want_cuttable(steps, pieces)
    breaks = set(_bodies(steps))
    if attention_apart:
        attends = [number for number, step in enumerate(steps) if isinstance(step.primitive, Attend)]
        breaks |= {*attends, *(number + 1 for number in attends)}
    return _sliced(model, runs(steps, sorted(breaks)), pieces, tiles=tiles)


def cut_at_tie(model: Blocks) -> CutModel:
    """Cut a model whose head is tied to its embedding, so that both are layers: they compute with one matrix.

    Whole blocks lie between them, and one activation between any two layers. The positions belong to the first block
    and the last norm to the last.

    >>> from shardlab.models import GPT
    >>> cut_at_tie(GPT(layers=3, tied=True)).layers
    5
    """
    blocks = [step.block for step in model.steps]
    between = [blocks.index(block) for block in range(1, model.layers)]
    return CutModel(model, runs(model.steps, [1, *between, len(blocks) - 1]), has_blocks=True)


def _bodies(steps: Sequence[Step]) -> list[int]:
    """Where bodies begin, with what reads a tensor that slices share, and where they end, with what makes their sum.

    What mixes tokens and is not cut, such as routing, begins a layer as well: it wants whole sequences.
    """
    return [
        number
        for number, (before, step) in enumerate(pairwise(steps), 1)
        if closes(before.primitive, SLICED) or opens(step.primitive, SLICED) or _mixes(step) > _mixes(before)
    ]


def _mixes(step: Step) -> bool:
    """Whether a primitive mixes tokens, and has no slices that do."""
    return step.primitive.mixes_tokens and not cut_indices(step.primitive, SLICED)


def _experts(steps: Sequence[Step]) -> list[int]:
    """Where experts begin, when tokens have been dispatched, and where they end."""
    kinds = [(type(before.primitive), type(step.primitive)) for before, step in pairwise(steps)]
    return [
        number
        for number, (before, step) in enumerate(kinds, 1)
        if before is Dispatch or (before, step) == (ExpertLinear, Place)
    ]


def _placed_again(steps: Sequence[Step]) -> list[Step]:
    """What has been dispatched is combined in another layer than it was: there, places follow from the choices again,
    so that experts' numbers alone are carried, exactly, in the compute dtype.
    """
    again: list[Step] = []
    for step in steps:
        if isinstance(step.primitive, Combine):
            place = Place(tokens=step.primitive.tokens, router=step.primitive.router)
            again.append(step._replace(primitive=place))
        again.append(step)
    return again


def _sliced(
    model: Blocks, layers: Sequence[Run], pieces: Mapping[str, int], *, columns: bool = False, tiles: int = 1
) -> CutModel:
    """These layers, each cut along those indices that its parameters have; by columns, along what it makes."""
    found: list[Run] = []
    want_carried(layers)
    for run in layers:
        mine = {index for step in run.steps for index in _indices(step.primitive)}
        if columns:
            made = [step.primitive.makes["x"] for step in run.steps if isinstance(step.primitive, Matrix)]
            mine = set(made[:1])
            run = replace(run, steps=tuple(_taking_own(step) for step in run.steps)) if made else run
        own = {index: count for index, count in pieces.items() if index in mine}
        for step in run.steps:
            for index, name, count in step.primitive.divides():
                if rest := count % own.get(index, 1):
                    how = (
                        "column-parallel" if columns else "expert-parallel" if index == "expert" else "tensor-parallel"
                    )
                    slices = f"{own[index]} {how} slices" if tiles == 1 else f"{own[index]} slices, tiles of a rank,"
                    raise UserError(
                        f"{count} {name} do not divide into {slices} (remainder {rest}); choose {name} that are a "
                        "multiple of the slices, or fewer slices"
                    )
        before = found[-1] if found else None
        found.append(replace(run, cut=tuple(own), pieces=own, name=_name(run, before, bool(own))))
    return CutModel(model, found, tiles=tiles)


def _taking_own(step: Step) -> Step:
    """A primitive whose slices make slices of its result, and take their own of a complete gradient."""
    return step._replace(primitive=replace(step.primitive, takes_own=True))


def _indices(primitive: Primitive) -> set[str]:
    borrowed = {"vocab"} if primitive.borrows else set[str]()
    return {index for parameter in primitive.parameters() for index in parameter.indices} | borrowed


def _name(run: Run, before: Run | None, cut: bool) -> str:
    """What sort of layer it is, for messages."""
    if not cut:
        first, last = run.steps[0].primitive, run.steps[-1].primitive
        if isinstance(first, Route):
            return "routing"
        return "norm" if isinstance(last, Norm) else "combining" if isinstance(last, Combine) else "non-expert"
    if run.attend is not None:
        return "projection"
    return "output" if before is not None and before.attend is not None else run.steps[-1].place.split(", ")[-1]


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
    """The model as a program's layers are: cut finer where the mesh slices layers, or the plan or a tie says so.

    Args:
        planned: whether a plan is followed. Its pipelines cut a model with a tied head into half-blocks.
        attention_apart: whether that plan wants attention to be a step of its own.
        ulysses: how many neighbours of `cp` exchange slices of sequences for heads in that plan.
        columns: whether the program wants every matrix cut by columns.
        tiles: in how many tiles each rank computes a layer that can be cut.

    Raises:
        UserError: when the model does not divide, or the program is not written for the layers that this makes.
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


# Models whose blocks are all alike, told by three of them: the first, one in the middle, and the last.


T = TypeVar("T")

SAMPLED = 3
"""Blocks of a sample."""


def sampled(model: Blocks) -> Blocks:
    """Take three of a model's blocks; all, if it has no more or does not make them all alike, as `Blocks` does."""
    kind = type(model)
    alike = kind.steps is Blocks.steps and kind.runs is Blocks.runs
    return replace(model, layers=min(SAMPLED, model.layers)) if alike else model


@dataclass(frozen=True)
class Repeated:
    """The layers of a model, each like one of its sample's.

    Attributes:
        sample: three blocks, cut into layers as the model is; or all of its blocks.
        more: how many blocks the model has beside them.
    """

    sample: Model
    more: int

    @cached_property
    def each(self) -> int:
        """Layers of a block in the middle."""
        return sum(run.steps[-1].block == 1 for run in self.sample.runs)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer the sample's layer that it is like; the loss's place follows the last one's."""
        sampled, each = self.sample.layers, self.each
        first = (sampled - each) // 2
        again = [first + layer % each for layer in range(self.more * each)]
        return (*range(first + each), *again, *range(first + each, sampled + 1))

    def place(self, layer: int) -> str:
        """Where a layer stands in the model, as `Model.place` tells it."""
        like = self.alike[layer]
        if like == layer:
            return self.sample.place(layer)
        further = (layer - like) // self.each
        return re.sub(r"\bblock (\d+)", lambda found: f"block {int(found[1]) + further}", self.sample.place(like))

    def sizes(self, sizes: Sizes) -> Sizes:
        """Sizes of the model, from those of its sample."""
        if not self.more:
            return sizes
        layers = self.alike[:-1]
        starts = sizes.blocks[:1] and [sizes.blocks[0] + block * self.each for block in range(self.more)]
        return replace(
            sizes,
            weights=_taken(sizes.weights, layers),
            opt_states=_taken(sizes.opt_states, layers),
            matrices=_taken(sizes.matrices, layers),
            activations=_taken(sizes.activations, self.alike),
            saved=_taken(sizes.saved, layers),
            saved_for_weight=_taken(sizes.saved_for_weight, layers),
            keeps_input=_taken(sizes.keeps_input, layers),
            saves_residual=_taken(sizes.saves_residual, layers),
            signatures=_signatures(sizes.signatures, layers),
            weight_blocks=tuple(
                [
                    tuple([block + (layer - like) // self.each for block in sizes.weight_blocks[like]])
                    for layer, like in enumerate(layers)
                ]
            ),
            blocks=(*starts, *[start + self.more * self.each for start in sizes.blocks]),
        )


def _taken(values: Sequence[T], layers: Sequence[int]) -> tuple[T, ...]:
    return tuple([values[layer] for layer in layers]) if values else ()


@lru_cache(maxsize=64)
def _signatures(sampled: tuple[Layer, ...], alike: tuple[int, ...]) -> tuple[Layer, ...]:
    """Signatures of layers that are like these; the same objects for all models of one shape."""
    return tuple([_moved(sampled[like], layer - like) for layer, like in enumerate(alike)])


def _moved(layer: Layer, by: int) -> Layer:
    """A layer that stands so many places further; the weight of a tied one stays the first layer's."""
    if not by:
        return layer
    inputs = tuple([port._replace(layer=port.layer + by) for port in layer.inputs])
    outputs = tuple([port._replace(layer=port.layer + by) for port in layer.outputs])
    return replace(layer, inputs=inputs, outputs=outputs, weight=layer.weight + (0 if layer.use else by))
