"""Logits are those of Hugging Face's transformers, both ways, for every family."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch and safetensors leave some of their annotations out.

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.models.named import SHARD_BYTES
from shardlab.models.tensors import add_borrowed, make_layers, parameter_views
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import Form, initial_from, open_source
from tests.train.huggingface.folders import random_run


def transformers() -> Any:
    """Return the module, which takes a second to import, so that only the worker that tests it imports it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return import_module("transformers")


SMALL = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = SMALL | {"n_layer": 2, "n_embd": 24, "n_head": 3, "n_positions": 16}
OTHERS = SMALL | {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}

THEIRS: dict[str, Any] = {
    "gpt2": lambda: transformers().GPT2LMHeadModel(transformers().GPT2Config(**GPT2)),
    "gpt2 untied": lambda: transformers().GPT2LMHeadModel(
        transformers().GPT2Config(**GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=50)
    ),
    "llama": lambda: transformers().LlamaForCausalLM(transformers().LlamaConfig(**OTHERS)),
    "llama 3.1": lambda: transformers().LlamaForCausalLM(
        transformers().LlamaConfig(**OTHERS, rope_parameters=LLAMA3, tie_word_embeddings=True)
    ),
    "llama with biases": lambda: transformers().LlamaForCausalLM(
        transformers().LlamaConfig(**OTHERS, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3)
    ),
    "qwen2": lambda: transformers().Qwen2ForCausalLM(transformers().Qwen2Config(**OTHERS)),
    "mixtral": lambda: transformers().MixtralForCausalLM(transformers().MixtralConfig(**OTHERS, num_local_experts=4)),
}


def their_model(name: str) -> Any:
    """A model of transformers whose every parameter is drawn, biases and norms as well."""
    torch.manual_seed(0)
    model = THEIRS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    return model


@torch.no_grad()
def our_logits(folder: Path, x: Tensor) -> Tensor:
    model = open_source(folder).model
    read, layouts = initial_from(folder, model), [model.layout(layer) for layer in range(model.layers)]
    flats = [read(layer, layout.numel, [(0, layout.numel)], torch.float32) for layer, layout in enumerate(layouts)]
    parameters = add_borrowed(
        model, [parameter_views(layout, flat) for layout, flat in zip(layouts, flats, strict=True)]
    )
    for layer, weights in zip(make_layers(model), parameters, strict=True):
        x = layer(weights, x)
    return x


def convert(folder: Path, out: Path, form: Form, shard_bytes: int = SHARD_BYTES) -> None:
    convert_weights(open_source(folder), out, form, shard_bytes=shard_bytes)


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


TOKENS = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_of_transformers_gives_their_logits(name: str, tmp_path: Path) -> None:
    model = their_model(name)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(TOKENS).logits
    assert error(our_logits(tmp_path, TOKENS), theirs) < 1e-5


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_of_transformers_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    their_model(name).save_pretrained(tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "ours", "shardlab")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    first, again = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    configs = [transformers().AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("first", "again")]
    for config in configs:
        config.pop("_name_or_path", None)
    assert configs[0] == configs[1]


SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "hidden_size": 32, "vocab_size": 40, "seq_len": 16}
SCALING = (8.0, 1.0, 4.0, 8)
OURS = [
    GPT(**SIZES),
    GPT(**SIZES, bias=False, tied=True, activation="squared_relu", norm_eps=1e-2, ffn_hidden_size=20),
    GPT(**SIZES, activation="swiglu", norm="rms", rope_theta=100.0),
    Llama(**SIZES, kv_heads=2, rope_theta=1e4, rope_scaling=SCALING, tied=True),
    Llama(**SIZES, kv_heads=2, head_dim=12),
    Llama(**SIZES, kv_heads=2, qkv_bias=True),
    Mixtral(**SIZES, kv_heads=1, experts=3, capacity_factor=None),
]


@pytest.mark.parametrize("ours", OURS, ids=str)
def test_transformers_reads_what_is_written(ours: Blocks, tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", ours)
    convert(run, tmp_path / "hf", "hf", shard_bytes=4000)
    model = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).eval()
    with torch.no_grad():
        theirs = model(TOKENS).logits
    assert error(our_logits(run, TOKENS), theirs) < 1e-5
