"""Grading: the result of a solution of an exercise, and advice on what to look at next.

`grade` is the entry point. A solution is checked, simulated in teaching costs (or predicted on the exercise's cluster),
and compared with the techniques and the goals of its exercise, in this order. The first failure is the *finding*. If
one of the exercise's mistakes matches the finding, its advice is shown; otherwise that of `_general_advice`. Refusals
by some rules have the same advice in all exercises (`ADVICE_OF_CALLS`, `ADVICE_OF_STEPS`).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from shardlab.check import BACKENDS, Checked
from shardlab.check import check as check_program
from shardlab.check.report import Retrace
from shardlab.common.errors import error_text
from shardlab.common.text import wrap_words
from shardlab.common.user_code import Endless, SourceLine, Stalled, at_line, line_of_error, never_awaited, run_stepwise
from shardlab.language import OpKind, Refused, Spec, UserError, World, trace
from shardlab.language.precision import find_precision
from shardlab.learn.course.catalogue import find as find_exercise
from shardlab.learn.course.exercise import Exercise, Mistake
from shardlab.learn.course.techniques import COMPUTES, live_values, values_text
from shardlab.learn.puzzles.calls import dropped_coroutine
from shardlab.learn.puzzles.grader import TEXT_WIDTH, GoalRow, Puzzle, checked_strategy, function_of, grade_html
from shardlab.learn.puzzles.grader import find as find_puzzle
from shardlab.learn.puzzles.values import timeline_picture
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.passes import apply_passes
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline import PUZZLE_COSTS, TEACHING_COSTS, Event, Timeline, simulate, traffic
from shardlab.simulate.timeline.memory import CATEGORIES, CATEGORY_OF_KIND, Category, memory_in_elements
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.strategies.schedules import Schedule

Stage = Literal["refused", "technique", "goals", "passed"]
"""Stage of the grading at which a solution fails ("passed": it does not fail)."""

TOLERANCE = 1e-6
"""Relative amount by which a time may exceed its goal, since times are sums of floating-point numbers."""


_CATEGORY_NAMES = {
    Category.PARAMETERS: "weights",
    Category.GRADIENTS: "weights' gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.ACTIVATIONS: "activations",
    Category.GATHERED: "gathered weights",
    Category.COMMUNICATION: "results of communication that is not awaited yet",
    Category.ARENA: "buffers",
}
"""Name of each category of memory in sentences for a student."""

ADVICE_OF_CALLS: dict[str, str] = {
    "not awaited": (
        "a call that communicates returns a handle at once, and its value exists after an `await`. An `async` function "
        "runs only when it is awaited."
    ),
    "unused result": "no collective changes its argument in place: it returns a new value. Which line keeps that?",
    "unknown verb": "",  # the refusal suggests a name, and it lists names that mistakes' patterns would match
}
"""Advice for refusals by rules about a single call ("": the refusal says it). It precedes that of mistakes."""

AVERAGED = "each gradient is a share of the batch's mean already, weighted by its tokens. What do shares add up to?"

SLICES = "the slices of all ranks are the layer, each once. Which does each rank have here, and which does the op need?"

ADVICE_OF_STEPS: dict[str, str] = {
    "counted twice": (
        "each microbatch may be in the sum once. Which of them does each rank load, and how often is each one summed?"
    ),
    "missing microbatches": (
        "an update needs the gradient of the whole batch. Where are the microbatches of one rank added up, and where "
        "are those of all ranks summed?"
    ),
    "missing slices": SLICES,
    "never updated": "which part of the step is still missing? Every layer that is loaded is updated at the end.",
    "pieces overlap": SLICES,
    "scaled gradient": AVERAGED,
    "wrong factor": AVERAGED,
}
"""Advice for refusals by rules about the step, if they match no mistake of the exercise."""

SOME_RANKS = (
    "all ranks run this program, and a collective must be called by each of them. Does an `if` on the rank's number "
    "keep some ranks from a line that sets this variable?"
)
"""Advice for a variable that a rank has not set."""


class Figures(NamedTuple):
    """Figures of a correct solution.

    Attributes:
        time: end of the step, in teaching costs; on a cluster, in seconds.
        memory: largest number of live elements on any rank; on a cluster, bytes that the fullest device needs.
        sent: largest number of elements that any rank sends (None on a cluster, where they are not counted).
    """

    time: float
    memory: int
    sent: int | None = None


class PuzzleFigures(NamedTuple):
    """Figures of a solution in puzzle costs, and the published figures of the puzzle.

    Attributes:
        puzzle: the puzzle, with the published targets and the figures of the published solution.
        steps: start of the last op.
        memory: largest number of elements on any rank.
    """

    puzzle: Puzzle
    steps: float
    memory: int


@dataclass(frozen=True, repr=False)
class ExerciseGrade:
    """Grade of a solution of an exercise.

    Attributes:
        exercise: the exercise.
        stage: stage at which it fails, or "passed".
        finding: the refusal of the check, the sentence of a technique, or the missed goals ("": the exercise is
            passed).
        rule: rule that the refusal names ("": the solution is not refused by a rule).
        mistake: the typical mistake that matches the finding (None: no mistake of the exercise matches).
        advice: what to look at next ("": the finding says it, or the exercise is passed).
        figures: time, memory and elements sent (None: the program is wrong).
        checked, timeline: the checked program and its timeline (None: the program is wrong, or the exercise predicts
            plans on a cluster).
        published: figures in puzzle costs (None: no LLM Training Puzzle has the same task, or the program is wrong).
    """

    exercise: Exercise
    stage: Stage
    finding: str = ""
    rule: str = ""
    mistake: Mistake | None = None
    advice: str = ""
    figures: Figures | None = None
    checked: Checked | None = None
    timeline: Timeline | None = None
    published: PuzzleFigures | None = None

    @property
    def passed(self) -> bool:
        """Whether the solution is correct, uses the technique and reaches every goal."""
        return self.stage == "passed"

    @property
    def title(self) -> str:
        """Number and title of the exercise."""
        return f"Exercise {self.exercise.number}: {self.exercise.title}"

    @property
    def finding_text(self) -> str:
        """The result in one sentence."""
        if self.passed:
            return "Passed."
        if self.stage == "refused":
            return f"Wrong: {self.finding}"
        can_hang = self.checked is not None and len(self.checked.backends()) < len(BACKENDS)
        return f"{'The gradients are right' if can_hang else 'Correct'}, but {self.finding}"

    @property
    def verdict(self) -> str:
        """The result in one sentence, with the advice if the exercise is not passed."""
        return self.finding_text + (f"\nLook at this next: {self.advice}" if self.advice else "")

    def rows(self) -> list[GoalRow]:
        """Return the figures with their goals."""
        goals, figures = self.exercise.goals, self.figures
        if figures is None:
            return []
        on_cluster = bool(self.exercise.cluster)
        names = ("step time [s]", "memory [bytes]", "") if on_cluster else ("time", "peak memory", "elements sent")
        pairs = zip(names, figures, (goals.time, goals.memory, goals.sent), strict=True)
        return [
            GoalRow(name, _number(value), _number(goal), _is_missed(value, goal))
            for name, value, goal in pairs
            if value is not None
        ]

    @property
    def goals_text(self) -> str:
        """The figures with their goals, in one line."""
        return "; ".join(f"{row.name} {row.value}, goal {row.goal or 'none'}" for row in self.rows())

    def _repr_html_(self) -> str:
        picture = timeline_picture(self.timeline) if self.timeline is not None else None
        return grade_html(self.title, self.verdict, self.rows(), picture)

    def __repr__(self) -> str:
        rows = [
            f"  {row.name:<15}{row.value:>14}   goal {row.goal or '-':>14}{'   missed' * row.missed}"
            for row in self.rows()
        ]
        return "\n".join([self.title, *rows, wrap_words(self.verdict, TEXT_WIDTH)])


def grade(exercise: Exercise, solution: Any) -> ExerciseGrade:
    """Check and simulate a solution, and compare it with the techniques and the goals of its exercise.

    Args:
        exercise: the exercise.
        solution: `async def f(rank)` for kind "rank"; a generator of actions or a `Schedule` for "schedule"; a function
            that returns a `Plan` for "plan".
    """
    with never_awaited() as coroutines:
        try:
            result = _grade_solution(exercise, solution)
        except (Refused, UserError) as error:
            result = refused_grade(exercise, error)
    if coroutines and result.stage == "refused":  # the forgotten `await` is the likelier reason
        return refused_grade(exercise, dropped_coroutine(coroutines[0].name, coroutines[0].line))
    for coroutine in coroutines:
        coroutine.warn()
    return result


def refused_grade(exercise: Exercise, error: Refused | UserError) -> ExerciseGrade:
    """Return the grade of a wrong solution, or of a file that fails."""
    if isinstance(error, Stalled):
        error.remedy = error.remedy.partition(", or raise --")[0]  # the course has no option for slow programs
    elif isinstance(error, Endless):
        error.remedy = "let its loops end"
    rule = error.rule if isinstance(error, Refused) else ""
    return _failed_grade(exercise, "refused", str(error), ExerciseGrade(exercise, "refused", rule=rule))


def _grade_solution(exercise: Exercise, solution: Any) -> ExerciseGrade:
    """Grade a solution.

    Raises:
        Refused, UserError: if it is wrong.
    """
    if exercise.cluster:
        return _compare_goals(exercise, ExerciseGrade(exercise, "passed", figures=_predict(exercise, _plan(solution))))
    checked = _check_solution(exercise, solution)
    timeline = simulate(checked)
    figures = Figures(timeline.end, timeline.peak_memory, elements_sent(checked))
    published = _puzzle_figures(exercise, checked)
    result = ExerciseGrade(exercise, "passed", figures=figures, checked=checked, timeline=timeline, published=published)
    for technique in exercise.techniques:
        if sentence := technique(checked):
            result = _failed_grade(exercise, "technique", sentence, result)
            break
    else:
        result = _compare_goals(exercise, result)
    return result if result.passed or exercise.kind != "rank" else _with_lines(result, solution)


_PLACE = re.compile(r"(rank (\d+)(?:'s| waits in| stands| holds| sends| starts) .*?)\((?:its )?op (\d+)\)")
"""Pattern of a rank's op in a sentence, such as `rank 2 waits in send to rank 3 (its op 11)`."""


