"""`shardlab train`: train a language model under a strategy, on processes of this machine or of a launcher.

`Train.train` leads through a run:

1. Settings: the sources (presets, config file, flags, or a resumed run) are merged into one configuration.
2. Checks: all mistakes that can be found without ranks are reported before a rank starts.
3. Choices: --plan auto measures plans, and passes are chosen by this machine's prices.
4. Ranks: `shardlab.train.loop.train_rank` runs on each rank, and returns a summary.
5. Report: it is written into the folder of the run, and printed.

Every rank of a launcher runs all of this; only the first one prints.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro
from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_fact, print_figures, print_json, print_whole, stdout_console, table_of
from shardlab.cli.model_options import DEFAULT_MODEL, NO_SETTINGS, ModelFlags, Settings
from shardlab.cli.options import Flag, MaxOps, MaxSeconds, Name, OptionalCount, Ranks
from shardlab.cli.plan_options import NO_FLAGS, Layout
from shardlab.cli.train.auto_plan import AUTO, PlannedRuns, measure_fastest, plan_for_this_machine, plan_of_resumed_run
from shardlab.cli.train.choose_passes import config_with_allowed_passes, settle_run
from shardlab.cli.train.this_machine import peak_flops, predicted_seconds
from shardlab.common.files import read_file
from shardlab.common.text import alternatives, counted
from shardlab.execute.optimizers.settings import USED_WITH, OptimizerConfig
from shardlab.language import AXES, UserError
from shardlab.language.precision import find_precision
from shardlab.models.model import ParameterCounts, count_parameters
from shardlab.models.named import weights_at
from shardlab.starting import INTERRUPTED
from shardlab.strategies.plan.plan import UNNAMED
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import (
    ConfigSource,
    depth_source,
    file_source,
    merge_fields,
    origin_of,
    preset_source,
    resolve_config,
    vocabulary_source,
    with_divided_batch,
)
from shardlab.train.data import parse_sources
from shardlab.train.history import AVERAGED, WEIGHTS

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.train.checkpoints import ResumedRun
    from shardlab.train.launch.environment import LaunchEnvironment
    from shardlab.train.launch.interrupt import Heartbeat
    from shardlab.train.run import Summary, TrainingRun
    from shardlab.train.steps import Callback


BY_NAME = {"model": "the model", "plan": "the plan"}
"""Printed origin of a field that no source sets, by its section. In other sections, such a field follows from a
rule."""


@dataclass(frozen=True)
class Train:
    """Train a language model under a strategy; save weights, metrics and drawings."""

    strategy: Annotated[str | None, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="(default: fsdp)")] = None
    """Built-in name or file.py:function."""

    ranks: Ranks = None
    """Number of ranks."""

    preset: Name = None
    """Named settings: default, wordplay or shakespeare-cpu."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with settings, such as the config.toml of a run, or a job. It overrides the preset, and flags override
    both."""

    depth: OptionalCount = None
    """Number of layers. It determines the model's width and heads, the batch, the steps and the learning rate."""

    print_config: Flag = False
    """Print the configuration and the model's parameter counts, check that they can be trained, and exit."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: in runs/)")] = None
    """New folder for the results."""

    bind: Flag = False
    """Pin each rank to CPUs of its own, unless the launcher has done so."""

    resume: Annotated[str | None, tyro.conf.arg(metavar="FOLDER|auto", help_behavior_hint="")] = None
    """Continue this run from its newest checkpoint; auto: continue the run in --out, or start it there."""

    from_step: OptionalCount = None
    """With --resume: continue from the checkpoint after N steps."""

    max_ops: MaxOps = None
    """Refuse a program with more ops in a step, over all ranks, because it may never end."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a program or a schedule that needs more CPU time until its next op, because it may loop forever."""

    json: Flag = False
    """Print only JSON."""

    settings: Settings = NO_SETTINGS

    model: ModelFlags = DEFAULT_MODEL

    layout: Layout = NO_FLAGS

    def run(self) -> int:
        return self.train(Caller(shlex.join(["shardlab", *sys.argv[1:]])))

    def train(self, caller: Caller) -> int:
        """Train for a caller, and return the exit status.

        Raises:
            RankFailed: if a rank fails and the caller is a Python program.
            KeyboardInterrupt: if the training is interrupted before it has a result and the caller is a Python program.
        """
        from shardlab.train.launch.environment import find_launch_environment, may_restart, require_port

        require_port(os.environ)
        place = find_launch_environment(os.environ)
        world = None if place is None or (place.world == 1 and not may_restart(os.environ)) else place
        if self.resume not in (None, "auto") or not may_restart(os.environ):
            return self._start(caller, world, 0)
        from shardlab.train.launch.commands import restarts_in  # which needs torch

        restart = restarts_in(world, self._start_limit)
        return (replace(self, resume="auto") if restart and self.out is not None else self)._start(
            caller, world, restart
        )

    def _start(self, caller: Caller, world: LaunchEnvironment | None, restart: int) -> int:
        """Merge the settings, and train.

        Args:
            world: environment of a launcher, if there is one.
            restart: number of times that the launcher restarted the ranks.
        """
        from shardlab.train.launch.interrupt import Heartbeat

        is_first, launched = world is None or world.rank == 0, world and world.world
        resumed = self._find_resumed(world)
        sources = self._sources() if resumed is None else self._sources_of_resumed_run(resumed, launched)
        is_resumed, tell = resumed is not None, is_first and not self.json and not caller.in_python
        entry, config, planned = self._resolve(sources, launched, is_resumed=is_resumed, tell=tell)
        flags = self.settings.flag_values()
        refuse_unused(flags["optimizer"], config.optimizer)
        if resumed is not None:
            config = resumed.config(config)
            if resumed.has_ended(config.train.steps):
                count, total = resumed.steps_taken, config.train.steps
                steps = f"all of its {count} steps" if count == total else f"{counted(count, 'step')} already"
                if self.resume != "auto":
                    raise UserError(f"{resumed.out} has taken {steps}; give more --steps")
                if is_first:
                    print(f"shardlab: {resumed.out} has taken {steps}", file=sys.stderr)
                return 0
            span, step = flags["logging"].get("profile_steps"), resumed.checkpoint.step
            if span is not None and span[1] <= step and self.resume != "auto":
                raise UserError(
                    f"--profile-steps {span[0]}:{span[1]} has no effect, because the run continues with step {step}; "
                    "give later steps, or leave it out"
                )
        if self.print_config and is_first:
            self._print_config(config_with_allowed_passes(entry, config), sources)
        parse_sources(config.data.data)  # reports wrong data before torch is imported
        with Heartbeat("start", until=lambda: not is_first) as heartbeat:
            return self._run(caller, heartbeat, is_first, entry, config, planned, sources, resumed, restart)

    def _find_resumed(self, world: LaunchEnvironment | None) -> ResumedRun | None:
        """Return the run to resume (None: start a new one). The ranks of a launcher agree on it.

        Raises:
            UserError: if the run cannot be resumed, or options contradict each other.
        """
        if self.resume is None:
            if self.from_step is not None:
                raise UserError("--from-step chooses a checkpoint of the run to resume; give --resume FOLDER, too")
            return None
        from shardlab.train.checkpoints import ResumedRun
        from shardlab.train.launch.commands import RankExchange

        if self.resume == "auto":
            if self.out is None:
                raise UserError("--resume auto resumes the run in --out, or starts it; give --out FOLDER")
            return ResumedRun.find(self.out, self.from_step, auto=True, together=RankExchange(world, self._start_limit))
        others = {"--preset": self.preset, "--config": self.config, "--depth": self.depth, "--out": self.out}
        others["--init"] = self.settings.flag_values()["train"].get("init")
        if conflicts := [name for name, value in others.items() if value is not None]:
            raise UserError(
                f"--resume and {conflicts[0]} exclude each other, because a resumed run keeps its own; give one of them"
            )
        return ResumedRun.find(Path(self.resume), self.from_step, together=RankExchange(world, self._start_limit))

    @property
    def _start_limit(self) -> timedelta:
        """Time limit for the rendezvous of a launcher's ranks while the run's settings are not known yet."""
        from shardlab.train.launch.ranks import RENDEZVOUS, start_limit

        sources = self._sources() if self.resume is None else [preset_source("default"), self._flags()]
        timeout = merge_fields(sources, "train")["timeout"]
        is_valid = isinstance(timeout, float) and timeout > 0  # a wrong value is reported later
        return start_limit(timeout) if is_valid else RENDEZVOUS.start

    def _sources_of_resumed_run(self, resumed: ResumedRun, launched: int | None) -> list[ConfigSource]:
        """Return the sources of a resumed run's settings: the default preset, its checkpoint, and the flags."""
        flags = self._flags()
        train = {name: value for name, value in flags.sections["train"].items() if name != "init"}
        checkpoint_source = resumed.source(launched, flags.sections["optimizer"])
        return [preset_source("default"), checkpoint_source, ConfigSource("flags", {**flags.sections, "train": train})]

    def _flags(self) -> ConfigSource:
        """Return the settings that flags set."""
        plan = self.layout.flag_values()
        if any(axis in plan for axis in AXES):
            plan["mesh"] = True
        options = {"strategy": self.strategy, "name": self.strategy, "ranks": self.ranks}
        plan |= {name: value for name, value in options.items() if value is not None}
        return ConfigSource("flags", {"plan": plan, "model": self.model.flag_values(), **self.settings.flag_values()})

    def _sources(self) -> list[ConfigSource]:
        """Return the sources of the settings. A later one overrides an earlier one."""
        names = ["default", *([] if self.preset in (None, "default") else [self.preset])]
        flags = self._flags()
        files = [] if self.config is None else [with_divided_batch(file_source(self.config), flags)]
        sources = [*map(preset_source, names), *files, flags]
        if (data := vocabulary_source(sources)) is not None:
            sources.append(data)
        return sources if self.depth is None else [*sources, depth_source(self.depth, sources, flags.sections)]

    def _resolve(
        self, sources: list[ConfigSource], launched: int | None, *, is_resumed: bool, tell: bool
    ) -> tuple[StrategyEntry, TrainingConfig, PlannedRuns | None]:
        """Merge the sources into a strategy and a configuration.

        With --plan auto, the plans to measure are returned as well. A resumed run keeps its plan if the plan still fits
        the flags.

        Args:
            launched: number of ranks that a launcher started (None: no launcher).
            is_resumed: whether the run continues an earlier one.
            tell: whether to print the choice of a plan.
        """
        if self.layout.plan == AUTO:
            ranks = self.ranks or launched
            planned = plan_of_resumed_run(self.layout, sources, ranks) if is_resumed else None
            if planned is None:
                measure = not is_resumed and not self.print_config
                planned = plan_for_this_machine(self.layout, sources, ranks, measure=measure, tell=tell)
            first = planned.runs[0]
            sources.append(first.cut)
            return first.entry, first.config, planned
        lower_sources = [source for source in sources if source.name != "flags"]
        follows = self.resume is not None and (self.ranks is None or not self.layout.names_mesh)
        entry, ranks = self.layout.entry(self.strategy, self.ranks, lower_sources, otherwise=launched, follows=follows)
        return entry, resolve_config(sources, entry, ranks), None

    def _report_model(self, config: TrainingConfig, sources: list[ConfigSource]) -> None:
        """Print the default model if the plan comes from a file and no source names a model."""
        path, unsaid = self.layout.plan, origin_of(sources, "model", "model") == "default" and config.train.init is None
        if path not in (None, AUTO) and unsaid:
            name, layers = merge_fields(sources, "model")["model"], counted(config.model.layers, "layer")
            size = f"{config.model.parameter_count:,} parameters in {layers}"
            is_job = "model" in read_file(path, "TOML")
            reason = f"--plan takes only the plan from {path}" if is_job else f"{path} does not name a model"
            print(f"{reason}, so {name} is trained, with {size}; --model chooses another")

    def _run(
        self,
        caller: Caller,
        heartbeat: Heartbeat,
        is_first: bool,
        entry: StrategyEntry,
        config: TrainingConfig,
        planned: PlannedRuns | None,
        sources: list[ConfigSource],
        resumed: ResumedRun | None,
        restart: int,
    ) -> int:
        """Check the run, make its choices, run its ranks, and report the result.

        Args:
            heartbeat: prints to stderr during long operations to show that the run is alive.
            is_first: whether this process is a launcher's first rank, or has no launcher.
            entry, config: strategy and configuration.
            planned: plans to measure, with --plan auto.
            sources: sources of the settings, to which choices are added.
            resumed: run to resume.
            restart: number of times that the launcher restarted the ranks.
        """
        from shardlab.cli.train.before_ranks import failures_as_exit, line_lookup, refuse_restart, report_interrupted
        from shardlab.train.faults import WatchSettings
        from shardlab.train.history import WARNED, describe_saved, free_folder, note_end, record_inode, require_writable
        from shardlab.train.launch.ranks import LazyFunction, Rendezvous, run_ranks, start_limit, torch_limit
        from shardlab.train.report import require_loggers, write_report
        from shardlab.train.run import ByValue, Summary, TrainingRun

        if restart and resumed is None:
            refuse_restart(restart, self.out, config.saving.save_every)
        out = self.out or free_folder(Path("runs"), Path(entry.name.rpartition(":")[2]).stem)
        out, checkpoint = (out, None) if resumed is None else (resumed.out, resumed.checkpoint)
        exists = os.path.exists(out)  # True as well for a folder that this user may not read
        resumes = self.resume is not None and exists
        if exists and not resumes:
            raise UserError(
                f"--out {out} exists; name a new folder, so that nothing is overwritten, or resume its run with "
                f"--resume {out}"
            )
        if is_first:
            require_writable(out)
        peak = peak_flops(config, find_precision(config.precision.precision).compute)
        resume = None if checkpoint is None else checkpoint.folder
        callbacks, tell = ByValue(caller.callbacks), is_first and not self.json and not caller.in_python
        run = TrainingRun(config, out, caller.command, peak=peak, resume=resume, continues=resumes, callbacks=callbacks)
        require_recorded_steps(config, run.tracing.steps, resumed=checkpoint is not None)
        require_loggers(config.logging)
        corpus, prompt = run.corpus(verify=True), config.logging.prompt
        if resumed is not None and not self.settings.flag_values()["data"]:
            resumed.require_same_data(corpus.identity)
        if prompt is not None and not corpus.tokenizer.encode([prompt.encode(errors="surrogateescape")])[0].size:
            raise UserError(f"--prompt {prompt!r} has no tokens in the data's vocabulary; give another")
        timeout = config.train.timeout
        dynamo = config.train.compile or config.logging.trace
        joining = Rendezvous(self.bind, torch_limit(timeout), start_limit(timeout), dynamo)
        if planned is not None and len(planned.runs) > 1:
            heartbeat.doing = "plans in turns"
            fastest = measure_fastest(planned, run, self._check_run, joining, tell=tell)
            sources[-1], entry, run = fastest.cut, fastest.entry, replace(run, config=fastest.config)
        heartbeat.doing = "choice of passes"
        entry, run = settle_run(entry, run, sources)
        config = run.config
        heartbeat.doing = "check of the program"
        proof = self._check_run(entry, run)
        if self.print_config:
            return 0  # only now, after all checks
        if tell:
            print_config(stdout_console(), config, sources if resumed is None else sources[1:], all=False)
            self._report_model(config, sources)
            print(*corpus.notes, sep="\n", end="\n" if corpus.notes else "", flush=True)
        if is_first and resumed is not None and (change := resumed.schedule_change(config)):
            print(f"shardlab: {change}", file=sys.stderr)
        heartbeat.doing = "start of the ranks"
        heartbeat.until = lambda: not is_first or (out.exists() and not resumes)  # rank 0 reports from here on
        old_inode = record_inode(out)
        with failures_as_exit(out, exits=not caller.in_python):
            watching = WatchSettings(
                config.train.timeout, proof, line_lookup(entry, run.job), partial(describe_saved, out)
            )
            train_rank = LazyFunction[Summary | None]("shardlab.train.loop", "train_rank")
            summary = run_ranks(config.plan.ranks, train_rank, run, joining=joining, watching=watching)
        if summary is None:  # a rank of an existing world, but not the one that reports
            return 0
        end, reason = ("interrupted", WARNED if summary.warned else "") if summary.interrupted else ("finished", "")
        note_end(out, end, old_inode, reason, summary.validation_after)
        try:
            write_report(run, summary, predicted_seconds(run.job))
        except UserError as error:
            print(f"shardlab: {error}", file=sys.stderr)
            summary = replace(summary, unwritten=[*summary.unwritten, "report.md"])
        caller.summaries.append(summary)
        if caller.in_python:
            return 0
        if self.json:
            print_json({**asdict(summary), "parameters": config.model.parameter_count})
        else:
            print_summary(summary, config)
        if summary.interrupted:
            report_interrupted(out)
            return 0 if summary.saved == summary.steps else INTERRUPTED
        return 1 if summary.unwritten else 0

    def _check_run(self, entry: StrategyEntry, run: TrainingRun) -> Checked:
        """Check that a run's programs are right and suit its options. Return the program of the last steps."""
        from shardlab.cli.train.before_ranks import require_audit
        from shardlab.execute.requirements import want_compilable, want_step_graph
        from shardlab.train.launch.ranks import device_type

        proof, config = self._check_programs(entry, run), run.config
        if config.train.compile:
            want_compilable(proof, device_type(config.plan.ranks), traced=config.logging.trace)
        if config.train.cuda_graph:
            requirements = run.job.cut, run.job.numbers, config.optimizer, device_type(config.plan.ranks)
            want_step_graph(proof, *requirements, traced=config.logging.trace)
        if config.train.non_finite == "skip" and not proof.clips:
            raise UserError(
                f"--non-finite skip needs the gradient norm, which {entry.name} does not compute; take fsdp or a "
                "plan, such as zero-3, or give --non-finite stop"
            )
        if config.train.audit_every is not None:
            require_audit(proof, entry.name)
        return proof

    def _check_programs(self, entry: StrategyEntry, run: TrainingRun) -> Checked:
        """Check a run's program for each number of microbatches. Return the program of the last steps."""
        from shardlab.cli.train.before_ranks import checked_to_run

        other_counts = [count for count in run.config.train.ramp.counts if count != run.job.microbatches]
        jobs = [run.job, *(replace(run.job, microbatches=count) for count in other_counts)]
        proofs = {job.microbatches: checked_to_run(entry, job, run.config.optimizer) for job in jobs}
        if len(proofs) > 1:
            from shardlab.train.tracing import require_same_slices

            require_same_slices(proofs, run.job.cut)
        return proofs[run.job.microbatches]

    def _print_config(self, config: TrainingConfig, sources: list[ConfigSource]) -> None:
        counts = count_parameters(config.model)
        if self.json:
            print_json({**config.as_dict(), "parameters": asdict(counts)})
            return
        console = stdout_console()
        print_config(console, config, sources, all=True)
        console.print()
        print_counts(console, counts)


