"""Checkpoints of torchtitan: which models they have, which names, and what is refused."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral
from shardlab.train.checkpoint.distributed import DistributedFiles, write_distributed
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from tests.train.huggingface.folders import output_of, random_run
from tests.train.huggingface.test_transformers import TOKENS, error, our_logits, transformers

SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 20, "seq_len": 8}
WIDE: dict[str, Any] = {
    **{"layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 40, "seq_len": 16},
    **{"rope_theta": 1e4, "norm_eps": 1e-6},
}
MODEL = Llama(**SIZES, kv_heads=1, ffn_hidden_size=24, tied=False)


def distributed(folder: Path, model: Blocks = MODEL) -> Path:
    """A checkpoint as torchtitan writes it: without a config.json, or the record of a run."""
    convert_weights(open_source(random_run(folder / "run", model)), folder / "dcp", "dcp")
    (description,) = (folder / "dcp").glob("*.json")
    description.unlink()
    return folder / "dcp"


def rewritten(folder: Path, names: dict[str, str | None], **more: Tensor) -> Path:
    """The same checkpoint with some tensors renamed, removed, or added."""
    files = DistributedFiles(folder)
    tensors = {names.get(name, name): files.read(name) for name in sorted(files.names)} | more
    new = folder.with_name("rewritten")
    new.mkdir()
    outputs = [output_of(name, tensor) for name, tensor in tensors.items() if name is not None]
    write_distributed(new, outputs, 10**9)
    return new


def refusal(folder: Path, model: Blocks = MODEL) -> str:
    with pytest.raises(UserError) as refused:
        open_source(folder, lambda _, source: model)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_names_and_shapes_are_those_of_torchtitan(tmp_path: Path) -> None:
    files = DistributedFiles(distributed(tmp_path))
    assert {name: files.shape(name) for name in files.names} == {
        "tok_embeddings.weight": (20, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.attention.qkv_linear.wq.weight": (16, 16),
        "layers.0.attention.qkv_linear.wk.weight": (8, 16),
        "layers.0.attention.qkv_linear.wv.weight": (8, 16),
        "layers.0.attention.wo.weight": (16, 16),
        "layers.0.ffn_norm.weight": (16,),
        "layers.0.feed_forward.w1.weight": (24, 16),
        "layers.0.feed_forward.w2.weight": (16, 24),
        "layers.0.feed_forward.w3.weight": (24, 16),
        "norm.weight": (16,),
        "lm_head.weight": (20, 16),
    }


TWO: dict[str, Any] = {"layers": 2}
LATENT: dict[str, Any] = {"kv_rank": 12, "head_dim": 6, "rope_dim": 4}
MIXTURE: dict[str, Any] = {"experts": 4, "top_k": 2, "capacity_factor": None, "ffn_hidden_size": 24}
OTHERS: dict[str, Blocks] = {
    "qwen3 mixture": Mixtral(**SIZES | MIXTURE, kv_heads=1, head_dim=6, dense_layers=0),
    "latents": Mixtral(
        **SIZES | MIXTURE | LATENT | TWO,
        q_rank=10,
        shared_experts=2,
        dense_layers=1,
        dense_ffn_hidden_size=40,
    ),
    "latents of keys": Llama(**SIZES | LATENT, ffn_hidden_size=24),
}


@pytest.mark.parametrize("name", OTHERS)
def test_mixtures_and_latents_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    folder = distributed(tmp_path, OTHERS[name])
    convert_weights(open_source(folder, lambda _, source: OTHERS[name]), tmp_path / "back", "shardlab")
    weights, expected = (load_file(tmp_path / subfolder / "weights.safetensors") for subfolder in ("back", "run"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_names_and_shapes_of_latent_attention_and_experts_are_those_of_torchtitan(tmp_path: Path) -> None:
    files = DistributedFiles(distributed(tmp_path, OTHERS["latents"]))
    shapes = {name: files.shape(name) for name in files.names if name.startswith("layers.1.")}
    assert shapes == {
        "layers.1.attention_norm.weight": (16,),
        "layers.1.attention.wq_a.weight": (10, 16),
        "layers.1.attention.q_norm.weight": (10,),
        "layers.1.attention.wq_b.weight": (2 * (6 + 4), 10),
        "layers.1.attention.wkv_a.weight": (12 + 4, 16),
        "layers.1.attention.kv_norm.weight": (12,),
        "layers.1.attention.wkv_b.weight": (2 * (6 + 6), 12),
        "layers.1.attention.wo.weight": (16, 12),
        "layers.1.ffn_norm.weight": (16,),
        "layers.1.moe.router.gate.weight": (4, 16),
        "layers.1.moe.expert_bias_E": (4,),
        "layers.1.moe.routed_experts.inner_experts.w1_EFD": (4, 24, 16),
        "layers.1.moe.routed_experts.inner_experts.w2_EDF": (4, 16, 24),
        "layers.1.moe.routed_experts.inner_experts.w3_EFD": (4, 24, 16),
        "layers.1.moe.shared_experts.w1.weight": (48, 16),
        "layers.1.moe.shared_experts.w2.weight": (16, 48),
        "layers.1.moe.shared_experts.w3.weight": (48, 16),
    }
    assert files.shape("layers.0.feed_forward.w1.weight") == (40, 16)


def test_a_router_that_balances_is_refused_and_zeros_are_not(tmp_path: Path) -> None:
    model = OTHERS["qwen3 mixture"]
    folder = distributed(tmp_path, model)
    assert not DistributedFiles(folder).read("layers.0.moe.expert_bias_E").any()
    other = rewritten(folder, {}, **{"layers.0.moe.expert_bias_E": torch.ones(4)})
    assert "layers.0.moe.expert_bias_E is not zero. torchtitan's routers add it" in refusal(other, model)


def test_heads_whose_norms_differ_are_not_written(tmp_path: Path) -> None:
    model = Llama(**SIZES, qk_norm=True, ffn_hidden_size=24)
    with pytest.raises(UserError, match=r"each head of block 0 has another attn.q_norm.weight, and torchtitan has one"):
        convert_weights(open_source(random_run(tmp_path / "run", model)), tmp_path / "dcp", "dcp")


# Logits of transformers, whose tensors torchtitan's adapters rename: qwen3/state_dict_adapter.py and
# deepseek_v3/state_dict_adapter.py at b5bcd76c. Shapes and the order of features stay.

RENAMED = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.": "",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    **{f"self_attn.{each}_proj": f"attention.qkv_linear.w{each}" for each in "qkv"},
    "self_attn.": "attention.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate.": "moe.router.gate.",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
THEIRS: dict[str, Any] = {
    "vocab_size": 40,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
TRANSFORMERS: dict[str, tuple[Callable[[], Any], Blocks]] = {
    "qwen3": (
        lambda: transformers().Qwen3ForCausalLM(transformers().Qwen3Config(**THEIRS, head_dim=12)),
        Llama(**WIDE, kv_heads=2, head_dim=12, qk_norm=True, ffn_hidden_size=40),
    ),
    "qwen3 mixture": (
        lambda: transformers().Qwen3MoeForCausalLM(
            transformers().Qwen3MoeConfig(
                **THEIRS, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
                norm_topk_prob=True, mlp_only_layers=[0],
            )
        ),
        Mixtral(
            **WIDE | MIXTURE, kv_heads=2, head_dim=8, qk_norm=True, dense_layers=1, dense_ffn_hidden_size=40
        ),
    ),
    "deepseek, dense": (
        lambda: transformers().DeepseekV3ForCausalLM(
            transformers().DeepseekV3Config(
                **THEIRS | {"num_key_value_heads": 4}, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8,
                qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=2,
            )
        ),
        Llama(**WIDE, head_dim=8, kv_rank=16, q_rank=12, rope_dim=4, ffn_hidden_size=40),
    ),
}  # fmt: skip


def as_torchtitan(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of torchtitan's that a tensor of transformers' becomes."""
    for theirs, titans in RENAMED.items():
        name = name.replace(theirs, titans)
    if not name.endswith("mlp.experts.gate_up_proj"):
        return {name: tensor.contiguous()}
    inside = name.removesuffix("mlp.experts.gate_up_proj") + "moe.routed_experts.inner_experts."
    gate, up = tensor.chunk(2, dim=1)
    return {f"{inside}w1_EFD": gate.contiguous(), f"{inside}w3_EFD": up.contiguous()}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_weights_in_torchtitans_layout_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, ours = TRANSFORMERS[name]
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        logits = theirs(TOKENS).logits
    tensors = {
        key: value for old, tensor in theirs.state_dict().items() for key, value in as_torchtitan(old, tensor).items()
    }
    (tmp_path / "dcp").mkdir()
    write_distributed(tmp_path / "dcp", [output_of(key, value) for key, value in tensors.items()], 10**9)
    convert_weights(open_source(tmp_path / "dcp", lambda _, source: ours), tmp_path / "run", "shardlab")
    assert error(our_logits(tmp_path / "run", TOKENS), logits) < 1e-5
    convert_weights(open_source(tmp_path / "run"), tmp_path / "back", "dcp")
    assert open_source(tmp_path / "back").model == ours, "the folder says of which model it is"
    files = DistributedFiles(tmp_path / "back")
    assert {name for name in files.names if not name.endswith("expert_bias_E")} == tensors.keys()
    assert all(torch.equal(files.read(key), value) for key, value in tensors.items())


