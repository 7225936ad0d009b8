"""`shardlab learn run`: train a small GPT with a student's program, verify it, and compare prediction and measurement.

The prediction is the timeline of the trained model in teaching costs, which the exercises use. Its unit of time is the
measured time of a forward pass. The comparison therefore tests whether all other ops cost what the course assumes.
`shardlab compare` predicts from the measured profile of this machine.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.text import Text

from shardlab.cli.console import Report
from shardlab.cli.learn.show import shell_command
from shardlab.common.errors import UserError
from shardlab.common.fields import as_flags
from shardlab.common.files import write_atomically
from shardlab.common.text import counted
from shardlab.common.user_code import load_module
from shardlab.language import Mesh, OpKind
from shardlab.learn.course.catalogue import CourseEntry
from shardlab.planner.describe import chosen_fields
from shardlab.simulate.hardware.cluster import cores
from shardlab.simulate.timeline import Timeline, simulate
from shardlab.simulate.timeline.measured import Measured, Pair, compare, read_trace
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.starting import INTERRUPTED
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import Schedule

if TYPE_CHECKING:
    from shardlab.check import Checked

MOST_PROCESSES = 16
"""Largest number of ranks of a training on this machine. Each rank is a process."""

FEWER_RANKS = 4
"""Number of ranks used for a data-parallel plan with more than `MOST_PROCESSES`."""

STEPS = 20
"""Default number of training steps. The first steps warm up and are not measured."""

HIDDEN_SIZE = 64
"""Width of the model that is trained."""

PARTS = {
    "computes": ("computing", "passes and updates do not cost what the course assumes, compared with a forward pass"),
    "waits for communication": ("exposed", "messages between processes do not cost what the course assumes"),
    "idle": ("idle", "a rank waits for others, for a core (this machine has {cores}), or for Python between two ops"),
}
"""Parts of a step: the field of each in a `RankRow`, and the reason for a measured time that was not predicted."""

UNCHANGED = ("--passes", "none")
"""Options that run a student's program as written. By default, ranks run it with every pass that helps."""


def require_steps(steps: int) -> None:
    """Refuse a training that is too short to be measured."""
    from shardlab.train.job import Tracing

    if steps < (minimum := Tracing().steps):
        raise UserError(f"--steps is {steps}; to compare its steps with the prediction, give {minimum} or more")