def _with_lines(result: ExerciseGrade, solution: Any) -> ExerciseGrade:
    """Return a grade whose sentences name the lines of ops instead of their numbers. A second run finds the lines."""
    if not any(_PLACE.search(text) for text in (result.finding, result.advice)):
        return result
    exercise, file = result.exercise, function_of(solution).__code__.co_filename
    retrace = Retrace(solution, file, World(exercise.mesh, exercise.layers, exercise.microbatches))

    def line(place: re.Match[str]) -> str:
        return f"{place[1]}({SourceLine(file, retrace.line(int(place[2]), int(place[3])))})"

    return replace(result, finding=_PLACE.sub(line, result.finding), advice=_PLACE.sub(line, result.advice))


def _check_solution(exercise: Exercise, solution: Any) -> Checked:
    """Trace and check a solution.

    Raises:
        Refused, UserError: if it is wrong.
    """
    if exercise.kind == "rank":
        return checked_strategy(solution, exercise.mesh, exercise.layers, exercise.microbatches)
    entry = plan_entry(exercise, _schedule_plan(exercise, solution) if exercise.kind == "schedule" else _plan(solution))
    ranks = exercise.mesh.world
    sizes = entry.puzzle(ranks, exercise.layers) if isinstance(exercise.layers, int) else exercise.layers
    checked = check_program(trace(entry.program, entry.grid(ranks), sizes, exercise.microbatches))
    return apply_passes(checked, entry.passes_on(ranks))


