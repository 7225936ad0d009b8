"""A rank's part of a race: its jobs' steps, by turns."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from shardlab.data import Corpus
from shardlab.data.kept import kept_tokenizer
from shardlab.execute import Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.execute.products import choose_products
from shardlab.measure.race import Race
from shardlab.measure.world import MeasuringRanks
from shardlab.models.tensors.onednn import choices
from shardlab.train.data import Batches
from shardlab.train.job import Job
from shardlab.train.launch import backend_of


def race_rank(rank: int, device: torch.device, jobs: Sequence[Job], turns: Race) -> list[float]:
    """Seconds of a step of every job: the median over rounds of its slowest rank's. Every rank gives the same.

    In a round each job takes a step to warm up and one that counts, so that what else the machine does slows all of
    them alike; every other round goes the other way. All jobs' weights are there at the same time.
    """
    with choices({}):
        return _race(MeasuringRanks(rank, device), jobs, turns)


def _race(world: MeasuringRanks, jobs: Sequence[Job], turns: Race) -> list[float]:
    device = world.device
    groups: Groups = {}
    began = time.perf_counter()
    executors = [_executor(job, world, groups, turns) for job in jobs]
    running = list(range(len(jobs)))
    for at in running:
        executors[at].step()  # memory is first taken, and connections are made
    choose_products(device)
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(turns.rounds):
        for at in running[:: 1 if number % 2 else -1]:
            executors[at].step()
            world.meet()
            start = time.perf_counter()
            executors[at].step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[at].append(world.most(time.perf_counter() - start))
        running = turns.going_on(running, times)
        if world.most(time.perf_counter() - began) > turns.seconds:
            break
    if device.type == "cuda":  # what follows in this process counts its memory anew
        executors.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return [median(each) for each in times]


def _executor(job: Job, world: MeasuringRanks, groups: Groups, turns: Race) -> Executor:
    tokenizer = None if turns.init is None else kept_tokenizer(turns.init)
    corpus = Corpus.open(turns.data, job.model.seq_len, tokenizer=tokenizer)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, world.device, turns.optimizer)
    backend = backend_of(world.device.type)
    return Executor(job.checked(), world.rank, job.cut, batches, settings, backend, groups=groups)