@pytest.mark.parametrize("tied", [False, True])
def test_older_names_are_read(tied: bool, tmp_path: Path) -> None:
    model = replace(MODEL, tied=tied)
    old = {
        f"layers.0.attention.qkv_linear.{name}.weight": f"layers.0.attention.{name}.weight"
        for name in ("wq", "wk", "wv")
    }
    folder = rewritten(distributed(tmp_path, model), {"lm_head.weight": "output.weight", **old})
    convert_weights(open_source(folder, lambda _, source: model), tmp_path / "back", "shardlab")
    weights, expected = (load_file(tmp_path / subfolder / "weights.safetensors") for subfolder in ("back", "run"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_tied_head_is_stored_twice_and_must_be_the_embedding(tmp_path: Path) -> None:
    model = replace(MODEL, tied=True)
    folder = distributed(tmp_path, model)
    files = DistributedFiles(folder)
    assert torch.equal(files.read("lm_head.weight"), files.read("tok_embeddings.weight"))
    other = rewritten(folder, {}, **{"lm_head.weight": torch.zeros(20, 16)})
    assert "its lm_head.weight differs from tok_embeddings.weight" in refusal(other, model)


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        ({"norm.weight": None}, {}, "lacks 1 tensor of its model's 12: norm.weight"),
        (
            {},
            {"norm.weight": torch.ones(17)},
            "norm.weight is 17, but the model's fields make it 16; its configuration is not that of these weights",
        ),
        ({}, {"freqs_cis": torch.ones(3)}, "has 1 tensor that its model does not have: freqs_cis"),
        (
            {"layers.0.attention.qkv_linear.wq.weight": "layers.0.attention.qkv_linear.wqkv.weight"},
            {},
            "in which some versions of torchtitan mixed queries, keys and values; load and save it",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    names: dict[str, str | None], more: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    assert said in refusal(rewritten(distributed(tmp_path), names, **more))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            GPT(**SIZES),
            "torchtitan has no model like a gpt with norm layer, activation gelu, bias True, learned positions;",
        ),
        (Llama(**SIZES, bias=True), "torchtitan has no model like a llama with bias True;"),
        (Mixtral(**SIZES, experts=2, activation="geglu"), "has no model like a mixtral with activation geglu;"),
    ],
)
def test_a_model_that_torchtitan_has_not_is_refused(model: Blocks, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        convert_weights(open_source(random_run(tmp_path / "run", model)), tmp_path / "dcp", "dcp")
    assert said in str(refused.value)
    assert not (tmp_path / "dcp").exists()


def test_a_checkpoint_that_does_not_say_its_model_wants_it_named(tmp_path: Path) -> None:
    folder = distributed(tmp_path)
    with pytest.raises(UserError, match="does not describe the model of its weights; name it, as by shardlab convert"):
        open_source(folder)
    assert "torchtitan has no model like a mlp;" in refusal(folder, MLP())


def test_a_folder_of_several_checkpoints_names_the_last(tmp_path: Path) -> None:
    folder = distributed(tmp_path)
    for step in (2, 10):
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / f"step-{step}").symlink_to(folder)
    assert "is a folder of 2 checkpoints; name one, such as" in (said := refusal(tmp_path / "checkpoint"))
    assert said.endswith("step-10")