def train_and_verify(entry: CourseEntry, file: Path, steps: int, *, json: bool) -> int:
    """Train with the program of a passed exercise, verify it against one device, and report.

    Args:
        entry: the exercise.
        file: the student's file.
        steps: number of training steps.
        json: print only the report, as JSON.

    Returns:
        The exit status: 1 if the numbers are not those of one device.

    Raises:
        UserError: if the exercise has more ranks than this machine should start.
    """
    from shardlab.cli.train.from_python import command_from
    from shardlab.cli.verify import Verify

    words, ranks = strategy_words(entry, file)
    size = _model_size(entry) | {"microbatches": ranks * entry.exercise.microbatches // entry.exercise.mesh.world}
    folder = _new_folder(file.parent / "runs", entry.name)
    options = {**size, "hidden_size": HIDDEN_SIZE, "steps": steps, "out": folder}
    training = [*_with_strategy_flag(words), "--trace", *as_flags(options).split()]
    command = [sys.executable, "-m", "shardlab", "train", *training]
    print(f"The exercise gives the flags: shardlab train {shlex.join(training)}", file=sys.stderr, flush=True)
    if status := run_command(command, json=json):
        return status
    verification = command_from("verify", words, size)
    assert isinstance(verification, Verify)
    verified = verification.compare()
    assert verified is not None, "the ranks are processes of this machine"
    report = comparison_report(folder)
    report.line()
    verdict = verified.verdict
    finding = "the numbers are those of one device" if verdict.ok else "the numbers are NOT those of one device"
    errors = f"float64, largest error of loss, gradients and weights {max(verdict.all):.1e}"
    report.fact("verified", f"{finding} ({errors})", style="green" if verdict.ok else "red", verified=verdict.ok)
    ops = f"every op of every rank, predicted if shardlab bench was run: {shell_command(f'compare {folder}')}"
    report.draw(lambda console: console.print(Text(ops, "dim"), soft_wrap=True))
    report.data |= {"exercise": entry.name, "ranks": ranks, "folder": str(folder)}
    report.show(json=json)
    return 0 if verdict.ok else 1


def run_command(command: list[str], *, json: bool) -> int:
    """Run a command, and return its exit status. With --json, its output goes to stderr.

    Ctrl-C reaches the command as well. The command then saves, says so and ends, and this function waits for its end.
    """
    with subprocess.Popen(command, stdout=sys.stderr if json else None) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait() or INTERRUPTED  # its status is 0 if it has saved


def strategy_words(entry: CourseEntry, file: Path) -> tuple[list[str], int]:
    """Return the arguments that select a student's program, and its number of ranks.

    Raises:
        UserError: if there are too many ranks, or the program's model cannot be trained here.
    """
    exercise = entry.exercise
    ranks = exercise.mesh.world
    if exercise.cluster:
        plan: Plan = getattr(load_module(file), entry.name)()
        size = f"--model {exercise.model} --cluster {exercise.cluster} --global-batch {exercise.microbatches}"
        raise UserError(
            f"{entry.name} is a plan for {ranks} devices, and at most {MOST_PROCESSES} processes are started here; see "
            f"what its step consists of: {shell_command(f'simulate {size} {as_flags(chosen_fields(plan))}')}"
        )
    if not isinstance(exercise.layers, int) and exercise.layers.tied:
        sharding = " --shard-optimizer dp_shard" if exercise.mesh.dp_shard > 1 else ""
        raise UserError(
            f"{entry.name} has tied layers on two stages. In a model that is trained, the embedding is part of the "
            "first block and the head of the last, so only a plan can tie them: "
            + shell_command(f"train {as_flags(exercise.mesh.used)}{sharding} --tied")
        )
    if exercise.kind == "plan":
        plan = getattr(load_module(file), entry.name)()
        if ranks > MOST_PROCESSES and plan.mesh == Mesh(dp_shard=ranks):
            ranks = FEWER_RANKS
            plan = replace(plan, mesh=Mesh(dp_shard=ranks))
        words = (as_flags(chosen_fields(plan)) or "--dp-shard 1").split()
    elif exercise.kind == "schedule":
        words = [*as_flags(exercise.mesh.used).split(), "--schedule", _schedule_name(entry, file), *UNCHANGED]
    else:
        words = [f"{_with_mesh(entry, file)}:{entry.name}", "--ranks", str(ranks), *UNCHANGED]
    if ranks > MOST_PROCESSES:
        raise UserError(
            f"{entry.name} has {ranks} ranks, and at most {MOST_PROCESSES} processes are started here; a plan of one "
            f"axis, dp_shard, runs on {FEWER_RANKS}"
        )
    return words, ranks


def _model_size(entry: CourseEntry) -> dict[str, Any]:
    """Return the option for the size of the trained model: as many layers, or blocks, as the exercise has."""
    layers = entry.exercise.layers
    if isinstance(layers, int):
        return {"layers": layers}
    return {"layers": layers.block_count}


def _with_strategy_flag(words: list[str]) -> list[str]:
    """Return the arguments for `train`, in which a flag names the strategy."""
    return words if words[0].startswith("-") else ["--strategy", *words]


def _with_mesh(entry: CourseEntry, file: Path) -> Path:
    """Return a file with the student's program and its mesh: the student's file itself if the default mesh is right."""
    mesh = entry.exercise.mesh
    if mesh == Mesh(dp_shard=mesh.world):
        return file
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.used.items())
    definition = f"def {entry.name}_mesh(ranks):\n    return Mesh({axes})\n"
    return _copy_with(file, f"from shardlab.language import Mesh\n\n\n{definition}")


def _schedule_name(entry: CourseEntry, file: Path) -> str:
    """Return the name of a student's schedule, wrapped in a `Schedule` if a rank has several stages."""
    stages = entry.exercise.stages_per_rank
    if stages == 1 or isinstance(getattr(load_module(file), entry.name), Schedule):
        return f"{file}:{entry.name}"
    definition = f'course_schedule = Schedule("{entry.name}", {entry.name}, stages_per_rank={stages})\n'
    copy = _copy_with(file, f"from shardlab.strategies.schedules import Schedule\n\n{definition}")
    return f"{copy}:course_schedule"


