"""A run's last weights are written by all ranks, none of which ever has the whole model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch and safetensors leave some of their annotations out.

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.recording import TrackedStorages
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.models import GPT, Blocks, MoE
from shardlab.models.named import weights_at
from shardlab.models.tensors import TokenSampling, initial_weights, named_views
from shardlab.models.tensors.weights import TensorFiles, weight_files
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.evaluate import Evaluation, OrderedBatches
from shardlab.train.job import Job
from shardlab.train.sample import ParallelWriter
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.weights import save_weights
from tests.support.processes import files_of_at_most
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.tied_plans import batches_of

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=3, hidden_size=16, heads=2, seq_len=8, vocab_size=51)
PLANS: dict[str, tuple[str | Plan, Blocks]] = {
    "fsdp": ("fsdp", MODEL),
    "ddp": ("ddp", MODEL),
    "1f1b": (Plan(Mesh(pp=2)), MODEL),
    "tp": (SHARDINGS["tp"], MODEL),
    "tied": (Plan(Mesh(pp=2)), replace(MODEL, tied=True)),
    "experts": (SHARDINGS["ep"], MoE(layers=2, hidden_size=16, heads=2, seq_len=8)),
}


def executor_of(rank: int, job: Job, config: OptimizerConfig | None = None) -> Executor:
    settings = Settings(0, job.numbers, CPU, config or OptimizerConfig())
    return Executor(job.checked(), rank, job.cut, batches_of(job.model, job.microbatches), settings)


def saved(rank: int, job: Job, out: Path, shard_bytes: int, config: OptimizerConfig | None = None) -> list[str]:
    return save_weights(executor_of(rank, job, config).state, out, shard_bytes=shard_bytes)


def first_weights(model: Blocks) -> dict[str, Tensor]:
    """All parameters of an untrained model, as one device has them."""
    weights: dict[str, Tensor] = {}
    for layer in range(model.layers):
        named = named_views(model.layout(layer), initial_weights(model, layer, 0, torch.float32))
        weights |= {f"layers.{layer}.{name}": tensor for name, tensor in named.items()}
    return weights


def read(single: Path) -> dict[str, Tensor]:
    files = TensorFiles(weight_files(single))
    return {name: files.read(name) for name in files.names}


@pytest.mark.parametrize("name", PLANS)
def test_one_file_and_several_have_the_weights_of_one_device(ranks: World, tmp_path: Path, name: str) -> None:
    strategy, model = PLANS[name]
    job, expected = Job(strategy, 2, 2, model, 2), first_weights(model)
    for folder, shard_bytes in ((tmp_path / "one", 10**9), (tmp_path / "several", 10_000)):
        folder.mkdir()
        assert ranks(2).call(saved, job, folder, shard_bytes) == [[], []]
        weights = read(folder / "weights.safetensors")
        assert are_equal(weights, expected)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["weights.safetensors"]
    assert are_equal(load_file(tmp_path / "one" / "weights.safetensors"), expected)
    several = sorted(path.name for path in (tmp_path / "several").iterdir())
    assert several[0] == f"weights-00001-of-{len(several) - 1:05}.safetensors"
    assert several[-1] == "weights.safetensors.index.json"
    index = json.loads((tmp_path / "several" / several[-1]).read_text())
    assert set(index["weight_map"].values()) == set(several[:-1])


def are_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def peaks(rank: int, job: Job, out: Path) -> tuple[dict[str, int], int, int]:
    """Bytes that this rank has at most beside what it had, when weights are saved, judged and sampled from.

    Returns:
        these, the bytes of its weights, and those of the largest layer.
    """
    checked, model = job.checked(), job.cut
    batches = Batches(batches_of(job.model, job.microbatches).corpus, job.model.seq_len, 1, job.microbatches, 0)
    executor = Executor(checked, rank, model, batches, Settings(0, job.numbers, CPU, OptimizerConfig(ema=job.ema)))
    executor.step()
    state = executor.state
    judged = OrderedBatches(1, job.microbatches, job.microbatches, batches.validation)
    looks: dict[str, Callable[[], object]] = {
        "saved": lambda: save_weights(state, out, shard_bytes=10**6),
        "judged": Evaluation(job, checked, rank, CPU, judged, weights_of=state).losses,
        "sampled": lambda: list(ParallelWriter(state, job.model, TokenSampling(), lambda: False).generate([1, 2], 2)),
    }
    peak_bytes: dict[str, int] = {}
    for name, look in looks.items():
        account = TrackedStorages(state)
        with account.tracking():
            before = account.live()
            look()
            peak_bytes[name] = account.peak() - before
    blocks = [4 * job.model.layout(block).numel for block in range(job.model.layers)]
    return peak_bytes, sum(tensor.nbytes for tensor in state.kept.values()), max(blocks)


@pytest.mark.parametrize("ema", sampled([None, 0.9], bool))
@pytest.mark.parametrize("name", ["fsdp", "zero-3", "tp"])
def test_no_rank_has_more_than_its_share_and_one_layer_when_a_run_ends(
    ranks: World, tmp_path: Path, name: str, ema: float | None
) -> None:
    """To judge averages, weights are put aside; zero-3 gathers the next layer while it computes with one."""
    model = GPT(layers=6, hidden_size=64, heads=2, seq_len=4, vocab_size=64)
    strategy = SHARDINGS["tp"] if name == "tp" else name
    for peak_bytes, share, layer in ranks(2).call(peaks, Job(strategy, 2, 2, model, 1, ema=ema), tmp_path):
        aside, computing, activations = share if ema else 0, layer * (2 if name == "zero-3" else 1), layer // 5
        assert peak_bytes["saved"] <= aside + layer + layer // 100
        assert peak_bytes["judged"] <= aside + computing + activations
        assert peak_bytes["sampled"] <= 4 * model.parameter_count // 2 + layer + activations
        assert share + computing + activations < 4 * model.parameter_count


def saved_in_vain(rank: int, job: Job, out: Path, temporary: Path) -> list[str]:
    """Save where rank 1 finds no room."""
    tempfile.tempdir, state = str(temporary), executor_of(rank, job).state
    try:
        with files_of_at_most(5_000) if rank else nullcontext():
            return save_weights(state, out, shard_bytes=10_000)
    finally:
        tempfile.tempdir = None


def test_no_part_of_weights_is_left_where_one_rank_finds_no_room(ranks: World, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "temporary").mkdir()
    names = ranks(2).call(saved_in_vain, Job("fsdp", 2, 2, MODEL, 2), tmp_path / "run", tmp_path / "temporary")
    assert names == [["weights.safetensors"]] * 2
    assert not list((tmp_path / "run").iterdir())
    assert not list((tmp_path / "temporary").iterdir())


def saved_elsewhere(rank: int, job: Job, out: Path, temporary: Path) -> list[str]:
    """Save into a folder that is gone."""
    tempfile.tempdir = str(temporary)
    try:
        return saved(rank, job, out, 10_000, OptimizerConfig(ema=0.9))
    finally:
        tempfile.tempdir = None


def test_weights_without_room_in_their_folder_go_to_another_one(ranks: World, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    job = Job("fsdp", 2, 2, MODEL, 2, ema=0.9)
    names = ranks(2).call(saved_elsewhere, job, tmp_path / "gone", tmp_path / "temporary")
    assert names == [["weights.safetensors", "ema.safetensors"]] * 2
    weights, averages = (
        read(path.with_name(path.name.removesuffix(".index.json")))
        for name in ("weights", "ema")
        for path in (tmp_path / "temporary").glob(f"*/{name}.safetensors.index.json")
    )
    assert are_equal(weights, first_weights(MODEL))
    assert are_equal(averages, weights), "before the first step"


def with_a_weight_that_is_no_number(rank: int, job: Job, out: Path) -> list[str]:
    state = executor_of(rank, job).state
    if rank:
        next(iter(state.kept.values()))[0] = torch.nan
    return save_weights(state, out)


def test_weights_that_are_not_finite_on_some_rank_are_not_written(ranks: World, tmp_path: Path) -> None:
    assert ranks(2).call(with_a_weight_that_is_no_number, Job("fsdp", 2, 2, MODEL, 2), tmp_path) == [[], []]
    assert not list(tmp_path.iterdir())


def new_weights(rank: int, job: Job, out: Path, shard_bytes: int, killed_at: str) -> str:
    """Save other weights than the first, and end as if killed before some file gets its name."""
    state, replace = executor_of(rank, job).state, Path.replace
    for tensor in state.kept.values():
        tensor.add_(1)

    def until_killed(path: Path, target: Path) -> Path:
        if target.name == killed_at:
            raise SystemExit("killed")
        return replace(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", until_killed)
        patch.setattr("torch.distributed.barrier", lambda: None)
        try:
            return " ".join(save_weights(state, out, shard_bytes=shard_bytes))
        except SystemExit as end:
            return str(end)


SEVERAL = 15_000


@pytest.mark.parametrize(("before", "after"), [(SEVERAL, 10**9), (10**9, SEVERAL), (SEVERAL, 8_000)])
def test_weights_that_are_saved_again_leave_nothing_of_the_old_ones(
    ranks: World, tmp_path: Path, before: int, after: int
) -> None:
    job = Job("fsdp", 2, 2, MODEL, 2)
    ranks(2).call(saved, job, tmp_path, before)
    ranks(2).call(new_weights, job, tmp_path, after, "")
    weights = read(tmp_path / "weights.safetensors")
    assert are_equal(weights, {name: tensor + 1 for name, tensor in first_weights(MODEL).items()})
    assert {path.name for path in tmp_path.iterdir()} == {
        *(path.name for path in weight_files(tmp_path / "weights.safetensors")),
        *(["weights.safetensors.index.json"] if after < 10**9 else []),
    }


def test_old_files_of_weights_and_new_ones_are_never_taken_for_one_model(ranks: World, tmp_path: Path) -> None:
    job = Job("fsdp", 1, 2, MODEL, 2)
    ranks(1).call(saved, job, tmp_path, SEVERAL)
    last = weight_files(tmp_path / "weights.safetensors")[-1].name
    assert ranks(1).call(new_weights, job, tmp_path, SEVERAL, last) == ["killed"]
    assert weights_at(tmp_path / "weights.safetensors") is None


def saved_on_a_failing_disk(rank: int, job: Job, out: Path, fails: str) -> list[str]:
    """Save where the disk becomes read-only on rank 1 before files get their names; or at once, everywhere."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    state = executor_of(rank, job).state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", refused)
        if fails == "at once":
            patch.setattr(Path, "open", refused)
            patch.setattr(Path, "unlink", refused)
        elif rank:
            patch.setattr(Path, "replace", refused)
        return save_weights(state, out, shard_bytes=SEVERAL)


@pytest.mark.parametrize("fails", ["at once", "on one rank, at the last"])
def test_a_disk_that_cannot_be_written_ends_no_rank_in_an_error(ranks: World, tmp_path: Path, fails: str) -> None:
    names = ranks(2).call(saved_on_a_failing_disk, Job("fsdp", 2, 2, MODEL, 2), tmp_path, fails)
    assert names == [["weights.safetensors"]] * 2
    assert not list(tmp_path.iterdir())