def plan_entry(exercise: Exercise, plan: Plan) -> StrategyEntry:
    """Return the strategy that follows a plan. The plan must have the number of ranks of the exercise.

    Raises:
        UserError: if it has another number of ranks.
    """
    if plan.mesh.world != exercise.mesh.world:
        raise UserError(f"the plan is for {plan.mesh.world} ranks; give one for {exercise.mesh.world}")
    return entry_from_plan(plan, exercise.name)


def _schedule_plan(exercise: Exercise, solution: Any) -> Plan:
    """Return the plan that follows a student's schedule."""
    if not isinstance(solution, Schedule):
        if not inspect.isgeneratorfunction(solution):
            raise UserError(
                f"{exercise.name} is not a schedule; write it as a generator of (rank, ranks, microbatches, "
                "stages_per_rank) that yields actions"
            )
        solution = Schedule(exercise.name, solution, stages_per_rank=exercise.stages_per_rank)
    return Plan(exercise.mesh, schedule=solution, stages_per_rank=exercise.stages_per_rank)


def _plan(solution: Any) -> Plan:
    """Return the plan that a student's function returns."""
    if not callable(solution):
        raise UserError("the solution is not a function; write it as `def f() -> Plan: ...`")
    if inspect.iscoroutinefunction(solution):
        raise UserError("the solution is an `async` function, and a plan awaits nothing; write `def f() -> Plan: ...`")
    try:
        plan = run_stepwise(solution, lambda: 0, lambda: "the end of the function")
    except (Refused, UserError):
        raise
    except Exception as error:
        line = at_line(line_of_error(error))
        raise UserError(f"the function raised {error_text(error)}{line}; fix it there") from error
    if not isinstance(plan, Plan):
        raise UserError(f"the function returned {plan!r:.60}; return a Plan")
    return plan


