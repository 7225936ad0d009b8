"""`shardlab view`: write an interactive page of a step as one HTML file, and print its figures.

`View.run` shows a step that `shardlab simulate` would simulate (`_simulate_step`), a traced run (`_run`), or a trace
(`_trace`). Each of these methods returns the packed tables of the page and the figures of its timelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from shardlab.cli.compare import traced_run
from shardlab.cli.console import print_path
from shardlab.cli.options import Flag, NewFile, check_new_file, option_values, writing
from shardlab.cli.simulate.command import sizes_text
from shardlab.cli.simulate.step_options import StepOptions
from shardlab.cli.step_request import StepRequest
from shardlab.cli.view.report import figures_report
from shardlab.common.files import missing_path
from shardlab.common.text import counted
from shardlab.common.user_code import file_and_name
from shardlab.language import UserError
from shardlab.simulate.timeline import schedule_bubble, simulate
from shardlab.simulate.timeline.critical_path import critical_path
from shardlab.simulate.timeline.figures import Figures
from shardlab.simulate.timeline.prices import stands_for
from shardlab.simulate.timeline.run import Clocks, element_counters, memory_counters

if TYPE_CHECKING:
    from shardlab.draw.viewer.source_lines import SourcePlace
    from shardlab.draw.viewer.step_tables import Step
    from shardlab.simulate.timeline.prices import Traced
    from shardlab.strategies.registry import StrategyEntry

DEFAULT_PAGE = Path("view.html")

MOST_OPS = 1_000_000
"""Largest number of ops on a page. The page then has about ten megabytes."""

MOST_LINES = 300_000
"""Largest number of ops for which the lines of the program are looked up."""

RUN_OPTIONS = ("cluster", "recipe", "other_machine")
"""Options that are allowed with a traced run, because its prediction uses them."""


@dataclass(frozen=True)
class PageContents:
    """Contents of a page.

    Attributes:
        title, note: title of the page, and the sentence below it.
        packed: tables that the page shows, as bytes (`step_tables`, `trace_tables`).
        timelines: figures of each timeline by its name.
        in_seconds: whether the times of the figures are in seconds, rather than in units.
        rows: names of the timelines' rows.
        remarks: sentences below the figures.
    """

    title: str
    note: str
    packed: bytes
    timelines: Mapping[str, Figures]
    in_seconds: bool
    rows: Sequence[str]
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class View(StepOptions):
    """Write an interactive page of a step: one HTML file without a server, and print the figures of the step.

    The page has a timeline of all ranks with zoom, memory by category, the inputs, outputs and waits of each op, and
    the critical path. The options of a step are those of simulate. For a traced run (shardlab train --trace), the page
    shows the prediction above the measurement.
    """

    strategy: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="STRATEGY|RUN|TRACE|JOB", help_behavior_hint=""),
    ] = None
    """Built-in name, or path/to/file.py:function; folder of a traced run; trace.json written by --trace; or job.toml.
    Leave it out for a plan by flags or --plan."""

    out: NewFile = None
    """Write the page into this file (default: view.html; none with --json)."""

    force: Flag = False
    """Replace a file that Shardlab did not write."""

    json: Flag = False
    """Print only JSON: the figures of the step."""

    edit: Flag = False
    """Serve a page on this machine in which the schedule of a pipeline, or a program, is edited beside its picture.
    Each version is checked at once. Ctrl-C ends it."""

    def run(self) -> int:
        if self.edit:
            return self._edit()
        out = self.out or (None if self.json else DEFAULT_PAGE)
        if self.force and out is None:
            raise UserError("--force replaces a page, but none is written with --json; give --out, or leave it out")
        check_new_file("--out", out, DEFAULT_PAGE.name, force=self.force)
        page = self._contents()
        if out is not None:
            from shardlab.draw.viewer.page import save_page

            with writing("--out", out):
                save_page(page.packed, page.title, out)
        report = figures_report(page.title, page.note, page.timelines, page.rows, in_seconds=page.in_seconds)
        report.data["remarks"] = list(page.remarks)
        for remark in page.remarks:
            report.line(Text(remark, "yellow"))
        if out is not None:
            report.data["page"] = str(out)
            report.line()
            report.draw(lambda console: print_path(console, "page", out))
        report.show(json=self.json)
        return 0

    def _edit(self) -> int:
        if self.out is not None or self.json or self.force:
            raise UserError("--edit writes no page and prints no figures; leave out --out, --json and --force")
        from shardlab.cli.view.edit import EditServer
        from shardlab.cli.view.editing import editor_of

        server = EditServer(editor_of(self))
        print(f"editing {server.editors[''].name} at {server.address}", flush=True)
        print("Ctrl-C ends it", flush=True)
        server.serve()
        return 0

    def _contents(self) -> PageContents:
        path = Path(self.strategy) if self.strategy is not None else None
        if path is None or self.strategy is None:
            return self._simulate_step()
        if path.is_dir():
            return self._run(path)
        if path.suffix == ".json":
            return self._trace(path)
        if path.suffix == ".toml":
            if self.config is not None:
                raise UserError(f"both {path} and --config {self.config} are given; give one of them")
            return replace(self, strategy=None, config=path)._simulate_step()
        if len(path.parts) > 1 and not path.exists() and file_and_name(self.strategy)[0] is None:
            raise missing_path(path, "name a run, as in runs/fsdp-1, or a strategy")
        if path.is_file() and path.suffix != ".py":
            advice = f"; a schedule is given as --pp N --schedule {path}" if path.suffix == ".csv" else ""
            raise UserError(
                f"{path} is no strategy (file.py:function), run (a folder), trace (.json) or job (.toml){advice}"
            )
        return self._simulate_step()

    def _simulate_step(self) -> PageContents:
        """Return the page of a simulated step."""
        request = StepRequest.of(self)
        step = self._in_seconds(request) if self.is_priced(request) else self._in_units(request)
        return _contents_of_step(step)

    def _in_units(self, request: StepRequest) -> Step:
        from shardlab.draw.viewer.step_tables import ShownTimeline, Step

        step = self.step_in_units(request)
        _require_few_ops(step.proof)
        times = Clocks(step.proof, step.costs).run()
        timeline = ShownTimeline(
            "",
            simulate(step.proof, step.costs),
            element_counters(step.proof, times),
            critical_path(step.proof, times),
            schedule_bubble(step.proof, step.costs),
        )
        return Step(
            step.entry.title(step.ranks),
            sizes_text(step.proof),
            step.proof,
            [timeline],
            _schedule_of(step.entry, step.ranks),
            _lines_of(step.entry, step.proof),
        )

    def _in_seconds(self, request: StepRequest) -> Step:
        from shardlab.cli.simulate.priced import price, traced_estimate
        from shardlab.draw.viewer.step_tables import ShownTimeline, Step

        result = price(request)
        estimate, ranks = traced_estimate(result, "the page"), result.workload.mesh.world
        traced = estimate.traced
        _require_few_ops(traced)
        counters = memory_counters(traced, estimate.times)
        free = schedule_bubble(traced, result.workload.prices)
        timeline = ShownTimeline("", estimate.timeline(), counters, critical_path(traced, estimate.times), free)
        title = f"{result.entry.title(ranks)} of {request.model} on {request.cluster}"
        note = f"{result.workload.mesh}, {counted(result.workload.microbatches, 'microbatch')}"
        schedule = _schedule_of(result.entry, ranks)
        return Step(title, note, traced, [timeline], schedule, _lines_of(result.entry, traced), result.notes)

    def _run(self, folder: Path) -> PageContents:
        """Return the page of a traced run: the measurement, and above it the prediction if there is one."""
        from shardlab.draw.viewer.step_tables import ShownTimeline, Step

        self._refuse_step_options(f"{folder} is a run", RUN_OPTIONS)
        run = traced_run(folder, self.cluster, self.recipe, other_machine=self.other_machine)
        _require_few_ops(run.checked)
        measured, remarks = run.measured, [f"incomplete: {sentence}" for sentence in run.measured.missing]
        timelines = [ShownTimeline("measured", measured.timeline, measured.counters)]
        if run.estimate is not None and run.prices is not None:
            counters = memory_counters(run.estimate.traced, run.estimate.times)
            path = critical_path(run.estimate.traced, run.estimate.times)
            free = schedule_bubble(run.estimate.traced, run.prices)
            timelines.insert(0, ShownTimeline("predicted", run.estimate.timeline(), counters, path, free))
        else:
            remarks.append("there is no prediction, because this machine is not measured yet; give --cluster")
        remarks += [run.limit] if run.limit else []
        entry = run.job.entry
        schedule, lines = _schedule_of(entry, run.job.ranks), _lines_of(entry, run.checked)
        return _contents_of_step(Step(run.title, str(folder), run.checked, timelines, schedule, lines, remarks))

    def _trace(self, path: Path) -> PageContents:
        from shardlab.draw.viewer.trace_file import read_trace_file, trace_tables

        self._refuse_step_options(f"{path} is a trace", ())
        timelines = read_trace_file(path)
        packed = trace_tables(path.stem, str(path), timelines)
        figures, rows = {trace.name: trace.figures for trace in timelines}, [rank.name for rank in timelines[-1].ranks]
        return PageContents(path.stem, str(path), packed, figures, in_seconds=True, rows=rows)

    def _refuse_step_options(self, subject: str, but: tuple[str, ...]) -> None:
        """Refuse options of a step, except those in `but`, for a run or a trace, which already determines its step."""
        defaults = option_values(View())
        for name, value in option_values(self).items():
            if name not in {"strategy", "out", "force", "json", *but} and value != defaults[name]:
                raise UserError(f"{subject}, which has its own step; leave out --{name.replace('_', '-')}")


def _contents_of_step(step: Step) -> PageContents:
    from shardlab.draw.rows import ranks_text
    from shardlab.draw.viewer.step_tables import step_tables

    figures = {timeline.name: values for timeline, values in zip(step.timelines, step.figures, strict=True)}
    in_seconds, program = step.timelines[0].timeline.in_seconds, step.traced.program
    rows = [ranks_text(stands_for(program, row)) for row in range(program.ranks)]
    return PageContents(step.title, step.note, step_tables(step), figures, in_seconds, rows, step.remarks)


def _schedule_of(entry: StrategyEntry, ranks: int) -> str:
    return entry.plan(ranks).schedule_name if entry.plan is not None else ""


def _lines_of(entry: StrategyEntry, traced: Traced) -> list[list[SourcePlace | None]]:
    """Return the source line of each op. The result is empty if ranks are folded, or there are too many ops."""
    from shardlab.draw.viewer.source_lines import source_lines

    program = traced.program
    if program.ranks != program.mesh.world or sum(map(len, program.tapes)) > MOST_LINES:
        return []
    return source_lines(entry.program, program)


def _require_few_ops(traced: Traced) -> None:
    ops = sum(map(len, traced.program.tapes))
    if ops > MOST_OPS:
        raise UserError(
            f"{ops:,} ops are too many for a page of at most {MOST_OPS:,}; take fewer ranks, layers or microbatches"
        )
