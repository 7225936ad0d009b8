"""`shardlab verify STRATEGY`: a strategy on real processes against plain training on one device."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from shardlab.cli.options import Count, Flag, Ranks, StrategyName
from shardlab.cli.strategy import checked
from shardlab.strategies.load import load


@dataclass(frozen=True)
class Verify:
    """Train a few steps under a strategy and on one device, in float64, and compare loss, gradients and weights.

    An error is max|a - b| / max|b| over all parameters of a layer; the worst layer counts. Up to 1e-12 is ok.
    """

    strategy: StrategyName
    """A built-in name, or path/to/file.py:function."""

    ranks: Ranks = None
    """How many ranks."""

    layers: Count = 4
    """How many layers the model has."""

    microbatches: Count = 4
    """How many microbatches the global batch has."""

    steps: Count = 3
    """How many optimizer steps are compared."""

    dropout: float = 0.0
    """Dropout's probability in the model."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        import torch

        from shardlab.cli.ranks import failures_as_exit, refuse_hanging
        from shardlab.models import GPT, MoE
        from shardlab.train.job import Job
        from shardlab.train.launch import ranks_here
        from shardlab.train.verify import TOLERANCE, verify

        chosen = load(self.strategy)
        ranks = self.ranks or ranks_here(chosen.ranks)
        if (ep := chosen.grid(ranks).ep) > 1:
            model = MoE(layers=self.layers, width=32, heads=4, block=16, dropout=self.dropout, experts=2 * ep)
        else:
            model = GPT(layers=self.layers, width=32, heads=4, block=16, dropout=self.dropout)
        job = Job(self.strategy, ranks, self.microbatches, model, 2, torch.float64)
        refuse_hanging(checked(chosen, ranks, job.sizes, self.microbatches))
        with failures_as_exit():
            verdict = verify(job, self.steps)
        if verdict is None:  # a rank of an existing world, but not the one that reports
            return 0
        if self.json:
            facts = {
                "strategy": self.strategy,
                "ranks": ranks,
                "layers": self.layers,
                "microbatches": self.microbatches,
            }
            print(json_format.dumps({**facts, **asdict(verdict), "tolerance": TOLERANCE, "ok": verdict.ok}, indent=2))
        else:
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_row("loss_error", f"{verdict.loss_error:.2e}")
            table.add_row("gradient_error", f"{verdict.gradient_error:.2e}", f"worst in layer {verdict.gradient_layer}")
            table.add_row("weight_error", f"{verdict.weight_error:.2e}", f"worst in layer {verdict.weight_layer}")
            limit = "" if verdict.ok else f"an error is more than {TOLERANCE:.0e}"
            table.add_row("ok", "[green]yes[/]" if verdict.ok else "[red]no[/]", limit)
            console = Console(highlight=False)
            console.print(
                f"[bold cyan]{self.strategy}[/] on {ranks} ranks against one device, float64, {self.steps} steps"
            )
            console.print(table)
        return 0 if verdict.ok else 1
