"""Conversion there and back is bitwise exact for models of any sizes, and a folder appears whole or not at all."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch and safetensors leave some of their annotations out.

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shardlab.language import UserError
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.train.checkpoint import contents
from shardlab.train.checkpoint.contents import OutputTensor
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from tests.support.thorough import examples
from tests.train.huggingface.folders import random_run

counts = st.integers(1, 3)
bools = st.booleans()


@st.composite
def models(draw: st.DrawFn) -> Blocks:
    """A small model of a family that is exchanged."""
    kv_heads = draw(counts)
    heads = kv_heads * draw(counts)
    common: dict[str, Any] = {
        "layers": draw(counts),
        "hidden_size": heads * 2 * draw(counts),
        "heads": heads,
        "vocab_size": draw(st.integers(2, 40)),
        "seq_len": draw(st.integers(1, 20)),
        "ffn_hidden_size": draw(st.integers(1, 40)),
        "tied": draw(bools),
    }
    rotary: dict[str, Any] = {
        "kv_heads": kv_heads,
        "rope_theta": draw(st.floats(1.5, 1e6)),
        "norm_eps": draw(st.floats(1e-8, 0.1)),
    }
    match draw(counts):
        case 1:
            return GPT(**common, bias=draw(bools), activation=draw(st.sampled_from(["gelu", "gelu_tanh"])))
        case 2:
            return Llama(
                **common, **rotary, bias=draw(bools), rope_scaling=draw(st.none() | st.just((2.0, 1.0, 4.0, 8)))
            )
        case _:
            experts = draw(st.integers(2, 5))
            return Mixtral(
                **common, **rotary, experts=experts, top_k=draw(st.integers(2, experts)), capacity_factor=None
            )


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=examples(40), deadline=None)
@given(models(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 2000, 10**9]))
def test_a_model_goes_out_and_comes_back_to_the_bit(model: Blocks, dtype: torch.dtype, shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = random_run(folder / "run", model, dtype)
        convert_weights(open_source(run), folder / "hf", "hf", shard_bytes=shard_bytes)
        there = convert_weights(open_source(folder / "hf"), folder / "back", "shardlab")
        assert equal(load_file(run / "weights.safetensors"), load_file(folder / "back" / "weights.safetensors"))
        assert there.parameters == model.parameter_count
        convert_weights(open_source(folder / "back"), folder / "again", "hf", shard_bytes=shard_bytes)
        first, again = (sorted((folder / subfolder).iterdir()) for subfolder in ("hf", "again"))
        assert [path.name for path in first] == [path.name for path in again]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, again, strict=True))


def is_in_torchtitan(model: Blocks) -> bool:
    return type(model) is Llama and not model.bias


@settings(max_examples=examples(10), deadline=None)
@given(
    models().filter(is_in_torchtitan),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([700, 3000, 10**9]),
    st.sampled_from([10, 2**24]),
)
def test_a_model_goes_to_torchtitan_and_from_there_anywhere(
    model: Blocks, dtype: torch.dtype, shard_bytes: int, piece_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name, patch.object(contents, "PIECE_BYTES", piece_bytes):
        folder = Path(name)
        run = random_run(folder / "run", model, dtype)
        convert_weights(open_source(run), folder / "dcp", "dcp", shard_bytes=shard_bytes)
        convert_weights(open_source(folder / "dcp"), folder / "back", "shardlab")
        assert equal(load_file(run / "weights.safetensors"), load_file(folder / "back" / "weights.safetensors"))
        convert_weights(open_source(run), folder / "hf", "hf")
        convert_weights(open_source(folder / "dcp"), folder / "hf from dcp", "hf")
        convert_weights(open_source(folder / "hf"), folder / "dcp from hf", "dcp", shard_bytes=2 * shard_bytes)
        convert_weights(open_source(folder / "dcp from hf"), folder / "again", "hf")
        files = [
            (folder / subfolder / "model.safetensors").read_bytes() for subfolder in ("hf", "hf from dcp", "again")
        ]
        assert files[0] == files[1] == files[2]


def test_of_many_files_an_index_says_which_tensor_is_where(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", GPT(layers=2))
    done = convert_weights(open_source(run), tmp_path / "hf", "hf", shard_bytes=100_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 5
    assert done.files == ["config.json", *files, "model.safetensors.index.json"]
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "hf" / file)
    assert index["metadata"]["total_size"] == 4 * done.parameters


def test_tokenizers_and_unknown_fields_come_along(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", GPT(layers=1))
    convert_weights(open_source(run), tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "summary_type": "cls_index"}))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert_weights(open_source(tmp_path / "hf"), tmp_path / "back", "shardlab")
    convert_weights(open_source(tmp_path / "back"), tmp_path / "again", "hf")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (again["eos_token_id"], again["summary_type"]) == (7, "cls_index")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_nothing_stays_of_a_conversion_that_breaks_off(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", GPT(layers=2))

    def broken(planned: list[OutputTensor]) -> Iterator[OutputTensor]:
        yield from planned[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_weights(open_source(run), tmp_path / "hf", "hf", follow=broken)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(tmp_path / "run", GPT(layers=2))
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=10)))
    with pytest.raises(UserError, match=r"bytes, but the disk of .* has 10 bytes free"):
        convert_weights(open_source(run), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