def _predict(exercise: Exercise, plan: Plan) -> Figures:
    """Return the predicted figures of a plan on the exercise's cluster.

    Raises:
        UserError: if the plan does not suit the model or the cluster, or does not fit into memory.
    """
    cluster, entry = find_cluster(exercise.cluster), plan_entry(exercise, plan)
    assert entry.plan is not None
    model, precision = find_model(exercise.model), find_precision("bf16")
    prediction = forecast(Workload(plan, model, cluster, exercise.microbatches, 1, precision))
    if not prediction.memory.fits:
        need, capacity = prediction.memory.unlimited, prediction.memory.capacity
        held_bytes = max(prediction.peaks, key=lambda peak: peak.bytes).by_category
        largest = sorted(_CATEGORY_NAMES, key=lambda category: held_bytes[category.value], reverse=True)
        parts = [
            f"{held_bytes[category.value] / 2**30:.0f} GiB of {_CATEGORY_NAMES[category]}"
            for category in largest
            if held_bytes[category.value] >= 2**30
        ]
        raise UserError(
            f"a device needs {need / 2**30:.1f} GiB and has {capacity / 2**30:.1f} GiB: {', '.join(parts)}; shard or "
            "recompute more"
        )
    return Figures(prediction.seconds, round(prediction.memory.unlimited))


def _puzzle_figures(exercise: Exercise, checked: Checked) -> PuzzleFigures | None:
    """Return the figures in puzzle costs if the exercise is one of the puzzles, else None."""
    if not exercise.puzzle:
        return None
    timeline = simulate(checked, PUZZLE_COSTS)
    return PuzzleFigures(find_puzzle(exercise.puzzle), timeline.steps, timeline.peak_memory)


