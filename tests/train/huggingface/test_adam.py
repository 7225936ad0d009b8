"""The state of AdamW goes to torchtitan's layout, and a run goes on from there as if nothing had been."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from shardlab.common.errors import UserError
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import Blocks, Llama, Mixtral
from shardlab.strategies.plan.plan import Plan
from shardlab.train.checkpoint.contents import OutputTensor
from shardlab.train.checkpoint.distributed import DistributedFiles, write_distributed
from shardlab.train.checkpoint.read import Checkpoint, CheckpointTensors
from shardlab.train.checkpoint.write import folder_of
from shardlab.train.config import SavingConfig
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source, parameters_of
from shardlab.train.job import Job
from tests.support.memory_growth import kib_grown
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.support.warm import WarmStarts
from tests.train.checkpoint.runs import STEPS, saving_run, trained
from tests.train.checkpoint.test_distributed import Decoder
from tests.train.huggingface.folders import output_of, random_run

World = Callable[[int], Ranks]
pytestmark = [pytest.mark.starts_ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SIZES: dict[str, Any] = {"layers": 2, "hidden_size": 16, "heads": 2, "seq_len": 8}
LLAMA = Llama(**SIZES, kv_heads=1, ffn_hidden_size=24)
EXPERTS = Mixtral(**SIZES, experts=4, capacity_factor=None, ffn_hidden_size=24)
RUNS: dict[str, tuple[str | Plan, Blocks, str]] = {
    "fsdp": ("fsdp", LLAMA, "fp32"),
    "bf16, with exact copies": ("zero-3", LLAMA, "bf16"),
    "a tied head": ("ddp", Llama(**SIZES, tied=True), "fp32"),
    "experts": ("zero-1", EXPERTS, "fp32"),
    "experts in bf16": ("zero-3", EXPERTS, "bf16"),
}


def job_of(name: str) -> Job:
    strategy, model, precision = RUNS[name]
    return Job(strategy, 2, 4, model, 2, precision)


def train(ranks: World, job: Job, out: Path, resume: Path | None = None, **settings: Any) -> None:
    """Train for 5 steps, and keep the checkpoints after 2, 4 and 5 of them."""
    run = saving_run(job, out, resume, OptimizerConfig(schedule_steps=STEPS, warmup_steps=1, **settings))
    run = replace(run, config=replace(run.config, saving=SavingConfig(save_every=2, keep=3)))
    ranks(2).call(trained, run)


def exported(ranks: World, folder: Path, job: Job, step: int = 2, **settings: Any) -> Path:
    """The checkpoint after some steps of a run, in torchtitan's layout."""
    train(ranks, job, folder / "run", **settings)
    source = open_source(folder_of(folder / "run" / "checkpoints", step))
    convert_weights(source, folder / "dcp", "dcp", shard_bytes=9000)
    return folder / "dcp"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[tuple[str, int], list[torch.Tensor]]:
    """All tensors of a checkpoint."""
    checkpoint = Checkpoint.open(folder)
    tensors = {kind: CheckpointTensors(checkpoint, kind) for kind in checkpoint.kinds}
    return {
        key: [tensors[key[0]]._opened(file).read(name) for *_, file, name in ranges]
        for key, ranges in checkpoint.ranges.items()
    }


@pytest.mark.parametrize("name", sampled(RUNS, {"experts in bf16"}.__contains__))
def test_a_run_goes_on_through_torchtitans_layout_to_the_bit(name: str, ranks: World, tmp_path: Path) -> None:
    job = job_of(name)
    folder = exported(ranks, tmp_path, job)
    source = open_source(folder, lambda _, source: job.model)
    done = convert_weights(source, tmp_path / "again", "shardlab", settings=folder, shard_bytes=9000)
    assert done.left_out == []
    begin = folder_of(tmp_path / "again" / "checkpoints", 2)
    assert Checkpoint.open(begin).ranks > 1, "in several files"
    (tmp_path / "again" / "run.json").unlink()
    train(ranks, job, tmp_path / "again", begin)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")[2:]
    ends = [contents(folder_of(tmp_path / run / "checkpoints", STEPS)) for run in ("run", "again")]
    assert ends[0].keys() == ends[1].keys()
    for key, tensors in ends[0].items():
        assert all(torch.equal(*pair) for pair in zip(tensors, ends[1][key], strict=True)), key


