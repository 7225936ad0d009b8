"""Report of a priced simulation, for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_fact, print_figures, print_path, stdout_console
from shardlab.cli.priced import MOST_CHECKED, PricedStep
from shardlab.cli.timeline_rows import print_timeline
from shardlab.predict.held import left_out
from shardlab.rules.pieces import counted
from shardlab.timeline.traced import rank_of, stands_for
from shardlab.timeline.units import bytes_text, room_text, seconds_text, share_text, unit_of

NAMED_STAGES = 4
"""Stages of folded ranks that are named at most: the first ones and the last."""

DRAWN_OPS = 200_000
"""Ops of which a timeline is drawn in the terminal at most; more would take longer than the simulation."""


def print_priced(result: PricedStep, written: list[Path], console: Console | None = None) -> None:
    """Print all of it; `written` are the files that were made."""
    from shardlab.predict.assumed_figures import assumed_figures
    from shardlab.predict.recipe import OWN

    console = console or stdout_console()
    workload, estimate = result.workload, result.estimate
    model, cluster = result.names
    console.print(Text.assemble((result.entry.name, "bold cyan"), f" of {model} on {cluster}"), soft_wrap=True)
    micro_batch_size = f"{counted(workload.micro_batch_size, 'sequence')} of {workload.model.seq_len} tokens"
    microbatches = counted(workload.microbatches, "microbatch")
    batch = f"global batch {workload.microbatches * workload.micro_batch_size:,}: {microbatches} of {micro_batch_size}"
    recipe = "" if workload.recipe == OWN else f", as {workload.recipe.name} runs it"
    console.print(f"{workload.mesh}, {batch}, {workload.precision.name}{recipe}\n", style="dim")
    print_figures(console, _figures(result))
    ops = sum(map(len, estimate.traced.program.tapes))
    print_fact(console, "ops", f"{ops:,}, of {_simulated(result)}")
    print_fact(console, "check", _checked(result))
    if assumed := assumed_figures(workload):
        print_fact(console, "assumed", ", ".join(assumed))
    for note in result.notes:
        print_fact(console, "note", note)
    if ops <= DRAWN_OPS:
        console.print()
        _print_ranks(console, result)
    for path in written:
        print_path(console, "written to", path)


def _figures(result: PricedStep) -> list[tuple[str, str, str]]:
    """List the figures, each with its label and a remark."""
    workload, estimate = result.workload, result.estimate
    step, peak, held, device = estimate.step, estimate.peak, result.held, workload.cluster.device
    speed, parts = workload.tokens / step, _parts(held.total, held.parts)
    return [
        ("step time", seconds_text(step), ""),
        ("tokens/s", f"{speed:,.0f}", f"{speed / workload.mesh.world:,.0f} on each device"),
        ("MFU", share_text(workload.mfu(step)), f"of {device.name}'s {workload.precision.compute} peak"),
        ("compute", f"{estimate.compute_share:.1%}", "of the step, the mean over ranks"),
        ("exposed", f"{estimate.exposed_share:.1%}", "compute waits for communication: " + _exposed(result)),
        ("bubble", f"{estimate.bubble_share:.1%}", "a rank waits for others, or has ended"),
        (
            "peak memory",
            bytes_text(peak.bytes),
            f"of tensors, on rank {peak.rank}: {peak.cause}",
        ),
        ("", "", _parts(peak.bytes, peak.by_category)),
        (
            "memory held",
            bytes_text(held.total),
            "; ".join(filter(None, (f"of {room_text(device.memory)}: {parts}", left_out(workload)))),
        ),
    ]


def _parts(all: float, parts: Mapping[str, float]) -> str:
    """What memory is made of, in the unit of all of it; what would be shown as nothing is left out."""
    _, size = unit_of(all)
    shares = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {bytes / size:,.2f}" for part, bytes in shares if bytes >= 0.005 * size)


def _exposed(result: PricedStep) -> str:
    shown = [(key, share) for key, share in result.estimate.exposed.items() if share >= 0.0005][:4]
    return ", ".join(f"{kind.replace('_', '-')} on {axis} {share:.1%}" for (kind, axis), share in shown) or "none"


def _simulated(result: PricedStep) -> str:
    """Say how many ranks were simulated, and which stand for which."""
    program, ranks = result.estimate.traced.program, result.workload.mesh.world
    if program.ranks == ranks:
        return counted(ranks, "rank")
    stood = [stands_for(program, row) for row in range(program.ranks)]
    stages = [f"rank {rank_of(program, row)} for {alike[0]}-{alike[-1]}" for row, alike in enumerate(stood)]
    if len(stages) > NAMED_STAGES:
        stages[NAMED_STAGES - 1 : -1] = ["..."]
    return f"{program.ranks:,} of {ranks:,} ranks, which represent identical ranks: {', '.join(stages)}"


def _checked(result: PricedStep) -> str:
    if result.checked:
        return "passed"
    return f"skipped above {MOST_CHECKED:,} ops over all ranks; use fewer ranks, layers or microbatches to check"


def _print_ranks(console: Console, result: PricedStep) -> None:
    """A row of signs for each rank, with its peak memory."""
    timeline, peaks = result.estimate.timeline(), result.estimate.peaks
    memory = [f"{bytes_text(peak.bytes):>11}" for peak in peaks]
    print_timeline(console, timeline, lambda row: rank_of(timeline.program, row), [("peak memory", memory)], label=6)
