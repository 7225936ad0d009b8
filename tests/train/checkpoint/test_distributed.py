"""Folders of torch.distributed.checkpoint are read as torch writes them, and torch reads what is written here."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardlab.common.errors import UserError
from shardlab.models import Llama
from shardlab.train.checkpoint.distributed import DistributedFiles, write_distributed
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from tests.support.memory_growth import kib_grown
from tests.support.ranks import Ranks
from tests.support.thorough import examples
from tests.support.warm import WarmStarts
from tests.train.huggingface.folders import output_of, random_run

World = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL = Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, ffn_hidden_size=24, vocab_size=31, seq_len=8)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def written(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = 10**9) -> Path:
    """A folder with these tensors, which it writes."""
    folder.mkdir(exist_ok=True)
    write_distributed(folder, [output_of(name, tensor) for name, tensor in tensors.items()], shard_bytes)
    return folder


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), dtypes, st.integers(50, 2000))
def test_torch_loads_what_is_written_and_any_part_is_read(
    data: st.DataObject, dtype: torch.dtype, shard_bytes: int
) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=4))
    tensors = {f"t{at}.weight": torch.randn(shape).to(dtype) for at, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name, "dcp"), tensors, shard_bytes)
        loaded = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
        load(loaded, checkpoint_id=folder, no_dist=True)
        files = DistributedFiles(folder)
        assert files.names == tensors.keys()
        for key, tensor in tensors.items():
            ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in tensor.shape]
            part = tuple(slice(*pair) for pair in ends)
            assert torch.equal(loaded[key], tensor)
            assert torch.equal(files.read(key), tensor)
            assert torch.equal(files.read(key, *part), tensor[part])
            assert (files.shape(key), files.dtype(key)) == (tuple(tensor.shape), dtype)


class Block(nn.Module):
    """Modules of a block, with torchtitan's names."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        size, inner, keys = model.hidden_size, model.hidden, model.hidden_size // model.heads * (model.kv_heads or 0)
        self.attention = nn.Module()
        self.attention.qkv_linear = nn.Module()
        for name, rows in (("wq", size), ("wk", keys), ("wv", keys)):
            self.attention.qkv_linear.add_module(name, nn.Linear(size, rows, bias=False))
        self.attention.wo = nn.Linear(size, size, bias=False)
        self.feed_forward = nn.Module()
        for name, (columns, rows) in {"w1": (size, inner), "w2": (inner, size), "w3": (size, inner)}.items():
            self.feed_forward.add_module(name, nn.Linear(columns, rows, bias=False))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size), nn.RMSNorm(size)


class Decoder(nn.Module):
    """Modules of a Llama, with torchtitan's names."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict({str(block): Block(model) for block in range(model.layers)})
        self.norm = nn.RMSNorm(model.hidden_size)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)


def saved_by_fsdp(rank: int, model: Llama, folder: Path) -> dict[str, Tensor]:
    """Save a model that FSDP2 shards, and its optimizer, as torchtitan does. Returns the whole weights."""
    torch.manual_seed(0)
    whole = Decoder(model)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    weights = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in whole.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), foreach=False)
    for parameter in whole.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = {name: tensor.full_tensor() for name, tensor in whole.state_dict().items()}  # decayed by the step
    moments = {
        f"state.{name}.exp_avg": optimizer.state[parameter]["exp_avg"] for name, parameter in whole.named_parameters()
    }
    state = whole.state_dict()
    across = "layers.0.attention.wo.weight"  # tensor parallelism shards its columns
    state[across] = distribute_tensor(weights[across], mesh, [Shard(1)])
    save(
        {**state, "optimizer": moments, "lr_scheduler": {"last_epoch": 1}, "train_state": {"step": 1}},
        checkpoint_id=folder,
    )
    return weights


def loaded_by_fsdp(rank: int, model: Llama, folder: Path) -> dict[str, Tensor]:
    """Load a checkpoint into a model that FSDP2 shards."""
    sharded = Decoder(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = sharded.state_dict()
    load(state, checkpoint_id=folder)
    sharded.load_state_dict(state)
    return {name: tensor.full_tensor().detach() for name, tensor in sharded.state_dict().items()}


def parts_of(model: Llama, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a run, from torchtitan's."""
    ours = {"layers.0.wte.weight": weights["tok_embeddings.weight"]}
    last = f"layers.{model.layers - 1}"
    ours |= {f"{last}.ln_f.weight": weights["norm.weight"], f"{last}.lm_head.weight": weights["lm_head.weight"]}
    for block in range(model.layers):
        old, new = f"layers.{block}.attention", f"layers.{block}.feed_forward"
        ours |= {
            f"layers.{block}.ln_1.weight": weights[f"layers.{block}.attention_norm.weight"],
            f"layers.{block}.ln_2.weight": weights[f"layers.{block}.ffn_norm.weight"],
            f"layers.{block}.attn.c_attn.weight": torch.cat(
                [weights[f"{old}.qkv_linear.{name}.weight"] for name in ("wq", "wk", "wv")]
            ),
            f"layers.{block}.attn.c_proj.weight": weights[f"{old}.wo.weight"],
            f"layers.{block}.mlp.c_fc.weight": torch.cat([weights[f"{new}.w1.weight"], weights[f"{new}.w3.weight"]]),
            f"layers.{block}.mlp.c_proj.weight": weights[f"{new}.w2.weight"],
        }
    return ours


