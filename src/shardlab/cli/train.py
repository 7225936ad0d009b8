"""`shardlab train`: train a small language model under a strategy, on processes of this machine or of a launcher."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from shardlab.cli.console import print_fact, print_json, stdout_console
from shardlab.cli.model_options import DEFAULT_MODEL, ModelFlags
from shardlab.cli.options import Count, Flag, MaxOps, MaxSeconds, Norm, Ranks
from shardlab.cli.plan_options import NO_FLAGS, Layout
from shardlab.program import UserError
from shardlab.program.files import want_file
from shardlab.starting import INTERRUPTED

if TYPE_CHECKING:
    from shardlab.models import Model
    from shardlab.train.heartbeat import Heartbeat
    from shardlab.train.run import Summary


@dataclass(frozen=True)
class Train:
    """Train a language model of bytes under a strategy, and keep its weights, metrics and drawings.

    Ranks are processes of this machine; under torchrun, srun or mpiexec the command joins their world instead.
    """

    strategy: Annotated[
        str | None, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="(default: fsdp, or the plan)")
    ] = None
    """A built-in name, or path/to/file.py:function; or none, for a plan by flags or --plan."""

    ranks: Ranks = None
    """How many ranks."""

    steps: Count = 200
    """How many optimizer steps."""

    microbatches: Count = 4
    """How many microbatches the global batch is cut into."""

    micro_batch_size: Count = 4
    """Sequences of a microbatch."""

    learning_rate: float = 2e-3
    """AdamW's largest learning rate, after a warm-up of a twentieth of the steps."""

    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices."""

    clip: Norm = None
    """The largest norm of the whole model's gradient; for plans, which compute it."""

    seed: int = 0
    """Seed of weights, batches, dropout and the sample."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text to train on; without one, the source of Python's standard library."""

    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """What the trained model goes on from; without it, a line of the text that it was not trained on."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A new folder for the results; without one, runs/NAME-1, -2, ..."""

    trace: Flag = False
    """Record a few steps, every op's time and memory on every rank: trace.json is for Perfetto (ui.perfetto.dev) and
    Chrome, and shardlab compare FOLDER lays them beside the prediction."""

    max_ops: MaxOps = None
    """Ops of a step on all ranks that are traced: more are refused, as those of a program that never ends."""

    max_seconds_per_op: MaxSeconds = None
    """CPU time until a program's or a schedule's next op: more is refused, as that of a loop that never ends."""

    json: Flag = False
    """Print JSON alone."""

    model: ModelFlags = DEFAULT_MODEL

    layout: Layout = NO_FLAGS

    def run(self) -> int:
        from shardlab.train.heartbeat import Heartbeat
        from shardlab.train.launch_environment import find_launch_environment, require_port

        if self.data is not None:
            want_file(self.data)  # before torch is imported
        require_port(os.environ)
        place = find_launch_environment(os.environ)
        first = place is None or place.rank == 0
        with Heartbeat("start", until=lambda: not first) as heartbeat:
            return self._run(heartbeat, first)

    def _run(self, heartbeat: Heartbeat, first: bool) -> int:
        from shardlab.cli.ranks import checked_to_run, failures_as_exit, refuse_restart, tell_interrupted
        from shardlab.execute import AdamW
        from shardlab.train.job import Job
        from shardlab.train.launch import ranks_here, run_ranks
        from shardlab.train.loop import train_rank
        from shardlab.train.output import free_folder
        from shardlab.train.run import TrainingRun
        from shardlab.train.tracing import Tracing

        refuse_restart(self.out)
        if self.prompt == "":
            raise UserError("--prompt is empty; give some text, or leave it out for a line of the validation text")

        name = "fsdp" if self.strategy is None and self.layout == NO_FLAGS else self.strategy
        chosen, ranks = self.layout.entry(name, self.ranks or ranks_here(0) or None)
        out = self.out or free_folder(Path("runs"), Path(chosen.name.rpartition(":")[2]).stem)
        if out.exists():
            raise UserError(f"--out {out} exists; name a new folder, so that nothing is overwritten")
        model = self.model.make(chosen.default_layers(ranks))
        if model.vocab_size < 256:
            raise UserError(f"the vocabulary is {model.vocab_size}, but text is read as bytes; give 256 or more")
        job = Job(
            chosen.for_job(ranks),
            ranks,
            self.microbatches,
            model,
            self.micro_batch_size,
            seed=self.seed,
            name=chosen.name,
        )
        optimizer = AdamW(
            self.learning_rate,
            weight_decay=self.weight_decay,
            warmup=-(-self.steps // 20),
            steps=self.steps,
            clip=self.clip,
        )
        tracing = Tracing() if self.trace else None
        if tracing is not None and self.steps < tracing.steps:
            raise UserError(f"--trace needs {tracing.steps} steps, but --steps is {self.steps}; give more")
        command = shlex.join(["shardlab", *sys.argv[1:]])
        plan = TrainingRun(job, optimizer, self.data, out, tracing, self.prompt, command)
        plan.corpus(plan.text())
        heartbeat.doing = "check of the program"
        checked_to_run(chosen, job, self.clip)
        heartbeat.doing = "start of the ranks"
        heartbeat.until = lambda: not first or out.exists()  # then rank 0 says what it does
        with failures_as_exit(out):
            summary = run_ranks(ranks, train_rank, plan)
        if summary is None:  # a rank of an existing world, but not the one that reports
            return 0
        self._print(summary, job.model)
        if summary.interrupted:
            tell_interrupted(out)
            return INTERRUPTED
        return 1 if summary.unwritten else 0

    def _print(self, summary: Summary, model: Model) -> None:
        if self.json:
            print_json({**asdict(summary), "parameters": model.parameter_count})
            return
        console = stdout_console()
        loss = f"loss {summary.validation_before:.3f} before, {summary.validation_after:.3f} after"
        speed = f"{summary.tokens_per_second:,.0f} tokens/s, {summary.ms_per_step:.0f} ms/step (median)"
        print_fact(console, "model", f"{model.parameter_count:,} parameters in {model.layers} layers")
        print_fact(console, "steps", f"{summary.steps}" + (" (interrupted)" if summary.interrupted else ""))
        print_fact(console, "validation", loss, "bold")
        print_fact(console, "speed", speed)
        files = ["run.json", "metrics.jsonl", "loss.svg", "strategy.svg", "weights.safetensors"]
        files = [file for file in [*files, *["trace.json"] * self.trace] if file not in summary.unwritten]
        print_fact(console, "results", f"{summary.out}/: {', '.join(files)}")
        source = "a line of the validation text" if self.prompt is None else "--prompt"
        console.print(f"\n[dim]The model goes on from {source}, {len(summary.prompt)} characters:[/]")
        console.print(Text.assemble((summary.prompt, "bold"), summary.sample.removeprefix(summary.prompt)))
