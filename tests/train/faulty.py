"""Faults of one rank of a training, at the update of its third step."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.execute.transport.neighbours import Neighbours
from shardlab.language import Holds
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.interrupt import StopRequest

LEAD = 1.0
"""Seconds before a rank goes wrong, in which the others come to where they wait for it."""

DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction: keep 0 bytes of a packet."""

SO_ATTACH_FILTER = 26


def drop_everything() -> None:
    """Have this process hear nothing more on any connection, as behind a network that drops all: not even resets."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    _drop(connection)


def may_drop() -> bool:
    """Whether the system lets this user put a filter on a socket. Some let only root."""
    with socket.socket() as probe, suppress(PermissionError):
        _drop(probe)
        return True
    return False


def _drop(connection: socket.socket) -> None:
    code = ctypes.create_string_buffer(DROP_ALL)
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def loop() -> None:
    while True:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("the batch is a fish")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": die,
    "endless loop": loop,
    "raises": fail,
    "stopped": stop,
    "deaf": drop_everything,
}


def train(rank: int, device: torch.device, job: Job, fault: str, culprit: int, steps: int = 50) -> None:
    """Take steps; on one rank something goes wrong in the third."""
    went_wrong = False

    def observe(layer: int, holds: Holds, gradient: torch.Tensor) -> None:
        nonlocal went_wrong
        if rank == culprit and executor.state.step == 2 and not went_wrong:
            went_wrong = True
            time.sleep(LEAD)
            FAULTS[fault]()

    if fault == "deaf":  # neighbours need no network
        Neighbours.part()
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers), observer=observe)
    with StopRequest(None):  # as a training does: a launcher asks the others to end as soon as one has
        for _ in range(steps):
            executor.step()
