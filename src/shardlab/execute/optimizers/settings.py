"""Settings of an optimizer (`OptimizerConfig`), its learning rate schedule, and the loss scale of float16.

The tensors that an optimizer updates are in `algorithms` and `flat_slice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardlab.check import Checked
from shardlab.common.errors import UserError
from shardlab.common.fields import COUNT, check_fields, choice, integer, number, number_or_none, pair
from shardlab.common.text import counted
from shardlab.language.precision import Optimizer, Precision
from shardlab.language.rules.kinds import MOST_DOUBLINGS_IN_FLOAT16

Schedule = Literal["cosine", "linear", "wsd", "constant"]


def rate_factor(schedule: Schedule, step: int, steps: int, warmup: int, decay: int, min_ratio: float) -> float:
    """Return the learning rate of a step, as a fraction of the peak.

    The rate rises linearly over `warmup` steps, stays constant, and decays to `min_ratio` over the last `decay` of
    `steps` steps:

    - cosine: along half a cosine (Loshchilov and Hutter 2017, SGDR, arXiv 1608.03983, eq. 5; as in nanoGPT);
    - linear: along a line;
    - wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv 2404.06395, section 4.2): exponentially;
    - constant: it does not decay.

    >>> [rate_factor("linear", step, 10, 2, 4, 0.0) for step in (0, 1, 5, 6, 8, 10)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]

    Args:
        step: number of the step, from 0. After `steps` the rate stays constant.
        min_ratio: final rate as a fraction of the peak, unless `decay` is 0. It must be above 0 for wsd.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or not decay:
        return 1.0
    progress = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    if schedule == "wsd":
        return min_ratio**progress
    remaining_share = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * remaining_share


FIRST = 2.0**16
"""Initial loss scale of a run, as in torch.amp.GradScaler."""

CALM = 2000
"""Number of steps without an overflow after which the scale is doubled, as in torch.amp.GradScaler."""


class LossScale:
    """Loss scale of float16, by which losses are multiplied so that small gradients do not underflow.

    Updates divide gradients by it. It is equal on all ranks, because all of them have the same norm of the gradient. If
    a gradient overflows, all ranks skip the update and the scale is halved; after 2,000 steps without an overflow it is
    doubled (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; the numbers are those of torch.amp.GradScaler).

    Attributes:
        scale: scale of the next step.
        calm: steps since the last overflow or doubling.
    """

    def __init__(self, scale: float = FIRST) -> None:
        self.scale = scale
        self.calm = 0

    def update(self, finite: bool) -> None:
        """Update the scale after a step. `finite` says whether the step's gradient was finite."""
        self.calm += 1
        if not finite:
            self.scale, self.calm = self.scale / 2, 0
        elif self.calm == CALM:
            self.scale, self.calm = self.scale * 2, 0


def want_scalable(precision: Precision, checked: Checked) -> None:
    """Refuse float16 if a rank would not notice overflows on other ranks, or if gradients have large factors.

    Raises:
        UserError: if so. The message has the remedy.
    """
    if precision.scaled and not checked.clips:
        raise UserError(
            f"{precision.name} needs a program that passes the gradient's norm to its updates, since the norm tells "
            "all ranks of an overflow; choose fsdp or a plan such as zero-3, or bf16"
        )
    if precision.scaled:
        factors = {spec.form.factor for specs in checked.specs for spec in specs.values()}
        for factor_text in filter(None, (factor.why_out_of_range(MOST_DOUBLINGS_IN_FLOAT16) for factor in factors)):
            raise UserError(
                f"the program multiplies gradients by {factor_text}, which overflows together with the loss scale of "
                f"{precision.name}; scale by less, or choose bf16"
            )


USED_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "betas": ("optimizer", ("adamw", "lion", "muon")),
    "momentum": ("optimizer", ("sgd", "muon")),
    "eps": ("optimizer", ("adamw", "muon")),
    "min_learning_rate_ratio": ("learning_rate_schedule", ("cosine", "linear", "wsd")),
}
"""Settings without effect for some optimizers or schedules: the field that decides, and its values that use them."""

