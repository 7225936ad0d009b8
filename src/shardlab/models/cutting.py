"""Cutting a model: choosing where its list of primitives is cut into layers, and along which indices these are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from shardlab.errors import UserError
from shardlab.models.attention import Attend, Projection
from shardlab.models.blocks import Blocks
from shardlab.models.mixture import Combine, Dispatch, ExpertLinear, Place
from shardlab.models.mlp import MLP
from shardlab.models.model import Model
from shardlab.models.moe import MoE
from shardlab.models.primitive import Primitive, Step
from shardlab.models.primitives import Add, Embed, Linear, Lookup, Norm
from shardlab.models.run import Run, runs
from shardlab.program.mesh import Mesh

Matrix = Projection | Linear | Lookup | ExpertLinear
"""Primitives with parameters that may be cut."""


@dataclass(frozen=True, init=False)
class CutModel(Model):
    """The blocks of another model, cut into finer layers, some of them sliced over ranks.

    Attributes:
        whole: the model that is cut; `layers` counts the finer layers, all other fields are its own.
        slices: of every layer that is sliced.
    """

    whole: Blocks
    slices: int
    layer_runs: tuple[Run, ...] = field(repr=False)

    def __init__(self, whole: Blocks, slices: int, layer_runs: Sequence[Run]) -> None:
        common: dict[str, Any] = {field.name: getattr(whole, field.name) for field in fields(Model)}
        common["layers"] = len(layer_runs)
        super().__init__(**common)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "layer_runs", tuple(layer_runs))
        self.at_least_one("slices")

    @cached_property
    def runs(self) -> Sequence[Run]:
        return self.layer_runs

    def place(self, layer: int) -> str:
        run = self.run(layer)
        last = run.steps[-1]
        if isinstance(last.primitive, Norm):
            return f"norm of {last.place}"
        matrices = [step for step in run.steps if isinstance(step.primitive, Matrix)]
        if run.attend is not None:
            return f"{last.place}'s queries, keys and values"
        if run.inputs == ("x",) and layer and self.run(layer - 1).attend is not None:
            return f"{last.place}'s output"
        return matrices[-1].place

    @property
    def parameter_count(self) -> int:
        return self.whole.parameter_count

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """Each block's first norm, and at last the head's; none where experts are layers."""
        first: dict[str, int] = {}
        for layer, run in enumerate(self.runs):
            last = run.steps[-1]
            if isinstance(last.primitive, Norm):
                first.setdefault(last.place.split(",")[0], layer)
        return tuple(first.values())

    def first_token(self, slice: int) -> int:
        """The first token of the vocabulary whose embedding and logit belong to a slice."""
        return self.logits // self.slices * slice


def cut(model: Blocks, *, tp: int = 1, ep: int = 1, attention_apart: bool = False, columns: bool = False) -> CutModel:
    """Cut a model where programs communicate.

    The list of primitives is cut before and after each part's body, between the matrices that its slices share: a body
    makes a term of the branch from a slice of its parameters (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053,
    section 3), and the sum with the residual stream and the next norm are a layer that every rank computes, or a slice
    of the sequence. A mixture of experts is cut before and after its experts. The vocabulary is padded to a multiple of
    the slices: rows of zeros, and logits of -inf.

    >>> from shardlab.models import GPT, MLP, MoE
    >>> cut(GPT(layers=2), tp=4).layers, cut(MLP(layers=2), tp=4, columns=True).layers, cut(MoE(layers=2), ep=2).layers
    (11, 9, 5)

    Args:
        tp: slices of every body.
        ep: slices of a mixture's experts.
        attention_apart: whether attention lies between two layers, as an op of its own: then every layer computes any
            tokens alone.
        columns: whether every matrix is a layer of its own, cut along what it makes.

    Raises:
        UserError: when the model does not divide, or cannot be cut so.
    """
    if isinstance(model, MoE):
        if tp > 1 or attention_apart or columns:
            raise UserError(
                "half-blocks, which tp, cp, selective recomputation and tied embeddings need, do not cut mixtures of "
                "experts; leave these out, and use ep"
            )
        if model.tied:
            raise UserError(
                "tied embeddings need the embedding and the head in one layer, but expert parallelism has one in the "
                "first and the other in the last; leave the embeddings untied"
            )
        return _sliced(model, _experts(model.steps), ep, ("expert",), "expert-parallel")
    if columns:
        if not isinstance(model, MLP):
            raise UserError(
                f"column-parallel layers are matrices one after the other, but {type(model).__name__} has more than "
                "MLPs; train an MLP (--model mlp), or cut this model by tensor-parallel"
            )
        ends = [step.primitive for step in model.steps]
        breaks = sorted({*_bodies(model.steps), *(n for n, each in enumerate(ends) if isinstance(each, Linear))})
        return _sliced(model, runs(model.steps, breaks), tp, None, "column-parallel")
    breaks = _bodies(model.steps)
    if attention_apart:
        attends = [number for number, step in enumerate(model.steps) if isinstance(step.primitive, Attend)]
        breaks = sorted({*breaks, *attends, *(number + 1 for number in attends)})
    return _sliced(model, runs(model.steps, breaks), tp, ("vocab", "head", "ffn"), "tensor-parallel")


def _bodies(steps: Sequence[Step]) -> list[int]:
    """Where bodies begin, after a norm or at first, and where they end, before what adds them to the residual."""
    return [
        number
        for number, (before, step) in enumerate(pairwise(steps), 1)
        if isinstance(before.primitive, Norm) or isinstance(step.primitive, Add | Embed)
    ]


def _experts(steps: Sequence[Step]) -> list[Run]:
    """Layers that end where tokens have been dispatched, or experts have computed.

    What has been dispatched is combined in another layer than it was: there, places follow from the choices again, so
    that experts' numbers alone are carried, exactly, in the compute dtype.
    """
    again: list[Step] = []
    breaks: list[int] = []
    for step in steps:
        before = again[-1].primitive if again else None
        if isinstance(before, Dispatch):
            breaks.append(len(again))
        if isinstance(step.primitive, Combine):
            breaks.append(len(again))
            place = Place(tokens=step.primitive.tokens, router=step.primitive.router)
            again.append(step._replace(primitive=place))
        again.append(step)
    return runs(again, breaks)


def _sliced(model: Blocks, layers: Sequence[Run], slices: int, along: tuple[str, ...] | None, how: str) -> CutModel:
    """These layers, each cut along those indices that its parameters have (None: along what it makes)."""
    found: list[Run] = []
    for run in layers:
        if along is None:
            own = next((step.primitive.makes["x"] for step in run.steps if isinstance(step.primitive, Matrix)), "")
            run = replace(run, steps=tuple(_taking_own(step) for step in run.steps)) if own else run
        else:
            mine = {index for step in run.steps for index in _indices(step.primitive)}
            own = " ".join(index for index in along if index in mine)
        pieces = dict.fromkeys(own.split(), slices)
        for step in run.steps:
            for index, name, count in step.primitive.divides():
                if count % pieces.get(index, 1):
                    raise UserError(
                        f"{count} {name} do not divide into {slices} {how} slices (remainder {count % slices}); choose "
                        f"{name} that are a multiple of the slices, or fewer slices"
                    )
        before = found[-1] if found else None
        found.append(replace(run, cut=tuple(pieces), pieces=pieces, name=_name(run, before, bool(pieces))))
    return CutModel(model, slices, found)


def _taking_own(step: Step) -> Step:
    """A primitive whose slices make slices of its result, and take their own of a complete gradient."""
    return step._replace(primitive=replace(step.primitive, takes_own=True))


def _indices(primitive: Primitive) -> set[str]:
    borrowed = {"vocab"} if primitive.borrows else set[str]()
    return {index for parameter in primitive.parameters() for index in parameter.indices} | borrowed


def _name(run: Run, before: Run | None, cut: bool) -> str:
    """What sort of layer it is, for messages."""
    if not cut:
        return "norm" if isinstance(run.steps[-1].primitive, Norm) else "non-expert"
    if run.attend is not None:
        return "projection"
    return "output" if before is not None and before.attend is not None else run.steps[-1].place.split(", ")[-1]


def _want_heads(model: Blocks, mesh: Mesh) -> None:
    """Refuse heads that do not divide among the ranks that exchange them."""
    for step in model.steps:
        for index, name, count in step.primitive.divides():
            if index == "head" and count % (mesh.tp * mesh.cp):
                raise UserError(
                    f"{count} {name} do not divide among tp {mesh.tp} x cp {mesh.cp} ranks, which exchange slices of "
                    f"sequences for heads; choose {name} that are a multiple of {mesh.tp * mesh.cp}, or context ring"
                )


def cut_for(
    model: Blocks,
    mesh: Mesh,
    *,
    planned: bool = False,
    attention_apart: bool = False,
    heads_dealt: bool = False,
    columns: bool = False,
) -> Model:
    """The model as a program's layers are: cut finer where the mesh slices layers, or the plan or a tie says so.

    Args:
        planned: whether a plan is followed, which shares a tied weight where a program of whole blocks cannot.
        attention_apart: whether that plan wants attention to be a step of its own.
        heads_dealt: whether that plan exchanges slices of sequences for heads over `cp`.
        columns: whether the program wants every matrix cut by columns.

    Raises:
        UserError: when the model does not divide.
    """
    if mesh.ep > 1 and not isinstance(model, MoE):
        raise UserError(
            f"the mesh has ep {mesh.ep}, which cuts mixtures of experts, but {type(model).__name__} has none; "
            "train a MoE, or set ep to 1"
        )
    tied = planned and bool(model.borrowed(model.layers - 1))
    apart = mesh.cp > 1 or attention_apart
    if heads_dealt:
        _want_heads(model, mesh)
    if mesh.ep > 1 or mesh.tp > 1 or apart or tied or columns:
        return cut(model, tp=mesh.tp, ep=mesh.ep, attention_apart=apart, columns=columns)
    return model
