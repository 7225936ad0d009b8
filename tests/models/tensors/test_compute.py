"""Every primitive by itself on real tensors: whole, in slices as its rule says, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardlab.models.attention import Attend, Projection
from shardlab.models.layout import Parameter
from shardlab.models.mixture import Combine, Dispatch, ExpertActivate, ExpertLinear, Place, Route, Router
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import Activate, Add, DropoutSite, Embed, Linear, Lookup, Norm, Scores, features_of
from shardlab.models.tensors import Dropout, Share
from shardlab.models.tensors.compute import Given, compute
from shardlab.models.tensors.mixture import slots_of
from shardlab.rules import derive
from shardlab.rules.derive import Held
from shardlab.rules.index import INDICES
from shardlab.rules.node import Layer
from shardlab.rules.spec import Space

ROWS, T, C, HIDDEN = 3, 6, 8, 16
ROUTER = Router(width=C, experts=4, top_k=2, capacity_factor=0.8, auxiliary=0.5)
SITE = DropoutSite.ATTENTION_OUTPUT


def linear(out: str, inner: str, *, bias: bool = False, sections: tuple[int, ...] = ()) -> Linear:
    return Linear(
        tokens=T, name="map", outputs=HIDDEN, inputs=C, bias=bias, out_index=out, in_index=inner, sections=sections
    )


def expert_linear(*, bias: bool) -> ExpertLinear:
    return ExpertLinear(
        tokens=T, router=ROUTER, name="map", outputs=HIDDEN, inputs=C, bias=bias, out_index="ffn", in_index="width"
    )


def scores(*, tied: bool) -> Scores:
    return Scores(
        tokens=T, name="lm_head", outputs=HIDDEN, inputs=C, bias=False, out_index="vocab", in_index="width", tied=tied
    )


def projection(*, bias: bool = False, kv_heads: int = 2, rope_theta: float | None = None) -> Projection:
    return Projection(tokens=T, width=C, heads=4, kv_heads=kv_heads, bias=bias, rope_theta=rope_theta)


PRIMITIVES: list[tuple[Primitive, str]] = [
    (Lookup(tokens=T, width=C, vocabulary=HIDDEN), "vocab width"),
    (Embed(tokens=T, width=C, positions=True, drops=False), "width"),
    (Embed(tokens=T, width=C, positions=False, drops=False), "width"),
    (Embed(tokens=T, width=C, positions=True, drops=True), ""),
    (Norm(tokens=T, name="ln", width=C, rms=False, bias=True), ""),
    (Norm(tokens=T, name="ln", width=C, rms=False, bias=False), ""),
    (Norm(tokens=T, name="ln", width=C, rms=True, bias=True), ""),
    (linear("ffn", "width"), "ffn width"),
    (linear("width", "ffn"), "ffn width"),
    (linear("width", "head"), "head width"),
    (linear("ffn", "width", bias=True), "ffn"),
    (linear("ffn", "width", bias=True, sections=(HIDDEN // 2, HIDDEN // 2)), "ffn"),
    (scores(tied=False), "vocab width"),
    (scores(tied=True), "vocab width"),
    *((Activate(tokens=T, activation=each, hidden=HIDDEN), "ffn") for each in ("gelu", "squared_relu", "swiglu")),
    (Add(tokens=T, width=C, bias="bias", drops=False, site=SITE), "width"),
    (Add(tokens=T, width=C, bias="", drops=True, site=SITE), ""),
    (projection(), "head width"),
    (projection(bias=True, rope_theta=100.0), "head"),
    (projection(kv_heads=4, rope_theta=100.0), "head width"),
    (Attend(tokens=T, width=C, heads=4, kv_heads=2, drops=False), "head"),
    (Attend(tokens=T, width=C, heads=4, kv_heads=4, drops=True), "head"),
    (Attend(tokens=T, width=C, heads=4, kv_heads=2, drops=True), "head"),
    (Route(tokens=T, router=ROUTER), ""),
    (Route(tokens=T, router=replace(ROUTER, top_k=1)), ""),
    (Place(tokens=T, router=ROUTER), ""),
    (Dispatch(tokens=T, router=ROUTER), "width"),
    (expert_linear(bias=True), "expert ffn"),
    (expert_linear(bias=False), "expert ffn width"),
    (ExpertActivate(tokens=T, router=ROUTER, activation="gelu", hidden=HIDDEN), "expert ffn"),
    (ExpertActivate(tokens=T, router=ROUTER, activation="swiglu", hidden=HIDDEN), "expert ffn"),
    (Combine(tokens=T, router=ROUTER), ""),
]
"""Each with the indices along which it is cut; not along one whose terms would each have the bias or a whole mask."""

every_primitive = pytest.mark.parametrize("primitive", [primitive for primitive, _ in PRIMITIVES], ids=repr)


def parameters_of(primitive: Primitive) -> list[Parameter]:
    """Those that it computes with."""
    borrowed = [Parameter(name, (HIDDEN, C), True, ("vocab", "width")) for name in primitive.borrows]
    return [*primitive.parameters(), *borrowed]


def inputs_of(primitive: Primitive, dtype: torch.dtype, rows: int = ROWS) -> dict[str, Tensor]:
    """Random tensors that it reads."""
    if isinstance(primitive, Lookup):
        return {"x": torch.randint(primitive.vocabulary, (rows, T))}
    if isinstance(primitive, Activate | ExpertActivate):
        features = features_of(primitive.activation, primitive.hidden)
    else:
        features = primitive.inputs if isinstance(primitive, Linear | ExpertLinear) else C
    choices = torch.rand(rows, T, ROUTER.experts).argsort(-1)[..., : ROUTER.top_k].to(torch.int32)
    buffers = "expert" in primitive.reads.get("x", "")
    shape = (ROUTER.experts, ROUTER.capacity(rows * T)) if buffers else (rows, T)
    kv = 2 * primitive.kv_width if isinstance(primitive, Attend) else 0
    given = {
        "x": torch.randn(*shape, features, dtype=dtype),
        **{name: torch.randn(rows, T, width, dtype=dtype) for name, width in (("s", C), ("q", C), ("kv", kv))},
        "gates": torch.rand(rows, T, ROUTER.top_k, dtype=dtype),
        "choices": choices,
        "slots": slots_of(ROUTER, choices, 1),
    }
    return {name: given[name].requires_grad_(given[name].is_floating_point()) for name in primitive.reads}


def made_by(
    primitive: Primitive, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], share: Share
) -> dict[str, Tensor]:
    """What it makes, by name."""
    drops = isinstance(primitive, Add | Embed | Attend) and primitive.drops
    dropout = Dropout(0.3, seed=1, step=2, layer=3, microbatches=(4,)) if drops else None
    return dict(zip(primitive.makes, compute(primitive, Given(parameters, tensors, share, dropout)), strict=True))


def gradients(made: Mapping[str, Tensor], above: Mapping[str, Tensor], of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of some tensors."""
    leaves = {name: each for name, each in of.items() if each.requires_grad}
    if not leaves:
        return {}
    outputs = [name for name in made if made[name].requires_grad]
    found = torch.autograd.grad([made[name] for name in outputs], list(leaves.values()), [above[n] for n in outputs])
    return dict(zip(leaves, found, strict=True))


