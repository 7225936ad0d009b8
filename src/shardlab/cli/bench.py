"""`shardlab bench`: how fast this machine communicates and computes; kept as its profile, for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import subcommand

from shardlab.cli.measuring import Measuring, check_seconds, default_ranks
from shardlab.cli.new_file import check_new_file
from shardlab.cli.options import Count, OptionalCount
from shardlab.cli.strategies_bench import BenchStrategies
from shardlab.errors import unknown
from shardlab.measure.points import KINDS
from shardlab.measure.sizes import parse_size, sizes_between
from shardlab.program import UserError


@dataclass(frozen=True, kw_only=True)
class BenchCollectives(Measuring):
    """Time every collective at every size, as nccl-tests does, check its results, and fit latency and bandwidth."""

    ranks: OptionalCount = None
    """Number of ranks. Groups of every divisor are measured. Default: one for each GPU, or else each core, but at least
    two."""

    min: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "1KB"
    """Smallest size of the whole value."""

    max: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "64MB"
    """Largest size of the whole value."""

    factor: Count = 4
    """Ratio of each size to the previous one."""

    kinds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND ...", help_behavior_hint="(default: all)")] = ()
    """Collectives to measure: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
    barrier, send_recv."""

    overlap: bool = True
    """Also measure collectives between and during computations, as they occur in steps. The profile then holds these
    figures."""

    def run(self) -> int:
        from shardlab.cli.bench_summary import print_collectives
        from shardlab.measure.collectives import CollectiveBench, group_sizes, measure_collectives
        from shardlab.measure.plot import plot_collectives

        check_new_file("--plot", self.plot, "collectives.svg", force=self.force)
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("collective", kind, KINDS)
        ranks = self.ranks or max(2, default_ranks())
        if ranks < 2:
            raise UserError("one rank has no other rank to communicate with; give --ranks 2 or more")
        sizes = tuple(sizes_between(parse_size(self.min), parse_size(self.max), self.factor))
        seconds = check_seconds(self.seconds)
        bench = CollectiveBench(self.kinds or KINDS, sizes, group_sizes(ranks), seconds, overlap=self.overlap)
        return self.measure(ranks, measure_collectives, bench, print_collectives, plot_collectives)


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
        from shardlab.cli.bench_summary import print_compute
        from shardlab.measure.layers import ComputeBench, measure_compute
        from shardlab.measure.plot import plot_compute
        from shardlab.measure.shapes import DTYPES, Shape, parse_batch

        check_new_file("--plot", self.plot, "compute.svg", force=self.force)
        for dtype in self.dtype:
            if dtype not in DTYPES:
                raise unknown("dtype that can be measured", dtype, DTYPES)
        small = [width for width in self.widths if width < 8]
        if small:
            raise UserError(f"a width of {small[0]} is too small for a model with heads; give 8 or more")
        shapes = tuple(Shape(width, *parse_batch(batch)) for width in self.widths for batch in self.batches)
        bench = ComputeBench(shapes, self.dtype, self.vocab_size, seconds=check_seconds(self.seconds))
        return self.measure(self.ranks or default_ranks(), measure_compute, bench, print_compute, plot_compute)


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
