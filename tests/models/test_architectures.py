"""The GPT's shapes, FLOPs and bytes, and what it refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardlab.cli import main
from shardlab.cli.model_options import ModelOptions, SizeOptions
from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.language.rules.kinds import Kind
from shardlab.models import GPT, MLP, Llama, Mixtral, Model, MoE, cut, find_model
from shardlab.models.attention import Attend
from shardlab.models.cutting import cut_for
from shardlab.models.mixture import Combine, Dispatch, Place, Route
from shardlab.models.named import name_of, with_fields
from shardlab.models.tensors import Dropout, initial_weights, make_layers, parameter_views
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.models.conftest import piece_of
from tests.models.small import WithHeads
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

Measure = Callable[[Model, int, int, torch.dtype], int]


def test_the_models_come_without_torch() -> None:
    script = "import sys, shardlab.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_it_has_as_many_parameters_as_gpt_2_with_a_head_of_its_own() -> None:
    gpt_2 = GPT(layers=12, heads=12, hidden_size=768, vocab_size=50257, seq_len=1024)
    assert gpt_2.parameter_count == 124_439_808 + 50257 * 768


def test_a_tied_head_has_no_matrix() -> None:
    untied, tied = GPT(layers=1), GPT(layers=1, tied=True)
    assert untied.parameter_count - tied.parameter_count == tied.vocab_size * tied.hidden_size


def test_matrices_and_embeddings_are_decayed_biases_and_norms_are_not() -> None:
    for layer in range(3):
        for parameter in GPT(layers=3).layout(layer).parameters:
            assert parameter.decayed == (len(parameter.shape) == 2), parameter.name


def test_without_bias_there_is_none() -> None:
    assert not [p.name for p in GPT(layers=1, bias=False).layout(0).parameters if p.name.endswith("bias")]


def test_embedding_and_head_belong_to_the_first_and_the_last_layer() -> None:
    names = [{p.name for p in GPT(layers=3).layout(layer).parameters} for layer in range(3)]
    assert names[0] - names[1] == {"wte.weight", "wpe.weight"}
    assert names[2] - names[1] == {"ln_f.weight", "ln_f.bias", "lm_head.weight"}
    assert {p.name for p in GPT(layers=1).layout(0).parameters} == names[0] | names[2]


def test_activations_go_from_tokens_to_logits() -> None:
    model = GPT(layers=2, hidden_size=32, heads=2, vocab_size=100, seq_len=16)
    assert [model.activation_shape(i, 3) for i in range(3)] == [(3, 16), (3, 16, 32), (3, 16, 100)]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    sampled(product((1, 3), (torch.float32, torch.float64)), [(1, torch.float64), (3, torch.float32)].__contains__),
)
@pytest.mark.parametrize(
    "model",
    [
        GPT(layers=3),
        GPT(layers=1, tied=True, bias=False),
        GPT(layers=3, dropout=0.1),
        GPT(layers=1, heads=1, dropout=0.1),
        GPT(layers=2, heads=3, hidden_size=48, seq_len=7, vocab_size=30),
        GPT(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30),
        GPT(layers=1, heads=6, kv_heads=1, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1),
        GPT(layers=2, heads=6, kv_heads=2, head_dim=20, hidden_size=48, seq_len=7, vocab_size=30),
        GPT(layers=1, heads=6, kv_heads=2, head_dim=5, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1),
        GPT(layers=2, activation="squared_relu", rope_theta=1e4, ffn_hidden_size=100),
        Llama(layers=3),
        Llama(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30, ffn_hidden_size=100),
        Llama(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1),
        Llama(layers=1, heads=6, kv_heads=2, head_dim=10, hidden_size=48, seq_len=7, vocab_size=30, qk_norm=True),
        Llama(layers=1, heads=6, hidden_size=48, seq_len=7, vocab_size=30, qkv_bias=True, activation="geglu"),
        GPT(layers=1, heads=6, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1, drops_attention=False),
    ],
    ids=str,
)
def test_autograd_keeps_exactly_the_declared_elements(
    model: GPT, rows: int, dtype: torch.dtype, saved_bytes: Measure
) -> None:
    for layer in range(model.layers):
        assert saved_bytes(model, layer, rows, dtype) == rows * model.run(layer).saved(1) * dtype.itemsize


def test_in_half_precision_only_the_log_sum_exp_counts_twice(saved_bytes: Measure) -> None:
    model = GPT(layers=3)
    for layer in range(model.layers):
        elements = model.run(layer).saved(1) + model.heads * model.seq_len
        assert saved_bytes(model, layer, 2, torch.bfloat16) == 2 * elements * 2


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_flops_are_those_that_torch_counts(kv_heads: int | None) -> None:
    """Counted by torch's own FLOP counter on plain attention, which does the whole T x T square."""
    model = GPT(layers=3, hidden_size=32, heads=2, kv_heads=kv_heads, vocab_size=100, seq_len=16)
    for layer, compute in enumerate(make_layers(model)):
        shape = model.activation_shape(layer)
        x = torch.zeros(shape, dtype=torch.int64) if layer == 0 else torch.zeros(shape)
        parameters = parameter_views(model.layout(layer), initial_weights(model, layer, 0, torch.float32))
        with FlopCounterMode(display=False) as counter:
            compute(parameters, x, Dropout(0.5, 0, 0, layer, (0,)))
        assert counter.get_total_flops() == model.forward_flops(layer)


