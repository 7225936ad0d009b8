"""`shardlab plan --model NAME --cluster NAME`: find the fastest plan that fits, and explain the choice.

`PlanCommand.run` converts the options into a `Problem`, searches with `shardlab.planner.choose`, and prints the choice.
With --grade, it instead grades the choices that predictions would make among measured runs. `SearchLine` shows the
progress of the search on a terminal.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardlab.cli.model_options import NO_SIZES, OptionalNumber, SizeFlags
from shardlab.cli.options import Count, Flag, Name, NewFile, OptionalCount, check_new_file, writing
from shardlab.cli.plan.grade import print_grades
from shardlab.cli.plan_options import (
    NO_LIMITS,
    DeviceMemory,
    JobFile,
    Layout,
    RecipeName,
    SwitchWords,
    recipe_called,
    switches_of,
)
from shardlab.cli.step_request import StepRequest
from shardlab.common.fields import as_flags
from shardlab.common.files import as_toml
from shardlab.common.text import counted, seconds_text
from shardlab.language import UserError
from shardlab.language.precision import Optimizer

if TYPE_CHECKING:
    from shardlab.planner.choose import PlanChoice
    from shardlab.planner.error_model import MeasuredStep
    from shardlab.planner.problem import Limits, Problem
    from shardlab.planner.results import Results
    from shardlab.planner.search import OnProgress


ELSEWHERE = {
    "--plan": "--plan gives a complete plan, but this command searches for one; leave it out, or give it to simulate",
    **{
        flag: f"{flag} rewrites the program of a plan, but this command compares plans; leave it out, or give "
        "it to simulate"
        for flag in ("--passes", "--offload")
    },
    "--freeze": "--freeze excludes blocks from training, but this command plans a training of all blocks; leave "
    "it out, or give it to simulate",
}
"""Error messages for options that other commands have and this one does not."""

LOADING = 0.5
"""Approximate time in seconds for loading the command. --seconds includes it."""

REFRESHED = 0.1
"""Seconds between two updates of the search's progress."""


