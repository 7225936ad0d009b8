"""Editors of `shardlab view --edit`, which check each version of a schedule or a program.

An editor has a starting text and checks each version of it. The result (`Judgement`) says whether the version is
accepted, and contains the error if it is not, or the simulated step if it is.
`ScheduleEditor` edits the actions of a pipeline's ranks, as a CSV text of PyTorch. `ProgramEditor` edits a file with a
strategy. `ScheduleLevel` and `ProgramLevel` do the same for an exercise of the course, with its goals (`level_editor`).
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardlab.check import Checked, check
from shardlab.cli.plan_options import checked
from shardlab.cli.simulate.command import sizes_text
from shardlab.cli.simulate.step_options import StepOptions
from shardlab.cli.step_request import StepRequest
from shardlab.common.fields import as_flags
from shardlab.common.text import counted
from shardlab.common.user_code import file_and_name, load_module
from shardlab.draw.viewer.columns import encode
from shardlab.draw.viewer.step_tables import ShownTimeline, Step, step_tables
from shardlab.language import Mesh, Refused, Sizes, UserError, trace
from shardlab.learn.course.catalogue import CourseEntry, course
from shardlab.learn.course.folder import grade_file
from shardlab.learn.course.grading import ExerciseGrade, grade
from shardlab.simulate.passes import apply_passes
from shardlab.simulate.timeline import TEACHING_COSTS, schedule_bubble, simulate
from shardlab.simulate.timeline.critical_path import critical_path
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Clocks, element_counters
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.registry import data_parallel_mesh
from shardlab.strategies.schedules import Action, Schedule
from shardlab.strategies.schedules.files import schedule_files
from shardlab.strategies.schedules.pytorch_csv import ACTIONS, check_rows, export_csv, parse_cells

LEVELS = range(13, 21)
"""Numbers of the exercises on pipelines."""


@dataclass(frozen=True)
class Judgement:
    """Result of checking the text of a schedule or a program.

    Attributes:
        sentence: error ("": none); for an exercise of the course, its verdict and the figures with their goals.
        legal: whether the check accepts the text. Goals of an exercise may still be missed.
        step: step of the schedule or the program (None: the text is wrong).
        files: files to save, by name.
    """

    sentence: str
    legal: bool
    step: Step | None = None
    files: dict[str, str] = field(default_factory=dict[str, str])

    def as_dict(self) -> dict[str, Any]:
        """Return the judgement as JSON for the page."""
        answer: dict[str, Any] = {"sentence": self.sentence, "legal": self.legal, "files": self.files}
        if self.step is not None:
            timeline = self.step.timelines[0].timeline
            bubble = self.step.timelines[0].bubble if timeline.program.mesh.sizes()["pp"] > 1 else None
            answer["figures"] = {"time": timeline.end, "memory": timeline.peak_memory, "bubble": bubble}
            answer["data"] = encode(step_tables(self.step))
        return answer


class Editor(ABC):
    """Editor of a text.

    Attributes:
        name: name of the edited schedule or program.
        start: starting text.
        is_schedule: whether the text is a schedule, rather than a program.
    """

    name: str
    start: str
    is_schedule: bool

    def judge(self, text: str) -> Judgement:
        """Return the judgement of a text."""
        try:
            return self._judge_text(text)
        except (UserError, Refused) as error:
            return Judgement(str(error), legal=False)

    def close(self) -> None:
        """Remove the editor's temporary files."""
        return

    @abstractmethod
    def _judge_text(self, text: str) -> Judgement:
        """Judge a text.

        Raises:
            UserError, Refused: if it is wrong.
        """