def test_sizes_count_whole_layers_and_microbatches() -> None:
    model = GPT(layers=2, hidden_size=32, heads=2, vocab_size=100, seq_len=16)
    sizes = model.sizes(rows=3, element_bytes=8)
    assert sizes.layers == 2
    assert sizes.weights == tuple(model.layout(layer).numel for layer in range(2))
    assert sizes.opt_states == tuple(2 * elements for elements in sizes.weights)
    assert sizes.activations == (3 * 16, 3 * 16 * 32, 3 * 16 * 100)
    assert sizes.saved == tuple(3 * model.run(layer).saved(1) for layer in range(2))
    assert sizes.element_bytes == dict.fromkeys(Kind, 8)


def test_it_is_frozen_and_hashable() -> None:
    model: Any = GPT()
    assert hash(model) == hash(replace(model))
    with pytest.raises(FrozenInstanceError):
        model.layers = 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hidden_size": 65}, "hidden_size 65 does not divide by 4 heads (remainder 1)"),
        ({"layers": 0}, "layers is 0; a model needs at least 1"),
        ({"layers": "2"}, "layers is '2'; give a whole number"),
        ({"layers": 2.5}, "layers is 2.5; give a whole number"),
        ({"n_layers": 2}, "there is no argument 'n_layers'; did you mean layers?"),
        ({"bias": 1}, "bias is 1; give true or false"),
        ({"dropout": "0.1"}, "dropout is '0.1'; give a number"),
        ({"heads": -1}, "heads is -1"),
        ({"head_dim": 0}, "head_dim is 0; a model needs at least 1"),
        ({"head_dim": 5, "rope_theta": 1e4}, "a head has 5; choose an even head_dim"),
        ({"kv_rank": 8}, "rope_theta is None, but latent attention (kv_rank 8) rotates an even number"),
        ({"kv_rank": 8, "rope_theta": 1e4, "kv_heads": 2}, "kv_heads is 2, but latent attention"),
        ({"kv_heads": 0}, "kv_heads is 0; a model needs at least 1"),
        ({"kv_heads": 3}, "4 heads cannot share 3 key/value heads evenly (remainder 1)"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"dropout": 1.0}, "dropout is 1.0; it is a probability"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0; a model needs at least 1"),
        ({"activation": "tanh"}, "activation is 'tanh'; give one of gelu, gelu_tanh, squared_relu, swiglu"),
        ({"norm": "batch"}, "norm is 'batch'; give one of layer, rms"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; the base of the rotary angles is a positive number"),
        (
            {"rope_theta": 1e4, "hidden_size": 12},
            "a head has 3 (hidden_size 12 / 4 heads); choose a hidden_size that is a multiple of 8",
        ),
    ],
)
def test_impossible_models_are_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        GPT(**fields)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tied_head_in_another_block_borrows_the_embedding() -> None:
    model = GPT(layers=3, tied=True)
    assert [model.borrowed(layer) for layer in range(3)] == [(), (), ("wte.weight",)]
    assert GPT(layers=3).parameter_count - model.parameter_count == model.vocab_size * model.hidden_size
    assert GPT(layers=1, tied=True).borrowed(0) == ()


