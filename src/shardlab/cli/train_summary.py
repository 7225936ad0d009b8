"""What `shardlab train` says of a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from shardlab.cli.console import print_fact, stdout_console
from shardlab.models.weight_files import weights_at
from shardlab.train.config import TrainingConfig
from shardlab.train.saved import AVERAGED, WEIGHTS

if TYPE_CHECKING:
    from shardlab.train.run import Summary


def print_summary(summary: Summary, config: TrainingConfig) -> None:
    """Print what a run came to, which files it has left, and a sample of its model."""
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
    files = ["config.toml", "run.json", "metrics.jsonl", "report.md", "loss.svg", "strategy.svg"]
    weights = (weights_at(Path(summary.out, name)) for name in (WEIGHTS, AVERAGED))
    files += [path.name for path in weights if path] + ["trace.json"] * config.logging.trace
    files = [file for file in files if file not in summary.unwritten]
    print_fact(console, "results", f"{summary.out}/: {', '.join(files)}")
    source = "a line of the validation text" if config.logging.prompt is None else "--prompt"
    console.print(f"\n[dim]The model continues {source}, {len(summary.prompt)} characters:[/]")
    console.print(Text.assemble((summary.prompt, "bold"), summary.sample.removeprefix(summary.prompt)))