class Whole:
    """A primitive on whole tensors: what it makes, and gradients of what it reads and of its parameters."""

    def __init__(self, primitive: Primitive) -> None:
        torch.manual_seed(0)
        self.primitive = primitive
        self.parameters = {
            p.name: torch.randn(p.shape, dtype=torch.float64).requires_grad_() for p in parameters_of(primitive)
        }
        self.tensors = inputs_of(primitive, torch.float64)
        self.made = made_by(primitive, self.parameters, self.tensors, Share())
        self.above = {name: torch.randn(y.shape, dtype=torch.float64) for name, y in self.made.items()}
        self.gradients = gradients(self.made, self.above, self.tensors | self.parameters)

    def piece(self, name: str, tensor: Tensor, indices: str, index: str, number: int, of: int) -> Tensor:
        """A piece of a tensor that has the index; else all of it. Keys and values, gates and features are cut alike."""
        if index not in indices.split():
            return tensor
        dim = 0 if index == "expert" else tensor.dim() - 1
        return _piece(tensor, dim, self._sections(name, tensor, dim), number, of)

    def piece_of_parameter(self, parameter: Parameter, tensor: Tensor, index: str, number: int, of: int) -> Tensor:
        assert index in parameter.indices, "all of a primitive's parameters are cut along an index that one of them has"
        dim = parameter.indices.index(index)
        sections = parameter.sections if dim == 0 and parameter.sections else tensor.shape[dim : dim + 1]
        return _piece(tensor, dim, sections, number, of)

    def _sections(self, name: str, tensor: Tensor, dim: int) -> tuple[int, ...]:
        length, primitive = tensor.shape[dim], self.primitive
        twice = name.endswith("kv")
        if isinstance(primitive, Activate | ExpertActivate) and dim:
            twice = length > primitive.hidden
        if isinstance(primitive, Linear) and name == "made x":
            twice = bool(primitive.sections)
        return (length // 2, length // 2) if twice else (length,)


def _piece(tensor: Tensor, dim: int, sections: tuple[int, ...], number: int, of: int) -> Tensor:
    return torch.cat([section.chunk(of, dim)[number] for section in tensor.split(list(sections), dim)], dim)


def cuts() -> Iterator[tuple[Primitive, str, int]]:
    for primitive, indices in PRIMITIVES:
        for index in indices.split():
            for of in (2,) if index == "head" else (2, 4):
                yield primitive, index, of


@pytest.mark.parametrize(("primitive", "index", "of"), list(cuts()), ids=repr)
def test_in_slices_it_makes_what_its_rule_says(primitive: Primitive, index: str, of: int) -> None:
    """Pieces that are held lie side by side, and terms of a sum add up; forward, and in the gradients."""
    whole, space = Whole(primitive), Space(1, 1, ((index, of),))
    node = replace(primitive.node, makes={f"made {name}": its for name, its in primitive.node.makes.items()})
    layer = Layer("", (node,), (), ())
    terms: dict[str, list[Tensor]] = {}
    counted: dict[str, list[int]] = {}

    def compare(
        held: Mapping[str, Held], name: str, indices: str, mine: Tensor, expected: Tensor, of_what: str
    ) -> None:
        term, key = held[name].term, f"{of_what} {name}"
        if term is not None:
            assert term.over == (index,)
            terms.setdefault(key, []).append(mine)
            counted.setdefault(key, []).append(term.bits)
        piece = whole.piece(name, expected, indices, index, number, of)
        assert mine.shape == piece.shape, key
        assert term is not None or error(mine, piece) <= 1e-12, key
        assert held[name].slices == ({index: 1 << number} if index in indices.split() else {})

    for number in range(of):
        cut = {index: 1 << number}
        own = {
            p.name: whole.piece_of_parameter(p, whole.parameters[p.name].detach(), index, number, of).requires_grad_()
            for p in parameters_of(primitive)
        }
        given = {
            name: whole.piece(name, x.detach(), primitive.reads[name], index, number, of).requires_grad_(
                x.requires_grad
            )
            for name, x in whole.tensors.items()
        }
        made = made_by(primitive, own, given, Share({index: (number, of)}))
        reads = {name: Held(cut if index in its.split() else {}) for name, its in node.reads.items()}
        in_weights = any(index in p.indices for p in parameters_of(primitive))
        held = derive.forward(layer, reads, cut if in_weights else {}, space)
        for name, its in primitive.node.makes.items():
            compare(held, f"made {name}", its, made[name].detach(), whole.made[name].detach(), "")
        above = {
            name: whole.piece(f"made {name}", whole.above[name], primitive.makes[name], index, number, of)
            for name in primitive.makes
        }
        ends = {name: Held(held[name].slices) for name in node.makes}
        below = derive.backward(layer, held, ends, cut if in_weights else {}, space)
        found = gradients(made, above, given | own)
        for name, its in node.reads.items():
            if name in found:
                compare(below, name, its, found[name], whole.gradients[name], "gradient of")
        for p in parameters_of(primitive):
            expected = whole.piece_of_parameter(p, whole.gradients[p.name], index, number, of)
            assert error(found[p.name], expected) <= 1e-12, p.name
    for key, parts in terms.items():
        assert counted[key] == [1 << number for number in range(of)]
        of_what, name = key.rsplit(" ", 1)
        expected = whole.gradients[name] if of_what.startswith("gradient") else whole.made[name].detach()
        assert error(sum(parts[1:], parts[0]), expected) <= 1e-12, key


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def test_every_index_of_every_primitive_is_tried() -> None:
    """Along which it may be cut: not one that it must hold whole."""
    tried: dict[type[Primitive], set[str]] = {}
    may: dict[type[Primitive], set[str]] = {}
    for primitive, indices in PRIMITIVES:
        node = primitive.node
        its = {
            index
            for table in (node.reads, node.makes, node.weights)
            for each in table.values()
            for index in each.split()
        }
        may.setdefault(type(primitive), set()).update(its & set(INDICES) - node.whole)
        tried.setdefault(type(primitive), set()).update(indices.split())
    assert tried == may
    assert set(compute.registry) - {object} <= set(tried)


@every_primitive
def test_any_tokens_are_computed_alone_unless_it_mixes_them(primitive: Primitive) -> None:
    """Results lie side by side, and the parameters' gradients add up."""
    if "expert" in primitive.reads.get("x", ""):
        pytest.skip("the experts' buffers are of whole microbatches")
    whole, alone = Whole(primitive), True
    total = {name: torch.zeros_like(each) for name, each in whole.parameters.items()}
    for tokens in ([0, 3, 5], [1, 2, 4]):
        own = {name: each.detach().clone().requires_grad_() for name, each in whole.parameters.items()}
        given = {n: x.detach()[:, tokens].requires_grad_(x.requires_grad) for n, x in whole.tensors.items()}
        try:
            made = made_by(primitive, own, given, Share(tokens=tokens))
        except (IndexError, RuntimeError):
            alone = False
            break
        found = gradients(made, {n: y[:, tokens] for n, y in whole.above.items() if y.shape[1] == T}, given | own)
        alone &= all(error(made[n].double(), whole.made[n][:, tokens].double()) <= 1e-12 for n in made)
        alone &= all(error(found[n], whole.gradients[n][:, tokens]) <= 1e-12 for n in given if n in found)
        total = {name: total[name] + found[name] for name in total}
    alone &= all(error(total[name], whole.gradients[name]) <= 1e-12 for name in total)
    assert alone is not primitive.mixes_tokens


@every_primitive
def test_autograd_keeps_what_it_declares(primitive: Primitive) -> None:
    """By storages, beyond its parameters: tensors that it reads or makes, and what lies beside them."""
    parameters = {p.name: torch.randn(p.shape).requires_grad_() for p in parameters_of(primitive)}
    tensors = inputs_of(primitive, torch.float32)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = made_by(primitive, parameters, tensors, Share())
    for each in parameters.values():
        kept.pop(each.untyped_storage().data_ptr(), None)
    named = [(made | tensors)[name] for name in primitive.keeps()]
    assert set(kept) >= {each.untyped_storage().data_ptr() for each in named}
    assert sum(kept.values()) == sum(each.numel() for each in named) + primitive.keeps_beside(ROWS)


@every_primitive
def test_shapes_and_flops_are_those_it_declares(primitive: Primitive) -> None:
    """FLOPs as torch counts them; it counts none for a fused attention."""
    parameters = {p.name: torch.randn(p.shape) for p in parameters_of(primitive)}
    with FlopCounterMode(display=False) as counter:
        made = made_by(primitive, parameters, inputs_of(primitive, torch.float32, 1), Share())
    assert {name: tuple(y.shape) for name, y in made.items()} == {n: primitive.shape(n, 1) for n in primitive.makes}
    if not isinstance(primitive, Attend) or primitive.drops:
        assert counter.get_total_flops() == primitive.flops()