def test_programs_of_whole_blocks_do_not_share_a_weight() -> None:
    with pytest.raises(UserError, match="set layers to 1, or leave the embeddings untied"):
        GPT(tied=True).sizes(rows=1, element_bytes=4)


def test_an_empty_microbatch_is_refused() -> None:
    with pytest.raises(UserError, match="a microbatch of 0 sequences is empty"):
        GPT().sizes(rows=0, element_bytes=4)


# Mixtures of experts: sizes, capacity, and how they are cut for expert parallelism.


SMALL: WithHeads = {"layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 40, "seq_len": 12}


def test_every_mlp_becomes_as_many_experts_of_its_size_and_a_router() -> None:
    gpt, moe = GPT(**SMALL), MoE(experts=5, **SMALL)
    mlp = 2 * 16 * 64 + 64 + 16
    assert moe.parameter_count - gpt.parameter_count == 2 * (4 * mlp + 5 * 16)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(ep=2), Mesh(ep=2, tp=2), Mesh(ep=2, cp=2)], ids=str)
def test_shared_experts_are_one_that_is_so_many_times_as_wide_and_whole_on_every_rank(mesh: Mesh) -> None:
    routed_only, with_three = (cut_for(MoE(shared_experts=count, **SMALL), mesh) for count in (0, 3))
    mlp = 2 * 16 * 3 * 64 + 3 * 64 + 16
    assert with_three.parameter_count - routed_only.parameter_count == 2 * mlp
    flops = [sum(model.forward_flops(layer) for layer in range(model.layers)) for model in (routed_only, with_three)]
    assert flops[1] - flops[0] == 2 * 2 * 12 * 2 * 16 * 3 * 64
    shared = [l for l in range(with_three.layers) if any("shared" in p.name for p in with_three.layout(l).parameters)]
    assert [with_three.layout(l).slices for l in shared] == [1, 1]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(ep=2), Mesh(ep=2, tp=2), Mesh(ep=2, cp=2), Mesh(tp=2)], ids=str)
def test_the_first_layers_of_a_mixture_may_have_an_mlp_of_its_own_width(mesh: Mesh) -> None:
    mixed = replace(MoE(shared_experts=2, shared_ffn_hidden_size=24, **SMALL), layers=3)
    dense = replace(mixed, dense_layers=2, dense_ffn_hidden_size=40)
    router, shared, experts, mlp = 4 * 16, 2 * 16 * 48 + 48 + 16, 4 * (2 * 16 * 64 + 64 + 16), 2 * 16 * 40 + 40 + 16
    model = cut_for(dense, mesh)
    assert cut_for(mixed, mesh).parameter_count - model.parameter_count == 2 * (router + shared + experts - mlp)
    routed_blocks = [step.block for step in dense.steps if isinstance(step.primitive, Route)]
    assert routed_blocks == [2]
    assert all(len({p.name for _, p in run.parameters()}) == len(run.parameters()) for run in model.runs)


