"""Primitives by themselves: one of every sort with random tensors, what it makes of them, and pieces of all."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shardlab.models.attention import Attend, HeadNorm, LatentProjection, Latents, LatentSizes, Projection
from shardlab.models.layout import Parameter
from shardlab.models.mixture import Combine, Dispatch, ExpertActivate, ExpertLinear, Place, Route, Router
from shardlab.models.primitives import (
    Activate,
    Add,
    DropoutSite,
    Embed,
    Linear,
    Lookup,
    Norm,
    Primitive,
    Scores,
    features_of,
)
from shardlab.models.tensors import Dropout, Share
from shardlab.models.tensors.compute import Operands, compute
from shardlab.models.tensors.dropout import FactorInputs, make_factor
from shardlab.models.tensors.mixture import assign_slots

ROWS, T, C, HIDDEN = 3, 6, 8, 16
ROUTER = Router(hidden_size=C, experts=4, top_k=2, capacity_factor=0.8, auxiliary=0.5)
SITE = DropoutSite.ATTENTION_OUTPUT


def linear(out: str, inner: str, *, bias: bool = False, sections: tuple[int, ...] = ()) -> Linear:
    return Linear(
        tokens=T, name="map", outputs=HIDDEN, inputs=C, bias=bias, out_index=out, in_index=inner, sections=sections
    )


def expert_linear(out: str, inner: str, *, bias: bool, sections: tuple[int, ...] = ()) -> ExpertLinear:
    return ExpertLinear(
        tokens=T, router=ROUTER, name="map", outputs=HIDDEN, inputs=C, bias=bias, out_index=out, in_index=inner,
        sections=sections,
    )  # fmt: skip


def scores(*, tied: bool) -> Scores:
    return Scores(
        tokens=T, name="lm_head", outputs=HIDDEN, inputs=C, bias=False, out_index="vocab", in_index="width", tied=tied
    )


def projection(
    *, bias: bool = False, kv_heads: int = 2, head_dim: int = C // 4, rope_theta: float | None = None
) -> Projection:
    return Projection(
        tokens=T, hidden_size=C, heads=4, kv_heads=kv_heads, head_dim=head_dim, bias=bias, rope_theta=rope_theta
    )


def latents(*, q_rank: int | None) -> LatentSizes:
    return LatentSizes(hidden_size=C, heads=4, q_rank=q_rank, kv_rank=6, nope_dim=3, rope_dim=4, value_dim=3)


PRIMITIVES: list[tuple[Primitive, str]] = [
    (Lookup(tokens=T, hidden_size=C, vocab_size=HIDDEN), "vocab width"),
    (Embed(tokens=T, hidden_size=C, positions=True, drops=False), "width"),
    (Embed(tokens=T, hidden_size=C, positions=False, drops=False), "width"),
    (Embed(tokens=T, hidden_size=C, positions=True, drops=True), ""),
    (Norm(tokens=T, name="ln", hidden_size=C, rms=False, bias=True), ""),
    (Norm(tokens=T, name="ln", hidden_size=C, rms=False, bias=False), ""),
    (Norm(tokens=T, name="ln", hidden_size=C, rms=True, bias=True), ""),
    (linear("ffn", "width"), "ffn width"),
    (linear("width", "ffn"), "ffn width"),
    (linear("width", "head"), "head width"),
    (linear("ffn", "width", bias=True), "ffn"),
    (linear("ffn", "width", bias=True, sections=(HIDDEN // 2, HIDDEN // 2)), "ffn"),
    (replace(linear("ffn", "width", bias=True), made="y"), "ffn"),
    (replace(linear("width", "ffn"), read="y", made="y"), "ffn width"),
    (scores(tied=False), "vocab width"),
    (scores(tied=True), "vocab width"),
    *(
        (Activate(tokens=T, activation=name, hidden=HIDDEN), "ffn")
        for name in ("gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu")
    ),
    (Add(tokens=T, hidden_size=C, bias="bias", drops=False, site=SITE), "width"),
    (Add(tokens=T, hidden_size=C, bias="", drops=True, site=SITE), ""),
    (Add(tokens=T, hidden_size=C, bias="bias", drops=False, site=SITE, branch="y"), "width"),
    (Activate(tokens=T, activation="swiglu", hidden=HIDDEN, tensor="y"), "ffn"),
    (projection(), "head width"),
    (projection(bias=True, rope_theta=100.0), "head"),
    (projection(kv_heads=4, rope_theta=100.0), "head width"),
    (projection(bias=True, head_dim=6, rope_theta=100.0), "head"),
    (Attend(tokens=T, head_dim=C // 4, heads=4, kv_heads=2, drops=False), "head"),
    (Attend(tokens=T, head_dim=6, heads=4, kv_heads=2, drops=False), "head"),
    (HeadNorm(tokens=T, head_dim=6, heads=4, kv_heads=2, eps=1e-6, rope_theta=100.0), "head"),
    (HeadNorm(tokens=T, head_dim=3, heads=4, kv_heads=4, eps=1e-2, rope_theta=None), "head"),
    (Attend(tokens=T, head_dim=C // 4, heads=4, kv_heads=4, drops=True), "head"),
    (Attend(tokens=T, head_dim=C // 4, heads=4, kv_heads=2, drops=True), "head"),
    (Latents(tokens=T, sizes=latents(q_rank=5), eps=1e-6), ""),
    (Latents(tokens=T, sizes=latents(q_rank=None), eps=1e-6), ""),
    (LatentProjection(tokens=T, sizes=latents(q_rank=5), rope_theta=100.0), "head"),
    (LatentProjection(tokens=T, sizes=latents(q_rank=None), rope_theta=100.0), "head"),
    (Route(tokens=T, router=ROUTER), ""),
    (Route(tokens=T, router=replace(ROUTER, top_k=1)), ""),
    (Place(tokens=T, router=ROUTER), ""),
    (Dispatch(tokens=T, router=ROUTER), "expert width"),
    (expert_linear("ffn", "width", bias=True), "expert ffn"),
    (expert_linear("ffn", "width", bias=True, sections=(HIDDEN // 2, HIDDEN // 2)), "expert ffn"),
    (expert_linear("width", "ffn", bias=True), "expert ffn"),
    (expert_linear("width", "ffn", bias=False), "expert ffn width"),
    (ExpertActivate(tokens=T, router=ROUTER, activation="gelu", hidden=HIDDEN), "expert ffn"),
    (ExpertActivate(tokens=T, router=ROUTER, activation="swiglu", hidden=HIDDEN), "expert ffn"),
    (Combine(tokens=T, router=ROUTER), "expert"),
]
"""Each with the indices along which it is cut; not along one whose terms would each have the bias or a whole mask."""


def parameters_of(primitive: Primitive) -> list[Parameter]:
    """Return random parameters of a primitive."""
    borrowed = [Parameter(name, (HIDDEN, C), True, ("vocab", "width")) for name in primitive.borrows]
    return [*primitive.parameters(), *borrowed]


def inputs_of(primitive: Primitive, dtype: torch.dtype, rows: int = ROWS) -> dict[str, Tensor]:
    """Random tensors that it reads."""
    if isinstance(primitive, Lookup):
        return {"x": torch.randint(primitive.vocab_size, (rows, T))}
    if isinstance(primitive, Activate | ExpertActivate):
        features = features_of(primitive.activation, primitive.hidden)
    else:
        features = primitive.inputs if isinstance(primitive, Linear | ExpertLinear) else C
    choices = torch.rand(rows, T, ROUTER.experts).argsort(-1)[..., : ROUTER.top_k].to(torch.int32)
    buffers = "expert" in primitive.reads.get("x", "")
    shape = (ROUTER.experts, ROUTER.capacity(rows * T)) if buffers else (rows, T)
    q, kv = (primitive.width, 2 * primitive.kv_width) if isinstance(primitive, Attend | HeadNorm) else (0, 0)
    if isinstance(primitive, LatentProjection):
        features = primitive.sizes.q_inputs + primitive.sizes.kv_rank + primitive.sizes.rope_dim
    tensors = {
        **{name: torch.randn(*shape, features, dtype=dtype) for name in ("x", "y")},
        **{
            name: torch.randn(rows, T, hidden_size, dtype=dtype)
            for name, hidden_size in (("s", C), ("q", q), ("kv", kv))
        },
        "gates": torch.rand(rows, T, ROUTER.top_k, dtype=dtype),
        "choices": choices,
        "slots": assign_slots(ROUTER, choices, Share()),
    }
    return {name: tensors[name].requires_grad_(tensors[name].is_floating_point()) for name in primitive.reads}


def outputs_of(
    primitive: Primitive, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], share: Share
) -> dict[str, Tensor]:
    """Return the results of a primitive by name."""
    drops = isinstance(primitive, Add | Embed | Attend) and primitive.drops
    dropout = Dropout(0.3, seed=1, step=2, layer=3, microbatches=(4,)) if drops else None
    x = next(iter(tensors.values()))
    factor = make_factor(primitive, FactorInputs(len(x), T, share, dropout, x))
    return dict(zip(primitive.makes, compute(primitive, Operands(parameters, tensors, share, factor)), strict=True))


def gradients(
    outputs: Mapping[str, Tensor], grad_outputs: Mapping[str, Tensor], of: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients of some tensors."""
    leaves = {name: tensor for name, tensor in of.items() if tensor.requires_grad}
    if not leaves:
        return {}
    names = [name for name in outputs if outputs[name].requires_grad]
    grads = torch.autograd.grad(
        [outputs[name] for name in names], list(leaves.values()), [grad_outputs[n] for n in names]
    )
    return dict(zip(leaves, grads, strict=True))


