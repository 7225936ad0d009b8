"""Both passes of a layer: what autograd makes of its definition, of as much as is declared."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, singledispatch
from itertools import product
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, Model, MoE, cut
from shardlab.models.layer import Run
from shardlab.models.layout import Kernel
from shardlab.models.mixture import ExpertActivate
from shardlab.models.primitives import Activate, Add, DropoutSite, Pieces, Primitive
from shardlab.models.tensors import AddGradients, Dropout, make_layers, parameter_views
from shardlab.models.tensors.backward import layer as layer_module
from shardlab.models.tensors.backward import prepare_layer
from shardlab.models.tensors.backward.autograd import AutogradGraph, autograd_passes
from shardlab.models.tensors.backward.workspace import BothPasses, TensorPlaces, make_passes
from shardlab.models.tensors.compute import Operands, compute
from shardlab.models.tensors.layers import TensorLayer
from tests.models.conftest import forward, inputs_of, passes_of, piece_of
from tests.models.small import WithHeads
from tests.models.tensors.comparing import error
from tests.support.thorough import sampled

ROWS = 3
SMALL: WithHeads = {"layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 30, "seq_len": 8}
LARGE: WithHeads = {"layers": 2, "hidden_size": 256, "heads": 4, "vocab_size": 30, "seq_len": 8}
"""Of a model whose feed-forward's products are large, in two slices too."""

WHOLE: list[Model] = [
    GPT(**SMALL),
    GPT(**SMALL, bias=False),
    GPT(layers=1, hidden_size=16, heads=4, vocab_size=30, seq_len=8, tied=True),
    GPT(layers=1, hidden_size=12, heads=3, seq_len=7, vocab_size=30, bias=False, dropout=0.2, tied=True),
    GPT(**LARGE, activation="gelu_tanh"),
    GPT(**LARGE, activation="squared_relu", norm="rms", dropout=0.2),
    GPT(**SMALL, kv_heads=2, rope_theta=1e4, dropout=0.2),
    MLP(layers=3, hidden_size=16, vocab_size=30, seq_len=8, dropout=0.2),
    Llama(**LARGE, kv_heads=2),
    MoE(**SMALL, top_k=1),
    MoE(**LARGE, dropout=0.2, capacity_factor=None),
    Mixtral(**LARGE, shared_experts=1),
    Llama(**SMALL, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True, activation="geglu"),
    Llama(**SMALL, head_dim=6, kv_rank=7, q_rank=5, rope_dim=4),
    Llama(**SMALL, head_dim=6, kv_rank=7, rope_dim=4),
]
CUT: Sequence[Model] = [
    *(cut(model) for model in WHOLE if isinstance(model, Blocks) and model.layers > 1),
    cut(GPT(**LARGE), tp=2),
    cut(GPT(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8, vocab_size=30, tied=True), tp=2),
    cut(GPT(layers=1, hidden_size=16, heads=4, kv_heads=2, seq_len=8, vocab_size=30, dropout=0.2), tp=2),
    *(cut(model, attention_apart=True) for model in WHOLE[:2] if isinstance(model, Blocks)),
    cut(GPT(**SMALL, dropout=0.2), attention_apart=True),
    cut(MLP(layers=1, hidden_size=16, seq_len=8), tp=2, columns=True),
    cut(MoE(layers=1, hidden_size=16, heads=2, seq_len=8), ep=2),
    cut(MoE(**SMALL, dense_layers=1, dense_ffn_hidden_size=40), ep=2),
    cut(Llama(**LARGE, ffn_hidden_size=1024, qk_norm=True), tp=2, attention_apart=True),
    cut(MLP(layers=2, hidden_size=256, vocab_size=30, seq_len=8), tp=2, columns=True),
    cut(MoE(**SMALL), ep=2),
    cut(MoE(**LARGE, dropout=0.2), tp=2, ep=2),
    cut(Mixtral(**SMALL, ffn_hidden_size=24), tp=2, attention_apart=True),
]
MODELS = [*WHOLE, *CUT]
CASES = [
    (model, layer, number)
    for model in MODELS
    for layer in range(model.layers)
    for number in range(model.layout(0 if model.borrowed(layer) else layer).slices)
]