@given(st.integers(1, 200), st.integers(1, 8), st.floats(0.1, 4), st.data())
def test_capacity_is_enough_for_balanced_tokens_from_a_factor_of_1_on(
    tokens: int, experts: int, factor: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    router = MoE(experts=experts, top_k=top_k, capacity_factor=factor).router
    assert 1 <= router.capacity(tokens) <= tokens
    if factor >= 1:
        assert router.capacity(tokens) * experts >= top_k * tokens
    dropless = MoE(experts=experts, top_k=top_k, capacity_factor=None).router
    assert dropless.capacity(tokens) == tokens


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_expert_layers_have_the_whole_models_parameters(slices: int) -> None:
    whole = MoE(**SMALL)
    model = cut(whole, ep=slices)
    assert sum(model.layout(layer).parameter_count for layer in range(model.layers)) == whole.parameter_count
    assert [layer.cut for layer in model.signatures] == [(), ("expert",)] * 2 + [()]
    assert [layer.carries for layer in model.signatures] == [True, False] * 2 + [True]
    assert [model.layout(layer).slices for layer in range(5)] == [1, slices, 1, slices, 1]


def test_flops_are_those_of_the_whole_model() -> None:
    whole = MoE(**SMALL)
    model = cut(whole, ep=2)
    layers = sum(model.forward_flops(layer) for layer in range(model.layers))
    assert layers == sum(whole.forward_flops(layer) for layer in range(whole.layers))


def test_dropless_buffers_have_room_for_every_token_at_every_expert() -> None:
    sizes = cut(MoE(experts=4, capacity_factor=None, **SMALL), ep=2).sizes(rows=3, element_bytes=4)
    assert sizes.activations[1] == sizes.activations[2] == 4 * (3 * 12) * 16
    assert (sizes.residual, sizes.routing) == (3 * 12 * 16, 3 * 12 * 2 * 2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("top_k", [1, 3])
def test_autograd_keeps_the_elements_that_the_model_declares(
    saved_bytes: Callable[..., int], dropout: float, capacity_factor: float | None, top_k: int
) -> None:
    kind, shared = (MoE, 0) if top_k == 1 else (Mixtral, 2)
    whole = kind(
        top_k=top_k, dropout=dropout, capacity_factor=capacity_factor, shared_experts=shared, dense_layers=shared // 2,
        **SMALL,
    )  # fmt: skip
    for layer in range(whole.layers):
        assert saved_bytes(whole, layer, 3, torch.float32) == 4 * whole.run(layer).saved(3), f"block {layer}"
    for tp, ep in ((1, 1), (1, 2), (2, 1), (2, 2)):
        model = cut(whole, tp=tp, ep=ep)
        for layer, run in enumerate(model.runs):
            shares = [piece_of(model, layer, number) for number in range(run.slices)]
            measured = [saved_bytes(model, layer, 3, torch.float32, share) for share in shares]
            assert sum(measured) == 4 * model.run(layer).saved(3), f"layer {layer}"
            assert len(set(measured)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 0}, "experts is 0"),
        ({"experts": 300}, "256 at most"),
        ({"shared_experts": -1}, "shared_experts is -1; there may be 0 or more"),
        ({"dense_layers": -1}, "dense_layers is -1; there may be 0 or more"),
        ({"dense_ffn_hidden_size": 0}, "dense_ffn_hidden_size is 0; a model needs at least 1"),
        ({"top_k": 5}, "top_k is 5, but there are 4 experts"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; give a positive number"),
        ({"auxiliary": -1.0}, "auxiliary is -1.0"),
    ],
)
def test_impossible_mixtures_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MoE(**SMALL, **fields)


def test_uncuttable_parameters_are_refused() -> None:
    with pytest.raises(UserError, match=r"4 experts do not divide into 3 .* \(remainder 1\)"):
        cut(MoE(**SMALL), ep=3)
    with pytest.raises(UserError, match=r"4 heads do not divide into 3 tensor-parallel slices \(remainder 1\)"):
        cut(MoE(**SMALL), tp=3)
    with pytest.raises(UserError, match=r"cut into 1 x 0 slices \(tp x ep\)"):
        cut(MoE(**SMALL), ep=0)


def test_a_mixture_follows_every_blocks_attention() -> None:
    model = MoE(**SMALL)
    for layer in range(model.layers):
        primitives = [type(step.primitive) for step in model.run(layer).steps]
        assert primitives.index(Attend) < primitives.index(Route) < primitives.index(Combine)
        assert [primitives.count(kind) for kind in (Route, Place, Dispatch, Combine)] == [1, 1, 1, 1]


# The per-token MLP's shapes and bytes, and what it refuses.


def test_it_is_a_gpt_without_attention_and_positions() -> None:
    for layer in range(3):
        gpt = [p for p in GPT(layers=3).layout(layer).parameters if not p.name.startswith(("attn", "ln_1", "wpe"))]
        assert list(MLP(layers=3).layout(layer).parameters) == gpt