def _copy_with(file: Path, lines: str) -> Path:
    """Write a copy of a student's file, with lines appended, into the folder of runs. Return the path of the copy."""
    copy = file.parent / "runs" / file.name
    copy.parent.mkdir(exist_ok=True)
    write_atomically(copy, f"{file.read_text(encoding='utf-8')}\n\n{lines}")
    return copy


def _new_folder(runs: Path, name: str) -> Path:
    """Return the path of a folder for a new run. The folder does not exist yet."""
    number = 1
    while (folder := runs / f"{name}-{number}").exists():
        number += 1
    return folder


def comparison_report(folder: Path) -> Report:
    """Return a report of the predicted and the measured step of a traced run."""
    from shardlab.train.job import job_from_dict

    trace = read_trace(folder)
    checked = job_from_dict(trace.job).checked()
    measured = trace.measured(checked)
    predicted, unit = predicted_timeline(checked, measured)
    memory = [max(rank_memory.before_ops) for rank_memory in memory_in_bytes(checked)]
    result = compare(measured, predicted, memory)
    step = {"what": "step", "unit": "ms", **_pair(result.step, 1e3)}
    parts = [
        {"what": part, "unit": "ms", **_mean_pair([getattr(row, name) for row in result.ranks], 1e3)}
        for part, (name, _) in PARTS.items()
    ]
    peak_memory = max((row.memory for row in result.ranks), key=_measured)
    report = Report()
    report.line()
    report.table(
        {
            counted(len(result.ranks), "rank"): lambda row: f"{'  ' * (row in parts)}{row['what']}",
            "predicted": lambda row: _cell(row["predicted"], row["unit"]),
            "measured": lambda row: _cell(row["measured"], row["unit"]),
        },
        [step, *parts, {"what": "peak memory", "unit": "MiB", **_pair(peak_memory, 2**-20)}],
        "comparison",
    )
    report.line()
    report.line(_meaning(step, parts))
    note = (
        "A step is the time in which a rank computes, waits for communication, or is idle: means over the ranks, and "
        f"over {counted(len(measured.steps), 'step')} whose ops are timed, without the fastest and the slowest quarter "
        "(speed above is the median over all steps but the first ones). Peak memory is that of the fullest rank. "
        f"Predicted: a layer's forward pass takes {unit * 1e3:.3g} ms, as measured, and every "
        "other op in proportion, as in the exercises."
    )
    report.line(note, "dim")
    return report


def _meaning(step: dict[str, Any], parts: list[dict[str, Any]]) -> str:
    """Return what the comparison says: how long the step took, which part of it differs most, and why."""
    excess = {row["what"]: row["measured"] - row["predicted"] for row in parts}
    part = max(excess, key=lambda name: abs(excess[name]))
    ratio, cause = step["measured"] / step["predicted"], PARTS[part][1].format(cores=cores())
    text = f"The step took {ratio:.2f} times the predicted time. The largest difference is {excess[part]:+.2f} ms"
    return f'{text} of "{part}": {cause}.'


def predicted_timeline(checked: Checked, measured: Measured) -> tuple[Timeline, float]:
    """Return the timeline that the costs of the course predict, scaled to seconds, and the seconds of a time unit."""
    timeline = simulate(checked)
    units = seconds = 0.0
    for events, times in zip(timeline.events, measured.seconds, strict=True):
        for event in events:
            if event.kind is OpKind.FORWARD and event.op in times:
                units += event.end - event.start
                seconds += times[event.op]
    if not units or not seconds:
        raise UserError("no forward pass was measured; train more steps")
    unit = seconds / units
    events = [
        [event._replace(start=event.start * unit, end=event.end * unit) for event in row] for row in timeline.events
    ]
    return Timeline(timeline.program, events, in_seconds=True), unit


def _pair(pair: Pair, times: float) -> dict[str, float | None]:
    figures = {"predicted": pair.predicted, "measured": pair.measured}
    return {name: None if figure is None else figure * times for name, figure in figures.items()}


def _mean_pair(pairs: list[Pair], times: float) -> dict[str, float | None]:
    predicted = fmean(pair.predicted or 0.0 for pair in pairs)
    return _pair(Pair(predicted, fmean(_measured(pair) for pair in pairs)), times)


def _measured(pair: Pair) -> float:
    return pair.measured or 0.0


def _cell(figure: float | None, unit: str) -> str:
    return "-" if figure is None else f"{figure:,.2f} {unit}"