@cache
def different_layers(model: Model) -> list[int]:
    """Return the layers of a model without those that repeat the primitives of an earlier one."""
    first = {tuple(step.primitive for step in run.steps): layer for layer, run in reversed([*enumerate(model.runs)])}
    return sorted(first.values())


def second_slice(model: Model, layer: int) -> int:
    """Return the number of a slice that does not begin where the whole begins, if there is one."""
    return min(1, model.layout(0 if model.borrowed(layer) else layer).slices - 1)


def is_in_sample(case: tuple[Model, int, int]) -> bool:
    model, layer, number = case
    return layer in different_layers(model)[:3] and number == second_slice(model, layer)


def every_slice(keep: Callable[[tuple[Model, int, int]], bool] = is_in_sample) -> pytest.MarkDecorator:
    """Return the mark of a test of all slices of all layers, of which the suite runs those to keep."""
    scope = "module"  # so that all tests of a slice run together, and find its weights in the cache
    return pytest.mark.parametrize(("model", "layer", "number"), sampled(CASES, keep), ids=str, scope=scope)


@lru_cache(maxsize=32)
def random_weights(model: Model, layer: int, dtype: torch.dtype) -> Tensor:
    """Return random weights of a slice of a layer, near 1 for norms and near 0 otherwise.

    They are cached, because most of the time is theirs.
    """
    layout = model.layout(layer)
    flat = torch.randn(layout.run_numel, dtype=dtype, generator=torch.Generator().manual_seed(layer)) / 5
    for parameter, view in zip(layout.parameters, parameter_views(layout, flat), strict=True):
        if parameter.name.endswith("weight") and not parameter.decayed:
            view += 1
    return flat


