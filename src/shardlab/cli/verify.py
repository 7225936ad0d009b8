"""`shardlab verify STRATEGY`: compare a strategy on real processes with plain training on one device.

`Verify.run` compares one strategy. With --all, `print_tables` shows the largest error of every strategy, sharding and
pipeline schedule.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import Report, print_json, stdout_console, table_of
from shardlab.cli.model_options import DEFAULT_MODEL, ModelFlags
from shardlab.cli.options import Count, Flag, MaxOps, MaxSeconds, Norm, OptionalCount, Ranks, StrategyName
from shardlab.cli.plan_options import NO_FLAGS, JobFile, Layout, job_source
from shardlab.cli.simulate.command import add_drifts
from shardlab.common.text import counted
from shardlab.language import OpKind, UserError
from shardlab.language.precision import Optimizer
from shardlab.train.config import BatchConfig
from shardlab.train.config_sources import batch_of
from shardlab.train.launch.environment import require_port

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.train.job import Job
    from shardlab.train.verification.cases import Verdict
    from shardlab.train.verification.verify import CaseResult

DEFAULT_BATCH = BatchConfig(microbatches=4, micro_batch_size=2)


class Verification(NamedTuple):
    """Result of a comparison.

    Attributes:
        job: job that ran.
        proof: checked program of the job.
        clip: norm to which gradients were clipped (None: not clipped).
        verdict: differences from one device.
        with_casts: differences of a second run, in float32 (None: there was none). A program with casts has one,
            because its casts are off in float64.
    """

    job: Job
    proof: Checked
    clip: float | None
    verdict: Verdict
    with_casts: Verdict | None


@dataclass(frozen=True)
class Verify:
    """Train a few steps with a strategy and on one device, in float64, and compare loss, gradients and weights.

    The error of a layer is max|a - b| / max|b| over all its parameters. The largest error may be 1e-12. In another
    precision, the strategy may differ from one device in float64 by at most twice as much as one device in that
    precision does. A program's casts are off in float64, so a program with casts runs a second time in float32.
    """

    strategy: StrategyName = None
    """Built-in name, or path/to/file.py:function. Leave it out for a plan by flags or --plan."""

    ranks: Ranks = None
    """Number of ranks."""

    microbatches: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4)")] = None
    """Number of microbatches in the global batch."""

    steps: Count = 3
    """Number of optimizer steps to compare."""

    clip: Norm = None
    """Largest norm of the whole model's gradient, on both sides. Needs fsdp or a plan, which compute this norm. For
    these, the default is 0.1, small enough for clipping to have an effect."""

    precision: Annotated[str, tyro.conf.arg(metavar="NAME")] = "fp64"
    """fp64, fp32, bf16, bf16-fp32-grads, bf16-params or fp16."""

    optimizer: Annotated[
        Optimizer | None, tyro.conf.arg(metavar="{adamw,sgd,lion,muon}", help_behavior_hint="(default: adamw)")
    ] = None
    """Optimizer of both sides."""

    ema: Annotated[float | None, tyro.conf.arg(metavar="DECAY", help_behavior_hint="")] = None
    """Decay of a moving average of the weights, which is compared as well."""

    compile: Flag = False
    """Compile the layers of the ranks with torch.compile, but not those of the one device."""

    all: Flag = False
    """Verify every strategy, and every sharding option on every pipeline schedule. This takes minutes."""

    max_ops: MaxOps = None
    """Refuse a program with more ops in a step, over all ranks, because it may never end."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a program or a schedule that needs more CPU time until its next op, because it may loop forever."""

    json: Flag = False
    """Print only JSON."""

    model: ModelFlags = DEFAULT_MODEL

    layout: Layout = NO_FLAGS

    config: JobFile = None

    def compare(self, *, exits: bool = True) -> Verification | None:
        """Run the strategy and one device, and compare them.

        Args:
            exits: whether a failed rank ends this process. Otherwise `RankFailed` is raised.

        Returns:
            The result, or None on a launcher's rank that does not report.
        """
        require_port(os.environ)

        from shardlab.cli.train.before_ranks import checked_to_run, failures_as_exit
        from shardlab.cli.train.choose_passes import settle_passes
        from shardlab.execute.optimizers.settings import OptimizerConfig
        from shardlab.execute.requirements import want_compilable
        from shardlab.train.job import Job
        from shardlab.train.launch.ranks import device_type, launched_ranks
        from shardlab.train.verification.cases import clip_for, verify

        file = job_source(self.config)
        file_settings = file.sections.get("optimizer", {})
        optimizer = self.optimizer or file_settings.get("optimizer", "adamw")
        ema = file_settings.get("ema") if self.ema is None else self.ema
        batch = BatchConfig(microbatches=self.microbatches).fill(batch_of(file)).fill(DEFAULT_BATCH)
        microbatches, _ = batch.cut(1, None)
        entry, ranks = self.layout.entry(self.strategy, self.ranks, [file], otherwise=launched_ranks(0) or None)
        ep = entry.grid(ranks).ep
        layers, kind = entry.default_layers(ranks), "moe" if ep > 1 else "mlp" if entry.columns else "gpt"
        small = {"hidden_size": 32, "heads": 4, "seq_len": 16, "experts": max(4, 2 * ep)}
        model = self.model.make(layers, kind, file_fields=file.sections.get("model"), **small)
        if model.vocab_size == 1:
            raise UserError("the loss of a vocabulary of one token is always 0; give --vocab-size 2 or more")
        job = Job(
            entry.for_job(ranks),
            ranks,
            microbatches,
            model,
            2,
            self.precision,
            name=entry.name,
            optimizer=optimizer,
            ema=ema,
            passes=entry.passes,
        )
        entry = settle_passes(entry, job)
        job = replace(job, strategy=entry.for_job(ranks), passes=entry.passes)
        proof = checked_to_run(entry, job, OptimizerConfig(optimizer=optimizer, clip=self.clip, ema=ema))
        if self.compile:
            want_compilable(proof, device_type(ranks))
        clip = clip_for(proof, self.clip)
        with failures_as_exit(exits=exits):
            verdict, with_casts = verify(job, self.steps, clip, self.compile), None
            if job.precision == "fp64" and has_casts(proof):
                with_casts = verify(replace(job, precision="fp32"), self.steps, clip, self.compile)
        return None if verdict is None else Verification(job, proof, clip, verdict, with_casts)

    def run(self) -> int:
        if self.all:
            return self._all()
        result = self.compare()
        if result is None:  # a rank of an existing world, but not the one that reports
            return 0
        from shardlab.train.verification.cases import TOLERANCE

        job, proof, clip, verdict, with_casts = result
        report = Report(
            strategy=job.name, ranks=job.ranks, layers=job.model.layers, microbatches=job.microbatches, clip=clip
        )
        conditions = f"on {counted(job.ranks, 'rank')} against one device, {job.numbers.compute}"
        report.line(Text.assemble((job.name, "bold cyan"), f" {conditions}, {counted(self.steps, 'step')}"))
        if clip is not None:
            report.fact("clip", "gradients are clipped to this norm", f"{clip:g}")
        worst = ["", f"worst in layer {verdict.gradient_layer}", f"worst in layer {verdict.weight_layer}"]
        limit = f"max |a - b| / max |b| is at most {TOLERANCE:.0e}"
        if verdict.exact is not None and verdict.one_device is not None:
            pairs = zip(verdict.exact.all, verdict.one_device.all, strict=True)
            worst = [f"from float64 {ours:.2e}, one device {theirs:.2e}" for ours, theirs in pairs]
            limit = f"is at most twice as far from float64 as one device, plus {verdict.rounding:.0e}"
        for name, error, text in zip(("loss_error", "gradient_error", "weight_error"), verdict.all, worst, strict=True):
            report.fact(name, text, f"{error:.2e}")
        answer, style = ("yes, each", "green") if verdict.ok else ("no, not each", "red")
        report.fact("ok", f"{answer} {limit}", style=style)
        report.data |= {**asdict(verdict), "tolerance": TOLERANCE, "ok": verdict.ok}
        if with_casts is not None:
            add_lossy_run(report, with_casts)
        add_drifts(report, proof)
        report.show(json=self.json)
        return 0 if verdict.ok else 1

    def _all(self) -> int:
        from shardlab.cli.train.before_ranks import failures_as_exit
        from shardlab.train.verification.cases import CASES
        from shardlab.train.verification.verify import verify_all

        flags = self.layout.flag_values()
        passes = flags.pop("passes", "all")
        if flags or replace(self, all=False, steps=3, json=False, layout=NO_FLAGS) != Verify():
            raise UserError(
                "verify --all uses its own strategies and sizes; give only --steps, --passes and --json with it"
            )
        start = time.monotonic()
        cases = {replace(case, passes=passes): place for place, case in enumerate(CASES)}
        results: list[CaseResult] = []
        try:
            with failures_as_exit():
                verify_all([*cases], self.steps, results)
        finally:  # an interrupt, or the failure of a rank, leaves the results of the cases before
            results.sort(key=lambda result: cases[result.case])
            seconds = time.monotonic() - start
            if results and self.json:
                print_json(as_json(results, len(cases), seconds))
            elif results:
                print_tables(results, len(cases), seconds, stdout_console())
        return 0 if all(result.ok for result in results) else 1


