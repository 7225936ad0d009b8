"""A rank reads its slices of a folder's weights, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.language import UserError
from shardlab.models import GPT, Blocks, Llama, Mixtral, Model, cut
from shardlab.models.tensors import pad_runs, to_layers
from shardlab.models.tensors.weights import TensorFiles
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import initial_from, open_source
from tests.train.huggingface.folders import random_run

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "hidden_size": 16, "vocab_size": 41, "seq_len": 8}
DTYPE = torch.float32
CUT: list[tuple[Blocks, dict[str, Any]]] = [
    (GPT(**SIZES), {"tp": 2}),
    (GPT(**SIZES, tied=True), {"tp": 4}),
    (GPT(**SIZES), {"tp": 2, "attention_apart": True}),
    (Llama(**SIZES, kv_heads=2), {"tp": 2}),
    (Mixtral(**SIZES, experts=4, capacity_factor=None), {"ep": 2}),
    (Mixtral(**SIZES, experts=4, capacity_factor=None), {"tp": 2, "ep": 2}),
]


def wholes(folder: Path, model: Blocks) -> list[Tensor]:
    """Each block's flat weights, read by a range that is all of it."""
    read = initial_from(folder, model)
    return [
        read(block, model.layout(block).numel, [(0, model.layout(block).numel)], DTYPE) for block in range(model.layers)
    ]


@pytest.mark.parametrize("form", ["shardlab", "hf"])
@pytest.mark.parametrize(("whole", "how"), CUT, ids=str)
def test_any_range_of_any_slice_is_read(whole: Blocks, how: dict[str, Any], form: str, tmp_path: Path) -> None:
    folder = random_run(tmp_path / "run", whole)
    if form == "hf":
        convert_weights(open_source(folder), folder := tmp_path / "hf", "hf")
    model, draw = cut(whole, **how), random.Random(0)
    read = initial_from(folder, model)
    for layer, flat in enumerate(to_layers(model, wholes(folder, whole))):
        layout = model.layout(layer)
        length = layout.padded(6)
        longer = pad_runs(layout, flat, length)
        ends = sorted(draw.randrange(length + 1) for _ in range(6))
        ranges = [(ends[0], ends[1]), (ends[2], ends[3]), (ends[4], ends[5])]
        assert torch.equal(read(layer, length, [(0, length)], DTYPE), longer)
        assert torch.equal(read(layer, length, ranges, DTYPE), torch.cat([longer[a:b] for a, b in ranges]))


def test_a_run_and_its_converted_folder_start_with_equal_losses(tmp_path: Path) -> None:
    model = Llama(**SIZES, kv_heads=2)
    run = random_run(tmp_path / "run", model)
    convert_weights(open_source(run), tmp_path / "hf", "hf")
    for a, b in zip(wholes(run, model), wholes(tmp_path / "hf", model), strict=True):
        assert torch.equal(a, b)


class Counted:
    """Elements that are read of all files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elements, read = 0, TensorFiles.read

        def counted(files: TensorFiles, name: str, *where: slice | int) -> Tensor:
            tensor = read(files, name, *where)
            self.elements += tensor.numel()
            return tensor

        monkeypatch.setattr(TensorFiles, "read", counted)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("form", ["shardlab", "hf"])
def test_a_rank_reads_little_more_than_it_holds(
    ranks: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Llama(layers=1, hidden_size=64, heads=8, vocab_size=300, seq_len=8)
    folder = random_run(tmp_path / "run", model)
    if form == "hf":
        convert_weights(open_source(folder), folder := tmp_path / "hf", "hf")
    length = model.layout(0).padded(ranks)
    read, counted, share = initial_from(folder, model), Counted(monkeypatch), length // ranks
    for rank in range(ranks):
        counted.elements = 0
        read(0, length, [(rank * share, (rank + 1) * share)], DTYPE)
        assert counted.elements <= share + 8 * 2 * 64  # a head's rows lie apart where rotary pairs do


def test_a_rank_of_tensor_parallelism_reads_its_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GPT(layers=1, hidden_size=64, heads=8, vocab_size=304, seq_len=8)
    convert_weights(open_source(random_run(tmp_path / "run", whole)), tmp_path / "hf", "hf")
    model = cut(whole, tp=4)
    read, counted = initial_from(tmp_path / "hf", model), Counted(monkeypatch)
    for layer in range(model.layers):
        layout, counted.elements = model.layout(layer), 0
        if layout.slices == 4:
            read(layer, layout.numel, [(layout.run_numel, 2 * layout.run_numel)], DTYPE)
            assert counted.elements == sum(parameter.numel for parameter in layout.parameters)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden_size is 16, not 32; ffn_hidden_size is 64, not 128"),
        ({"activation": "gelu_tanh"}, "activation is 'gelu', not 'gelu_tanh'"),
        ({"seq_len": 9}, "seq_len is 8, less than 9"),
    ],
)
def test_another_model_is_refused_with_what_differs(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", GPT(**SIZES))
    with pytest.raises(UserError, match="has the weights of another model") as caught:
        initial_from(run, GPT(**(SIZES | changes)))
    assert str(caught.value).endswith(said)


CHANGED: dict[str, Any] = {"seq_len": 5, "dropout": 0.1}


def test_sequences_may_be_shorter(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", GPT(**SIZES))
    shorter: Model = GPT(**(SIZES | CHANGED))
    layout = shorter.layout(0)
    got = initial_from(run, shorter)(0, layout.numel, [(0, layout.numel)], DTYPE)
    at = layout.offsets[[parameter.name for parameter in layout.parameters].index("wpe.weight")]
    positions = TensorFiles([run / "weights.safetensors"]).read("layers.0.wpe.weight")
    assert torch.equal(got[at : at + 5 * 16].view(5, 16), positions[:5])
