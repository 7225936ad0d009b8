"""A folder that is not what Shardlab's models are is refused in one sentence that names what differs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch and safetensors leave some of their annotations out.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardlab.language import UserError
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, MoE
from shardlab.models.tensors.weights import TensorFiles
from shardlab.train.huggingface import sources
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from tests.train.huggingface.folders import random_run

SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 20, "seq_len": 8}
MODELS: dict[str, Blocks] = {
    "gpt2": GPT(**SIZES),
    "llama": Llama(**SIZES),
    "mixtral": Mixtral(**SIZES, experts=2, capacity_factor=None),
}


def hf_folder(folder: Path, model: Blocks) -> Path:
    """A folder in Hugging Face's form."""
    convert_weights(open_source(random_run(folder / "run", model)), folder / "hf", "hf")
    return folder / "hf"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gpt2", {"model_type": "olmo"}, "is 'olmo', but gpt2, llama, mistral, qwen2 and mixtral are the models"),
        ("gpt2", {"model_type": None}, "model_type is None"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type is ['gpt2']"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
            "of another architecture than Shardlab's GPT: activation_function is 'relu', not gelu_new, "
            "gelu_pytorch_tanh, gelu or relu2; scale_attn_by_inverse_layer_idx is True, not False",
        ),
        ("gpt2", {"attn_pdrop": 0.3}, "attn_pdrop is 0.3, not 0.0 like resid_pdrop"),
        ("gpt2", {"n_layer": "two"}, "layers is 'two'; give a whole number"),
        ("gpt2", {"n_embd": 17}, "17 does not divide by 2 heads"),
        ("gpt2", {"bias": False}, "has 7 tensors that its model does not have: transformer.h.0.attn.c_attn.bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ("llama", {"head_dim": 32}, "q_proj.weight is 16 x 16, but the model's fields make it 64 x 16"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True, not False like attention_bias"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', not 'default'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3', not 'default' or"),
        ("llama", {"rope_scaling": "llama3"}, "rope_scaling is 'llama3', not a table"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, not 1.0"),
        ("mixtral", {"sliding_window": 4}, "sliding_window is 4, not null"),
        ("mixtral", {"num_experts_per_tok": 1}, "with one expert for a token"),
        ("mixtral", {"num_local_experts": 3}, "lacks 3 tensors of its model's 19: model.layers.0.block_sparse_moe"),
        ("llama", {"vocab_size": 21}, "model.embed_tokens.weight is 20 x 16, but the model's fields make it 21 x 16"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused_with_the_fields_that_differ(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = hf_folder(tmp_path, MODELS[family])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert said in refusal(folder)


@pytest.mark.parametrize("family", MODELS)
def test_every_field_without_a_default_is_wanted(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, MODELS[family])
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    assert refusal(folder).count(" is missing") == (5 if family == "gpt2" else 6)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (MLP(layers=1), "Hugging Face's transformers has no model of the kind mlp"),
        (GPT(**SIZES, kv_heads=1), "Hugging Face's gpt2 cannot express this model: kv_heads is 1, not 2 like heads"),
        (GPT(**SIZES, activation="swiglu"), "activation is 'swiglu', not squared_relu, gelu or gelu_tanh"),
        (GPT(**SIZES, norm="rms"), "norm is 'rms', not 'layer'"),
        (GPT(**SIZES, rope_theta=1e4), "llama cannot express this model: norm is 'layer', not 'rms'; activation"),
        (MoE(**SIZES), "cannot express this model: norm is 'layer', not 'rms'; activation is 'gelu', not 'swiglu'"),
        (Mixtral(**SIZES), "cannot express this model: capacity_factor is 1.25, not None"),
        (Mixtral(**SIZES, capacity_factor=None, top_k=1), "with one expert for a token"),
    ],
    ids=str,
)
def test_a_model_that_transformers_has_not_is_refused(model: Blocks, said: str, tmp_path: Path) -> None:
    source = open_source(random_run(tmp_path / "run", model))
    with pytest.raises(UserError) as caught:
        convert_weights(source, tmp_path / "hf", "hf")
    assert said in str(caught.value)
    assert not (tmp_path / "hf").exists()


def rewritten(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace or remove a tensor of a folder's file."""
    files = TensorFiles([folder / "model.safetensors"])
    tensors = {key: files.read(key) for key in files.names}
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.norm.weight", None, "lacks 1 tensor of its model's 12: model.norm.weight"),
        ("model.norm.weight", torch.ones(4), "model.norm.weight is 4, but the model's fields make it 16"),
        ("model.norm.weight", torch.ones(16, dtype=torch.int8), "tensor model.norm.weight is in I8; weights are"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(8), "has 1 tensor that its model does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, tensor: torch.Tensor | None, said: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, MODELS["llama"])
    rewritten(folder, name, tensor)
    assert said in refusal(folder)


@pytest.mark.parametrize("family", [Llama(**SIZES, tied=True), GPT(**SIZES, tied=True)], ids=["llama", "gpt2"])
def test_a_stored_head_must_be_the_embedding_that_it_is_tied_to(
    family: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are compared a few at a time, and the last of them differs."""
    monkeypatch.setattr(sources, "COMPARED", 48)
    folder = hf_folder(tmp_path, family)
    tensors = load_file(folder / "model.safetensors")
    head = next(tensor for name, tensor in tensors.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    save_file(tensors | {"lm_head.weight": head.clone()}, folder / "model.safetensors")
    assert open_source(folder).model.has_tied_head
    other = head.clone()
    other[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": other}, folder / "model.safetensors")
    assert "its lm_head.weight differs from " in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert not open_source(folder).model.has_tied_head


def test_additional_tensors_of_older_folders_are_ignored(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, MODELS["llama"])
    rewritten(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    assert open_source(folder).model == Llama(**SIZES, ffn_hidden_size=64, kv_heads=2)


def test_names_may_lack_the_prefix_of_the_whole_model(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, GPT(**SIZES, tied=True))
    files = TensorFiles([folder / "model.safetensors"])
    bare = {name.removeprefix("transformer."): files.read(name) for name in files.names}
    save_file(bare, folder / "model.safetensors")
    again = convert_weights(open_source(folder), tmp_path / "again", "hf")
    assert again.parameters == GPT(**SIZES, tied=True).parameter_count


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, MODELS["llama"])
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert (
        "has its weights in pytorch_model.bin, a pickle, which could run any code and is not read; convert it to saf"
        in (refusal(folder))
    )


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    assert "does not exist; name the folder of a run" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file; name the folder" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no weights.safetensors, config.json or .metadata" in refusal(tmp_path / "empty")
    folder = hf_folder(tmp_path, MODELS["gpt2"])
    (tmp_path / "run" / "weights.safetensors").unlink()
    assert "has no weights.safetensors: the run has ended without any" in refusal(tmp_path / "run")
    (folder / "model.safetensors").write_bytes(b"no tensors at all")
    assert "model.safetensors cannot be read as safetensors" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert "lacks b.safetensors, which model.safetensors.index.json names" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "; give a table" in refusal(folder)


@pytest.mark.parametrize(
    "record", [{}, {"model": 3}, {"model": {"kind": "fish"}}, {"model": {"kind": "GPT", "layers": "a"}}]
)
def test_a_run_whose_record_names_no_model_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", MODELS["gpt2"])
    (run / "run.json").write_text(json.dumps(record))
    assert refusal(run)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, MODELS["gpt2"])
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks elsewhere.safetensors" in refusal(folder)
