"""Steps for the tests of the page: simulated, with a prediction above a measurement, and read from a trace."""

from __future__ import annotations

from pathlib import Path

from shardlab.api import check, simulate
from shardlab.check import Checked
from shardlab.draw.trace_events import save_trace_events
from shardlab.draw.viewer.source_lines import source_lines
from shardlab.draw.viewer.step_tables import ShownTimeline, Step, step_tables
from shardlab.draw.viewer.trace_file import read_trace_file, trace_tables
from shardlab.language import Mesh
from shardlab.simulate.timeline import TEACHING_COSTS, Timeline, schedule_bubble
from shardlab.simulate.timeline.critical_path import critical_path
from shardlab.simulate.timeline.run import Clocks, element_counters
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan

LARGE = Plan(Mesh(pp=64), schedule="1f1b")


def step_of(name: str, *, ranks: int = 4) -> Step:
    """A built-in strategy in teaching costs, with the lines of its program."""
    checked = check(name, ranks=ranks)
    lines = source_lines(STRATEGIES[name].program, checked.program)
    return Step(name, "", checked, [predicted(checked)], schedule=name, lines=lines)


def predicted(checked: Checked, name: str = "") -> ShownTimeline:
    """The timeline of a program in teaching costs."""
    times = Clocks(checked, TEACHING_COSTS).run()
    timeline = simulate(checked, TEACHING_COSTS)
    path, free = critical_path(checked, times), schedule_bubble(checked, TEACHING_COSTS)
    return ShownTimeline(name, timeline, element_counters(checked, times), path, free)


def slower(timeline: Timeline) -> Timeline:
    """A timeline as a measurement might be: from the middle of the step on, all takes twice as long."""
    middle = timeline.end / 2

    def later(time: float) -> float:
        return time + max(0.0, time - middle)

    events = [[e._replace(start=later(e.start), end=later(e.end)) for e in row] for row in timeline.events]
    return Timeline(timeline.program, events, timeline.in_seconds)


def two_timelines() -> Step:
    """A prediction above what could be its measurement."""
    checked = check("zero-2", ranks=4)
    one = predicted(checked, "predicted")
    return Step("zero-2", "", checked, [one, ShownTimeline("measured", slower(one.timeline), one.counters)])


def tables_of_trace(path: Path) -> bytes:
    """GPipe, written as a trace and read from it."""
    step = step_of("gpipe")
    (view,) = step.timelines
    save_trace_events({"": (view.timeline, view.counters)}, path)
    return trace_tables("gpipe", "", read_trace_file(path))


def large_step(microbatches: int = 256) -> Step:
    """64 ranks with many microbatches."""
    checked = check(LARGE, layers=64, microbatches=microbatches)
    return Step("large", "", checked, [predicted(checked)], "1f1b")


def write_tables(folder: Path) -> None:
    """Write the tables of all steps that the tests of the scripts read."""
    for name in ("gpipe", "fsdp", "pipeline"):
        (folder / f"{name}.bin").write_bytes(step_tables(step_of(name)))
    (folder / "two.bin").write_bytes(step_tables(two_timelines()))
    (folder / "trace.bin").write_bytes(tables_of_trace(folder / "trace.json"))
    (folder / "large.bin").write_bytes(step_tables(large_step(32)))
