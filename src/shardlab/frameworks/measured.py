"""Where a measured step and its prediction differ, what could explain it, and what to measure next.

Each hypothesis is a step that may have run in place of the predicted one: a configuration with another key, another
choice of the recipe, a slower network, communication that does not overlap, slower devices, or time beside the step.
Its time and memory are predicted in the same way as those of the configuration. `explain_difference` orders the
hypotheses by a weight: how likely such a cause is before anything was measured, times how well its prediction agrees
with the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import NamedTuple

from shardlab.common.errors import Refused, UserError
from shardlab.common.text import bytes_text, seconds_text
from shardlab.frameworks.changes import Trial
from shardlab.frameworks.logs import Measured, MemoryKind
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import change_text
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.memory import DeviceMemory
from shardlab.simulate.predict.recipe import variants
from shardlab.simulate.predict.workload import Workload

CLOSE = 0.1
"""Relative difference at which a hypothesis explains a measurement half as well as one that agrees exactly. The mean
error of predictions is used instead if it is larger."""

WORTH = 0.01
"""Least relative amount by which a hypothesis must bring a prediction closer to the measurement to be named."""


class Hypothesis(NamedTuple):
    """Possible cause of the difference between a measured and a predicted step.

    Attributes:
        what: description of the cause.
        seconds: predicted step time with this cause.
        memory: predicted bytes of the fullest device with this cause, counted as in the measurement.
        prior: how likely the cause is before anything was measured, relative to others.
        next: the measurement that shows whether it is the cause.
        weight: how likely the cause is, given the measurement, relative to others.
    """

    what: str
    seconds: float
    memory: float
    prior: float
    next: str
    weight: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted figures of a step.

    Attributes:
        seconds: measured step time (None: not measured).
        memory: measured bytes of the fullest device (None: not measured).
        predicted_seconds, predicted_memory: the predictions, with memory counted as it was measured.
        kind: what the bytes count.
        error: mean error of predicted step times of similar steps, as a share.
        hypotheses: what could explain the difference, the likeliest first.
        notes: how the figures were read.
    """

    seconds: float | None
    memory: float | None
    predicted_seconds: float
    predicted_memory: float
    kind: MemoryKind
    error: float
    hypotheses: Sequence[Hypothesis]
    notes: tuple[str, ...]

    @property
    def time_difference(self) -> float | None:
        """Measured step time divided by the predicted one, minus 1."""
        return None if self.seconds is None else self.seconds / self.predicted_seconds - 1

    @property
    def memory_difference(self) -> float | None:
        """Measured memory divided by the predicted one, minus 1."""
        return None if self.memory is None else self.memory / self.predicted_memory - 1


def counted_as(kind: MemoryKind, memory: DeviceMemory) -> float:
    """Return the bytes of a forecast's fullest device, counted as `kind` says."""
    return {"allocated": memory.allocated, "reserved": memory.logged}.get(kind, memory.unlimited)


def explain_difference(
    measured: Measured,
    step: FrameworkRun,
    forecast: Forecast,
    trials: Sequence[Trial],
    error: float,
    memory_error: float,
) -> Comparison:
    """Compare a measured step with its prediction, and find causes that could explain the difference.

    Args:
        measured: the measured figures.
        step, forecast: the configuration's step and its forecast.
        trials: all changes of the configuration that were tried.
        error, memory_error: mean errors of predicted time and memory of similar steps, as shares.
    """
    workload, notes = step.workload, list(measured.notes)
    seconds = measured.step_seconds(workload.tokens, workload.mesh.world)
    if seconds is None and measured.mfu is not None:
        seconds = workload.mfu(1.0) / measured.mfu
    if measured.sequences not in (None, step.sequences):
        notes.append(f"the log has a global batch of {measured.sequences}, and the configuration {step.sequences}")
        if seconds is not None and measured.seconds is not None:
            seconds *= step.sequences / int(measured.sequences or 1)
    predicted = counted_as(measured.kind, forecast.memory)
    possible = [
        *_of_units(measured, step, forecast),
        *_of_keys(measured, step, trials),
        *_of_the_machine(step, forecast, measured, seconds),
        *_of_memory(measured, forecast, predicted),
    ]
    hypotheses = [cause for cause in possible if _differs(cause, forecast.seconds, predicted, seconds, measured.memory)]
    weighed = [
        cause._replace(weight=cause.prior * _agreement(cause, seconds, measured.memory, error, memory_error))
        for cause in hypotheses
    ]
    whole = sum(cause.weight for cause in weighed) or 1.0
    weighed = [cause._replace(weight=cause.weight / whole) for cause in weighed]
    return Comparison(
        seconds,
        measured.memory,
        forecast.seconds,
        predicted,
        measured.kind,
        error,
        sorted(weighed, key=lambda cause: -cause.weight),
        tuple(notes),
    )


def _differs(cause: Hypothesis, seconds: float, memory: float, measured: float | None, bytes: float | None) -> bool:
    """Return whether a hypothesis moves the prediction of a measured figure towards the measurement."""
    closer_time = measured is not None and abs(log(measured / cause.seconds)) < abs(log(measured / seconds)) - WORTH
    closer_memory = bytes is not None and abs(log(bytes / cause.memory)) < abs(log(bytes / memory)) - WORTH
    return closer_time or closer_memory