def elements_sent(checked: Checked) -> int:
    """Return the largest number of elements that a rank sends. Collectives count as ring algorithms (`traffic`)."""
    return round(max(rank_traffic.elements for rank_traffic in traffic(checked)))


def _compare_goals(exercise: Exercise, result: ExerciseGrade) -> ExerciseGrade:
    """Compare a correct solution with the goals."""
    goals, figures = exercise.goals, result.figures
    assert figures is not None
    missed_goals: list[str] = []
    if _is_missed(figures.time, goals.time):
        missed_goals.append(f"too slow: time {_number(figures.time)}, goal {_number(goals.time)}")
    if _is_missed(figures.memory, goals.memory):
        excess = _excess(exercise, result.checked, result.timeline) if result.checked and result.timeline else ""
        missed_goals.append(f"too much memory: {_number(figures.memory)}, goal {_number(goals.memory)}{excess}")
    if figures.sent is not None and _is_missed(figures.sent, goals.sent):
        missed_goals.append(f"too much is sent: {_number(figures.sent)}, goal {_number(goals.sent)}")
    return _failed_grade(exercise, "goals", "; ".join(missed_goals), result) if missed_goals else result


def _is_missed(value: float, goal: float | None) -> bool:
    return goal is not None and value > goal * (1 if isinstance(value, int) else 1 + TOLERANCE)


def _excess(exercise: Exercise, checked: Checked, timeline: Timeline) -> str:
    """Return the end of a sentence: the values of which a solution holds more than the reference solution; "" if none.

    The rank with the largest peak is compared at the op where it holds most. On the same rank of the reference
    solution, the same op is looked at, or if there is none, the op where that rank holds most.
    """
    rank = max(range(len(timeline.events)), key=timeline.peak_memory_by_rank.__getitem__)
    reference = _check_solution(exercise, find_exercise(exercise.number).solution)
    peak_event, events = _fullest(timeline.events[rank]), simulate(reference).events[rank]
    same_events = [event for event in events if event[2:5] == peak_event[2:5]]  # kind, layer and microbatches
    pairs = zip(
        CATEGORIES,
        memory_in_elements(checked)[rank].at_starts[peak_event.op],
        memory_in_elements(reference)[rank].at_starts[_fullest(same_events or events).op],
        strict=True,
    )
    category, elements, reference_elements = max(pairs, key=lambda pair: pair[1] - pair[2])
    if elements <= reference_elements:
        return ""
    held_values = _live_of(category, checked, rank, peak_event.op)
    surplus = held_values - _live_of(category, reference, rank, _fullest(same_events).op) if same_events else None
    return f", with an excess of {_CATEGORY_NAMES[category]}{f': {values_text(surplus)}' if surplus else ''}"


def _live_of(category: Category, checked: Checked, rank: int, index: int) -> Counter[Spec]:
    """Return the values of a category that a rank holds when an op starts."""
    of_kinds = Category.PARAMETERS if category is Category.GATHERED else category
    kinds = {kind for kind, place in CATEGORY_OF_KIND.items() if CATEGORIES[place] is of_kinds}
    return Counter(spec for spec in live_values(checked, rank, index) if spec.kind in kinds)


def _fullest(events: Sequence[Event]) -> Event:
    return max(events, key=lambda event: event.memory)


def _failed_grade(exercise: Exercise, stage: Stage, finding: str, result: ExerciseGrade | None = None) -> ExerciseGrade:
    """Return the grade of a solution that fails, with the advice of the mistake that matches the finding."""
    matches = (mistake for mistake in exercise.mistakes if re.search(mistake.shows, finding))
    result = replace(result or ExerciseGrade(exercise, stage), stage=stage, finding=finding)
    is_full = "too much memory" in finding and exercise.kind == "rank"
    if is_full and result.checked and (advice := _never_awaited(result.checked)):
        return replace(result, advice=advice)
    if result.rule in ADVICE_OF_CALLS:
        return replace(result, advice=ADVICE_OF_CALLS[result.rule])
    mistake = next(matches, None)
    return replace(result, mistake=mistake, advice=mistake.advice if mistake else _general_advice(result))