@pytest.fixture(scope="module")
def after_4_steps(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run and of its checkpoint after 4 steps in torchtitan's layout."""
    folder = tmp_path_factory.mktemp("after-4-steps")
    exported(ranks, folder, job_of("fsdp"), step=4, learning_rate=3e-3, weight_decay=0.2)
    return folder


def test_torch_loads_the_state_into_its_own_adamw(after_4_steps: Path) -> None:
    """As torchtitan does (components/optimizer/utils.py, load_flat_optim_state_dict)."""
    folder = after_4_steps / "dcp"
    decoder = Decoder(LLAMA)
    optimizer = torch.optim.AdamW(decoder.named_parameters())
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    groups = optimizer.state_dict()["param_groups"][0]
    names = [name for name, _ in decoder.named_parameters()]
    state: dict[str, Any] = {}
    for (name, parameter), number in zip(decoder.named_parameters(), range(len(names)), strict=True):
        state |= {f"state.{name}.{key}": value for key, value in optimizer.state_dict()["state"][number].items()}
        state |= {f"param_groups.{name}.{key}": value for key, value in groups.items() if not key.startswith("param")}
        assert parameter.shape == optimizer.state[parameter]["exp_avg"].shape
    whole = {**decoder.state_dict(), "optimizer": state, "train_state": {"step": 0, "ntokens_seen": 0}}
    load(whole, checkpoint_id=folder, no_dist=True)
    assert whole["train_state"] == {"step": 4, "ntokens_seen": 4 * 2 * 4 * 8}
    source = open_source(folder_of(after_4_steps / "run" / "checkpoints", 4))
    for block, parameter in parameters_of(source.model):
        if parameter.name == "mlp.c_proj.weight":
            rows, columns = map(torch.arange, parameter.shape)
            moments = CheckpointTensors(Checkpoint.open(source.folder), "exp_avg_sq")
            moment = moments.read(block, parameter, 0, rows, columns)
            assert torch.equal(state[f"state.layers.{block}.feed_forward.w2.weight.exp_avg_sq"], moment)
            assert moment.any()
    assert {float(state[f"state.{name}.step"]) for name in names} == {4.0}
    assert state["param_groups.layers.0.attention.wo.weight.weight_decay"] == 0.2
    assert state["param_groups.norm.weight.weight_decay"] == 0.0
    assert state["param_groups.norm.weight.betas"] == (0.9, 0.95)
    assert state["param_groups.norm.weight.lr"] == pytest.approx(
        OptimizerConfig(schedule_steps=STEPS, warmup_steps=1, learning_rate=3e-3).rate(4)
    )


def test_a_later_step_of_torchtitans_goes_on_with_the_settings_of_an_earlier_one(
    after_4_steps: Path, tmp_path: Path
) -> None:
    earlier = folder_of(after_4_steps / "run" / "checkpoints", 2)
    convert_weights(open_source(after_4_steps / "dcp"), tmp_path / "again", "shardlab", settings=earlier)
    checkpoint = Checkpoint.open(folder_of(tmp_path / "again" / "checkpoints", 4))
    assert (checkpoint.step, checkpoint.updates) == (4, 4)
    assert checkpoint.state["data"]["sequence"] == 4 * 2 * 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "sgd"}, "optimizer (momentum_buffer beside AdamW's moments, which torchtitan does not have)"),
        ({"ema": 0.9}, "optimizer (average beside AdamW's moments, which torchtitan does not have)"),
    ],
)
def test_other_optimizers_are_left_out_by_name(
    settings: dict[str, Any], said: str, ranks: World, tmp_path: Path
) -> None:
    train(ranks, job_of("fsdp"), tmp_path / "run", **settings)
    source = open_source(folder_of(tmp_path / "run" / "checkpoints", 2))
    assert convert_weights(source, tmp_path / "dcp", "dcp").left_out == [said]
    assert not any(name.startswith("optimizer") for name in DistributedFiles(tmp_path / "dcp").all_names)
    with pytest.raises(UserError, match=r"to go on, a run needs optimizer\.state\..*; leave out --settings"):
        convert_weights(open_source(tmp_path / "dcp"), tmp_path / "again", "shardlab", settings=source.folder)


EXCHANGE = """
def convert(name):
    source = open_source(Path(name))
    convert_weights(source, Path(f"{name}-run"), "shardlab", shard_bytes=10**7, settings=Path("settings"))
    checkpoint = open_source(Path(f"{name}-run/checkpoints/step-000001"))
    convert_weights(checkpoint, Path(f"{name}-back"), "dcp", shard_bytes=10**9)
"""


def state_in_torchtitans_layout(folder: Path, model: Blocks) -> Path:
    """A folder with weights and moments that are drawn, in one file."""
    run = random_run(folder.with_name(f"{folder.name}-weights"), model)
    convert_weights(open_source(run), folder, "dcp", shard_bytes=10**9)
    files = DistributedFiles(folder)
    outputs, values = list[OutputTensor](), dict[str, Any]()
    for name in sorted(files.names):
        tensor = files.read(name)
        moments = {f"optimizer.state.{name}.{moment}": torch.rand_like(tensor) for moment in ("exp_avg", "exp_avg_sq")}
        outputs += [output_of(key, value) for key, value in ({name: tensor} | moments).items()]
        values[f"optimizer.state.{name}.step"] = torch.tensor(1.0)
    for path in (*folder.glob("*.distcp"), folder / ".metadata"):
        path.unlink()
    write_distributed(folder, outputs, 10**9, values=values)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a part of a process's life")
def test_a_process_that_exchanges_the_state_holds_three_chunks_and_a_few_pieces(
    warm: WarmStarts, tmp_path: Path
) -> None:
    """The largest tensor has 2 MiB, and weights and moments 60 MiB. Mapped files count as well."""
    large = Llama(layers=5, hidden_size=256, heads=4, vocab_size=2048, seq_len=8, ffn_hidden_size=688)
    (settings := tmp_path / "settings").mkdir()
    (settings / "config.toml").write_text("")
    (settings / "state.json").write_text(json.dumps({"step": 1, "data": {"sequence": 8}}))
    state_in_torchtitans_layout(tmp_path / "small", LLAMA)
    state_in_torchtitans_layout(tmp_path / "large", large)
    chunk, piece, state = 2 * 2**10, 2**9, 3 * 4 * large.parameter_count / 2**10
    assert kib_grown(warm, EXCHANGE, tmp_path, 2**19) < 3 * chunk + 12 * piece < state / 4
    first, back = DistributedFiles(tmp_path / "large"), DistributedFiles(tmp_path / "large-back")
    name = "optimizer.state.layers.4.feed_forward.w2.weight.exp_avg"
    assert torch.equal(back.read(name), first.read(name))