class Passes:
    """One forward pass of a slice of a layer on random input, with gradients of its outputs."""

    def __init__(self, model: Model, layer: int, number: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.share = replace(piece_of(model, layer, number), gradient_scale=3)
        owner = 0 if model.borrowed(layer) else layer
        self.flat = random_weights(model, owner, dtype).clone()
        torch.default_generator.manual_seed(layer)  # `torch.manual_seed` would format three stacks for other devices
        self.weights = parameter_views(model.layout(owner), self.flat)
        self.inputs = inputs_of(model, layer, ROWS, dtype, self.share)
        self.layer = passes_of(model, layer)
        self.outputs, self.ctx, self.saved_tensors = forward(model, layer, self.inputs, self.weights, self.share)
        self.gradients = [torch.randn_like(y) for y in self.outputs]
        self.later: list[tuple[AddGradients, Tensor, Tensor]] = []

    def backward(self, sums: Sequence[Tensor], *, halves: bool = False) -> list[Tensor]:
        """The inputs' gradients, where there are any; adds those of the weights to `sums`."""

        def take(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
            if halves:
                self.later.append((add, gradient, read))
            else:
                add(sums, gradient, read)

        gradients = self.layer.backward(self.ctx, self.gradients, self.weights, take)
        return [gradient for gradient in gradients if gradient is not None]

    def backward_weight(self, sums: Sequence[Tensor]) -> None:
        """The second half of a backward pass."""
        while self.later:
            add, gradient, read = self.later.pop(0)
            add(sums, gradient, read)

    def zero_sums(self) -> list[Tensor]:
        return [torch.zeros_like(weight) for weight in self.weights]


@every_slice()
def test_both_passes_are_those_that_autograd_makes_of_the_definition(model: Model, layer: int, number: int) -> None:
    passes = Passes(model, layer, number)
    leaves = [weight.clone().requires_grad_() for weight in passes.weights]
    dropout = Dropout(model.dropout, 0, 0, layer, (0,))
    outputs = make_layers(model)[layer].run(leaves, passes.inputs, passes.share, dropout)
    torch.autograd.backward(outputs, passes.gradients)
    sums = passes.zero_sums()
    gradients = passes.backward(sums)
    for mine, reference in zip(passes.outputs, outputs, strict=True):
        assert error(mine, reference) <= 1e-14
    expected = [x.grad for x in passes.inputs if x.grad is not None]
    for mine, reference in zip(gradients, expected, strict=True):
        assert error(mine, reference) <= 1e-14
    for total, leaf in zip(sums, leaves, strict=True):
        assert leaf.grad is None or error(total, leaf.grad) <= 1e-13


@every_slice()
def test_two_halves_are_the_whole_to_the_bit_and_the_weight_may_go_between_them(
    model: Model, layer: int, number: int
) -> None:
    """It lies elsewhere for the first half, and nowhere for the second."""
    passes, halves = Passes(model, layer, number), Passes(model, layer, number)
    expected, sums = passes.zero_sums(), passes.zero_sums()
    x_expected = passes.backward(expected)
    elsewhere = halves.flat.clone()
    halves.flat.fill_(torch.nan)
    halves.weights = parameter_views(model.layout(0 if model.borrowed(layer) else layer), elsewhere)
    gradients = halves.backward(sums, halves=True)
    elsewhere.fill_(torch.nan)
    halves.backward_weight(sums)
    for mine, reference in zip((*gradients, *sums), (*x_expected, *expected), strict=True):
        assert torch.equal(mine, reference)


@every_slice()
def test_gradients_are_added_to_what_is_there_and_nothing_stays(model: Model, layer: int, number: int) -> None:
    first, second = Passes(model, layer, number), Passes(model, layer, number)
    zeros, ones = first.zero_sums(), [torch.ones_like(weight) for weight in first.weights]
    first.backward(zeros)
    second.backward(ones)
    for zero, one in zip(zeros, ones, strict=True):
        assert error(one, zero + 1) <= 1e-14
    assert not any(tensor is not None for tensor in first.ctx.tensors)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Place of each memory to its bytes."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_between_the_halves_stays_what_models_declare(model: Model) -> None:
    """Beyond each layer's inputs, its parameters, and the gradients of its outputs and vectors."""
    for layer in different_layers(model):
        assert kept_between_the_halves(model, layer) == model.run(layer).saved_for_weight(ROWS), layer


def kept_between_the_halves(model: Model, layer: int) -> int:
    elements = 0
    for number in range(model.layout(layer).slices):
        passes = Passes(model, layer, number)
        passes.backward(passes.zero_sums(), halves=True)
        passes.saved_tensors.clear()
        stays = [tensor for _, *pair in passes.later for tensor in pair if tensor.dim() > 1]
        others = storages([passes.flat, *passes.gradients, *passes.inputs])
        elements += sum(size for place, size in storages(stays).items() if place not in others) // 8
    return elements


@pytest.mark.parametrize(
    ("model", "dtype"),
    sampled(
        product(MODELS, (torch.float32, torch.float64, torch.bfloat16)),
        lambda case: case[1] is torch.float32 or case[0] in (GPT(**SMALL), WHOLE[-1]),
    ),
    ids=str,
)
def test_a_pass_that_keeps_nothing_makes_the_same_to_the_bit(model: Model, dtype: torch.dtype) -> None:
    for layer in different_layers(model):
        passes, dropout = Passes(model, layer, 0, dtype), Dropout(model.dropout, 0, 0, layer, (0,))
        inputs = [x.detach() for x in passes.inputs]
        outputs, _ = passes.layer.forward(inputs, passes.weights, passes.share, dropout, keeps=False)
        assert all(torch.equal(a, b) for a, b in zip(outputs, passes.outputs, strict=True))


def test_gradients_may_be_summed_in_wider_numbers_than_they_are_made_in() -> None:
    for model in (WHOLE[0], WHOLE[8], WHOLE[11]):
        passes, exact = Passes(model, 1, 0, torch.bfloat16), Passes(model, 1, 0, torch.bfloat16)
        wide, narrow = (
            [torch.zeros_like(weight, dtype=dtype) for weight in passes.weights] for dtype in (torch.float32, None)
        )
        passes.backward(wide)
        exact.backward(narrow)
        for total, reference in zip(wide, narrow, strict=True):
            assert total.dtype == torch.float32
            assert torch.equal(total.bfloat16(), reference)


def test_every_activation_function_is_made_again_that_a_large_product_reads() -> None:
    small, large = (WHOLE[0], WHOLE[9]), (WHOLE[4], WHOLE[8], WHOLE[10], WHOLE[11])
    assert not any(run.made_again for model in small for run in model.runs)
    for run in (run for model in large for run in model.runs):
        followed = {n for n, step in enumerate(run.steps) if isinstance(step.primitive, Activate | ExpertActivate)}
        assert {recomputed.step for recomputed in run.made_again} == followed


@singledispatch
def none(primitive: Primitive, at: TensorPlaces) -> BothPasses | None:
    """No primitive has passes of its own."""
    return None


@every_slice(lambda case: is_in_sample(case) and case[0] in WHOLE)
def test_autograd_makes_the_backward_pass_of_a_primitive_that_has_none(model: Model, layer: int, number: int) -> None:
    """Wherever its weight lies then."""
    by_hand = Passes(model, layer, number)
    expected = by_hand.zero_sums()
    x_expected = by_hand.backward(expected)
    with patch.object(layer_module, "make_passes", none):
        mine = Passes(model, layer, number)
    assert any(isinstance(tensor, AutogradGraph) for tensor in mine.ctx.tensors)
    elsewhere = mine.flat.clone()
    mine.flat.fill_(torch.nan)
    mine.weights = parameter_views(model.layout(0 if model.borrowed(layer) else layer), elsewhere)
    sums = mine.zero_sums()
    gradients = mine.backward(sums)
    for ours, reference in zip(
        (*mine.outputs, *gradients, *sums), (*by_hand.outputs, *x_expected, *expected), strict=True
    ):
        assert error(ours, reference) <= 1e-13


class Without:
    """The primitives' passes, but for those of one kind."""

    def __init__(self, kind: type[Primitive]) -> None:
        self.registry = {
            primitive: factory for primitive, factory in make_passes.registry.items() if primitive is not kind
        }

    def __call__(self, primitive: Primitive, at: TensorPlaces) -> BothPasses | None:
        return make_passes(primitive, at)


@pytest.mark.parametrize("maximum", sampled([1, 5], {1}.__contains__))
@pytest.mark.parametrize(
    "kind", [kind for kind in make_passes.registry if kind is not object], ids=lambda kind: kind.__name__
)
def test_passes_that_autograd_makes_meet_those_that_are_written_out(kind: type[Primitive], maximum: int) -> None:
    """In so many layers that have the primitive, or as many as there are."""
    count = 0
    for model in (WHOLE[4], WHOLE[6], WHOLE[8], WHOLE[10], WHOLE[11], WHOLE[13], CUT[-5]):
        for layer in different_layers(model):
            if count < maximum and any(type(step.primitive) is kind for step in model.run(layer).steps):
                count += 1
                with patch.object(layer_module, "make_passes", Without(kind)):
                    test_both_passes_are_those_that_autograd_makes_of_the_definition(model, layer, 0)
                    test_two_halves_are_the_whole_to_the_bit_and_the_weight_may_go_between_them(model, layer, 0)
    assert count


@dataclass(frozen=True, kw_only=True)
class HandsOn(Primitive):
    """A branch that may be dropped, and is handed on otherwise."""

    einsum: ClassVar[str] = "x(width) -> x(width)"
    hidden_size: int

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        return ()


@compute.register
def _(primitive: HandsOn, operands: Operands) -> tuple[Tensor, ...]:
    return (operands.x if operands.factor is None else operands.x * operands.factor,)


@dataclass(frozen=True, kw_only=True)
class Gate(HandsOn):
    """Primitive that multiplies an attention output by a gate of its queries, which attention reads as well."""

    einsum: ClassVar[str] = "q(head) x(head) -> x(head)"


@compute.register
def _(primitive: Gate, operands: Operands) -> tuple[Tensor, ...]:
    return (operands.x * operands.tensors["q"].sigmoid(),)


@dataclass(frozen=True, kw_only=True)
class Halved(HandsOn):
    """Keys and values that lie between their projection and attention."""

    einsum: ClassVar[str] = "kv(head) -> kv(head)"

    def features(self, tensor: str) -> int:
        return 2 * self.hidden_size


@compute.register
def _(primitive: Halved, operands: Operands) -> tuple[Tensor, ...]:
    return (operands.tensors["kv"] / 2,)


@dataclass(frozen=True, kw_only=True)
class Unusual(GPT):
    """A model with primitives between those that usually meet."""

    def attention_part(self) -> tuple[Primitive, ...]:
        norm, project, attend, *rest = super().attention_part()
        tokens, width = self.seq_len, self.hidden_size
        halved, gate = Halved(tokens=tokens, hidden_size=width), Gate(tokens=tokens, hidden_size=width)
        return norm, project, halved, attend, gate, *rest

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        attention, (name, (*others, add)) = super().block_parts()
        return attention, (name, (*others, HandsOn(tokens=self.seq_len, hidden_size=self.hidden_size), add))


@pytest.mark.parametrize("layer", range(2))
def test_primitives_may_stand_between_those_that_usually_meet(layer: int) -> None:
    model = Unusual(**SMALL)
    test_both_passes_are_those_that_autograd_makes_of_the_definition(model, layer, 0)
    test_two_halves_are_the_whole_to_the_bit_and_the_weight_may_go_between_them(model, layer, 0)


def test_outputs_of_a_primitive_have_memory_of_their_own() -> None:
    step = WHOLE[0].run(0).steps[0]._replace(primitive=HandsOn(tokens=8, hidden_size=4))
    x = torch.randn(2, 8, 4)
    for keeps in (True, False):
        (output,), _ = prepare_layer(Run((step,), ("x",), ("x",)), "cpu").forward([x], (), keeps=keeps)
        assert torch.equal(output, x)
        assert output.data_ptr() != x.data_ptr()


def test_a_layer_without_parameters_draws_masks() -> None:
    step = WHOLE[3].run(0).steps[0]
    parts = (
        Activate(tokens=8, activation="gelu", hidden=4),
        Add(tokens=8, hidden_size=4, bias="", drops=True, site=DropoutSite.FEED_FORWARD_OUTPUT),
    )
    run, inputs = (
        Run(tuple(step._replace(primitive=part) for part in parts), ("x", "s"), ("s",)),
        torch.randn(2, 2, 8, 4),
    )
    dropout = Dropout(0.2, 0, 0, 0, (0,))
    (output,), _ = prepare_layer(run, "cpu").forward([*inputs], (), dropout=dropout, keeps=False)
    assert torch.equal(output, TensorLayer(run).run((), [*inputs], dropout=dropout)[0])


class Twice(Activate):
    """A primitive that is made of another, and would compute something else."""


def test_a_primitive_that_is_made_of_another_one_does_not_take_its_passes() -> None:
    run = WHOLE[0].run(0)
    twice = [
        step._replace(primitive=Twice(tokens=8, activation="gelu", hidden=64))
        if isinstance(step.primitive, Activate)
        else step
        for step in run.steps
    ]
    with patch.object(layer_module, "autograd_passes", wraps=autograd_passes) as autograd_calls:
        prepare_layer(run, "cpu")
        assert not autograd_calls.called
        prepare_layer(replace(run, steps=tuple(twice)), "cpu")
        assert [type(call.args[0]) for call in autograd_calls.call_args_list] == [Twice]


@pytest.mark.parametrize("halves", range(3))
def test_a_pass_that_is_let_go_at_any_point_takes_what_it_kept_with_it(halves: int) -> None:
    passes = Passes(GPT(**SMALL, dropout=0.2), 1)
    references = [weakref.ref(tensor) for tensor in passes.saved_tensors]
    passes.saved_tensors.clear()
    if halves >= 1:
        passes.backward(passes.zero_sums(), halves=True)
    if halves == 2:
        passes.backward_weight(passes.zero_sums())
    gc.disable()
    try:
        del passes
        assert not [reference for reference in references if reference() is not None]
    finally:
        gc.enable()
