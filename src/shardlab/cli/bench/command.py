"""`shardlab bench`: measure how fast this machine communicates and computes, and save the fit as its profile.

The profile is the cluster `local` of the simulator. `BenchCollectives` and `BenchCompute` share the options of
`Measuring`, whose `measure` starts the ranks, fits the points and prints them. `BenchStrategies` is in `strategies.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import subcommand

from shardlab.cli.bench.strategies import BenchStrategies
from shardlab.cli.console import Report, print_path
from shardlab.cli.options import Count, Flag, NewFile, OptionalCount, check_new_file, writing
from shardlab.common.errors import unknown_name
from shardlab.common.text import alternatives, parse_size, sizes_between
from shardlab.language import UserError
from shardlab.measure.fits import KINDS
from shardlab.starting import INTERRUPTED

if TYPE_CHECKING:
    from shardlab.measure.fits import Point


PLOTS = (".svg", ".png", ".pdf")
"""Formats of a plot. Shardlab writes a mark into such files, by which it recognizes its own."""

ProfileFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the user's cache)")]
"""Path of the profile, or None for the default."""


@dataclass(frozen=True)
class Bench:
    """Measure this machine and save the results as its profile; or compare our strategies with PyTorch's own."""

    what: Annotated[
        Annotated[BenchCollectives, subcommand("collectives", prefix_name=False)]
        | Annotated[BenchCompute, subcommand("compute", prefix_name=False)]
        | Annotated[BenchStrategies, subcommand("strategies", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Options of the benches that measure the profile."""

    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 0.2
    """Time for which each collective is measured at each size."""

    save: bool = True
    """Save the fit in this machine's profile."""

    profile: ProfileFile = None
    """Path of the profile. The name must end in .json, so that --cluster accepts it."""

    plot: NewFile = None
    """Draw the measurements into this file."""

    verbose: Flag = False
    """Also print every size and layer, and every fitted rate."""

    force: Flag = False
    """Replace --plot even if Shardlab did not write that file."""

    json: Flag = False
    """Print only JSON."""

    def measure(
        self,
        ranks: int,
        function: Callable[..., bool],
        bench: Any,
        show: Callable[[Report, list[Point], bool], None],
        draw: Callable[[list[Point], Path], None],
    ) -> int:
        """Run a bench on ranks, save and print the points, and return the exit status.

        If a rank fails or the user interrupts, the points so far are kept.

        Args:
            ranks: number of ranks.
            function: `function(rank, device, bench, file)` runs on each rank. It writes points into the file, and
                returns whether this process reports them.
            bench: plan of the measurement.
            show: function that adds the points to a report; its last argument is --verbose.
            draw: function that draws the points into a file.
        """
        from shardlab.measure.fits import read_points
        from shardlab.measure.profile import profile_to_update
        from shardlab.train.faults import RankFailed
        from shardlab.train.launch.ranks import run_ranks

        if self.profile is not None and self.profile.suffix != ".json":
            raise UserError(
                f"--profile {self.profile}: its name must end in .json, so that --cluster recognizes a profile"
            )
        if self.plot is not None and self.plot.suffix.lower() not in PLOTS:
            raise UserError(f"--plot {self.plot}: its name must end in {alternatives(PLOTS)}")
        if self.save:
            profile_to_update(self.profile)  # before minutes of measuring, not after
        failure, status, is_reporter = "", 0, True
        with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
            file = Path(folder, "points.jsonl")
            try:
                is_reporter = run_ranks(ranks, function, bench, file)
            except RankFailed as error:
                failure, status = str(error), 1
            except KeyboardInterrupt as interrupt:
                failure, status = f"interrupted{f' ({interrupt})' if str(interrupt) else ''}", INTERRUPTED
            points = read_points(file)
        if is_reporter and points:
            self._report(points, failure, show, draw)
        if failure:
            note = "; the above was measured before" if points and not self.json else ""
            print(f"shardlab: {failure}{note}", file=sys.stderr)
        return status

    def _report(
        self,
        points: list[Point],
        failure: str,
        show: Callable[[Report, list[Point], bool], None],
        draw: Callable[[list[Point], Path], None],
    ) -> None:
        from shardlab.measure.profile import as_json, save

        profile = save(points, self.profile) if self.save else None
        if self.plot is not None:
            with writing("--plot", self.plot):
                draw(points, self.plot)
        report = Report(**as_json(points), profile=None if profile is None else str(profile), failure=failure or None)
        show(report, points, self.verbose)
        for label, path in (("profile", profile), ("drawn in", self.plot)):
            if path is not None:
                report.draw(partial(print_path, label=label, path=path))
        report.show(json=self.json)


def check_seconds(seconds: float) -> float:
    """Return a number of seconds if it is positive and finite.

    Raises:
        UserError: if it is not.
    """
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds is {seconds}; give a positive number of seconds")
    return seconds


def default_ranks() -> int:
    """Return the default number of ranks: the launcher's, or one for each GPU, or one for each core without GPUs."""
    from shardlab.measure.profile import this_machine
    from shardlab.train.launch.ranks import launched_ranks

    return launched_ranks(this_machine().places)


@dataclass(frozen=True, kw_only=True)
class BenchCollectives(Measuring):
    """Time every collective at every size, as nccl-tests does, check its results, and fit latency and bandwidth."""

    ranks: OptionalCount = None
    """Number of ranks. Groups of every size that divides it are measured, too. Default: one for each GPU, or else each
    core, but at least two."""

    min: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "1KB"
    """Smallest size of the whole tensor."""

    max: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "64MB"
    """Largest size of the whole tensor."""

    factor: Count = 4
    """Ratio of each size to the previous one."""

    kinds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND ...", help_behavior_hint="(default: all)")] = ()
    """Collectives to measure: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
    barrier, send_recv."""

    overlap: bool = True
    """Also measure collectives between and during computations, as they occur in steps. The profile then holds these
    figures."""

    def run(self) -> int:
        from shardlab.cli.bench.report import add_collectives
        from shardlab.measure.collectives import CollectiveBench, group_sizes, measure_collectives
        from shardlab.measure.plot import plot_collectives

        check_new_file("--plot", self.plot, "collectives.svg", force=self.force)
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown_name("collective", kind, KINDS)
        ranks = self.ranks or max(2, default_ranks())
        if ranks < 2:
            raise UserError("one rank has no other rank to communicate with; give --ranks 2 or more")
        sizes = tuple(sizes_between(parse_size(self.min), parse_size(self.max), self.factor))
        seconds = check_seconds(self.seconds)
        bench = CollectiveBench(self.kinds or KINDS, sizes, group_sizes(ranks), seconds, overlap=self.overlap)
        return self.measure(ranks, measure_collectives, bench, add_collectives, plot_collectives)


@dataclass(frozen=True, kw_only=True)
class BenchCompute(Measuring):
    """Time the layers of the model in real training steps, and fit the speed of each kind of kernel."""

    ranks: OptionalCount = None
    """Number of processes that compute at once; one process alone is measured as well. Default: one for each GPU, or
    else each core."""

    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="C ...")] = (64, 128, 256, 512)
    """Features of a token."""

    batches: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROWSxTOKENS ...")] = ("1x64", "4x64", "2x256", "8x128")
    """Microbatches: numbers of sequences and of tokens in each."""

    dtype: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DTYPE ...")] = ("float32",)
    """Data types of weights and activations: float32, bfloat16, float16, float64."""

    vocab_size: Count = 256
    """Number of different tokens."""

    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 1.0
    """Time for which each model is trained."""

    def run(self) -> int:
        from shardlab.cli.bench.report import add_compute
        from shardlab.measure.fits import DTYPES, Shape, parse_batch
        from shardlab.measure.layers import ComputeBench, measure_compute
        from shardlab.measure.plot import plot_compute

        check_new_file("--plot", self.plot, "compute.svg", force=self.force)
        for dtype in self.dtype:
            if dtype not in DTYPES:
                raise unknown_name("dtype that can be measured", dtype, DTYPES)
        small = [width for width in self.widths if width < 8]
        if small:
            raise UserError(f"a width of {small[0]} is too small for a model with heads; give 8 or more")
        shapes = tuple(Shape(width, *parse_batch(batch)) for width in self.widths for batch in self.batches)
        bench = ComputeBench(shapes, self.dtype, self.vocab_size, seconds=check_seconds(self.seconds))
        return self.measure(self.ranks or default_ranks(), measure_compute, bench, add_compute, plot_compute)
