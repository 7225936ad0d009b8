"""`shardlab verify STRATEGY`: compare a strategy on real processes with plain training on one device."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro
from rich.markup import escape

from shardlab.check import drifts_of
from shardlab.cli.console import print_fact, print_figures, print_json, stdout_console
from shardlab.cli.model_options import DEFAULT_MODEL, ModelFlags
from shardlab.cli.options import Count, Flag, MaxOps, MaxSeconds, Norm, Ranks, StrategyName
from shardlab.cli.plan_options import NO_FLAGS, Layout
from shardlab.cli.simulate.command import print_drifts
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.language.precision import Optimizer
from shardlab.train.launch.environment import require_port

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.train.job import Job
    from shardlab.train.verification.cases import Verdict


class Verification(NamedTuple):
    """Result of a comparison: what ran, its program, the norm to which gradients were clipped, and the verdict."""

    job: Job
    proof: Checked
    clip: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Verify:
    """Train a few steps with a strategy and on one device, in float64, and compare loss, gradients and weights.

    The error of a layer is max|a - b| / max|b| over all its parameters, and the largest error counts. Up to 1e-12 is
    ok. In another precision, the strategy may be at most twice as far from one device in float64 as one device in that
    precision is.
    """

    strategy: StrategyName = None
    """Built-in name, or path/to/file.py:function. Leave it out for a plan by flags or --plan."""

    ranks: Ranks = None
    """Number of ranks."""

    microbatches: Count = 4
    """Number of microbatches in the global batch."""

    steps: Count = 3
    """Number of optimizer steps to compare."""

    clip: Norm = None
    """Largest norm of the whole model's gradient, on both sides. Needs fsdp or a plan, which compute this norm; their
    default is a small norm (0.1), so that clipping has an effect."""

    precision: Annotated[str, tyro.conf.arg(metavar="NAME")] = "fp64"
    """fp64, fp32, bf16, bf16-fp32-grads or fp16."""

    optimizer: Annotated[Optimizer, tyro.conf.arg(help_behavior_hint="(default: adamw)")] = "adamw"
    """Optimizer of both sides."""

    ema: Annotated[float | None, tyro.conf.arg(metavar="DECAY", help_behavior_hint="")] = None
    """Decay of a moving average of the weights, which is compared as well."""

    compile: Flag = False
    """Compile the layers of the ranks with torch.compile, but not those of the one device."""

    all: Flag = False
    """Verify every strategy, and every way to shard on every pipeline schedule. This takes minutes."""

    max_ops: MaxOps = None
    """Refuse a program with more ops in a step, over all ranks, because it may never end."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a program or a schedule that needs more CPU time until its next op, because it may loop forever."""

    json: Flag = False
    """Print only JSON."""

    model: ModelFlags = DEFAULT_MODEL

    layout: Layout = NO_FLAGS

    def compare(self, *, exits: bool = True) -> Verification | None:
        """Run the strategy and one device, and compare them.

        Args:
            exits: whether a failed rank ends this process. Otherwise `RankFailed` is raised.

        Returns:
            The result; None on a rank of a launcher's world that does not report.
        """
        require_port(os.environ)

        from shardlab.cli.train.before_ranks import checked_to_run, failures_as_exit
        from shardlab.cli.train.choose_passes import settle_passes
        from shardlab.execute import OptimizerConfig
        from shardlab.execute.requirements import want_compilable
        from shardlab.train.job import Job
        from shardlab.train.launch.ranks import device_type, launched_ranks
        from shardlab.train.verification.cases import clip_for, verify

        chosen, ranks = self.layout.entry(self.strategy, self.ranks or launched_ranks(0) or None)
        ep = chosen.grid(ranks).ep
        layers, kind = chosen.default_layers(ranks), "moe" if ep > 1 else "mlp" if chosen.columns else "gpt"
        model = self.model.make(layers, kind, hidden_size=32, heads=4, seq_len=16, experts=max(4, 2 * ep))
        job = Job(
            chosen.for_job(ranks),
            ranks,
            self.microbatches,
            model,
            2,
            self.precision,
            name=chosen.name,
            optimizer=self.optimizer,
            ema=self.ema,
            passes=chosen.passes,
        )
        chosen = settle_passes(chosen, job)
        job = replace(job, strategy=chosen.for_job(ranks), passes=chosen.passes)
        proof = checked_to_run(chosen, job, OptimizerConfig(optimizer=self.optimizer, clip=self.clip, ema=self.ema))
        if self.compile:
            want_compilable(proof, device_type(ranks))
        clip = clip_for(proof, self.clip)
        with failures_as_exit(exits=exits):
            verdict = verify(job, self.steps, clip, self.compile)
        return None if verdict is None else Verification(job, proof, clip, verdict)

    def run(self) -> int:
        if self.all:
            return self._all()
        result = self.compare()
        if result is None:  # a rank of an existing world, but not the one that reports
            return 0
        from shardlab.train.verification.cases import TOLERANCE

        job, proof, clip, verdict = result
        if self.json:
            facts = {
                "strategy": job.name,
                "ranks": job.ranks,
                "layers": job.model.layers,
                "microbatches": self.microbatches,
                "clip": clip,
                "drifts": [drift.as_dict() for drift in drifts_of(proof)],
            }
            print_json({**facts, **asdict(verdict), "tolerance": TOLERANCE, "ok": verdict.ok})
        else:
            console = stdout_console()
            where = f"on {counted(job.ranks, 'rank')} against one device, {job.numbers.compute}"
            console.print(f"[bold cyan]{escape(job.name)}[/] {where}, {counted(self.steps, 'step')}")
            clipped = [] if clip is None else [("clip", f"{clip:g}", "the largest norm of the gradient")]
            worst = ["", f"worst in layer {verdict.gradient_layer}", f"worst in layer {verdict.weight_layer}"]
            limit = f"max |a - b| / max |b| is at most {TOLERANCE:.0e}"
            if verdict.exact is not None and verdict.one_device is not None:
                pairs = zip(verdict.exact.all, verdict.one_device.all, strict=True)
                worst = [f"from float64 {ours:.2e}, one device {its:.2e}" for ours, its in pairs]
                limit = f"is at most twice as far from float64 as one device, and {verdict.rounding:.0e}"
            names = ("loss_error", "gradient_error", "weight_error")
            errors = zip(names, [f"{error:.2e}" for error in verdict.all], worst, strict=True)
            print_figures(console, [*clipped, *errors])
            if verdict.ok:
                print_fact(console, "ok", f"yes, each {limit}", "green")
            else:
                print_fact(console, "ok", f"no, not each {limit}", "red")
            print_drifts(console, proof)
        return 0 if verdict.ok else 1

    def _all(self) -> int:
        from shardlab.cli.train.before_ranks import failures_as_exit
        from shardlab.cli.verify_table import as_json, print_tables
        from shardlab.train.verification.cases import CASES
        from shardlab.train.verification.verify import verify_all

        given = self.layout.given()
        passes = given.pop("passes", "all")
        if given or replace(self, all=False, steps=3, json=False, layout=NO_FLAGS) != Verify():
            raise UserError(
                "verify --all uses its own strategies and sizes; give only --steps, --passes and --json with it"
            )
        start = time.monotonic()
        with failures_as_exit():
            results = verify_all([replace(case, passes=passes) for case in CASES], self.steps)
        seconds = time.monotonic() - start
        if self.json:
            print_json(as_json(results, seconds))
        else:
            print_tables(results, seconds, stdout_console())
        return 0 if all(result.ok for result in results) else 1
