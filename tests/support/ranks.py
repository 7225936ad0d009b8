"""Processes that multi-process tests share: a world of n ranks on gloo, started once for the tests of a file."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from shardlab.common.errors import UserError
from shardlab.execute.transport.neighbours import connect_neighbours
from shardlab.train.job import Job
from shardlab.train.launch.ranks import set_wakeups

PRELOAD = [
    "shardlab.train.verification.verify",
    "shardlab.train.loop",
    "shardlab.cli",
    "shardlab.measure.collectives",
    "shardlab.measure.layers",
    "shardlab.measure.side_by_side.sides",
    "torch._dynamo",
    "pytest",
    "tests.train.jobs",
    "tests.support.short_runs",
]
"""Modules that ranks import, those of their tests included. They are imported once for all ranks, in the server that
forks them. torch's optimizers import torch._dynamo at their first use."""


FORGET = ForkingPickler.dumps(None)
"""Message after which a rank destroys the groups of the last call, in which no rank communicates any more."""

PATIENCE_SECONDS = 20.0
"""Seconds that the other ranks may take after one has failed; they may be waiting for it for ever."""


class Ranks:
    """A world of `size` processes; `call` runs a function on every rank and gives the results in rank order.

    Args:
        patience: seconds that the other ranks have once one has failed (None: `PATIENCE_SECONDS`).

    Attributes:
        usable: whether the world can still be called; false after a rank died, or if it waits for one that failed.
    """

    def __init__(self, size: int, patience: float | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name, "store").as_uri()
        self.usable = True
        self._patience = patience
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, store), daemon=True)
            process.start()
            theirs.close()  # or its end would not be seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on every rank; raise with all tracebacks if one raised.

        Jobs among the arguments are traced, checked and given their fingerprint here, once for all ranks.
        """
        for job in arguments:
            if isinstance(job, Job):
                with suppress(UserError):  # which the ranks raise as well
                    job.checked().program.fingerprint()
        call = ForkingPickler.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers: dict[int, tuple[bool, Any]] = {}
        while pending := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}:
            failed = any(not ok for ok, _ in answers.values())
            ready = wait(list(pending), (self._patience or PATIENCE_SECONDS) if failed else None)
            if not ready:
                self.close()
                answers |= dict.fromkeys(pending.values(), (False, "waited for a rank that had failed\n"))
            for pipe in (pipe for pipe in pending if pipe in ready):
                answers[pending[pipe]] = self._answer(pipe)
        if not self.usable:
            self.close()
        elif all(ok for ok, _ in answers.values()):
            for pipe in self._pipes:
                pipe.send_bytes(FORGET)
        failures = [f"rank {rank}:\n{error}" for rank, (ok, error) in sorted(answers.items()) if not ok]
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except EOFError:
            self.usable = False
            return False, "the process ended\n"

    def close(self) -> None:
        self.usable = False
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # as ranks of `run_processes` do
    torch.set_num_threads(1)
    set_wakeups()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    connect_neighbours(timedelta(minutes=30))
    while True:
        call = pipe.recv()
        _forget_groups()
        if call is None:
            continue
        function, arguments = call
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _forget_groups() -> None:
    """Destroy the process groups of earlier calls, once all ranks have finished with them.

    gloo has a thread for each group, which polls for messages a hundred times a second while the group exists. torch
    names a group by its members and by the number of groups. Destroyed groups still count in this number; otherwise a
    name would occur again, for which the store has old addresses.
    """
    import torch.distributed as dist

    world: Any = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
            world.pg_names[object()] = "gone"
