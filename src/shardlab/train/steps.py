"""One rank's optimizer steps, and what all ranks learn of each while the next one runs."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.compute_clock import ComputeClock
from shardlab.execute.state import State
from shardlab.models.tensors.tokens import sent_to
from shardlab.program import UserError
from shardlab.program.duration import TICK
from shardlab.rules.pieces import listed
from shardlab.train.figures import SPREAD, bits_per_byte, memory_of, speeds, spreads
from shardlab.train.interrupt import GRACE, WARNED_GRACE, StopRequest
from shardlab.train.ramped import RampedExecutor
from shardlab.train.run import TrainingRun
from shardlab.train.saved import saved_in
from shardlab.train.saving import Saver


class Stepping(Protocol):
    """An executor, or what stands around one."""

    @property
    def state(self) -> State:
        """The rank's tensors, as the last step has left them."""
        ...

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Result of a step, as all ranks know it.

    Attributes:
        metrics: number, loss in nats per token, and the rest of a line of metrics.jsonl.
        stopping: whether a rank was asked to stop.
        diverged: ranks that reported a loss or gradient that is not finite, if that stops the run.
        saving: whether rank 0 wishes to save.
        not_finite: what is not finite, in which step and on which ranks; nothing if all is.
    """

    metrics: dict[str, Any]
    stopping: bool
    diverged: list[int]
    saving: bool
    not_finite: str = ""


class TrainingSteps:
    """One rank's optimizer steps.

    Args:
        executor: of the rank's tape or tapes, perhaps traced or audited.
        clock: of its forward and backward passes.
        run: what is asked for.
        stop: whether this rank is asked to stop.
        saver: saves the run.
        bytes_per_token: of the text.
    """

    def __init__(
        self,
        executor: Stepping,
        clock: ComputeClock | RampedExecutor,
        run: TrainingRun,
        stop: StopRequest,
        saver: Saver,
        bytes_per_token: float,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._run = run
        self._stop = stop
        self._saver = saver
        self._stalls: dict[int, float] = {}
        self._bytes_per_token = bytes_per_token
        self._ended = 0.0

    @property
    def warned(self) -> bool:
        """Whether a rank has had a scheduler's warning."""
        return self._stop.warned

    def __iter__(self) -> Iterator[StepResult]:
        """Train, giving each step while the next one runs; the same steps on every rank.

        A step after which the weights are looked at is given before the next one runs, and all ranks wait for the look
        to end. The last step given is the run's last, or the first that diverged, or the one after a rank wished to
        stop.
        """
        summing: tuple[int, Tensor, dist.Work] | None = None
        found: StepResult | None = None
        self._begin()
        for step in range(self._executor.state.step, self._run.config.train.steps):
            ran = (step, *self._step())
            before, summing = summing, ran
            if before is not None:
                found = self._summed(*before)
                if found.diverged:
                    ran[2].wait()  # nothing stays in flight, although nobody asks for more
                yield found
                if found.diverged:
                    return
                if found.stopping:
                    break
            if self._saver.due() or (before is not None and found is not None and found.saving):
                self._stalls[step] = self._saver.begin()
            if any(self._run.looks(step)):
                found, summing = self._summed(*ran), None
                yield found
                if found.diverged:
                    return
                if found.stopping:
                    break
                self._begin()
        if summing is not None:
            found = self._summed(*summing)
            yield found
        if found is None or not found.diverged:
            self._saver.finish(interrupted=found is not None and found.stopping)

    def _begin(self) -> None:
        """Rank 0 may have been at work: no rank's time counts before all are there."""
        dist.barrier()
        self._ended = time.perf_counter()

    def _step(self) -> tuple[Tensor, dist.Work]:
        """One step, and the sum over the ranks that has it all.

        That is the loss, the wish to stop, and for each rank what is not finite, the gradient's norm if it knows it,
        and its own figures.
        """
        loss = self._executor.step()
        state = self._executor.state
        device, rank = state.settings.device, state.rank
        own = [*self._clock.read(), memory_of(device)]
        began, self._ended = self._ended, time.perf_counter()
        flags = torch.zeros(3 + len(SPREAD), self._run.config.plan.ranks, dtype=loss.dtype)
        told = [_flag(loss, state), self._saver.told, state.squared_norm]
        flags[:, rank] = torch.tensor([*told, max(self._ended - began, TICK), *own])
        wishes = torch.tensor([self._stop.asked, self._stop.warned, self._saver.wish], dtype=loss.dtype)
        sums = torch.cat([loss, *(sent_to(device, each) for each in (wishes, flags.flatten()))])
        return sums, cast(dist.Work, dist.all_reduce(sums, async_op=True))

    def _summed(self, step: int, sums: Tensor, work: dist.Work) -> StepResult:
        work.wait()
        run, sums = self._run, sums.cpu()
        total, tokens, stopping, warned, saving = (float(figure) for figure in sums[:5])
        diverged, written, norms, *figures = sums[5:].view(-1, run.config.plan.ranks)
        known = norms[~norms.isnan()]
        spread = spreads(torch.stack(figures))
        job, loss = run.job, total / max(1.0, tokens)
        sequences = run.config.train.ramp.microbatches(step) * job.micro_batch_size
        metrics = {
            "step": step,
            "loss": loss,
            "bits_per_byte": bits_per_byte(loss, self._bytes_per_token),
            "learning_rate": run.config.optimizer.rate(step),
            "grad_norm": math.sqrt(known[0]) if len(known) else None,
            **spread,
            **speeds(job.model, sequences, spread["dt"], job.ranks, run.peak),
        }
        if step in self._stalls:
            metrics["save_stall"] = self._stalls.pop(step)
        flags = [int(flag) for flag in diverged]
        stops = run.config.train.non_finite == "stop"
        what = _not_finite(flags, step, run) if any(flags) else ""
        self._saver.hear([int(number) for number in written])
        if stopped := [rank for rank, flag in enumerate(flags) if flag and stops]:
            self._saver.give_up(step)
        if stopping:
            grace = WARNED_GRACE if warned else GRACE
            self._stop.ask(grace)  # also where another rank was asked: the rest has to end in time on each
        return StepResult(metrics, stopping > 0, stopped, saving > 0, what)


def diverged(run: TrainingRun, what: str) -> UserError:
    """A sentence of what is not finite, what is saved of the run, and what to try."""
    clip = run.config.optimizer.clip
    now = "--clip 1" if run.job.checked().clips else "--clip 1 with a plan"
    limit = now if clip is None else f"a --clip of less than {clip:g}"
    return UserError(
        f"{what} is not finite, so training has stopped; {saved_in(run.out)}; "
        f"try a --learning-rate of less than {run.config.optimizer.learning_rate:g}, or {limit}"
    )


def _flag(loss: Tensor, state: State) -> int:
    """What is not finite on this rank: nothing (0), the loss (1), or the gradient of layer l (l + 2).

    Where no layer's is, and yet the norm is not, it is that of all layers (the number of layers, and 2).
    """
    if not loss.isfinite().all():
        return 1
    if state.finite or state.settings.precision.scaled:
        return 0
    return 2 + (state.model.layers if state.not_finite is None else state.not_finite)


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