def _agreement(
    cause: Hypothesis, seconds: float | None, bytes: float | None, error: float, memory_error: float
) -> float:
    """Return how well a hypothesis agrees with the measurements, from 0 to 1."""
    agreement = 1.0
    if seconds is not None:
        agreement *= exp(-((log(seconds / cause.seconds) / max(CLOSE, error)) ** 2) * log(2))
    if bytes is not None:
        agreement *= exp(-((log(bytes / cause.memory) / max(CLOSE, memory_error)) ** 2) * log(2))
    return agreement


def _of_units(measured: Measured, step: FrameworkRun, forecast: Forecast) -> Iterator[Hypothesis]:
    """Yield confusions of units: tokens/s of one device that were given as those of all devices, or the reverse."""
    world, speed = step.workload.mesh.world, step.workload.tokens / forecast.seconds
    memory = counted_as(measured.kind, forecast.memory)
    total, per_device = measured.tokens_per_second, measured.tokens_per_device
    if world > 1 and total and total / speed < 2 / world:
        text = f"the tokens/s are those of one device: {total * world:,.0f} on all {world}"
        yield Hypothesis(text, forecast.seconds * world, memory, 5.0, "give them as tokens/s/device=")
    if world > 1 and per_device and per_device > speed / 2:
        text = f"the tokens/s are those of all {world} devices, not of each"
        yield Hypothesis(text, forecast.seconds / world, memory, 5.0, "give them as tokens/s=")


def _of_keys(measured: Measured, step: FrameworkRun, trials: Sequence[Trial]) -> Iterator[Hypothesis]:
    """Yield configurations that may have run instead of this one. Each differs in one key."""
    for trial in trials:
        if trial.step.sequences == step.sequences:
            yield Hypothesis(
                f"the run had {change_text(trial.settings)}",
                trial.forecast.seconds,
                counted_as(measured.kind, trial.forecast.memory),
                0.5,
                "compare the arguments that the run printed at its start with the file",
            )


def _of_the_machine(
    step: FrameworkRun, forecast: Forecast, measured: Measured, seconds: float | None
) -> Iterator[Hypothesis]:
    """Yield causes on the machine: other kernels, a slow network, no overlap, low clocks, and time beside the step."""
    workload, memory = step.workload, counted_as(measured.kind, forecast.memory)
    for switch, value, recipe in variants(step.recipe):
        if (other := _forecast(replace(workload, recipe=recipe))) is not None:
            text = f"{switch} is {value}, not {step.recipe.switches[switch].value}"
            bytes = counted_as(measured.kind, other.memory)
            yield Hypothesis(text, other.seconds, bytes, 1.0, f"look in the log for what runs ({switch})")
    cluster = workload.cluster
    if cluster.nodes > 1 and cluster.nics > 1:
        other = _forecast(replace(workload, cluster=replace(cluster, nics=1)))
        if other is not None:
            text = f"collectives use 1 of the {cluster.nics} network cards of a node"
            todo = "run nccl-tests' all_gather_perf on two nodes, and compare its busbw with the bandwidth of one card"
            yield Hypothesis(text, other.seconds, memory, 0.7, todo)
    bare = replace(step.recipe, overlap=replace(step.recipe.overlap, share={}))
    if step.recipe.overlap.share and (other := _forecast(replace(workload, recipe=bare))) is not None:
        text = "communication does not run beside compute"
        todo = "look in a trace of torch.profiler for gaps of the compute stream"
        yield Hypothesis(text, other.seconds, memory, 0.8, todo)
    if seconds is None or seconds <= forecast.seconds:
        return
    if not forecast.memory.safe and forecast.memory.fits:
        text = f"the allocator is nearly full ({bytes_text(forecast.memory.unlimited, 1)}), and frees and asks again"
        yield Hypothesis(text, seconds, memory, 1.5, "count num_alloc_retries in torch.cuda.memory_stats()")
    extra = seconds_text(seconds - forecast.seconds)
    text = f"{extra} of each step pass outside the GPUs: data, logs, checkpoints, Python"
    todo = "time the next() of the data loader, and a step with one batch repeated"
    yield Hypothesis(text, seconds, memory, 0.6, todo)
    if (share := forecast.seconds / seconds) > 0.5:
        text = f"the GPUs, or one of them, run at {share:.0%} of their usual clock (power or heat)"
        todo = "nvidia-smi -q -d CLOCK,PERFORMANCE on every node during a step"
        yield Hypothesis(text, seconds, memory, 0.4, todo)


def _of_memory(measured: Measured, forecast: Forecast, predicted: float) -> Iterator[Hypothesis]:
    """Yield causes of more memory than predicted."""
    if measured.memory is None or measured.memory <= predicted:
        return
    extra = bytes_text(measured.memory - predicted, 1)
    if measured.kind == "nvidia-smi":
        text = f"{extra} are beside the allocator: NCCL's buffers, CUDA's context, or another process"
        todo = "compare torch.cuda.max_memory_reserved() with nvidia-smi"
        yield Hypothesis(text, forecast.seconds, measured.memory, 0.5, todo)
    if measured.kind != "allocated":
        text = f"{extra} are reserved and not used, because free blocks have other sizes (fragmentation)"
        todo = "compare max_memory_allocated() with max_memory_reserved(); try expandable_segments:True"
        yield Hypothesis(text, forecast.seconds, measured.memory, 0.5, todo)


def _forecast(workload: Workload) -> Forecast | None:
    try:
        return forecast(workload)
    except (UserError, Refused):
        return None
