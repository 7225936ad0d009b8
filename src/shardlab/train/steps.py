"""One rank's optimizer steps, and what all ranks learn of each while the next one runs."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute import Executor
from shardlab.program import UserError
from shardlab.rules.pieces import listed
from shardlab.train.interrupt import StopRequest
from shardlab.train.run import TrainingRun
from shardlab.train.saved import saved_in
from shardlab.train.tracing import TracedExecutor


@dataclass(frozen=True)
class StepResult:
    """Result of a step, as all ranks know it.

    Attributes:
        metrics: number, loss in nats per token, and the rest of a line of metrics.jsonl.
        stopping: whether a rank was asked to stop.
        diverged: ranks that reported a loss or gradient that is not finite, if that stops the run.
        not_finite: what is not finite, in which step and on which ranks; nothing if all is.
    """

    metrics: dict[str, Any]
    stopping: bool
    diverged: list[int]
    not_finite: str = ""


def steps(
    executor: Executor | TracedExecutor, run: TrainingRun, rank: int, device: torch.device, stop: StopRequest
) -> Iterator[StepResult]:
    """Train, giving each step while the next one runs; the same steps on every rank.

    One sum over the ranks has it all: the loss, the wish to stop, and for each rank what is not finite. The
    last step given is the run's last, or the first that diverged, or the one after a rank wished to stop.
    """
    summing: tuple[int, float, Tensor, dist.Work] | None = None
    for step in range(run.config.train.steps):
        start = time.perf_counter()
        loss = executor.step()
        ms = 1000 * (time.perf_counter() - start)
        flags = torch.zeros(1 + run.config.plan.ranks, dtype=loss.dtype)
        flags[0] = stop.asked
        flags[1 + rank] = _flag(loss, executor)
        sums = torch.cat([loss, flags]).to(device)
        work = cast(dist.Work, dist.all_reduce(sums, async_op=True))
        before, summing = summing, (step, ms, sums, work)
        if before is not None:
            found = _summed(run, *before)
            if found.diverged:
                work.wait()  # nothing stays in flight, although nobody asks for more
                summing = None
            yield found
            if found.stopping:
                stop.ask()  # also where another rank was asked: the rest has to end in time on each
            if found.diverged or found.stopping:
                break
    if summing is not None:
        yield _summed(run, *summing)


def diverged(run: TrainingRun, what: str) -> UserError:
    """A sentence of what is not finite, what is saved of the run, and what to try."""
    clip = run.config.optimizer.clip
    limit = "--clip 1 with a plan" if clip is None else f"a --clip of less than {clip:g}"
    return UserError(
        f"{what} is not finite, so training has stopped; {saved_in(run.out)}; "
        f"try a --learning-rate of less than {run.config.optimizer.learning_rate:g}, or {limit}"
    )


def _flag(loss: Tensor, executor: Executor | TracedExecutor) -> int:
    """What is not finite on this rank: nothing (0), the loss (1), or the gradient of layer l (l + 2).

    Where no layer's is, and yet the norm is not, it is that of all layers (the number of layers, and 2).
    """
    state = executor.state
    if not loss.isfinite().all():
        return 1
    if state.finite or state.settings.precision.scaled:
        return 0
    return 2 + (len(state.layers) if state.not_finite is None else state.not_finite)


def _not_finite(flags: Sequence[int], step: int, run: TrainingRun) -> str:
    """The worst of what ranks flag, with all ranks that flag it."""
    found = min(flag for flag in flags if flag)
    ranks = [rank for rank, flag in enumerate(flags) if flag == found]
    what = (
        "loss"
        if found == 1
        else f"gradient of layer {found - 2}"
        if found - 2 < run.job.cut.layers
        else "gradient's norm"
    )
    return f"the {what} of step {step + 1} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _summed(run: TrainingRun, step: int, ms: float, sums: Tensor, work: dist.Work) -> StepResult:
    work.wait()
    total, tokens, stopping, *diverged = (float(figure) for figure in sums)
    metrics = {
        "step": step,
        "loss": total / max(1.0, tokens),
        "ms": round(ms, 3),
        "tokens_per_second": round(run.job.tokens / ms * 1000, 1),
        "learning_rate": run.config.optimizer.rate(step),
    }
    flags = [int(flag) for flag in diverged]
    stops = run.config.train.non_finite == "stop"
    what = _not_finite(flags, step, run) if any(flags) else ""
    return StepResult(metrics, stopping > 0, [rank for rank, flag in enumerate(flags) if flag and stops], what)
