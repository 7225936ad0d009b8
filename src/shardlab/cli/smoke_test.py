"""`shardlab test`: do the ranks that are here train, and rightly?"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from shardlab.cli.console import print_fact, print_json, stdout_console
from shardlab.cli.options import Flag, OptionalCount
from shardlab.rules.pieces import counted
from shardlab.train.launch_environment import require_port

if TYPE_CHECKING:
    from shardlab.doctor.smoke import SmokeResult


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

        from shardlab.cli.ranks import failures_as_exit
        from shardlab.doctor.smoke import STRATEGIES, smoke_rank
        from shardlab.execute.gpus import gpu_count
        from shardlab.train.launch import ranks_here, run_ranks

        ranks = self.ranks or ranks_here(gpu_count() or 2)
        began = time.monotonic()
        with failures_as_exit():
            result = run_ranks(ranks, smoke_rank, STRATEGIES)
        if result is None:  # a rank of an existing world, but not the one that reports
            return 0
        seconds, failures = time.monotonic() - began, result.failures()
        if self.json:
            print_json({**asdict(result), "ranks": ranks, "seconds": seconds, "failures": failures, "ok": not failures})
        else:
            _print(result, ranks, seconds)
        for failure in failures:
            print(f"shardlab: {failure}", file=sys.stderr)
        return bool(failures)


def _print(result: SmokeResult, ranks: int, seconds: float) -> None:
    console = stdout_console()
    for each in result.trained:
        far = f"{max(each.verdict.all):.1e} from one device; "
        twins = "the ranks are in sync" if not each.unequal else "the ranks differ"
        print_fact(console, each.strategy, far + twins, "" if each.ok else "red")
    if (point := result.all_reduce) is not None:
        print_fact(console, "all-reduce", f"{point.bus_bandwidth / 1e9:.2f} GB/s on the bus, of 8 MiB")
    for link in result.links:
        figures = f"latency {1e6 * link.latency:,.0f} us, {link.bandwidth / 1e9:.2f} GB/s"
        print_fact(console, "messages", f"rank {link.first} to {link.second}: {figures}")
    ended = ("failed", "red") if result.failures() else ("passed", "green")
    console.print(Text(f"\n{ended[0]} on {counted(ranks, 'rank')} in {seconds:.1f} s", ended[1]))