_NOT_NEGATIVE = number("0 or more", lambda value: 0 <= value < math.inf)
_POSITIVE = number("a positive number", lambda value: 0 < value < math.inf)
_NORM = number_or_none("a positive norm, or none at all", lambda value: 0 < value < math.inf, "NORM")
_DECAYS = pair("two numbers from 0 up to but not including 1", lambda value: 0 <= value < 1)
_DECAY = number_or_none("a number from 0 up to but not including 1, or none", lambda value: 0 <= value < 1, "DECAY")
_SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, and the schedule of its learning rate.

    AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), SGD with momentum (Sutskever et al. 2013), Lion (Chen et al.
    2023, arXiv 2302.06675) or Muon (Jordan 2024).
    """

    optimizer: Annotated[Optimizer, choice(Optimizer)] = "adamw"
    """Optimizer. muon updates matrices; adamw updates the embeddings, the head and all vectors beside it."""

    learning_rate: Annotated[float, _NOT_NEGATIVE] = 1e-3
    """Peak learning rate."""

    betas: Annotated[tuple[float, float], _DECAYS] = (0.9, 0.95)
    """Decay rates of AdamW's two moments. lion uses the first one for its update and the second one for its moment."""

    momentum: Annotated[float, _SHARE] = 0.95
    """Momentum of sgd and muon."""

    eps: Annotated[float, _POSITIVE] = 1e-8
    """Number that AdamW adds to its denominator, so that it is never zero."""

    weight_decay: Annotated[float, _NOT_NEGATIVE] = 0.1
    """Weight decay of matrices and embeddings. Biases and norms do not decay."""

    clip: Annotated[float | None, _NORM] = None
    """Largest norm of the whole model's gradient, or none. Needs fsdp or a plan, which compute this norm."""

    ema: Annotated[float | None, _DECAY] = None
    """Decay of an exponential moving average (EMA) of the weights, such as 0.999, or none."""

    learning_rate_schedule: Annotated[Schedule, choice(Schedule)] = "cosine"
    """Decay of the learning rate after the warm-up."""

    schedule_steps: Annotated[int, COUNT] = 200
    """Steps of the whole learning rate schedule. Default: the steps of the run."""

    warmup_steps: Annotated[int, integer("0 or more", 0)] = 10
    """Steps in which the learning rate rises linearly. Default: a twentieth of the schedule."""

    decay_steps: Annotated[int | None, integer("0 or more", 0)] = None
    """Steps in which the learning rate decays, at the end of the schedule. Default: a tenth of the schedule for wsd,
    otherwise all steps after the warm-up."""

    min_learning_rate_ratio: Annotated[float, _SHARE] = 0.1
    """Last learning rate, as a fraction of the peak."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learning_rate_schedule == "wsd" and not self.min_learning_rate_ratio:
            raise UserError(
                "the learning rate schedule wsd decays exponentially, which never comes down to a "
                "min_learning_rate_ratio of 0; give a larger one, or take linear"
            )
        if self.learning_rate_schedule == "constant" and self.decay_steps is not None:
            raise UserError(
                f"the learning rate schedule constant has no decay, but decay_steps is {self.decay_steps}; leave it "
                "out, or take another schedule"
            )
        required_steps = self.warmup_steps + (self.decay_steps or 0)
        if required_steps > self.schedule_steps:
            decay = "" if self.decay_steps is None else f" and decay_steps is {self.decay_steps}"
            raise UserError(
                f"warmup_steps is {self.warmup_steps}{decay}, but the learning rate's schedule has "
                f"{self.schedule_steps} steps; give fewer of these steps, or more schedule_steps"
            )

    @property
    def decay(self) -> int:
        """Number of steps over which the learning rate decays."""
        if self.decay_steps is not None:
            return self.decay_steps
        remaining_steps = self.schedule_steps - self.warmup_steps
        return {"constant": 0, "wsd": min(remaining_steps, -(-self.schedule_steps // 10))}.get(
            self.learning_rate_schedule, remaining_steps
        )

    @property
    def schedule(self) -> str:
        """Learning rate schedule in words, without its peak."""
        if self.learning_rate_schedule == "constant":
            return f"constant after a warm-up of {self.warmup_steps}"
        return (
            f"{self.learning_rate_schedule} over {counted(self.schedule_steps, 'step')} (warm-up {self.warmup_steps}, "
            f"decay {self.decay})"
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * rate_factor(
            self.learning_rate_schedule,
            step,
            self.schedule_steps,
            self.warmup_steps,
            self.decay,
            self.min_learning_rate_ratio,
        )