class Whole:
    """A primitive on whole tensors: what it makes, and gradients of what it reads and of its parameters."""

    def __init__(self, primitive: Primitive) -> None:
        torch.manual_seed(0)
        self.primitive = primitive
        self.parameters = {
            p.name: torch.randn(p.shape, dtype=torch.float64).requires_grad_() for p in parameters_of(primitive)
        }
        self.tensors = inputs_of(primitive, torch.float64)
        self.outputs = outputs_of(primitive, self.parameters, self.tensors, Share())
        self.grad_outputs = {name: torch.randn(y.shape, dtype=torch.float64) for name, y in self.outputs.items()}
        self.gradients = gradients(self.outputs, self.grad_outputs, self.tensors | self.parameters)

    def piece(self, name: str, tensor: Tensor, indices: str, index: str, number: int, of: int) -> Tensor:
        """A piece of a tensor that has the index; else all of it. Keys and values, gates and features are cut alike."""
        if (name, index) == ("slots", "expert"):
            places = ROUTER.places(ROWS * T) // of
            mine = tensor - number * places
            return mine.masked_fill((mine < 0) | (mine >= places), -1)
        if index not in indices.split():
            return tensor
        dim = 0 if index == "expert" else tensor.dim() - 1
        return _piece(tensor, dim, self._sections(name, tensor, dim), number, of)

    def piece_of_parameter(self, parameter: Parameter, tensor: Tensor, index: str, number: int, of: int) -> Tensor:
        assert index in parameter.indices, "all of a primitive's parameters are cut along an index that one of them has"
        dim = parameter.indices.index(index)
        sections = parameter.sections if dim == parameter.section_dim and parameter.sections else (tensor.shape[dim],)
        return _piece(tensor, dim, sections, number, of)

    def _sections(self, name: str, tensor: Tensor, dim: int) -> tuple[int, ...]:
        length, primitive = tensor.shape[dim], self.primitive
        twice = name.endswith("kv")
        if twice and isinstance(primitive, LatentProjection):
            values = primitive.sizes.heads * primitive.sizes.value_dim
            return (length - values, values)
        if isinstance(primitive, Activate | ExpertActivate) and dim:
            twice = length > primitive.hidden
        if isinstance(primitive, Linear | ExpertLinear) and dim and name.startswith("made"):
            twice = bool(primitive.sections)
        return (length // 2, length // 2) if twice else (length,)


def _piece(tensor: Tensor, dim: int, sections: tuple[int, ...], number: int, of: int) -> Tensor:
    return torch.cat([section.chunk(of, dim)[number] for section in torch.split(tensor, list(sections), dim)], dim)
