"""Compiled layers compute what plain ones do, and there are few graphs, however many layers and steps."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.language.precision import FP64
from shardlab.models import GPT, MLP, Llama, Mixtral, Model
from shardlab.models.tensors import (
    AddGradients,
    CompiledPasses,
    Dropout,
    Share,
    compile_layers,
    initial_weights,
    parameter_views,
)
from shardlab.models.tensors import layers as compiled
from shardlab.strategies.plan.plan import Plan, Recompute
from shardlab.train.batches import Batches
from shardlab.train.data.corpus import Corpus
from shardlab.train.job import Job
from tests.models.conftest import passes_of
from tests.models.small import WithHeads
from tests.models.tensors.comparing import error
from tests.support.thorough import sampled

SIZES: WithHeads = {"layers": 4, "hidden_size": 16, "heads": 2, "vocab_size": 256, "seq_len": 8}
MODELS = {
    "gpt": GPT(**SIZES, dropout=0.2),
    "llama": Llama(**SIZES),
    "mixtral": Mixtral(**SIZES, experts=4),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated",  # torch's own compiler uses it
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.FUNCTIONS.clear()
    yield
    compiled.FUNCTIONS.clear()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that torch.compile does but the making of kernels, which takes a compiler half a minute."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def graphs() -> int:
    """How many graphs torch.compile has made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def passes(model: Model, layer: int, compile: bool, scale: float = 1) -> list[Tensor]:
    """Outputs and gradients of one layer, whose weight is gathered elsewhere between its two passes."""
    torch.manual_seed(layer)
    flat = initial_weights(model, layer, 0, torch.float64)
    shape = (2, 8, model.hidden_size)
    x = torch.randint(256, shape[:2]) if layer == 0 else torch.randn(shape, dtype=torch.float64)
    dropout = Dropout(model.dropout, 1, 2, layer, (3,))
    layer_passes: Any = CompiledPasses(compile_layers(model)[layer]) if compile else passes_of(model, layer)
    layout = model.layout(layer)
    outputs, ctx = layer_passes.forward(
        [x], parameter_views(layout, flat), Share(tokens=range(8), gradient_scale=scale), dropout
    )
    elsewhere, into = flat.clone(), torch.zeros_like(flat)
    sums = parameter_views(layout, into)
    flat.fill_(float("nan"))

    def take(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
        add(sums, gradient, read)

    back = layer_passes.backward(
        ctx, [torch.ones_like(tensor) for tensor in outputs], parameter_views(layout, elsewhere), take
    )
    return [*outputs, *(tensor for tensor in back if tensor is not None), into]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("kind", sampled(MODELS, {"gpt"}.__contains__))
def test_outputs_and_gradients_are_those_of_plain_layers(kind: str) -> None:
    for layer in range(MODELS[kind].layers):
        for ours, theirs in zip(*(passes(MODELS[kind], layer, compile) for compile in (True, False)), strict=True):
            assert error(ours, theirs) <= 1e-12
    assert graphs() == 3, "first, middle and last layers"


@pytest.mark.usefixtures("traced_only")
def test_another_scale_of_gradients_needs_no_other_graph() -> None:
    for scale in (1, 0.5, 2**16):
        for ours, theirs in zip(
            *(passes(MODELS["mixtral"], 1, compile, scale) for compile in (True, False)), strict=True
        ):
            assert error(ours, theirs) <= 1e-12
    assert graphs() == 1


@pytest.mark.thorough  # torch makes the kernels, of the graphs that the other tests compute
def test_kernels_compute_what_plain_layers_do() -> None:
    """The one test that runs the compiler."""
    for ours, theirs in zip(
        *(passes(MLP(layers=3, hidden_size=16, seq_len=8), 1, compile) for compile in (True, False)), strict=True
    ):
        assert error(ours, theirs) <= 1e-12
    assert graphs() == 1


def executor(compile: bool, layers: int, recompute: Recompute = "none") -> Executor:
    model = replace(MODELS["gpt"], layers=layers)
    job = Job(Plan(Mesh(), recompute=recompute), 1, 2, model, 2)
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, 2, 0)
    return Executor(job.checked(), 0, job.cut, batches, Settings(precision=FP64, compile=compile))


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("recompute", "maximum"), sampled([("none", 3), ("full", 6)], lambda case: case[0] == "full"))
def test_each_kind_of_layer_has_one_graph_in_any_number_of_steps(recompute: Recompute, maximum: int) -> None:
    """Recomputed layers have one without gradients as well."""
    plain, ours = (executor(compile, 6, recompute) for compile in (False, True))
    for _ in range(2):
        expected, loss = plain.step(), ours.step()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    first = graphs()
    assert first <= maximum
    for _ in range(2):
        ours.step()
    assert graphs() == first


@pytest.mark.usefixtures("traced_only")
def test_many_kinds_of_layers_each_have_room_for_their_graphs() -> None:
    """Torch limits the graphs of one piece of code."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (8, 16, 24):
            passes(MLP(layers=3, hidden_size=width, seq_len=8), 1, compile=True)
    assert graphs() == 3