def test_the_hidden_width_is_four_times_the_width_unless_given() -> None:
    assert MLP() == MLP(ffn_hidden_size=None)
    assert MLP(hidden_size=32).layout(1) == MLP(hidden_size=32, ffn_hidden_size=128).layout(1)
    assert dict(p[:2] for p in MLP(hidden_size=32, ffn_hidden_size=50).layout(1).parameters)["mlp.c_fc.weight"] == (
        50,
        32,
    )


@pytest.mark.parametrize(
    "model", [MLP(layers=3), MLP(layers=1), MLP(layers=2, ffn_hidden_size=50, dropout=0.1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autograd_keeps_exactly_the_declared_elements_in_mlp(
    model: MLP, dtype: torch.dtype, saved_bytes: Measure
) -> None:
    for layer in range(model.layers):
        assert saved_bytes(model, layer, 3, dtype) == 3 * model.run(layer).saved(1) * dtype.itemsize


def test_flops_are_two_for_every_element_of_every_matrix_and_token() -> None:
    model = MLP(layers=2, hidden_size=32, vocab_size=100, seq_len=16)
    assert [model.forward_flops(layer) for layer in range(2)] == [16 * 2 * 8 * 32**2, 16 * 2 * (8 * 32**2 + 32 * 100)]


def test_a_hidden_width_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="ffn_hidden_size is 0; a model needs at least 1"):
        MLP(ffn_hidden_size=0)


# Models in users' files: found by FILE.py:NAME, carried to other processes, and refused with a sentence.


FILE = '''
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shardlab.models import GPT, Blocks, Llama, Parameter
from shardlab.models.primitives import Primitive
from shardlab.models.tensors.compute import Operands, compute

@dataclass(frozen=True, kw_only=True)
class Mine(GPT):
    """With a size of its own."""
    hidden_size: int = 48
    more: int | None = None

@dataclass(frozen=True, kw_only=True)
class Empty(Blocks):
    pass

@dataclass(frozen=True, kw_only=True)
class Needy(GPT):
    more: int

@dataclass(frozen=True, kw_only=True)
class Twice(GPT):
    def block_parts(self):
        attention, mlp = super().block_parts()
        return attention, mlp, mlp

@dataclass(frozen=True, kw_only=True)
class Broken(GPT):
    def block_parts(self):
        return 1 // 0

class Odd(Primitive):
    einsum: ClassVar[str] = "x(width) -> x(width)"

    def features(self, tensor):
        return 64

    def kernels(self, sequences, tokens, pieces):
        return ()

class Elsewhere(Odd):
    einsum: ClassVar[str] = "y(width) -> x(width)"

class Other(Odd):
    einsum: ClassVar[str] = "x(ffn) -> x(ffn)"

class Unknown(Odd):
    einsum: ClassVar[str] = "x({inner}) -> x(width)"

class Keeps(Odd):
    def keeps(self):
        return ("z",)

class Shapeless(Primitive):
    einsum: ClassVar[str] = "x(width) -> x(width)"

    def kernels(self, sequences, tokens, pieces):
        return ()

class Makes(Odd):
    einsum: ClassVar[str] = "x(width) -> x(width) g(width)"

class Takes(Odd):
    einsum: ClassVar[str] = "x(width) g(width) -> x(width)"

@compute.register
def makes(primitive: Makes, operands: Operands) -> tuple[Tensor, ...]:
    return operands.x.clone(), operands.x.sigmoid()

@compute.register
def takes(primitive: Takes, operands: Operands) -> tuple[Tensor, ...]:
    return (operands.x * operands.tensors["g"],)

class Flat(Odd):
    def parameters(self):
        return (Parameter("mlp.flat.weight", (64,), False, ()),)

class Again(Flat):
    made_again = True

class Squash(Odd):
    def keeps(self):
        return ("x",)

@compute.register
def squash(primitive: Squash, operands: Operands) -> tuple[Tensor, ...]:
    return (operands.x.tanh(),)

def with_(kind):
    @dataclass(frozen=True, kw_only=True)
    class With(GPT):
        def block_parts(self):
            attention, (name, (*first, add)) = super().block_parts()
            return attention, (name, (*first, kind(tokens=self.seq_len), add))
    return With

Reads, Differs, Names, Keeping, Unsaid, Short = map(with_, (Elsewhere, Other, Unknown, Keeps, Shapeless, Flat))
Alone, Squashed, Remade = map(with_, (Odd, Squash, Again))

@dataclass(frozen=True, kw_only=True)
class Gated(GPT):
    """A gate of the feed-forward part, made before it and read after it, or at once."""
    early: bool = True

    def block_parts(self):
        attention, (name, (norm, up, activate, down, add)) = super().block_parts()
        makes, takes = (kind(tokens=self.seq_len) for kind in (Makes, Takes))
        inside = (makes, up, activate, down, takes) if self.early else (makes, takes, up, activate, down)
        return attention, (name, (norm, *inside, add))

@dataclass(frozen=True, kw_only=True)
class Biased(GPT):
    """The last linear map adds its bias itself, in every slice."""
    def block_parts(self):
        attention, (name, (norm, up, activate, down, add)) = super().block_parts()
        return attention, (name, (norm, up, activate, replace(down, bias=True), replace(add, bias="")))

small = Llama(layers=2, hidden_size=32, heads=2)
ours = Mine(layers=3)
def function(): ...
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_class_of_a_file_is_an_architecture_that_keeps_the_sizes_it_says(file: Path) -> None:
    model = ModelOptions(f"{file}:Mine").make(7, hidden_size=16, heads=2)
    assert (model.layers, model.hidden_size, getattr(model, "heads", None)) == (7, 48, 2)
    assert ModelOptions(f"{file}:Mine", sizes=SizeOptions(hidden_size=64)).make(7).hidden_size == 64


def test_a_model_of_a_file_has_the_sizes_that_it_was_made_with(file: Path) -> None:
    assert ModelOptions(f"{file}:small").make(7) == Llama(layers=2, hidden_size=32, heads=2)
    assert ModelOptions(f"{file}:ours").make(7).layers == 3


def test_a_model_of_a_file_goes_to_other_processes_by_its_name(file: Path) -> None:
    """Which cannot import it; what it has computed of itself stays behind."""
    for name in ("Mine", "ours", "small"):
        model = find_model(f"{file}:{name}")
        assert model.signatures
        copy = pickle.loads(pickle.dumps(Job("ddp", 2, 4, model, 2))).model
        assert {field: getattr(copy, field) for field in ("layers", "hidden_size", "heads")} == {
            field: getattr(model, field) for field in ("layers", "hidden_size", "heads")
        }
        assert type(copy).__name__ == type(model).__name__
    assert name_of(type(find_model(f"{file}:Mine"))) == f"{file}:Mine"
    assert name_of(GPT) == "gpt"


def test_the_only_model_of_a_file_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "only.py"
    path.write_text("from shardlab.models import GPT, Llama\n\nclass Only(GPT):\n    pass\n")
    assert name_of(type(find_model(str(path)))) == f"{path}:Only"


def test_a_toml_file_says_fields_of_their_types_whether_annotations_are_text_or_not(file: Path) -> None:
    toml = file.with_suffix(".toml")
    toml.write_text(f'model = "{file}:Mine"\nmore = 3\nlayers = 2\n')
    assert getattr(find_model(str(toml)), "more", None) == 3
    toml.write_text(f'model = "{file}:Mine"\nmore = "three"\n')
    with pytest.raises(UserError, match="more is 'three'; give a whole number"):
        find_model(str(toml))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "say which model of mine.py: mine.py:NAME; its models are: Mine, Empty, Needy, Twice, Broken,"),
        ("Min", "mine.py has no model 'Min'; did you mean Mine?"),
        ("function", "function in mine.py is not a model; write it as a subclass of shardlab.models.Blocks, or as an"),
        ("Odd", "Odd in mine.py is not a model"),
        ("Empty", "Empty in mine.py does not say its block_parts; define that as GPT does"),
        ("Needy", "Needy in mine.py has no default for more; every field of a model has one"),
        ("Twice", "block 0, feed-forward: Norm has a parameter ln_2.weight, and block 0 has one of that name"),
        ("Broken", "mine.py:35 cannot be run: ZeroDivisionError"),
        ("Reads", "block 0, feed-forward: Elsewhere reads y, which nothing before it makes; there are kv, q, s, x"),
        ("Differs", "block 0, feed-forward: Other reads x(ffn), but Linear made x(width); they must be the same"),
        ("Names", "Unknown has the einsum 'x({inner}) -> x(width)', which cannot be read: KeyError('inner')"),
        ("Keeping", "Keeps keeps z, which it neither reads nor makes; it has x, x"),
        ("Unsaid", "Shapeless makes x, but does not say how many features it has; define features(tensor)"),
        ("Remade", "Again says made_again, but has parameters or makes several tensors; leave it out"),
        ("Short", "mlp.flat.weight has the shape (64,) and the indices (); give an index for each dim"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(
    file: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["verify", "ddp", "--model", f"mine.py:{name}" if name else "mine.py"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("shardlab: ")
    assert error.count("\n") == 1


def test_a_missing_file_and_a_field_that_a_model_lacks_are_one_sentence(file: Path) -> None:
    with pytest.raises(UserError, match=r"none\.py is not a file; give path/to/file\.py:NAME"):
        find_model("none.py:Mine")
    with pytest.raises(UserError, match=r"a model of this kind \(Mine\) has no experts"):
        ModelOptions(f"{file}:Mine", sizes=SizeOptions(experts=2)).make(4)


def test_without_a_function_on_torch_a_primitive_is_simulated_and_no_more(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["simulate", "--tp", "2", "--model", "mine.py:Alone", "--cluster", "h100x2"]) == 0
    capsys.readouterr()
    assert main(["verify", "ddp", "--ranks", "2", "--model", "mine.py:Alone"]) == 2
    assert "nothing computes Odd on torch; register a function (primitive: Odd" in capsys.readouterr().err


def test_a_parameter_that_every_slice_would_have_is_refused_where_it_is_cut(file: Path) -> None:
    model = find_model(f"{file}:Biased")
    assert cut(model, tp=1).layers
    with pytest.raises(UserError, match=r"mlp\.c_proj\.bias has no index ffn, along which Linear is cut"):
        cut(model, tp=2)


def test_a_tensor_with_a_name_of_its_own_is_read_in_the_layer_that_makes_it(
    file: Path, ranks: Callable[[int], Ranks]
) -> None:
    model = replace(find_model(f"{file}:Gated"), layers=2, seq_len=8)
    assert model.sizes(1, 4).layers == 2  # whole blocks are layers
    with pytest.raises(UserError, match="block 0, feed-forward reads g, which is made in an earlier layer"):
        cut(model, tp=2)
    job = Job(Plan(Mesh(tp=2)), 2, 2, with_fields(model, {"early": False}, "Gated"), 2, "fp64")
    assert ranks(2).call(verify_rank, torch.device("cpu"), job, 2)[0].ok


def test_a_step_after_a_sum_over_slices_is_in_the_next_layer(file: Path, ranks: Callable[[int], Ranks]) -> None:
    """Where the terms have been added: tanh of a term is no term of a tanh."""
    model = find_model(f"{file}:Squashed")
    of_mlp = [layer for layer in cut(model, tp=2).signatures if any(node.name == "squash" for node in layer.nodes)]
    assert [(layer.nodes[0].name, layer.sliced) for layer in of_mlp] == [("squash", False)] * model.layers
    job = Job(Plan(Mesh(tp=2)), 2, 2, replace(model, layers=2, seq_len=8), 2, "fp64")
    assert ranks(2).call(verify_rank, torch.device("cpu"), job, 2)[0].ok


def test_a_field_may_be_a_number_of_numpy() -> None:
    model = GPT(layers=cast(Any, np.int64(2)), dropout=cast(Any, np.float64(0.5)))
    assert model == GPT(layers=2, dropout=0.5)
    assert (type(model.layers), type(model.dropout)) == (int, float)


def test_the_base_of_all_models_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"give one of shardlab.models, such as Llama\(layers=4\)"):
        cast(Any, Model)(layers=2)
