"""Experiments of `shardlab plan`: suggest plans to measure, and correct the predictions by measured steps.

For `--measure N`, `commands` and `add_experiments` suggest plans whose measured times could change the choice. For
`--measured`, `read_measured` reads steps from folders of runs and from the JSON of `--measure --json`, and
`add_measured` shows the corrected predictions. The statistics are in `shardlab.planner.error_model`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text

from shardlab.cli.console import Report
from shardlab.cli.train.this_machine import device_called
from shardlab.common.files import read_file
from shardlab.common.text import counted, seconds_text
from shardlab.language import UserError
from shardlab.language.precision import find_precision
from shardlab.models import Blocks
from shardlab.planner.describe import describe, summary, train_command
from shardlab.planner.error_model import Experiment
from shardlab.planner.problem import family
from shardlab.simulate.predict.recipe import OWN
from shardlab.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from shardlab.planner.choose import PlanChoice
    from shardlab.planner.error_model import ErrorModel, MeasuredStep
    from shardlab.planner.problem import Problem
    from shardlab.planner.results import Results


STEPS = 13
"""Number of steps of a suggested run: three to warm up, and ten for the median."""

SECONDS = "measured_seconds"
"""JSON field of an experiment that the user fills in: a number of seconds, or "out of memory"."""

OUT_OF_MEMORY = re.compile("out of memory|[Cc]an(no|')t allocate memory|MemoryError")
"""Pattern of out-of-memory errors: those of torch on a GPU or CPU, of Python, and of a killed rank."""


def commands(experiments: list[Experiment], problem: Problem, words: str) -> list[tuple[str, Path]]:
    """Return the command and the new run folder of each experiment.

    The list is empty for plans of another framework, and for precisions that only predictions support.

    Args:
        words: options of `shardlab train` that give the model.
    """
    if problem.recipe.name != OWN.name or any(precision.instead for precision in problem.precisions):
        return []
    pairs = zip((experiment.outcome.candidate for experiment in experiments), _new_folders(Path("runs")), strict=False)
    return [
        (train_command(problem, candidate, words, run=f"--steps {STEPS} --out {folder}", name=folder.name), folder)
        for candidate, folder in pairs
    ]


def experiments_as_json(
    experiments: list[Experiment], run: list[tuple[str, Path]], problem: Problem
) -> list[dict[str, Any]]:
    """Return the suggested experiments for --json. The user fills in `measured_seconds`."""
    return [
        {
            "command": run[number][0] if run else None,
            "why": experiment.reason,
            "family": family(experiment.outcome.candidate.plan),
            "plan": experiment.outcome.candidate.plan.as_dict(),
            "micro_batch_size": experiment.outcome.candidate.micro_batch_size,
            "precision": experiment.outcome.candidate.precision.name,
            "predicted_seconds": experiment.outcome.forecast.seconds,
            "measured_seconds": None,
        }
        for number, experiment in enumerate(experiments)
    ]


def add_experiments(
    report: Report, experiments: list[Experiment], run: list[tuple[str, Path]], choice: PlanChoice, read_command: str
) -> None:
    """Add the suggested experiments with their reasons, and the command that reads their results."""
    problem = choice.problem
    report.data["experiments"] = experiments_as_json(experiments, run, problem)
    report.line("\nworth running next", "dim")
    for number, experiment in enumerate(experiments):
        candidate = experiment.outcome.candidate
        report.fact(f"  {number + 1}", f"{family(candidate.plan)}, {summary(candidate)}: {experiment.reason}", indent=4)
        if run:
            report.line(Text(f"    {run[number][0]}"), wrap=False)
        else:
            report.fact("", "; ".join(describe(problem, candidate)), indent=4)
    if not experiments:
        report.fact("", "nothing: no other plan that may be as fast would give new information", indent=4)
    elif run:
        paths = shlex.join(str(folder) for _, folder in run)
        report.line(Text(f"  then: {read_command} {paths}"), wrap=False)
    else:
        name = problem.recipe.name
        report.fact("  then", f"run them in {name}, and give {read_command} what --json prints, with measured_seconds")


def measured_as_json(model: ErrorModel) -> dict[str, Any]:
    """Return the measured steps and the corrected predictions for --json."""
    rows: list[dict[str, Any]] = [
        {
            "family": outcome.family,
            "plan": outcome.candidate.plan.as_dict(),
            "micro_batch_size": outcome.candidate.micro_batch_size,
            "precision": outcome.candidate.precision.name,
            "predicted_seconds": outcome.seconds,
            "measured_seconds": model.measured.get(index),
            "step_seconds": model.seconds[index],
            "error": model.expected_errors[index],
        }
        for index, outcome in enumerate(model.plans)
    ]
    return {"factors": model.factors, "plans": sorted(rows, key=lambda row: row["step_seconds"])}


def add_measured(report: Report, model: ErrorModel, top: int) -> None:
    """Add the measured plans and the best plans, ranked by their corrected times."""

    def measured_text(index: int) -> str:
        seconds = model.measured.get(index)
        return "" if seconds is None else seconds_text(seconds)

    order = sorted(range(len(model.plans)), key=lambda index: model.seconds[index])
    columns: dict[str, Callable[[int], str]] = {
        "": lambda index: model.plans[index].family,
        "after measuring": lambda index: summary(model.plans[index].candidate),
        "predicted": lambda index: seconds_text(model.plans[index].seconds),
        "measured": measured_text,
        "corrected": lambda index: seconds_text(model.seconds[index]),
        "sure to": lambda index: f"± {model.expected_errors[index]:.1%}",
    }
    report.line()
    report.table(
        columns,
        [index for place, index in enumerate(order) if place <= top or index in model.measured],
        words=2,
        wrapped=1,
    )
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in model.factors.items())
    report.line()
    report.fact("corrected by", f"{factors} times as long as predicted, and errors of similar plans")


def add_ran_out(report: Report, results: Results) -> None:
    """Add the plans that ran out of memory when they were measured."""
    for outcome in (outcome for outcome in results.outcomes if outcome.ran_out):
        report.fact("does not fit", f"{outcome.family}, {summary(outcome.candidate)}: it ran out of memory")


def time_error_text(choice: PlanChoice) -> str:
    """Return the expected error of the chosen plan's predicted time as text."""
    model, confidence = choice.error_model, choice.confidence[0]
    text = str(confidence)
    if model is not None and model.measured:
        steps = counted(len(model.measured), "measured step")
        text = f"time ± {choice.expected_error:.1%} after {steps}, ± {confidence.error:.1%} before"
    return f"{text}; closer plans count as equal"