@dataclass(frozen=True)
class PlanCommand:
    """Search all plans of a model on a cluster for the fastest one that fits, and explain the choice.

    Flags of a plan, such as --tp 4 or --recompute none, restrict the search to plans with these values.
    """

    config: JobFile = None

    model: Name = None
    """Model such as llama3-8b, or path/to/file.py:NAME, path/to/model.toml, path/to/config.json, or a folder of
    transformers."""

    sizes: SizeFlags = NO_SIZES

    cluster: Name = None
    """Device type and number, such as h100x16, or path/to/cluster.toml; or the results of bench: local, or
    path/to/profile.json. Plans use all devices."""

    other_machine: Flag = False
    """Accept a profile that was measured on another machine."""

    sequence: OptionalCount = None
    """Tokens of a sequence (default: the model's)."""

    layers: OptionalCount = None
    """Number of layers of the model (default: its own)."""

    tokens_per_step: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens in a step, such as 4M (default: 16 sequences for each device, and at most 16M tokens)."""

    global_batch: OptionalCount = None
    """Sequences in a step, instead of --tokens-per-step."""

    micro_batch_size: OptionalCount = None
    """Sequences of a microbatch (default: chosen by the search)."""

    precision: Name = None
    """fp32, tf32, bf16, bf16-fp32-grads, bf16-params, fp16, fp8 or mxfp8; or several with commas, from which the search
    takes the fastest (default: that of the recipe)."""

    optimizer: Annotated[Optimizer | None, tyro.conf.arg(help_behavior_hint="(default: adamw)")] = None
    """Optimizer, which determines the size of the optimizer state."""

    recipe: RecipeName = None

    switch: SwitchWords = ()

    memory: DeviceMemory = None
    """Memory of each device that the step may use, such as 72GiB."""

    max_tp: OptionalCount = None
    """Largest number of tensor-parallel ranks."""

    max_pp: OptionalCount = None
    """Largest number of pipeline ranks."""

    max_cp: OptionalCount = None
    """Largest number of context-parallel ranks."""

    max_ep: OptionalCount = None
    """Largest number of expert-parallel ranks."""

    max_dp_shard: OptionalCount = None
    """Largest size of dp_shard in plans that shard weights, gradients or optimizer state over it."""

    max_micro_batch_size: OptionalCount = None
    """Largest number of sequences of a microbatch."""

    seconds: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 120.0
    """Time limit of the search and its explanation. When it is over, or after Ctrl-C, the best plan so far is
    printed."""

    forecasts: OptionalCount = None
    """Largest number of plans to simulate. If the search ends before --seconds, the result does not depend on the speed
    of this machine."""

    top: Count = 3
    """Number of runners-up to list."""

    explain: Flag = False
    """Explain the choice with its numbers, in the order in which an expert decides, and list the best plan of each
    family."""

    out: NewFile = None
    """Write the chosen plan, with model, cluster and batch, into this TOML file, which simulate, verify and train
    accept as --config. An earlier plan is replaced."""

    write: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Write the chosen plan into this folder as files of the recipe's framework, such as torchtitan's TOML file or a
    script with Megatron-LM's arguments. Settings that the framework lacks are listed in a comment."""

    search_schedule: OptionalNumber = None
    """Afterwards, search schedules for the best pipeline plans for this many seconds, and report the gains (see
    `shardlab schedule search`)."""

    measure: OptionalCount = None
    """Suggest at most N plans to measure next: those whose measured step times could change the choice, each with its
    command and a reason."""

    measured: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN|RESULTS.json ...", help_behavior_hint="")] = ()
    """Measured steps, which correct the predictions and the ranking: folders of runs, or the output of --measure --json
    with measured_seconds filled in."""

    grade: Annotated[Path | None, tyro.conf.arg(metavar="RUNS.json", help_behavior_hint="")] = None
    """Do not search, but grade the predictions on a file of measured runs in the format of validate. For each model and
    number of devices, choose the run with the fastest prediction, and compare its measured speed with that of the best
    run."""

    force: Flag = False
    """Replace --out, or files of --write, even if Shardlab did not write them."""

    json: Flag = False
    """Print only JSON."""

    layout: Layout = NO_LIMITS

    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE

    def run(self) -> int:
        began = time.monotonic()
        if self.grade is not None:
            self._require_no_search_options(self.grade)
            recipe = None if self.recipe is None else recipe_called(self.recipe, switches_of(self.switch))
            print_grades(self.grade, recipe, json=self.json)
            return 0
        from shardlab.cli.plan.measure import add_experiments, add_ran_out, commands, read_measured
        from shardlab.cli.plan.report import PlanReport, add_schedules
        from shardlab.cli.plan.write import add_written, check_folder, write_files
        from shardlab.planner.error_model import choose_experiments

        request = StepRequest.of(self)
        problem = self.problem(request)
        if self.force and self.out is None and self.write is None:
            raise UserError("--force replaces the file of --out or those of --write; give one of them, or leave it out")
        if self.search_schedule is not None and not 0 < self.search_schedule < inf:
            raise UserError(
                f"--search-schedule {self.search_schedule:g} is not a time; give a number of seconds above 0"
            )
        check_new_file("--out", self.out, "plan.toml", force=self.force)
        if self.write is not None:
            check_folder(self.write, problem, force=self.force)
        assert isinstance(request.model, str)
        assert isinstance(request.cluster, str)
        model, cluster = request.model, request.cluster
        measured = read_measured(self.measured, problem, model, cluster)
        choice = self.search(problem, began, measured if self.measured or self.measure else None)
        trials = choose_experiments(choice.error_model, self.measure) if choice.error_model and self.measure else []
        run = commands(trials, problem, self._model_words())
        run_commands = self.commands_for(choice)
        if self.out is not None:
            with writing("--out", self.out):
                self.out.write_text(self.job_text(choice), encoding="utf-8")
        report = PlanReport(choice, model, cluster, run_commands, self.top, self.out).report(explain=self.explain)
        if self.write is not None:
            add_written(report, self.write, write_files(self.write, choice, model))
        if self.search_schedule is not None:
            from shardlab.planner.schedule_search.for_plans import schedules_for_plans

            add_schedules(report, schedules_for_plans(problem, choice.results, self.search_schedule))
        elif (plan := choice.best.candidate.plan).mesh.pp > 1:
            faster = f"--search-schedule 10 searches a faster one than {plan.schedule_name} for these stages"
            report.fact("schedule", faster)
        add_ran_out(report, choice.results)
        if self.measure:
            add_experiments(report, trials, run, choice, self._next_command(problem))
        report.show(json=self.json)
        return 0

    def search(self, problem: Problem, began: float, measured: Sequence[MeasuredStep] | None = None) -> PlanChoice:
        """Search for the best plan, with a line of progress on a terminal.

        Args:
            problem: the problem that the options describe.
            began: start of --seconds, as a value of `time.monotonic`.
            measured: measured steps, which correct the predictions (None: no measurements are planned).
        """
        from shardlab.planner.choose import choose
        from shardlab.planner.search import Budget
        from shardlab.planner.workers import workers

        budget = Budget(max(0.0, self.seconds - LOADING - (time.monotonic() - began)), self.forecasts or inf)
        with workers(problem) as processes, SearchLine(Console(stderr=True)) as progress:
            return choose(problem, processes, budget=budget, on_progress=progress, measured=measured)

    def _require_no_search_options(self, runs: Path) -> None:
        """Refuse options of the search together with --grade, which accepts only --recipe, --switch and --json.

        Raises:
            UserError: with these options.
        """
        default = PlanCommand(grade=runs, recipe=self.recipe, switch=self.switch if self.recipe else (), json=self.json)
        options = {flag.name: getattr(self, flag.name) for flag in fields(self) if flag.name not in ("layout", "sizes")}
        changes = {name: value for name, value in options.items() if value != getattr(default, name)}
        if words := " ".join(filter(None, (as_flags(changes | self.layout.flag_values()), *self.sizes.words()))):
            raise UserError(f"--grade predicts the runs in its file and does not search for a plan; leave out {words}")

    def problem(self, request: StepRequest | None = None) -> Problem:
        """Make the planning problem of a request (None: the request of the options).

        Raises:
            UserError: for unknown names, and values that contradict each other.
        """
        request = request or StepRequest.of(self)
        if request.model is None or request.cluster is None:
            missing = "--model, such as llama3-8b" if request.model is None else "--cluster, such as h100x32"
            raise UserError(f"a plan is for a model on a cluster; give {missing}")
        if not self.seconds > 0:
            raise UserError(f"--seconds {self.seconds:g} is not a time; give a number above 0")
        return request.problem(self._limits())

    def _limits(self) -> Limits:
        from shardlab.planner.problem import Limits

        names = [name.removeprefix("max_") for name in vars(self) if name.startswith("max_")]
        max_sizes = {name: size for name in names if (size := getattr(self, f"max_{name}")) is not None}
        return Limits(self.layout.values(), max_sizes, self.micro_batch_size)

    def commands_for(self, choice: PlanChoice) -> dict[str, str]:
        """Return the commands that simulate and train the chosen plan.

        The command for training is left out if the plan is for another framework, or has a precision or a recomputation
        that only predictions support.
        """
        from shardlab.planner.describe import simulate_flags, train_command
        from shardlab.simulate.predict.recipe import OWN

        problem, candidate = choice.problem, choice.best.candidate
        job = shlex.quote(str(self.out)) if self.out else None
        flags = f"--config {job}" if job else f"{self._problem_words()} {simulate_flags(problem, candidate)}"
        texts = {"simulate": f"shardlab simulate {flags}"}
        predicted = bool(candidate.precision.instead) or bool(candidate.plan.recompute_inside)
        if problem.recipe.name == OWN.name and not predicted:
            texts["train"] = train_command(problem, candidate, self._model_words(), job)
        return texts

    def job_text(self, choice: PlanChoice) -> str:
        """Return the job file of a chosen plan. It begins with comments: the commands that run the plan."""
        problem, candidate, request = choice.problem, choice.best.candidate, StepRequest.of(self)
        batch = f"{counted(problem.sequences, 'sequence')} a step in microbatches of {candidate.micro_batch_size}"
        description = f"for {request.model} on {problem.cluster}: {batch}, in {candidate.precision.name}"
        commands = self.commands_for(choice).values()
        lines = [f"# written by shardlab plan: {description}", *(f"# {command}" for command in commands)]
        size = problem.sequences, candidate.micro_batch_size
        return "\n".join([*lines, as_toml(request.as_tables(candidate.plan, candidate.precision.name, *size))])

    def _problem_words(self) -> str:
        """Return the options for the model, the cluster and the recipe, for another command line."""
        options = ("config", "model", "layers", "sequence", "cluster", "memory", "recipe")
        other = ["--other-machine"] if self.other_machine else []
        switches = ["--switch", *self.switch] if self.switch else []
        words = self._words_of({name: getattr(self, name) for name in options})
        return shlex.join([*words, *self.sizes.words(), *switches, *other])

    def _words_of(self, flags: Mapping[str, object]) -> list[str]:
        """Return these options as words of a command line, and --optimizer unless it is the default."""
        values = {name: value for name, value in flags.items() if value is not None}
        if self.optimizer not in (None, "adamw"):
            values["optimizer"] = self.optimizer
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def _model_words(self) -> str:
        """Return the options of `shardlab train` for the model and the optimizer."""
        flags = {"config": self.config, "model": self.model, "layers": self.layers, "seq-len": self.sequence}
        return shlex.join([*self._words_of(flags), *self.sizes.words()])

    def _next_command(self, problem: Problem) -> str:
        """Return the command that reads the results of the suggested experiments, without their paths."""
        precisions = ",".join(precision.name for precision in problem.precisions)
        flags = f"{self._problem_words()} --global-batch {problem.sequences} --precision {precisions} {problem.limits}"
        paths = shlex.join(map(str, self.measured))
        return " ".join(["shardlab plan", *flags.split(), "--measured", *([paths] if paths else [])])


class SearchLine:
    """Live line with the progress of a search, shown only on a terminal.

    The value of the context is the callback of the search.

    Args:
        console: console on which the line is shown.
    """

    def __init__(self, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        # no thread may refresh the line, because workers are forked while it is shown
        self._progress = Progress(
            *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
        )
        self._next = 0.0

    def __enter__(self) -> OnProgress:
        self._task = self._progress.add_task("generating plans")
        self._progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, results: Results, queue_length: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + REFRESHED
        best = f"; best so far {seconds_text(results.best.seconds)} a step" if results.best else ""
        text = f"{counted(len(results.outcomes), 'plan')} simulated, {queue_length:,} wait{best}"
        self._progress.update(self._task, description=text, refresh=True)
