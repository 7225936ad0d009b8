"""Verdict on a strategy whose numbers are compared with one device's, and the start of the ranks that compare them.

The comparison itself is in `shardlab.train.verify`, which needs torch; the process that starts the ranks needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.check import Checked
from shardlab.train.job import Job
from shardlab.train.launch import Joining, Named, run_ranks

TOLERANCE = 1e-12
"""Largest error of float64, whose rounding is 1e-16; sums in another order give gradients some 1e-15 of their largest
element apart.

AdamW can make that more: it divides by the gradient's size, so an error d of a gradient g near eps (1e-8) moves the
weight by rate * d * eps / (|g| + eps)^2 in the first step. The small MLP on which `column-parallel` is verified has a
weight whose gradient is 3e-8 of a largest 2.5e-2: there 1.4e-18 becomes 3.5e-13 of the layer's largest weight.
"""

SMALL_NORM = 0.1
"""Norm so small that it clips every gradient, for programs that clip."""


@dataclass(frozen=True)
class Errors:
    """How far some numbers are from others.

    Attributes:
        loss_error: largest relative difference of a step's loss.
        gradient_error, weight_error: of the worst layer (and step; averages are weights), max|a - b| / max|b| over all
            its parameters together; elementwise, a gradient of zero (an attention's key bias has one) would make it
            meaningless.
        gradient_layer, weight_layer: the worst layers.
    """

    loss_error: float
    gradient_error: float
    gradient_layer: int
    weight_error: float
    weight_layer: int

    @property
    def all(self) -> tuple[float, float, float]:
        return self.loss_error, self.gradient_error, self.weight_error


@dataclass(frozen=True)
class Verdict(Errors):
    """How far a strategy's numbers are from one device's in the same precision.

    Attributes:
        exact: how far they are from one device's in float64, as lengths of vectors (None: these are in float64).
        one_device: how far one device's in the same precision are from those.
        rounding: of the dtype that layers compute in: the distance from 1 to the next number.
    """

    exact: Errors | None = None
    one_device: Errors | None = None
    rounding: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every error is within 1e-12; of lower precision, within twice one device's, and a rounding more.

        In lower precision sums in another order differ by its rounding, so what counts is that the strategy is as near
        to the exact numbers as one device.
        """
        if self.exact is None or self.one_device is None:
            return max(self.all) <= TOLERANCE
        return all(
            ours <= 2 * alone + self.rounding for ours, alone in zip(self.exact.all, self.one_device.all, strict=True)
        )


def clip_for(checked: Checked, clip: float | None) -> float | None:
    """The norm to which gradients are clipped: as given, or so small that every gradient is, if the program clips."""
    return SMALL_NORM if clip is None and checked.clips else clip


def verify(job: Job, steps: int, clip: float | None = None, compile: bool = False) -> Verdict | None:
    """Train `steps` steps under the job's strategy on its ranks, and on one device, and compare.

    Args:
        clip: the largest norm of the gradient (None: see `clip_for`).
        compile: compile the layers of the ranks.

    Returns:
        The verdict; None in a process of an existing world that is not rank 0.

    Raises:
        Refused: when the program is wrong.
        RankFailed: when a rank raised.
        UserError: for a request that cannot be met.
    """
    job.checked()  # in this process first: a refusal needs no ranks
    verdict_on_rank = Named[Verdict | None]("shardlab.train.verify", "verdict_on_rank")
    return run_ranks(job.ranks, verdict_on_rank, job, steps, clip, compile, joining=Joining(dynamo=compile))
