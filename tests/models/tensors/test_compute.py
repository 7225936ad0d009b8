"""Every primitive by itself on real tensors: whole, in slices as its rule says, and what autograd keeps of it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardlab.language.rules import layer_graph
from shardlab.language.rules.kinds import INDICES, WHOLE, Holds
from shardlab.language.rules.layer_graph import Extent, Layer
from shardlab.language.rules.spec import Space
from shardlab.models.attention import Attend
from shardlab.models.primitives import Add, Embed, Primitive
from shardlab.models.tensors import (
    Context,
    Dropout,
    Share,
    combine_loss,
    cross_entropy,
    cross_entropy_backward,
    log_probabilities,
    loss_gradient,
    loss_of,
    loss_stats,
)
from shardlab.models.tensors.backward import autograd
from shardlab.models.tensors.backward.workspace import TensorPlaces, make_passes
from shardlab.models.tensors.compute import compute, look_up, with_auxiliary_loss
from tests.models.conftest import Watched
from tests.models.tensors.alone import PRIMITIVES, T, Whole, gradients, inputs_of, outputs_of, parameters_of
from tests.models.tensors.alone import ROWS as ROWS_imported
from tests.models.tensors.comparing import error, gradient_of

ALL = [primitive for primitive, _ in PRIMITIVES]
every_primitive = pytest.mark.parametrize("primitive", ALL, ids=repr)


def cuts() -> Iterator[tuple[Primitive, str, int]]:
    for primitive, indices in PRIMITIVES:
        for index in indices.split():
            for of in (2,) if index == "head" else (2, 4):
                yield primitive, index, of


@dataclass
class Slices:
    """Results of slices of a primitive, put together by its rule and compared with the whole.

    Attributes:
        whole: the primitive on whole tensors.
        index, of: along which it is cut, and into how many slices.
        terms: of each tensor that is a sum over slices: the whole sum, and each slice's term with its bit.
    """

    whole: Whole
    index: str
    of: int
    terms: dict[str, tuple[Tensor, list[tuple[int, Tensor]]]] = field(
        default_factory=dict[str, tuple[Tensor, list[tuple[int, Tensor]]]]
    )

    def add(self, number: int, extent: Extent, name: str, indices: str, mine: Tensor, expected: Tensor) -> None:
        """A piece that is held is that piece of the whole; a term is kept."""
        assert extent.slices == ({self.index: 1 << number} if self.index in indices.split() else {})
        piece = self.whole.piece(name, expected, indices, self.index, number, self.of)
        assert mine.shape == piece.shape, name
        if extent.term is None:
            assert error(mine, piece) <= 1e-12, name
        else:
            assert extent.term.indices == (self.index,)
            self.terms.setdefault(name, (expected, []))[1].append((extent.term.bits, mine))

    def run(self, number: int) -> None:
        """Forward and back with one slice of the parameters, and of what it reads."""
        whole, primitive, index, of = self.whole, self.whole.primitive, self.index, self.of
        node = replace(
            primitive.node, makes={f"made {name}": indices for name, indices in primitive.node.makes.items()}
        )
        layer, space = Layer("", (node,), (), ()), Space(1, 1, ((index, of),))
        parameters = parameters_of(primitive)
        weights = {
            p.name: whole.piece_of_parameter(p, whole.parameters[p.name].detach(), index, number, of).requires_grad_()
            for p in parameters
        }
        inputs: dict[str, Tensor] = {}
        for name, x in whole.tensors.items():
            mine = whole.piece(name, x.detach(), primitive.reads[name], index, number, of)
            inputs[name] = mine.requires_grad_(x.requires_grad)
        experts = Holds(1 << number, of) if index == "expert" else WHOLE
        outputs = outputs_of(primitive, weights, inputs, Share({index: (number, of)}, experts=experts))
        cut = {index: 1 << number} if parameters or index in primitive.deals else {}
        reads = {
            name: Extent({index: 1 << number} if index in indices.split() else {})
            for name, indices in node.reads.items()
        }
        extents = layer_graph.forward(layer, reads, cut, space)
        for name, indices in primitive.node.makes.items():
            self.add(
                number,
                extents[f"made {name}"],
                f"made {name}",
                indices,
                outputs[name].detach(),
                whole.outputs[name].detach(),
            )
        grad_outputs = {
            name: whole.piece(f"made {name}", y, primitive.makes[name], index, number, of)
            for name, y in whole.grad_outputs.items()
        }
        grad_extents, of_weights = layer_graph.backward(
            layer, extents, {name: Extent(extents[name].slices) for name in node.makes}, cut, space
        )
        assert of_weights is None
        grads = gradients(outputs, grad_outputs, inputs | weights)
        for name, indices in node.reads.items():
            if name in grads:
                self.add(number, grad_extents[name], name, indices, grads[name], whole.gradients[name])
        for p in parameters:
            expected = whole.piece_of_parameter(p, whole.gradients[p.name], index, number, of)
            assert error(grads[p.name], expected) <= 1e-12, p.name


@pytest.mark.parametrize(("primitive", "index", "of"), list(cuts()), ids=repr)
def test_in_slices_it_makes_what_its_rule_says(primitive: Primitive, index: str, of: int) -> None:
    """Pieces that are held lie side by side, and terms of a sum add up; forward, and in the gradients."""
    slices = Slices(Whole(primitive), index, of)
    for number in range(of):
        slices.run(number)
    for name, (expected, terms) in slices.terms.items():
        assert [bits for bits, _ in terms] == [1 << number for number in range(of)]
        assert error(torch.stack([term for _, term in terms]).sum(0), expected) <= 1e-12, name


def test_every_index_of_every_primitive_is_tried() -> None:
    """Along which it may be cut: not one that it must hold whole."""
    tested: dict[type[Primitive], set[str]] = {}
    possible: dict[type[Primitive], set[str]] = {}
    for primitive, indices in PRIMITIVES:
        node = primitive.node
        node_indices = {
            index
            for table in (node.reads, node.makes, node.weights)
            for indices_text in table.values()
            for index in indices_text.split()
        }
        possible.setdefault(type(primitive), set()).update(node_indices & set(INDICES) - node.whole)
        tested.setdefault(type(primitive), set()).update(indices.split())
    assert tested == possible
    assert {kind for kind in compute.registry if kind.__module__.startswith("shardlab.")} <= set(tested)


@pytest.mark.parametrize(
    "primitive", [primitive for primitive in ALL if "expert" not in primitive.reads.get("x", "")], ids=repr
)
def test_any_tokens_are_computed_alone_unless_it_mixes_them(primitive: Primitive) -> None:
    """Results lie side by side, and parameters' gradients add up; experts' buffers are of whole microbatches."""
    whole, alone = Whole(primitive), True
    total = {name: torch.zeros_like(parameter) for name, parameter in whole.parameters.items()}
    for tokens in ([0, 3, 5], [1, 2, 4]):
        weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in whole.parameters.items()}
        inputs = {n: x.detach()[:, tokens].requires_grad_(x.requires_grad) for n, x in whole.tensors.items()}
        try:
            outputs = outputs_of(primitive, weights, inputs, Share(tokens=tokens))
        except (IndexError, RuntimeError):
            alone = False
            break
        grads = gradients(
            outputs, {n: y[:, tokens] for n, y in whole.grad_outputs.items() if y.shape[1] == T}, inputs | weights
        )
        alone &= all(error(outputs[n].double(), whole.outputs[n][:, tokens].double()) <= 1e-12 for n in outputs)
        alone &= all(error(grads[n], whole.gradients[n][:, tokens]) <= 1e-12 for n in inputs if n in grads)
        total = {name: total[name] + grads[name] for name in total}
    alone &= all(error(total[name], whole.gradients[name]) <= 1e-12 for name in total)
    assert alone is not primitive.mixes_tokens


@every_primitive
def test_its_backward_pass_is_linear_or_affine_as_it_declares(primitive: Primitive) -> None:
    whole = Whole(primitive)
    leaves, doubled = (
        whole.tensors | whole.parameters,
        {name: 2 * gradient for name, gradient in whole.grad_outputs.items()},
    )

    def is_doubled(share: Share) -> bool:
        grads = gradients(outputs_of(primitive, whole.parameters, whole.tensors, share), doubled, leaves)
        return all(error(gradient, 2 * whole.gradients[name]) <= 1e-12 for name, gradient in grads.items())

    assert is_doubled(Share(gradient_scale=2))
    assert is_doubled(Share()) is not primitive.affine


@every_primitive
def test_its_passes_keep_what_it_declares(primitive: Primitive) -> None:
    """By storages, beyond its parameters: tensors that it reads or makes, and what lies beside them."""
    names = [parameter.name for parameter in parameters_of(primitive)]
    weights = [torch.randn(parameter.shape) for parameter in parameters_of(primitive)]
    tensors = inputs_of(primitive, torch.float32)
    at = TensorPlaces({name: place for place, name in enumerate(names)}, "cpu")
    read = {name: at.make(name) for name in tensors}
    drops = isinstance(primitive, Add | Embed | Attend) and primitive.drops
    dropout = Dropout(0.3, seed=1, step=2, layer=3, microbatches=(4,)) if drops else None
    Watched.tensors.clear()
    with patch.object(autograd, "SavedTensors", Watched):
        passes = make_passes(primitive, at) or autograd.autograd_passes(primitive, at)
        ctx = Context([None] * at.count, weights, Share(), dropout, ROWS_imported, T)
        for name, x in tensors.items():
            ctx.tensors[read[name]] = (x if "expert" in primitive.reads[name] else x.flatten(0, 1)).detach()
        passes.forward(ctx)
    saved_tensors = [
        tensor for tensor in (ctx.tensors[place] for place in passes.keeps) if isinstance(tensor, Tensor)
    ] + Watched.tensors
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // tensor.element_size()
        for tensor in saved_tensors
    }
    for tensor in weights:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    places = at.tensors | read
    declared = [ctx.tensors[places[name]] for name in primitive.keeps()]
    assert set(storages) >= {tensor.untyped_storage().data_ptr() for tensor in declared}
    assert sum(storages.values()) == sum(tensor.numel() for tensor in declared) + primitive.keeps_beside(ROWS_imported)


@every_primitive
def test_shapes_and_flops_are_those_it_declares(primitive: Primitive) -> None:
    """FLOPs as torch counts them; it counts none for a fused attention."""
    parameters = {p.name: torch.randn(p.shape) for p in parameters_of(primitive)}
    with FlopCounterMode(display=False) as counter:
        outputs = outputs_of(primitive, parameters, inputs_of(primitive, torch.float32, 1), Share())
    assert {name: tuple(y.shape) for name, y in outputs.items()} == {n: primitive.shape(n, 1) for n in primitive.makes}
    if not isinstance(primitive, Attend) or primitive.drops:
        assert counter.get_total_flops() == primitive.flops()


# The look-up in one slice of the vocabulary.


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 100))
def test_slices_sum_to_the_whole_look_up_and_their_gradients_are_its_slices(size: int, slices: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(size * slices, 3, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(size * slices, (2, 7), generator=generator)
    gradient = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)
    expected = F.embedding(tokens, whole)
    expected.backward(gradient)

    parts = [part.requires_grad_() for part in whole.detach().clone().chunk(slices)]
    results = [look_up(part, tokens, i * size) for i, part in enumerate(parts)]
    assert torch.equal(torch.stack(results).sum(0), expected)
    torch.autograd.backward(results, [gradient] * slices)
    torch.testing.assert_close(torch.cat([gradient_of(part) for part in parts]), gradient_of(whole), rtol=0, atol=1e-14)


# Cross-entropy over slices of the vocabulary is cross-entropy.


ROWS, LENGTH = 2, 5


def by_slices(logits: Tensor, targets: Tensor, slices: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient from `slices` slices of the logits, padded at the end."""
    vocab_size = logits.shape[-1]
    size = -(-vocab_size // slices)
    padded = F.pad(logits, (0, size * slices - vocab_size), value=float("-inf"))
    cut = list(zip(padded.chunk(slices, -1), range(0, size * slices, size), strict=True))
    stats = torch.stack([loss_stats(part, targets, first) for part, first in cut])
    assert stats.shape == (slices, ROWS, LENGTH, 3)
    gradients = [loss_gradient(part, stats, targets, first) for part, first in cut]
    gradient = torch.cat(gradients, -1)
    assert not gradient[..., vocab_size:].any()
    return combine_loss(stats, targets), gradient[..., :vocab_size]


@given(st.integers(1, 30), st.integers(1, 7), st.sampled_from([1e-3, 1.0, 300.0]), st.integers(0, 1000))
def test_loss_and_gradient_of_slices_are_cross_entropys(vocab_size: int, slices: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(ROWS, LENGTH, vocab_size, dtype=torch.float64, generator=generator)
    targets = torch.randint(-1, vocab_size, (ROWS, LENGTH), generator=generator)
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    expected.backward()
    loss, gradient = by_slices(logits.detach(), targets, slices)
    assert abs(loss - expected).item() <= 1e-14 * max(1.0, expected.item())
    assert (gradient - gradient_of(logits)).abs().max().item() <= 2e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_and_its_gradient_without_autograd_are_bitwise_those_of_autograd(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(ROWS, LENGTH, 6).to(dtype), torch.randint(-1, 6, (ROWS, LENGTH))
    logits[0, 0, 3:] = -torch.inf  # padding of the vocabulary
    targets[0, 0] = 1
    expected = cross_entropy(logits.requires_grad_(), targets)
    (expected / 37).backward()
    log_probs = log_probabilities(logits)
    loss = loss_of(log_probs, targets)
    gradient = cross_entropy_backward(log_probs, targets, torch.ones_like(loss) / 37, dtype)
    assert torch.equal(loss, expected.detach())
    assert torch.equal(gradient, gradient_of(logits))
    assert gradient.dtype == dtype


def test_logits_are_left_as_they_were() -> None:
    logits, targets = torch.randn(ROWS, LENGTH, 6, dtype=torch.float64), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    copy = logits.clone()
    stats = loss_stats(logits, targets, 0)[None]
    loss_gradient(logits, stats, targets, 0)
    combine_loss(stats, targets)
    assert torch.equal(logits, copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_are_in_single_precision_at_least_and_gradients_in_the_logits(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(ROWS, LENGTH, 6).to(dtype), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    stats = loss_stats(logits, targets, 0)[None]
    assert stats.dtype == torch.float32
    assert loss_gradient(logits, stats, targets, 0).dtype == dtype
    torch.testing.assert_close(combine_loss(stats, targets), cross_entropy(logits, targets))


# An auxiliary loss of a primitive that a user writes.


def test_an_auxiliary_loss_goes_back_at_the_scale_of_the_gradients_with_its_share_of_the_step() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    output = with_auxiliary_loss(2 * x, (x**2).sum(), Share(step_microbatches=4, gradient_scale=8))
    grad_output = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(output, x, grad_output)
    assert torch.equal(output, 2 * x)
    assert error(gradient, 2 * grad_output + 8 / 4 * 2 * x.detach()) <= 1e-15
