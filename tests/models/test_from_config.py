"""Models of config.json: what is read, what is left out and named, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.common.errors import UserError
from shardlab.models import GPT, Blocks, Mixtral, find_model
from shardlab.models.from_config import CONFIG_FAMILIES, HARMLESS, config_notes, model_from_config, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4},
    **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **{"intermediate_size": 6144, "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 4096},
}
DEEPSEEK: dict[str, Any] = LLAMA | {
    **{"model_type": "deepseek", "num_hidden_layers": 28, "hidden_size": 2048, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{"moe_intermediate_size": 1408, "intermediate_size": 10944, "first_k_dense_replace": 1, "moe_layer_freq": 1},
    **{"vocab_size": 102400, "max_position_embeddings": 4096, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
}
DEEPSEEK_V2: dict[str, Any] = DEEPSEEK | {
    **{"model_type": "deepseek_v2", "num_hidden_layers": 27, "kv_lora_rank": 512, "q_lora_rank": None},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1},
}
QWEN2: dict[str, Any] = LLAMA | {
    **{"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "rope_theta": 1e6},
    **{"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "sliding_window": 4096, "use_sliding_window": False},
}
NEOX: dict[str, Any] = {
    **{"model_type": "gpt_neox", "num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8},
    **{"intermediate_size": 2048, "max_position_embeddings": 2048, "vocab_size": 50304, "hidden_act": "gelu"},
    **{"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((LLAMA, "llama3-8b"), (QWEN2, "qwen2-7b"), (QWEN3_MOE, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-moe-16b")),
        *((DEEPSEEK_V2, "deepseek-v2-lite"),),
    ],
)
def test_a_configuration_gives_the_model_of_its_name(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    expected = find_model(name)
    folder = write_config(tmp_path / "hf", config)
    for path in (folder, folder / "config.json"):
        model = find_model(str(path))
        assert isinstance(model, GPT)
        changes = {"kv_heads": getattr(expected, "kv_heads", None)}
        if isinstance(expected, Mixtral):
            changes["auxiliary"] = expected.auxiliary
        changes["head_dim"] = model.head_size if getattr(expected, "head_dim", None) else None
        assert replace(model, **changes) == expected


def test_what_a_model_leaves_out_is_named_in_one_sentence(tmp_path: Path) -> None:
    path = write_config(tmp_path, NEOX | {"weird": 3, "initializer_range": 0.02})
    differs, unread = config_notes(path)
    assert "attention and feed-forward of a block read one norm" in differs
    assert "rotary_pct is 0.25, not 1.0" in differs
    assert unread.endswith("leaves out: weird")


def test_a_configuration_that_is_said_exactly_has_no_notes(tmp_path: Path) -> None:
    assert config_notes(write_config(tmp_path, LLAMA)) == []
    assert config_notes(write_config(tmp_path, QWEN2)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 1024}, "sliding_window is 1024, not null"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "leaves out: quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, not 0.0"),
        ({"mlp_bias": True}, "mlp_bias is True, not False like attention_bias"),
    ],
)
def test_a_field_that_cannot_be_said_is_a_note(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (note,) = config_notes(write_config(tmp_path, LLAMA | changes))
    assert message in note


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; shardlab has models of gpt2, llama, mistral,"),
        ({}, "model_type is None"),
        (
            {"model_type": "llama", "hidden_size": 8},
            "is not a whole configuration of llama: num_hidden_layers is missing",
        ),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size is 'wide'; give a whole number"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (QWEN3_MOE | {"mlp_only_layers": [3]}, r"mlp_only_layers is [3], but only the first layers may be dense"),
        (DEEPSEEK_V2 | {"v_head_dim": 64}, "v_head_dim is 64, not 128 like qk_nope_head_dim"),
        (QWEN3_MOE | {"num_experts": 512}, "experts is 512; there may be 256 at most"),
    ],
)
def test_a_model_that_cannot_be_said_is_refused_with_its_file(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refusal:
        model_from_config(write_config(tmp_path, config))
    assert message in str(refusal.value)
    assert "config.json" in str(refusal.value)


def test_the_text_model_of_a_larger_configuration_is_read() -> None:
    nested = {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    assert read_config(nested, "here").model == read_config(LLAMA, "here").model


@pytest.mark.parametrize("kind", CONFIG_FAMILIES)
def test_every_family_reads_its_least_configuration(kind: str) -> None:
    family = CONFIG_FAMILIES[kind]
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "seq_len": 32, "vocab_size": 100, "ffn_hidden_size": 96}
    values = {field.theirs: (sizes | {"experts": 8, "top_k": 2}).get(field.ours) for field in family.fields}
    config = {name: value for name, value in values.items() if value is not None}
    model: Blocks = read_config({"model_type": kind, **config}, "here").model
    assert (model.layers, model.hidden_size, model.vocab_size) == (2, 64, 100)
    assert not read_config({"model_type": kind, **config}, "here").unread


def test_a_field_is_harmless_for_one_reason() -> None:
    names = [name for fields_of_reason in HARMLESS.values() for name in fields_of_reason]
    assert len(names) == len(set(names))
