"""`shardlab doctor`: what is there to train with, what is wrong with it, and the remedy."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import print_json, stdout_console, table_of
from shardlab.cli.options import Flag, OptionalCount
from shardlab.program import UserError
from shardlab.rules.pieces import counted

if TYPE_CHECKING:
    from shardlab.doctor.finding import Finding
    from shardlab.doctor.links import WorldFacts

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Doctor:
    """Examine this machine, or the hosts of a launcher's world, and the links between ranks.

    On each host: Python, torch, backend, devices, CPUs, limits, memory and disk. On all ranks: versions, clocks and
    messages. The exit status is 1 if there is an error. A warning concerns speed, or something that may fail later.
    """

    ranks: OptionalCount = None
    """Number of processes, if no launcher started them. Default: one for each GPU, or 2."""

    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """Time for which a rank waits for the others."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"--timeout is {self.timeout}; give a positive number of seconds")
        try:
            importlib.import_module("torch")
        except ImportError as error:
            from shardlab.doctor.finding import Finding

            return self._tell([Finding("torch", f"cannot be imported: {error}", "pip install torch", "error")], None)
        findings, world = self._examined()
        return 0 if findings is None else self._tell(findings, world)

    def _examined(self) -> tuple[list[Finding] | None, WorldFacts | None]:
        """What was found, and the world if its ranks met; None in a process that leaves the telling to rank 0."""
        from shardlab.doctor.checks import examined
        from shardlab.doctor.facts import host_facts
        from shardlab.doctor.finding import Finding
        from shardlab.doctor.links import world_facts
        from shardlab.doctor.world_checks import all_findings
        from shardlab.execute.gpus import gpu_count
        from shardlab.train.launch import Joining, ranks_here, run_ranks, start_limit
        from shardlab.train.launch_environment import find_launch_environment

        place, launched, world = None, True, None
        remedy = "check MASTER_ADDR and MASTER_PORT, the firewall, and GLOO_SOCKET_IFNAME"
        try:
            place = find_launch_environment(os.environ)
            launched = place is not None and place.world > 1
            here = (place.local_rank, place.local_world) if place is not None and launched else (None, None)
            ranks = ranks_here(self.ranks or gpu_count() or 2)
            limit = start_limit(self.timeout)
            joining = Joining(timeout=limit, start=limit)
            world = run_ranks(ranks, world_facts, *here, joining=joining)
        except Exception as error:  # whatever torch says of a network
            first = place.rank if place is not None and launched else 0
            what = (str(error).strip() or type(error).__name__).splitlines()[-1]
            network = Finding("network", f"rank {first} did not connect to the others: {what}", remedy, "error")
            return [*examined(host_facts(first, (place and place.local_world) or 1, write=True)), network], None
        return (None, None) if world is None else (list(all_findings(world)), world)

    def _tell(self, findings: Sequence[Finding], world: WorldFacts | None) -> int:
        errors = [finding for finding in findings if finding.state == "error"]
        warnings = [finding for finding in findings if finding.state == "warning"]
        if self.json:
            links = [] if world is None else [asdict(link) for link in world.links]
            clocks = [] if world is None else world.clocks
            rows = [asdict(finding) for finding in findings]
            print_json({"findings": rows, "links": links, "clocks": clocks, "ok": not errors})
            return bool(errors)
        console = stdout_console()
        console.print(_table(findings))
        console.print()
        if errors or warnings:
            console.print(f"{counted(len(errors), 'error')}, {counted(len(warnings), 'warning')}", style="bold")
        else:
            console.print("nothing is wrong", style="green")
        return bool(errors)


def _table(findings: Sequence[Finding]) -> Table:
    several = any(finding.host for finding in findings)
    table = table_of(*["host"] * several, "check", "state", "found, and the remedy", words=4)
    for column in table.columns[2 + several :]:
        column.no_wrap, column.overflow = False, "fold"
    for finding in findings:
        state, text = Text(finding.state, STYLES[finding.state]), Text(finding.present)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", "bold")
        table.add_row(*[finding.host] * several, finding.check, state, text)
    return table