@pytest.mark.starts_ranks
def test_a_checkpoint_of_fsdp_on_two_ranks_comes_in_and_goes_back(ranks: World, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights, _ = ranks(2).call(saved_by_fsdp, MODEL, tmp_path / "dcp")
    source = open_source(tmp_path / "dcp", lambda _, source: MODEL)
    assert source.left_out == ("optimizer", "lr_scheduler", "train_state")
    convert_weights(source, tmp_path / "run", "shardlab")
    read_weights, expected = load_file(tmp_path / "run" / "weights.safetensors"), parts_of(MODEL, weights)
    assert read_weights.keys() == expected.keys()
    assert all(torch.equal(read_weights[name], expected[name]) for name in expected)
    convert_weights(open_source(tmp_path / "run"), tmp_path / "back", "dcp", shard_bytes=3000)
    for loaded in ranks(2).call(loaded_by_fsdp, MODEL, tmp_path / "back"):
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def changed(folder: Path, how: Callable[[Any], object]) -> None:
    """Change the metadata of a folder."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


class Harm:
    """Object whose unpickling would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / ".metadata").unlink(), "has no .metadata: the checkpoint is not complete"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), "lacks __1_0.distcp, which its .metadata names"),
        (
            lambda folder: os.truncate(folder / "__0_0.distcp", 100),
            "__0_0.distcp has 100 bytes, but its tensors end at",
        ),
        (lambda folder: os.truncate(folder / ".metadata", 50), ".metadata cannot be read (pickle data was truncated)"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata cannot be read (Ran out of input)"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})), "is not of torch.distributed.checkpoint"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Harm(folder / "harm"))),
            "it needs posix.mkdir, which does not describe tensors",
        ),
        (
            lambda folder: changed(folder, lambda metadata: setattr(metadata, "version", "2.0.0")),
            "was written in version 2.0.0 of the format, and this Shardlab reads version 1",
        ),
        (
            lambda folder: changed(folder, lambda metadata: metadata.state_dict_metadata["w"].chunks.pop()),
            "has 12 of the 24 elements of w",
        ),
        (
            lambda folder: changed(folder, lambda metadata: metadata.storage_data.clear()),
            ".metadata does not say in which file w is",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_sentence(
    harm: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "dcp", {"w": torch.randn(6, 4)}, shard_bytes=60)
    harm(folder)
    with pytest.raises(UserError) as refused:
        DistributedFiles(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (folder / "harm").exists()


def test_a_damaged_chunk_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "dcp", {"w": torch.randn(6, 4)})
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))
    with pytest.raises(UserError, match=r"w cannot be read .*; the file is damaged"):
        DistributedFiles(folder).read("w")


def test_whole_numbers_are_not_weights(tmp_path: Path) -> None:
    save({"w": torch.ones(2, dtype=torch.int64)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match="tensor w is in int64; weights are exchanged in F64"):
        DistributedFiles(tmp_path / "dcp").dtype("w")


SIX_DIRECTIONS = """
def convert(begin):
    for number, step in enumerate(("hf", "shardlab", "dcp", "hf", "dcp", "shardlab")):
        source, begin = open_source(Path(begin)), f"{begin}-{number}"
        convert_weights(source, Path(begin), step, shard_bytes=10**9 if number == 2 else 10**7)
"""


@pytest.mark.thorough  # tests/train/huggingface/test_adam.py measures the same with more state
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a part of a process's life")
def test_a_process_that_converts_holds_two_chunks_and_a_few_pieces(warm: WarmStarts, tmp_path: Path) -> None:
    """The largest tensor has 4 MiB, and the model 44 MiB, in files of 10 MB. Mapped files count as well."""
    large = Llama(layers=12, hidden_size=256, heads=4, vocab_size=4096, seq_len=8, ffn_hidden_size=688, tied=False)
    kib: list[int] = []
    for piece in (2**20, 2**27):
        folder = tmp_path / str(piece)
        folder.mkdir()
        random_run(folder / "small", MODEL)
        random_run(folder / "large", large)
        kib.append(kib_grown(warm, SIX_DIRECTIONS, folder, piece))
    chunk, piece, model = 4 * 2**10, 2**10, 4 * large.parameter_count / 2**10
    assert kib[0] < 2 * chunk + 12 * piece < model / 2
    assert kib[1] > 0.9 * model, "the measure sees files that stay mapped"
