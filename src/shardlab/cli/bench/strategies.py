"""`shardlab bench strategies`: time Shardlab's strategies and PyTorch's own implementations side by side.

A row of the result compares a pair of strategies at one size of the model. With --each-pass, a row compares one
strategy before and after each pass (`passes.py`). The measurement is in `shardlab.measure.side_by_side`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shardlab.cli.console import Report, print_path, stdout_console
from shardlab.cli.options import Count, Flag, writing
from shardlab.common.errors import find_by_name
from shardlab.common.files import atomic_file
from shardlab.common.text import counted
from shardlab.language import Refused, UserError
from shardlab.starting import INTERRUPTED
from shardlab.train.launch.environment import find_launch_environment

if TYPE_CHECKING:
    from shardlab.cli.bench.passes import PassesRow
    from shardlab.measure.side_by_side.results import Comparison, PairRow, Size, StrategyPair


@dataclass(frozen=True, kw_only=True)
class BenchStrategies:
    """Time our strategies against PyTorch's own: the same model, weights and data, with alternating steps.

    Losses must agree to 1e-4 before a time counts. Both sides run in the same processes, with fused AdamW, in float32.
    """

    ranks: Count = 2
    """Number of processes: 2 or 4."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(default: all)")] = ()
    """Strategies to time: ddp, zero-1, zero-3, fsdp, hsdp, tensor-parallel, gpipe, 1f1b, interleaved-1f1b, zb-v."""

    sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIZE ...", help_behavior_hint="(default: all)")] = ()
    """Models to time: small (4.9 million parameters, 2,048 tokens a step) and overhead (32 wide, 24 layers)."""

    turns: Count = 20
    """Number of timed steps of each side."""

    transport: Annotated[
        Literal["shared", "gloo"] | None, tyro.conf.arg(help_behavior_hint="(default: shared where possible)")
    ] = None
    """Transport of both sides: shared memory between the ranks of this host, or gloo's TCP."""

    passes: Annotated[str, tyro.conf.arg(metavar="all|none|NAME,...")] = "all"
    """Passes that rewrite our programs, with the settings that help on this machine, as in train."""

    each_pass: Flag = False
    """Time only our programs, before and after each pass, and compare its measured gain with the predicted one."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Write strategies.json, strategies.svg and strategies.png into this folder; with --each-pass, passes.json."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        from shardlab.measure.side_by_side.results import SIZES, PairRow, as_json, find_pairs

        pairs = find_pairs(self.only, self.passes)
        sizes = [find_by_name(SIZES, name, "size") for name in self.sizes] or list(SIZES.values())
        self._check()
        load, interrupted = os.getloadavg()[0], ""
        rows: list[PairRow | PassesRow] = []
        try:
            rows.extend(self._rows(pairs, sizes))
        except KeyboardInterrupt as interrupt:
            interrupted = f"interrupted after {{}}{f' ({interrupt})' if str(interrupt) else ''}"
        flags = f"--passes {self.passes}{' --each-pass' * self.each_pass}"
        if self.transport:
            flags += f" --transport {self.transport}"
        results = as_json([row.as_dict() for row in rows], self.ranks, self.turns, flags, load)
        if rows or self.json:
            self._report(rows, results).show(json=self.json)
        if self.out is not None:
            self._write(self.out, results, [row for row in rows if isinstance(row, PairRow)])
        if interrupted:
            print(f"shardlab: {interrupted.format(counted(len(rows), 'pair'))}", file=sys.stderr)
            return INTERRUPTED
        return 1 if any(row.failed for row in rows) else 0

    def _check(self) -> None:
        """Refuse options that cannot work, before anything is timed.

        Raises:
            UserError: with the reason.
        """
        if self.ranks < 2:
            raise UserError("one rank has no other rank to communicate with; give --ranks 2 or 4")
        if self.each_pass and self.transport:
            raise UserError("--each-pass times only our programs, by the fastest transport; leave --transport out")
        environment = find_launch_environment(os.environ)
        if environment is not None and environment.world > 1:
            raise UserError(
                "bench strategies starts its own processes for each pair; run it without a launcher, with --ranks"
            )
        if self.out is not None:
            if self.out.exists() and not self.out.is_dir():
                raise UserError(f"--out {self.out}: this is a file; name a folder")
            with writing("--out", self.out):
                self.out.mkdir(parents=True, exist_ok=True)

    def _report(self, rows: Sequence[PairRow | PassesRow], results: dict[str, Any]) -> Report:
        from shardlab.cli.bench.passes import add_passes
        from shardlab.cli.bench.report import add_rows
        from shardlab.measure.side_by_side.results import PairRow

        report = Report(**results)
        if self.each_pass:
            add_passes(report, [row for row in rows if not isinstance(row, PairRow)], self.ranks)
        else:
            add_rows(report, [row for row in rows if isinstance(row, PairRow)], self.ranks)
            transports = {row.compared.transport for row in rows if isinstance(row, PairRow) and row.compared}
            if transports:
                report.line(f"both sides communicate by {', '.join(sorted(transports))}")
        return report

    def _rows(self, pairs: Sequence[StrategyPair], sizes: Sequence[Size]) -> Iterator[PairRow | PassesRow]:
        from shardlab.cli.bench.passes import passes_row
        from shardlab.measure.progress import Progress

        progress = Progress(len(pairs) * len(sizes))
        try:
            for size in sizes:
                for pair in pairs:
                    sized = pair.sized(size, self.ranks)
                    if self.each_pass:
                        progress.say(f"each pass of {pair.name}, {size.name}")
                        yield passes_row(pair, sized, self.ranks, self.turns)
                    else:
                        progress.say(f"{pair.name} beside {pair.theirs}, {size.name}")
                        yield self._row(pair, sized)
                    progress.step()
        finally:
            progress.stop()

    def _row(self, pair: StrategyPair, size: Size) -> PairRow:
        from shardlab.cli.bench.passes import settle_pair
        from shardlab.measure.side_by_side.results import PairRow
        from shardlab.measure.side_by_side.sides import compare_rank
        from shardlab.train.faults import RankFailed
        from shardlab.train.launch.ranks import Rendezvous, run_ranks

        if why_not := pair.why_not(size, self.ranks):
            return PairRow(pair, size, None, why_not)
        try:
            pair = settle_pair(pair, size, self.ranks)
            arguments = pair, size, self.turns, self.transport or ""
            comparison = run_ranks(self.ranks, compare_rank, *arguments, joining=Rendezvous(dynamo=True))
        except (RankFailed, Refused, UserError) as error:
            return PairRow(pair, size, None, str(error), failed=True)
        if not comparison.agrees:
            reason = f"losses differ by {comparison.loss_error:.1e} (relative), so times do not count"
            return PairRow(pair, size, None, reason, failed=True)
        return PairRow(pair, size, comparison)

    def _write(self, folder: Path, results: dict[str, object], rows: Sequence[PairRow]) -> None:
        from shardlab.measure.plot import plot_strategies

        panels: dict[str, list[tuple[StrategyPair, Comparison]]] = defaultdict(list)
        for row in rows:
            if row.compared is not None:
                panels[row.size.title(self.ranks)].append((row.pair, row.compared))
        name = "passes.json" if self.each_pass else "strategies.json"
        files = [folder / name, *((folder / f"strategies.{end}") for end in ("svg", "png") if panels)]
        with writing("--out", folder):
            with atomic_file(files[0]) as part:
                part.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            if panels:
                plot_strategies(panels, files[1:])
        if not self.json:
            for file in files:
                print_path(stdout_console(), "written", file)