def _never_awaited(checked: Checked) -> str:
    """Return advice about a communication that is not awaited before the rank's last op that computes, or "".

    Its values stay in memory until it is awaited. If a program drops the handle, its tape waits for it at the end.
    """
    for rank, tape in enumerate(checked.program.tapes):
        last = max(index for index, op in enumerate(tape) if op.kind in COMPUTES)
        awaited_handles = {op.handle for op in tape[:last] if op.kind is OpKind.WAIT}
        read_numbers = {number for op in tape if op.kind is not OpKind.FREE for number in op.inputs}
        for index, op in enumerate(tape[:last]):
            if op.handle >= 0 and op.handle not in awaited_handles and read_numbers.isdisjoint(op.outputs):
                return (
                    f"rank {rank} starts {op} (op {index}), and does not await the handle before the end of the step. "
                    "The value stays in memory until then."
                )
    return ""


def _general_advice(result: ExerciseGrade) -> str:
    """Return advice for a refusal or a missed goal that matches no mistake of the exercise ("": there is none)."""
    if result.rule in ADVICE_OF_STEPS:
        return ADVICE_OF_STEPS[result.rule]
    if "UnboundLocalError" in result.finding and result.exercise.mesh.world > 1:
        return SOME_RANKS
    if result.stage != "goals" or result.checked is None or result.timeline is None:
        return ""
    exercise, checked = result.exercise, result.checked
    events = [event for events in result.timeline.events for event in events]

    def place(op: int) -> str:
        return f" (op {op})" if exercise.kind == "rank" else ""

    if "is sent" in result.finding and (surplus := _surplus_traffic(exercise, checked)):
        rank, op = surplus
        return (
            f"rank {rank} sends more than it has to in {checked.program.tapes[rank][op]}{place(op)}. Does each rank "
            "need all of that, and so often?"
        )
    if "too slow" in result.finding:
        idle = Clocks(checked, TEACHING_COSTS).run().idle
        lengths = [
            (rank, wait.op, round(wait.until - wait.since, 6)) for rank, waits in enumerate(idle) for wait in waits
        ]
        rank, op, longest = max(lengths, key=itemgetter(2), default=(0, 0, 0.0))  # the first of equal maxima
        if not longest:
            return "no rank waits for communication. Which passes are computed more often than they have to be?"
        return (
            f"rank {rank} stands still longest for {checked.program.tapes[rank][op]}{place(op)}: {longest:.3g}. Can "
            "that start earlier, or the rank compute meanwhile?"
        )
    if "memory" in result.finding:
        peak = _fullest(events)
        return (
            f"rank {peak.rank} holds most when {checked.program.tapes[peak.rank][peak.op]}{place(peak.op)} "
            "starts. Which of the values that it holds then could be freed earlier, or made later?"
        )
    return "which values does a rank send more often than another rank needs them, or larger than it needs them?"


def _surplus_traffic(exercise: Exercise, checked: Checked) -> tuple[int, int] | None:
    """Return the rank that sends most, and the index of its first op that the reference solution issues less often.

    The result is None if there is no such op.
    """
    sent_elements = [rank_traffic.elements for rank_traffic in traffic(checked)]
    rank = sent_elements.index(max(sent_elements))
    reference = _check_solution(exercise, find_exercise(exercise.number).solution)
    counts = Counter(str(op) for op in reference.program.tapes[rank] if op.handle >= 0 and op.kind is not OpKind.WAIT)
    for index, op in enumerate(checked.program.tapes[rank]):
        if op.handle >= 0 and op.kind not in (OpKind.WAIT, OpKind.RECV, OpKind.BARRIER):
            counts[str(op)] -= 1
            if counts[str(op)] < 0:
                return rank, index
    return None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{round(value, 6):g}"
