"""`shardlab launch -- COMMAND`: any command as ranks, on processes of this machine or of a launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from shardlab.cli.console import table_of
from shardlab.cli.options import Flag, OptionalCount
from shardlab.program import UserError
from shardlab.rules.pieces import counted
from shardlab.starting import INTERRUPTED
from shardlab.train.launch_environment import LaunchEnvironment, find_launch_environment, launcher_of


@dataclass(frozen=True)
class Launch:
    """Run any command as ranks, such as your own script with torch.distributed, with any launcher or none.

    Without a launcher, the ranks are processes of this machine, and each line of output begins with its rank. If a rank
    fails, all ranks are stopped, and the last lines printed are those of the failed rank. Under torchrun, SLURM, PBS or
    mpiexec, this process becomes the command and sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and OMP_NUM_THREADS.
    """

    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ] = ()
    """The command and its arguments. A .py file is run with this Python."""

    ranks: OptionalCount = None
    """Number of ranks. Default: one for each GPU, or else each CPU."""

    bind: Flag = False
    """Pin each rank to CPUs of its own, unless the launcher has done so."""

    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of times that all ranks are restarted if one fails."""

    def run(self) -> int:
        from shardlab.train.worker import as_program, become

        if self.max_restarts < 0:
            raise UserError(f"--max-restarts is {self.max_restarts}; give 0 or more")
        command = as_program(self.command)
        place = find_launch_environment(os.environ)
        if place is None or place.world == 1:
            return self._start(command)
        launcher = launcher_of(os.environ)
        if self.ranks not in (None, place.world):
            raise UserError(f"--ranks is {self.ranks}, but {launcher} started {place.world}; leave out --ranks")
        if self.max_restarts:
            raise UserError(
                f"--max-restarts is for ranks that this command starts, but {launcher} started these; leave it out"
            )
        if place.local_rank == 0:
            self._tell_joined(place)
        return become(place, command, bound=self.bind)

    def _tell_joined(self, place: LaunchEnvironment) -> None:
        where = f"{socket.gethostname()} has {place.local_world or 'some'} of {counted(place.world, 'rank')}"
        bound = ", each on CPUs of its own" if self.bind else ""
        print(f"shardlab: {where}, started by {launcher_of(os.environ)}{bound}", file=sys.stderr, flush=True)

    def _start(self, command: list[str]) -> int:
        from shardlab.cli.measuring import default_ranks
        from shardlab.train.binding import as_ranges, dealt, usable_cpus

        cpus = usable_cpus()
        ranks = self.ranks or default_ranks()
        each = dealt(cpus, ranks) if self.bind else [cpus] * ranks
        threads = os.environ.get("OMP_NUM_THREADS")
        table = table_of("rank", "cpus", "threads", words=0)
        for rank, own in enumerate(each):
            table.add_row(str(rank), as_ranges(own), threads or str(max(1, len(cpus) // ranks)))
        Console(file=sys.stderr, highlight=False).print(table)
        sys.stdout.flush()

        from shardlab.train.commands import LAST_LINES, run_command
        from shardlab.train.processes import how_ended

        ending = run_command(command, ranks, bound=self.bind, restarts=self.max_restarts)
        if ending.rank is not None and not ending.asked:
            if ending.output:
                print(f"\nshardlab: last lines of rank {ending.rank} (at most {LAST_LINES}):", file=sys.stderr)
                print(ending.output, file=sys.stderr)
            print(f"shardlab: rank {ending.rank} {how_ended(ending.code)}, so all ranks were stopped", file=sys.stderr)
        if ending.asked:
            print(f"shardlab: interrupted ({signal.Signals(ending.asked).name}); all ranks have ended", file=sys.stderr)
            return 0 if ending.rank is None else INTERRUPTED
        return ending.code if ending.code >= 0 else 128 - ending.code