def read_measured(paths: Sequence[Path], problem: Problem, model: str, cluster: str) -> list[MeasuredStep]:
    """Read measured steps of a problem's plans from files and folders.

    Args:
        paths: folders of runs, folders that contain such folders, and output of `plan --measure N --json` in which
            `measured_seconds` is filled in.
        model, cluster: names of the model and the cluster.

    Raises:
        UserError: for a file in another format, and for results of another model, batch or cluster.
    """
    steps: list[MeasuredStep] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"--measured {path}: no such file or folder; give the folder of a run, or RESULTS.json")
        steps += (
            _read_folder(path, problem, model, cluster) if path.is_dir() else _read_file(path, problem, model, cluster)
        )
    return steps


def _new_folders(parent: Path) -> Iterator[Path]:
    """Yield the paths `parent/measure-N` that do not exist, in order."""
    number = 0
    while True:
        number += 1
        if not (path := parent / f"measure-{number}").exists():
            yield path


def _read_folder(path: Path, problem: Problem, model: str, cluster: str) -> Iterator[MeasuredStep]:
    from shardlab.train.history import find_runs

    runs = find_runs([path])
    if not runs:
        raise UserError(f"--measured {path}: this folder contains no run; give one that shardlab train has written")
    for run in runs:
        yield _read_run(run.folder, dict(run.record), problem, model, cluster)


