"""Checkpoints of torchtitan: which models they have, which names, and what is refused."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

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
from shardlab.train.huggingface import convert_weights, open_source
from tests.train.huggingface.folders import output_of, random_run

SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 20, "seq_len": 8}
MODEL = Llama(**SIZES, kv_heads=1, ffn_hidden_size=24, tied=False)


def distributed(folder: Path, model: Blocks = MODEL) -> Path:
    """A checkpoint as torchtitan writes it: without a config.json."""
    convert_weights(open_source(random_run(folder / "run", model)), folder / "dcp", "dcp")
    (folder / "dcp" / "config.json").unlink()
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


@pytest.mark.parametrize("tied", [False, True])
def test_older_names_are_read(tied: bool, tmp_path: Path) -> None:
    model = replace(MODEL, tied=tied)
    old = {
        f"layers.0.attention.qkv_linear.{name}.weight": f"layers.0.attention.{name}.weight"
        for name in ("wq", "wk", "wv")
    }
    folder = rewritten(distributed(tmp_path, model), {"lm_head.weight": "output.weight", **old})
    convert_weights(open_source(folder, lambda _, source: model), tmp_path / "back", "shardlab")
    found, wanted = (load_file(tmp_path / each / "weights.safetensors") for each in ("back", "run"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_tied_head_is_stored_twice_and_must_be_the_embedding(tmp_path: Path) -> None:
    model = replace(MODEL, tied=True)
    folder = distributed(tmp_path, model)
    files = DistributedFiles(folder)
    assert torch.equal(files.read("lm_head.weight"), files.read("tok_embeddings.weight"))
    other = rewritten(folder, {}, **{"lm_head.weight": torch.zeros(20, 16)})
    assert "its lm_head.weight is another matrix than tok_embeddings.weight" in refusal(other, model)


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        ({"norm.weight": None}, {}, "lacks 1 tensor of its model's 12: norm.weight"),
        (
            {},
            {"norm.weight": torch.ones(17)},
            "norm.weight is 17, but the model's fields make it 16; its configuration is not that of these weights",
        ),
        ({}, {"freqs_cis": torch.ones(3)}, "has 1 tensor that its model has no place for: freqs_cis"),
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
        (GPT(**SIZES), "a gpt has no like in torchtitan; its checkpoints are exchanged for llama without biases"),
        (Llama(**SIZES, bias=True), "a llama with biases has no like in torchtitan"),
        (Mixtral(**SIZES, experts=2, capacity_factor=None), "a mixtral has no like in torchtitan"),
    ],
)
def test_a_model_that_torchtitan_has_not_is_refused(model: Blocks, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        convert_weights(open_source(random_run(tmp_path / "run", model)), tmp_path / "dcp", "dcp")
    assert said in str(refused.value)
    assert not (tmp_path / "dcp").exists()


def test_a_checkpoint_that_does_not_say_its_model_wants_it_named(tmp_path: Path) -> None:
    folder = distributed(tmp_path)
    with pytest.raises(UserError, match="does not say of which model its weights are; name it, as by shardlab convert"):
        open_source(folder)
    assert "exchanged for llama, not for mlp; name another --model" in refusal(folder, MLP())


def test_a_folder_of_several_checkpoints_names_the_last(tmp_path: Path) -> None:
    folder = distributed(tmp_path)
    for step in (2, 10):
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / f"step-{step}").symlink_to(folder)
    assert "is a folder of 2 checkpoints; name one, such as" in (said := refusal(tmp_path / "checkpoint"))
    assert said.endswith("step-10")