class ScheduleEditor(Editor):
    """Editor of the schedule of a pipeline.

    Args:
        name: name of the strategy.
        plan: plan whose schedule is edited.
        sizes: sizes of the model.
        microbatches: microbatches of the global batch.
        costs: times of ops.
    """

    is_schedule = True

    def __init__(self, name: str, plan: Plan, sizes: Sizes, microbatches: int, costs: Prices) -> None:
        self.name, self.plan, self.sizes, self.microbatches, self.costs = name, plan, sizes, microbatches, costs
        steps = plan.steps(model_layers(sizes).pipeline_units, microbatches)
        self.start = export_csv(steps, form="compute_only")

    def _judge_text(self, text: str) -> Judgement:
        schedule = schedule_of(text, self.plan.mesh.pp, self.microbatches // self.plan.data_ranks)
        plan = replace(self.plan, schedule=schedule, stages_per_rank=None)
        program = trace(program_from_plan(plan), plan.mesh, self.sizes, self.microbatches)
        proof = apply_passes(check(program), plan.passes or "none")
        steps = plan.steps(model_layers(self.sizes).pipeline_units, self.microbatches)
        return Judgement("", legal=True, step=_step(self.name, proof, self.costs), files=schedule_files(steps))


class ScheduleLevel(Editor):
    """Editor of the schedule that an exercise of the course asks for.

    Args:
        entry: the exercise.
    """

    is_schedule = True

    def __init__(self, entry: CourseEntry) -> None:
        self.entry, self.exercise = entry, entry.exercise
        self.name = level_title(entry)
        self.start = export_csv(
            self._plan(_start_of(entry)).steps(self._units, self._microbatches), form="compute_only"
        )

    def _judge_text(self, text: str) -> Judgement:
        schedule = schedule_of(text, self.exercise.mesh.pp, self._microbatches)
        files = schedule_files(self._plan(schedule).steps(self._units, self._microbatches))
        return _judgement(self.name, grade(self.exercise, schedule), files)

    def _plan(self, schedule: Schedule) -> Plan:
        return Plan(self.exercise.mesh, schedule=schedule, stages_per_rank=self.exercise.stages_per_rank)

    @property
    def _microbatches(self) -> int:
        return self.exercise.microbatches

    @property
    def _units(self) -> int:
        layers = self.exercise.layers
        return layers if isinstance(layers, int) else model_layers(layers).pipeline_units


class FileEditor(Editor):
    """Editor of a Python file. Each version of it is written into the editor's temporary folder, and loaded from there.

    Args:
        name: name of the edited schedule or program.
        file: name of the file.
        start: starting text.
    """

    is_schedule = False

    def __init__(self, name: str, file: str, start: str) -> None:
        self.name, self.start = name, start
        self._folder = tempfile.TemporaryDirectory(prefix="shardlab-edit-")
        self._path = Path(self._folder.name) / file

    def close(self) -> None:
        self._folder.cleanup()

    def judge(self, text: str) -> Judgement:
        self._path.write_text(text, encoding="utf-8")
        judgement = super().judge(text)
        return replace(judgement, sentence=judgement.sentence.replace(f"{self._folder.name}/", ""))


class ProgramEditor(FileEditor):
    """Editor of a user's file with a strategy. The file itself is not changed.

    Args:
        path, function: path of the file, and name of the strategy in it.
        mesh: grid of the ranks, unless the file defines another one.
        sizes: sizes of the model.
        microbatches: microbatches of the global batch.
        costs: times of ops.
    """

    def __init__(self, path: Path, function: str, mesh: Mesh, sizes: Sizes, microbatches: int, costs: Prices) -> None:
        super().__init__(f"{path}:{function}", path.name, path.read_text(encoding="utf-8"))
        self.function, self.mesh = function, mesh
        self.sizes, self.microbatches, self.costs = sizes, microbatches, costs

    def _judge_text(self, text: str) -> Judgement:
        entry = load(f"{self._path}:{self.function}")
        ranks = self.mesh.world if entry.plan is None else entry.ranks
        if entry.mesh is data_parallel_mesh:
            entry = entry.on_mesh(self.mesh)
        proof = apply_passes(checked(entry, ranks, self.sizes, self.microbatches), entry.passes_on(ranks))
        return Judgement("", legal=True, step=_step(self.name, proof, self.costs), files={self._path.name: text})


class ProgramLevel(FileEditor):
    """Editor of the program that an exercise of the course asks for.

    Args:
        entry: the exercise.
    """

    def __init__(self, entry: CourseEntry) -> None:
        self.entry = entry
        super().__init__(level_title(entry), f"{entry.name}.py", entry.start_text)

    def _judge_text(self, text: str) -> Judgement:
        return _judgement(self.name, grade_file(self.entry, self._path), {self._path.name: text})


def editor_of(options: StepOptions) -> Editor:
    """Return the editor for a step: a program's editor if a file is given, else a schedule's.

    Raises:
        UserError: if the step has neither.
    """
    request = StepRequest.of(options)
    if options.is_priced(request):
        raise UserError("--edit shows a step in time units; leave out --model and --cluster")
    step = options.step_in_units(request)
    program = step.proof.program
    path, function = file_and_name(step.entry.name)
    if path is not None:
        if flags := as_flags(options.layout.flag_values()):
            raise UserError(f"--edit runs {step.entry.name} as its file says; leave out {flags}")
        return ProgramEditor(path, function, program.mesh, program.sizes, program.microbatches, step.costs)
    plan = step.entry.plan(step.ranks) if step.entry.plan is not None else None
    if plan is None or plan.mesh.pp < 2:
        raise UserError(
            f"{step.entry.name} has no schedule to edit; give a pipeline, such as --pp 4 --schedule 1f1b, or a program "
            "as path/to/file.py:function"
        )
    return ScheduleEditor(step.entry.title(step.ranks), plan, program.sizes, program.microbatches, step.costs)


def levels() -> list[CourseEntry]:
    """Return the course's exercises on pipelines."""
    return [entry for entry in course() if entry.exercise.number in LEVELS]


def level_editor(entry: CourseEntry) -> Editor:
    """Return the editor for an exercise, which asks for a schedule or a program."""
    return ScheduleLevel(entry) if entry.exercise.kind == "schedule" else ProgramLevel(entry)


def level_title(entry: CourseEntry) -> str:
    """Return the number and the title of an exercise."""
    return f"{entry.exercise.number}: {entry.exercise.title}"


def schedule_of(text: str, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of a CSV text. Messages in the text are left out.

    Args:
        ranks: number of ranks of the pipeline.
        microbatches: number of microbatches of the pipeline.

    Raises:
        UserError: if the schedule cannot be executed to its end (the error names the cell), or has other numbers of
            ranks or microbatches than the pipeline.
    """
    rows = parse_cells(text)
    placement = check_rows(rows)
    microbatch_count = len({cell.microbatch for row in rows for cell in row if cell.kind in ACTIONS})
    if (len(rows), microbatch_count) != (ranks, microbatches):
        raise UserError(
            f"the schedule has {counted(len(rows), 'rank')} and {counted(microbatch_count, 'microbatch')}; "
            f"the pipeline has {ranks} and {microbatches}"
        )
    steps = [[cell.step(placement) for cell in row] for row in rows]
    actions = [[step for step in row if isinstance(step, Action)] for row in steps]
    stages, rest = divmod(len(placement), ranks)
    if rest:
        raise UserError(f"the schedule has {len(placement)} stages, which do not divide among {ranks} ranks")

    def of_rank(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
        return iter(actions[rank])

    return Schedule("edited", of_rank, "the page", lambda stage, ranks: placement[stage], stages)


def _judgement(name: str, result: ExerciseGrade, files: dict[str, str]) -> Judgement:
    """Convert the grade of an exercise into a judgement."""
    step = None if result.checked is None else _step(name, result.checked, TEACHING_COSTS)
    return Judgement(
        f"{result.verdict} {result.goals_text}".strip(), legal=result.checked is not None, step=step, files=files
    )


def _start_of(entry: CourseEntry) -> Schedule:
    """Return the initial schedule of an exercise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{entry.name}.py"
        path.write_text(entry.start_text, encoding="utf-8")
        start = getattr(load_module(path), entry.name)
    if isinstance(start, Schedule):
        return start
    return Schedule(entry.name, start, stages_per_rank=entry.exercise.stages_per_rank)


def _step(name: str, proof: Checked, costs: Prices) -> Step:
    times = Clocks(proof, costs).run()
    timeline = simulate(proof, costs)
    path, free = critical_path(proof, times), schedule_bubble(proof, costs)
    shown_timeline = ShownTimeline("", timeline, element_counters(proof, times), path, free)
    return Step(name, sizes_text(proof), proof, [shown_timeline])
