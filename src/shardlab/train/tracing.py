"""`train --trace`: a few steps early in a run are timed op by op, then a few have their memory measured."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.data import Corpus
from shardlab.draw.trace import save_trace_events
from shardlab.execute import Executor, Settings
from shardlab.execute.clock import clock_offset
from shardlab.execute.recording import OpTimer
from shardlab.execute.state import State
from shardlab.execute.tracked_memory import step_with_memory
from shardlab.program.record import MemoryRecord, RankRecord
from shardlab.recorded.trace_file import rank_file, write_rank, write_trace
from shardlab.train.data import Batches
from shardlab.train.described import described
from shardlab.train.job import Job
from shardlab.train.launch import backend_of
from shardlab.train.traced_steps import Tracing
from shardlab.train.written import written


class TracedExecutor:
    """Takes the steps of one rank's executor, recording those that are to be.

    What a rank has seen is on disk after each of them, also when it fails, and in one file for all ranks in the end.
    """

    def __init__(self, executor: Executor, job: Job, folder: Path, tracing: Tracing) -> None:
        self._executor = executor
        self._job = described(job)
        self._folder = folder
        self._tracing = tracing
        self._recorder = OpTimer(executor)
        self._record = RankRecord(executor.state.rank, steps=self._recorder.steps)
        self._merged = False

    @property
    def state(self) -> State:
        """The rank's tensors."""
        return self._executor.state

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        tracing, step = self._tracing, self._executor.state.step
        if step == tracing.steps:
            self.finish()
        if not tracing.warm_up <= step < tracing.steps:
            return self._executor.step()
        if step == tracing.warm_up:
            device, ranks = self._executor.state.settings.device, dist.get_world_size()
            self._record.offset, self._record.bound = clock_offset(self._record.rank, ranks, device)
            self._folder.mkdir(parents=True, exist_ok=True)  # on a host whose disk is its own there is none yet
        try:
            if step < tracing.warm_up + tracing.timed:
                dist.barrier()
                return self._recorder.step()
            self._record.memory = MemoryRecord()
            return step_with_memory(self._executor, self._record.memory)
        finally:
            self._write()

    def finish(self) -> None:
        """Put all ranks' records into one file, and the timeline into one for viewers.

        All ranks call this together, and more than once if they like.
        """
        if self._merged or not self._record.steps:
            return
        self._merged = True
        rank = self._record.rank
        records: list[RankRecord] | None = [self._record] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(self._record, records)
        if records is not None:
            everyone = {record.rank: record for record in records}
            with written(self._folder / "trace.json") as path:
                seen = write_trace(self._folder, self._job, self._executor.state.checked, everyone)
                save_trace_events({"measured": (seen.timeline, seen.counters)}, path)
        dist.barrier()  # no rank's own file goes before the common one is there
        rank_file(self._folder, rank).unlink(missing_ok=True)

    def _write(self) -> None:
        with written(rank_file(self._folder, self._record.rank)):
            write_rank(self._folder, self._job, self._executor.state.checked.program.fingerprint(), self._record)


def trace_rank(rank: int, device: torch.device, job: Job, folder: Path, tracing: Tracing) -> None:
    """Run one rank's part of a training of no more steps than are recorded, on the default text; it leaves a trace."""
    corpus = Corpus.open((), job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, device)
    executor = Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))
    traced = TracedExecutor(executor, job, folder, tracing)
    for _ in range(tracing.steps):
        traced.step()
    traced.finish()