def _read_run(folder: Path, record: dict[str, Any], problem: Problem, model: str, cluster: str) -> MeasuredStep:
    """Return the measured step of a run of `shardlab train`: the median of its steps after the warm-up."""
    from shardlab.planner.error_model import MeasuredStep
    from shardlab.planner.problem import Candidate
    from shardlab.train.history import METRICS
    from shardlab.train.job import job_from_dict
    from shardlab.train.run import WARM_UP

    job = job_from_dict(record)
    if not isinstance(job.strategy, Plan):
        raise UserError(f"{folder} ran {job.strategy}, which is a program and not a plan; leave it out")
    _require_same_model(str(folder), job.model, problem.model, model)
    sequences = job.microbatches * job.micro_batch_size
    _require_equal(str(folder), "sequences a step", sequences, problem.sequences, "its --global-batch")
    _require_equal(str(folder), "optimizer", job.optimizer, problem.optimizer, "its --optimizer")
    if record.get("batch_ramp"):
        raise UserError(f"{folder} had a batch ramp, so its steps have several sizes; leave it out")
    devices = {str(place["device"]).partition(" (")[2].rstrip(")") for place in record.get("places", [])}
    if others := [name for name in sorted(devices) if not _is_device(name, problem)]:
        raise UserError(f"{folder} ran on {others[0]}, and {cluster} is {problem.cluster}; leave it out")
    times: list[float] = []
    with suppress(OSError, ValueError, KeyError):  # the last line may be incomplete
        for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            times.append(float(json.loads(line)["dt"]))
    plan = replace(job.strategy, passes=None)  # as in the planner's plans
    candidate = Candidate(plan, job.micro_batch_size, job.numbers)
    if OUT_OF_MEMORY.search(dict(record.get("ended") or {}).get("why", "")):
        return MeasuredStep(candidate, None, str(folder))
    if len(times) <= WARM_UP:
        raise UserError(
            f"{folder} has {len(times)} steps on record, of which the first {WARM_UP} do not count; run it again with "
            f"more --steps, or leave it out"
        )
    return MeasuredStep(candidate, median(times[WARM_UP:]), str(folder))


def _is_device(name: str, problem: Problem) -> bool:
    """Return whether the device that a run recorded is that of the cluster. All CPUs count as the same."""
    cluster = problem.cluster
    if cluster.on_cpu:
        return not device_called(name)
    return cluster.device.name in (name, device_called(name))


def _require_same_model(source: str, theirs: Blocks, ours: Blocks, model: str) -> None:
    if theirs == ours:
        return
    if type(theirs) is not type(ours):
        raise UserError(f"{source} trained another model than {model}, a {type(theirs).__name__}; leave it out")
    name = next(field.name for field in fields(ours) if getattr(theirs, field.name) != getattr(ours, field.name))
    raise UserError(
        f"{source} trained another model than {model}: its {name} is {getattr(theirs, name)}, not "
        f"{getattr(ours, name)}; leave it out"
    )


def _require_equal(source: str, name: str, theirs: object, ours: object, flag: str) -> None:
    if theirs != ours:
        raise UserError(f"{source}: {name} {theirs} there, and {ours} here; leave it out, or give {flag}")


def _read_file(path: Path, problem: Problem, model: str, cluster: str) -> Iterator[MeasuredStep]:
    """Yield the experiments of a file that have a measured time."""
    from shardlab.planner.error_model import MeasuredStep
    from shardlab.planner.problem import Candidate

    content = read_file(path, "JSON")
    data = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    rows = data.get("experiments")
    if not isinstance(rows, list):
        raise UserError(
            f"{path} holds no results: take what shardlab plan --measure 3 --json prints, and give each of its "
            f"experiments that was run its {SECONDS}"
        )
    expected = {"model": model, "cluster": cluster, "global_batch": problem.sequences, "tokens": problem.tokens}
    for name, value in expected.items():
        _require_equal(str(path), name.replace("_", " "), data.get(name), value, "what it was measured with")
    count = 0
    for number, row in enumerate(cast(list[Any], rows)):
        source = f"{path}, experiment {number + 1}"
        if not isinstance(row, dict):
            raise UserError(f"{source} is not an object; give its plan, micro_batch_size, precision and {SECONDS}")
        values = cast(dict[str, Any], row)
        if (seconds := values.get(SECONDS)) is None:
            continue
        number_given = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds != "out of memory" and not (number_given and 0 < seconds < float("inf")):
            raise UserError(
                f'{source}: {SECONDS} is {seconds!r}; give the seconds of a step, a number above 0, or "out of memory"'
            )
        size, plan = values.get("micro_batch_size"), values.get("plan")
        if type(size) is not int or size < 1 or not isinstance(plan, dict):
            raise UserError(f"{source} has no plan; give plan and micro_batch_size as they were printed")
        try:
            read, precision = Plan.from_dict(cast(dict[str, Any], plan)), find_precision(str(values.get("precision")))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        count += 1
        measured = float(seconds) if number_given else None
        yield MeasuredStep(Candidate(read, size, precision), measured, source, by_hand=True)
    if not count:
        raise UserError(f"no experiment in {path} has {SECONDS}; run one, and give it the seconds of its step")