def has_casts(checked: Checked) -> bool:
    """Return whether a program casts values to another dtype, by which they may be rounded."""
    return any(op.kind is OpKind.CAST for tape in checked.program.tapes for op in tape)


def add_lossy_run(report: Report, verdict: Verdict) -> None:
    """Add to the report the errors of a second run, in float32 with the program's casts applied."""
    assert verdict.exact is not None
    assert verdict.one_device is not None
    report.fact("casts", "disabled in float64; the same in float32, with casts:")
    report.data["with_casts"] = {"precision": "fp32", **asdict(verdict.exact)}
    pairs = zip(verdict.exact.all, verdict.one_device.all, strict=True)
    for name, (error, one_device) in zip(("loss_error", "gradient_error", "weight_error"), pairs, strict=True):
        report.fact(name, f"from float64; one device in float32 {one_device:.2e}", f"{error:.2e}")


def as_json(results: Sequence[CaseResult], total: int, seconds: float) -> dict[str, Any]:
    """Return the results for --json. The field `ok` is true if all `total` cases have run and are ok."""
    from shardlab.train.verification.cases import TOLERANCE

    rows = [
        {
            **{name: value for name, value in vars(result.case).items() if name != "strategy"},
            "error": None if math.isinf(result.error) else result.error,
            "refused": result.refused or None,
            "ok": result.ok,
        }
        for result in results
    ]
    ok = len(results) == total and all(result.ok for result in results)
    return {"cases": rows, "total": total, "tolerance": TOLERANCE, "seconds": round(seconds, 1), "ok": ok}


