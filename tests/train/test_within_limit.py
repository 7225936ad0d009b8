"""A model whose state is larger than the memory that its ranks may take is trained within it, from files."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.common.errors import UserError
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.language.pass_names import with_offload
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.checkpoint import Snapshot
from shardlab.train.checkpoint.contents import held
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.ranks import is_out_of_memory, out_of_memory, run_ranks, set_heap

ROOM = 52 * 2**20
JOB = Job("fsdp", 2, 2, GPT(layers=24, hidden_size=224, heads=4, seq_len=16), 1, passes="none")
CPU = torch.device("cpu")


def limit(more: int) -> None:
    """Let this process take so much more private memory than it has."""
    taken = 1024 * int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, resource.RLIM_INFINITY))


def losses(rank: int, job: Job) -> list[float]:
    """Those of two steps; all that is kept is then copied, as for a checkpoint, and made again."""
    corpus = Corpus.split(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, 1, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig()))
    found = [float(executor.step()[0]) for _ in range(2)]
    before = {name: each.clone() for name, each in list(Snapshot(executor.state).take().items())[:2]}
    for key in executor.state.opt_states:
        executor.state.make_moments(key, 2)
    assert all(each.place == "disk" for each in held(executor.state)) == (job.passes != "none")
    assert before
    return found


def train(rank: int, device: torch.device, jobs: tuple[Job, Job], out: Path) -> None:
    """Without a limit; within it; and within it from memory, which rank 0 finds out while the other waits for it."""
    limit(2**40)
    set_heap()
    whole = losses(rank, jobs[0])
    limit(ROOM)
    within = losses(rank, jobs[1])
    out.with_suffix(f".{rank}").write_text(json.dumps([whole, within]))
    if rank == 0:
        losses(0, jobs[0])
    dist.barrier()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not limit what files take no part in"
)
def test_what_does_not_fit_into_memory_is_trained_from_the_disk_with_the_same_losses(tmp_path: Path) -> None:
    away = Job("fsdp", 2, 2, JOB.model, 1, passes=with_offload("update-early", ["parameters=disk", "optimizer=disk"]))
    assert 12 * JOB.model.parameter_count / JOB.ranks > 1.5 * ROOM
    with pytest.raises(UserError) as refused:
        run_ranks(2, train, (JOB, away), tmp_path / "losses")
    assert re.match(
        r"rank 0 is out of memory: it asked for [\d.]+ .iB, more than the process may take", str(refused.value)
    )
    assert "--offload parameters=disk optimizer=disk" in str(refused.value)
    for rank in range(2):
        whole, within = json.loads((tmp_path / f"losses.{rank}").read_text())
        assert whole == within


def test_a_gpu_without_memory_is_told_of_its_hosts() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
    )
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    said = str(out_of_memory(3, torch.device("cuda"), error))
    assert said.startswith("rank 3 is out of memory: it asked for 20.00 GiB, more than its GPU has free; keep less")
    assert "optimizer=host" in said