@dataclass(frozen=True)
class Caller:
    """Command line or Python program that starts a training.

    Attributes:
        command: text of the call, for the record of the run.
        callbacks: callbacks of the caller, added to those of the training itself.
        in_python: whether to raise failures and return the summary, instead of printing them.
        summaries: list to which the summary is appended.
    """

    command: str
    callbacks: Sequence[Callback] = ()
    in_python: bool = False
    summaries: list[Summary] = field(default_factory=list[Any])


def refuse_unused(flag_names: Collection[str], config: OptimizerConfig) -> None:
    """Refuse flags that the optimizer or the learning-rate schedule does not use.

    Presets, files and earlier runs may set such fields.

    Args:
        flag_names: fields of the optimizer that flags set.
        config: settings of the optimizer from all sources.

    Raises:
        UserError: with the values that use the flag.
    """
    for name, (decider, users) in USED_WITH.items():
        if name in flag_names and (value := getattr(config, decider)) not in users:
            flag, others = f"--{name.replace('_', '-')}", alternatives(users)
            option = f"--{decider.replace('_', '-')}"
            raise UserError(f"{flag} has no effect with {option} {value}; leave it out, or give {option} {others}")


def require_recorded_steps(config: TrainingConfig, traced: int, *, resumed: bool) -> None:
    """Refuse a run if steps to trace or to profile do not exist, or differ in their batch sizes.

    Args:
        traced: number of steps in a trace.
        resumed: whether the run is resumed.

    Raises:
        UserError: with the reason.
    """
    steps = config.train.steps
    if config.logging.trace and steps < traced:
        raise UserError(f"--trace needs {traced} steps, but --steps is {steps}; give more")
    first_step, end = config.logging.profile_steps or (0, 0)
    if config.logging.memory_snapshot and not end:
        raise UserError(
            "--memory-snapshot records the steps of --profile-steps; give them, too, as in --profile-steps 3:5"
        )
    if end > steps:
        raise UserError(f"--profile-steps {first_step}:{end} needs {end} steps, but --steps is {steps}; give more")
    ramp, recorded = config.train.ramp, {"--profile-steps": (first_step, end)} if end else {}
    if config.logging.trace:
        recorded["--trace"] = 0, traced
    for flag, (begin, stop) in recorded.items():
        if ramp.stage(begin) != ramp.stage(stop - 1):
            raise UserError(
                f"{flag} covers steps {begin} to {stop - 1}, but the batch ramp {config.train.batch_ramp} changes "
                "the batch between them; change it before or after"
            )
    if config.logging.trace and resumed:
        raise UserError("--trace records the first steps of a run, which are already done; trace a new run")