def print_tables(results: Sequence[CaseResult], total: int, seconds: float, console: Console) -> None:
    """Print tables of strategies, sharding options and pipelines, each with the case that has the largest error.

    If there are fewer results than `total`, the run was interrupted.
    """
    from shardlab.train.verification.cases import ALONE, TOLERANCE

    strategy_cases = [result for result in results if result.case.column == ALONE]
    pairs = [result for result in results if result.case.column != ALONE]
    for title, rows in (("strategy", strategy_cases), ("sharding", pairs), ("pipeline", pairs)):
        if rows:
            console.print(_table(rows, title))
            console.print()
    failures = [result for result in results if not result.ok]
    for result in failures:
        console.print(Text(str(result), "red"))
    criterion = "the largest error max|a - b| / max|b| of loss, gradients, weights"
    count = f"{len(results)} of {total} cases" if len(results) < total else f"{total} cases"
    console.print(f"[dim]{count} in {seconds:.0f} s: {criterion}[/]")
    if failures:
        console.print(f"[red]{counted(len(failures), 'case')} wrong[/]")
    elif results:
        console.print(f"[green]{'all' if len(results) == total else 'these'} within {TOLERANCE:.0e}[/]")


def _table(results: Sequence[CaseResult], title: str) -> Table:
    """Return a table with the number of cases and the largest error of each strategy, sharding option or pipeline."""
    table = table_of(title, "cases", "largest error", gap=3)
    table.columns[0].style = "cyan"
    table.add_column("" if title == "strategy" else "where", style="dim", no_wrap=True)
    cases: dict[str, list[CaseResult]] = defaultdict(list)
    for result in results:
        cases[result.case.column if title == "sharding" else result.case.row].append(result)
    for name, group in cases.items():
        worst = max(group, key=lambda result: result.error)
        text = "refused" if math.isinf(worst.error) else f"{worst.error:.0e}"
        other = {"strategy": "", "sharding": worst.case.row, "pipeline": worst.case.column}[title]
        style = "" if all(result.ok for result in group) else "red"
        table.add_row(name, str(len(group)), Text(text, style), other)
    return table
