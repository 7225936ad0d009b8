"""What runs on GPUs has the numbers of one CPU; `make gpu` runs these tests."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardlab.cli import main
from shardlab.execute.executor import FIRST_STEPS, Executor
from shardlab.execute.recording import ComputeClock, OpTimer, step_with_memory
from shardlab.execute.settings import Settings
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.data.corpus import Corpus
from shardlab.train.job import Job

pytestmark = [pytest.mark.gpu, pytest.mark.starts_ranks, pytest.mark.usefixtures("gpus")]

ONE_RANK = "--dp-shard 1"

PLANS = [
    ("--dp-shard 2", 2),
    ("zero-3 --ranks 2", 2),
    ("--tp 2 --sequence-parallel", 2),
    ("--cp 2", 2),
    ("--ep 2", 2),
    ("--pp 2 --schedule 1f1b", 2),
    ("--pp 2 --schedule zb-h1", 2),
    ("--pp 2 --tp 2 --dp-shard 2 --recompute full", 8),
]


@pytest.fixture
def gpus() -> int:
    found = torch.cuda.device_count()
    assert found, "torch sees no CUDA device here; this test is for machines that have one"
    return found


def executor(steps_of: str = "single", *, compile: bool = False, cuda_graph: bool = False) -> Executor:
    job = Job(steps_of, 1, 2, GPT(layers=2, hidden_size=64, heads=2, seq_len=32), 2)
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 32), 32, 2, 2, 0)
    settings = Settings(device=torch.device("cuda", 0), compile=compile, cuda_graph=cuda_graph)
    return Executor(job.checked(), 0, job.cut, batches, settings)


@pytest.mark.parametrize("options", ["", "--compile", "--recompute full", "--model llama", "--model moe"])
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_one_gpu_has_the_numbers_of_the_cpu(options: str, precision: str) -> None:
    assert main(["verify", *ONE_RANK.split(), *options.split(), "--precision", precision]) == 0


@pytest.mark.parametrize("strategy", ["single", "ddp", "wsdp", "fsdp", "zero-1", "zero-3"])
def test_a_group_of_one_rank_communicates_by_nccl(strategy: str) -> None:
    assert main(["verify", strategy, "--ranks", "1"]) == 0


def test_the_smoke_test_takes_the_gpus_that_are_there(capsys: pytest.CaptureFixture[str], gpus: int) -> None:
    assert main(["test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == gpus


@pytest.mark.parametrize(("words", "ranks"), PLANS)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_ranks_on_nccl_have_the_numbers_of_one_device(words: str, ranks: int, precision: str, gpus: int) -> None:
    if gpus < ranks:
        pytest.skip(f"{words} needs {ranks} GPUs, and this machine has {gpus}")
    assert main(["verify", *words.split(), "--precision", precision]) == 0


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("steps_of", ["single", "zero-3"])
def test_replayed_steps_have_the_numbers_of_issued_ones(steps_of: str, compile: bool) -> None:
    issued, captured = (executor(steps_of, compile=compile, cuda_graph=graph) for graph in (False, True))
    clock = ComputeClock(captured)
    for _ in range(FIRST_STEPS + 4):
        expected, found = issued.step(), captured.step()
        forward, backward = clock.read()
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-4)
        assert forward > 0
        assert backward > 0
    assert captured.graph is not None
    assert captured.graph.replays == 4


def test_seconds_forward_and_backward_are_a_part_of_the_step() -> None:
    ours = executor()
    clock, timer = ComputeClock(ours), OpTimer(ours)
    for _ in range(3):
        timer.step()
    forward, backward = clock.read()
    whole = sum(step.ended - step.began for step in timer.steps if step.ended is not None)
    assert 0 < forward < whole
    assert 0 < backward < whole
    assert forward + backward < whole


def test_every_op_has_a_beginning_and_an_end_by_the_devices_clock() -> None:
    ours = executor()
    timer = OpTimer(ours)
    timer.step()
    (step,) = timer.steps
    assert len(step.ops) == len(ours.state.tape)
    assert all(None not in moments[:2] for moments in step.ops.values())


def test_memory_is_the_allocators() -> None:
    ours, record = executor(), MemoryRecord()
    ours.step()
    step_with_memory(ours, record)
    assert record.peak >= max(sum(each.values()) for each in record.live.values())


def test_a_run_in_bf16_learns_and_leaves_a_trace_that_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = f"train {ONE_RANK} --steps 40 --precision bf16 --trace --out {out} --json"
    assert main(words.split()) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["validation_after"] < summary["validation_before"] - 1
    assert main(["compare", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["measured"] > 0
