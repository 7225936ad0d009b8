"""`shardlab doctor` examines the machine and names remedies for its problems. `shardlab test` trains on it briefly.

The checks of both are in `shardlab.measure.doctor`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import Report, table_of
from shardlab.cli.options import Flag, OptionalCount
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.train.launch.environment import require_port

if TYPE_CHECKING:
    from shardlab.measure.doctor.checks import Finding
    from shardlab.measure.doctor.network import WorldFacts


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
            from shardlab.measure.doctor.checks import Finding

            return self._report([Finding("torch", f"cannot be imported: {error}", "pip install torch", "error")], None)
        findings, world = self._examine()
        return 0 if findings is None else self._report(findings, world)

    def _examine(self) -> tuple[list[Finding] | None, WorldFacts | None]:
        """Examine the hosts and the links.

        Returns:
            The findings, and the world if its ranks found each other. Both are None if rank 0 reports for this process.
        """
        from shardlab.execute.requirements import gpu_count
        from shardlab.measure.doctor.checks import Finding, check_host, host_facts
        from shardlab.measure.doctor.network import check_world, examine_world
        from shardlab.train.launch.environment import find_launch_environment
        from shardlab.train.launch.ranks import Rendezvous, launched_ranks, run_ranks, start_limit

        place, launched, world = None, True, None
        remedy = "check MASTER_ADDR and MASTER_PORT, the firewall, and GLOO_SOCKET_IFNAME"
        try:
            place = find_launch_environment(os.environ)
            launched = place is not None and place.world > 1
            local = (place.local_rank, place.local_world) if place is not None and launched else (None, None)
            ranks = launched_ranks(self.ranks or gpu_count() or 2)
            limit = start_limit(self.timeout)
            joining = Rendezvous(timeout=limit, start=limit)
            world = run_ranks(ranks, examine_world, *local, joining=joining)
        except Exception as error:  # torch raises many types for network errors
            first = place.rank if place is not None and launched else 0
            message = (str(error).strip() or type(error).__name__).splitlines()[-1]
            network = Finding("network", f"rank {first} did not connect to the others: {message}", remedy, "error")
            return [*check_host(host_facts(first, (place and place.local_world) or 1, write=True)), network], None
        return (None, None) if world is None else (list(check_world(world)), world)

    def _report(self, findings: Sequence[Finding], world: WorldFacts | None) -> int:
        errors = [finding for finding in findings if finding.state == "error"]
        warnings = [finding for finding in findings if finding.state == "warning"]
        links, clocks = ([], []) if world is None else ([asdict(link) for link in world.links], world.clocks)
        rows = [asdict(finding) for finding in findings]
        report = Report(findings=rows, links=links, clocks=clocks, ok=not errors)
        report.draw(lambda console: console.print(_table(findings), ""))
        if errors or warnings:
            report.line(f"{counted(len(errors), 'error')}, {counted(len(warnings), 'warning')}", "bold")
        else:
            report.line("nothing is wrong", "green")
        report.show(json=self.json)
        return bool(errors)


@dataclass(frozen=True)
class SmokeTest:
    """Test in seconds that ranks train correctly here: a tiny model with two strategies, against one device.

    Replicated weights are compared bit by bit, and bandwidths are measured. Under a launcher, all its ranks take part.
    The exit status is 1 if something fails.
    """

    ranks: OptionalCount = None
    """Number of processes, if no launcher started them. Default: one for each GPU, or 2."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        require_port(os.environ)

        from shardlab.cli.train.before_ranks import failures_as_exit
        from shardlab.execute.requirements import gpu_count
        from shardlab.measure.doctor.network import STRATEGIES, smoke_rank
        from shardlab.train.launch.ranks import launched_ranks, run_ranks

        ranks = self.ranks or launched_ranks(gpu_count() or 2)
        began = time.monotonic()
        with failures_as_exit():
            result = run_ranks(ranks, smoke_rank, STRATEGIES)
        if result is None:  # a rank of an existing world, but not the one that reports
            return 0
        seconds, failures = time.monotonic() - began, result.failures()
        report = Report(**asdict(result), ranks=ranks, seconds=seconds, failures=failures, ok=not failures)
        for trial in result.trained:
            error = f"{max(trial.verdict.all):.1e} from one device; "
            sync = "the ranks are in sync" if not trial.unequal else "the ranks differ"
            report.fact(trial.strategy, error + sync, style="" if trial.ok else "red")
        if (point := result.all_reduce) is not None:
            report.fact("all-reduce", f"{point.bus_bandwidth / 1e9:.2f} GB/s on the bus, of 8 MiB")
        for link in result.links:
            figures = f"latency {1e6 * link.latency:,.0f} us, {link.bandwidth / 1e9:.2f} GB/s"
            report.fact("messages", f"rank {link.first} to {link.second}: {figures}")
        outcome, style = ("failed", "red") if failures else ("passed", "green")
        report.line(f"\n{outcome} on {counted(ranks, 'rank')} in {seconds:.1f} s", style)
        report.show(json=self.json)
        for failure in failures:
            print(f"shardlab: {failure}", file=sys.stderr)
        return bool(failures)


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