def print_summary(summary: Summary, config: TrainingConfig) -> None:
    """Print the results of a run, its files, and a sample of its model."""
    model = config.model
    console = stdout_console()
    loss = f"loss {summary.validation_before:.3f} before, {summary.validation_after:.3f} after"
    speed = f"{summary.tps:,.0f} tokens/s, {1000 * summary.dt:.0f} ms/step (median after {summary.warm_up} steps)"
    print_fact(console, "model", f"{model.parameter_count:,} parameters in {model.layers} layers")
    print_fact(console, "steps", f"{summary.steps}" + (" (interrupted)" if summary.interrupted else ""))
    if summary.validation_after_ema is not None:
        loss += f", {summary.validation_after_ema:.3f} with the averaged weights"
    print_fact(console, "validation", loss, "bold")
    print_fact(console, "speed", speed)
    files = ["config.toml", "run.json", "metrics.jsonl", "report.md", "plots.svg", "strategy.svg"]
    weights = (weights_at(Path(summary.out, name)) for name in (WEIGHTS, AVERAGED))
    files += [path.name for path in weights if path] + ["trace.json"] * config.logging.trace
    files = [file for file in files if file not in summary.unwritten]
    print_fact(console, "results", f"{summary.out}/: {', '.join(files)}")
    source = "a line of the validation text" if config.logging.prompt is None else "--prompt"
    console.print(f"\n[dim]The model continues {source}, {len(summary.prompt)} characters:[/]")
    console.print(Text.assemble((summary.prompt, "bold"), summary.sample.removeprefix(summary.prompt)))


def print_config(console: Console, config: TrainingConfig, sources: Sequence[ConfigSource], *, all: bool) -> None:
    """Print a row for each field of a configuration, with its value and its source.

    Args:
        all: whether to print all fields, including derived ones and those from the first source.
    """
    table = table_of("section", "field", "value", "from", words=4)
    for section, fields in config.as_dict().items():
        heading = section
        for name, value in fields.items():
            source = origin_of(sources, section, name)
            if value is None or (not all and source in (None, sources[0].name)) or (name, value) == ("name", UNNAMED):
                continue
            origin_text = source or ("rule" if name == "passes" else BY_NAME.get(section, "rule"))
            table.add_row(heading, name, Text(value_text(value), "bold"), Text(origin_text, "dim"))
            heading = ""
    if table.row_count:
        print_whole(console, table, folded=2)


def value_text(value: Any) -> str:
    """Return a value as text for a table."""
    if isinstance(value, dict):
        sizes = cast(dict[str, Any], value)
        return " ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one rank"
    if isinstance(value, list):
        return ", ".join(map(str, cast(list[Any], value))) or "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def print_counts(console: Console, counts: ParameterCounts) -> None:
    """Print the parameter counts of a model."""
    rows = [
        ("parameters", f"{counts.parameters:,}", "all"),
        ("decayed", f"{counts.decayed:,}", f"in {counts.decayed_tensors} tensors"),
        ("not decayed", f"{counts.not_decayed:,}", f"in {counts.not_decayed_tensors} tensors"),
        ("nanoGPT's count", f"{counts.without_positions:,}", "without position embeddings"),
    ]
    print_figures(console, rows)
