"""An optimizer's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from shardlab.errors import UserError
from shardlab.optimizers.schedules import Schedule, rate_factor
from shardlab.program.field_types import COUNT, check_fields, choice, number, number_or_none, pair, whole
from shardlab.program.precision import Optimizer
from shardlab.rules.pieces import counted

_NOT_NEGATIVE = number("0 or more", lambda value: 0 <= value < math.inf)
_POSITIVE = number("a positive number", lambda value: 0 < value < math.inf)
_NORM = number_or_none("a positive norm, or none at all", lambda value: 0 < value < math.inf, "NORM")
_DECAYS = pair("two numbers from 0 up to but not including 1", lambda value: 0 <= value < 1)
_DECAY = number_or_none("a number from 0 up to but not including 1, or none", lambda value: 0 <= value < 1, "DECAY")
_SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, and the schedule of its learning rate: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), SGD
    with momentum (Sutskever et al. 2013), Lion (Chen et al. 2023, arXiv 2302.06675) or Muon (Jordan 2024).
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
    """How the learning rate decays after the warm-up."""

    schedule_steps: Annotated[int, COUNT] = 200
    """Steps of the whole learning rate schedule. Default: the steps of the run."""

    warmup_steps: Annotated[int, whole("0 or more", 0)] = 10
    """Steps in which the learning rate rises linearly. Default: a twentieth of the schedule."""

    decay_steps: Annotated[int | None, whole("0 or more", 0)] = None
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
        together = self.warmup_steps + (self.decay_steps or 0)
        if together > self.schedule_steps:
            decay = "" if self.decay_steps is None else f" and decay_steps is {self.decay_steps}"
            raise UserError(
                f"warmup_steps is {self.warmup_steps}{decay}, but the learning rate's schedule has "
                f"{self.schedule_steps} steps; give fewer of the former, or more steps"
            )

    @property
    def decay(self) -> int:
        """Steps in which the learning rate comes down."""
        if self.decay_steps is not None:
            return self.decay_steps
        after = self.schedule_steps - self.warmup_steps
        return {"constant": 0, "wsd": min(after, -(-self.schedule_steps // 10))}.get(self.learning_rate_schedule, after)

    @property
    def schedule(self) -> str:
        """The learning rate's schedule in words, without its largest rate."""
        if self.learning_rate_schedule == "constant":
            return f"constant after a warm-up of {self.warmup_steps}"
        return (
            f"{self.learning_rate_schedule} over {counted(self.schedule_steps, 'step')} (warm-up {self.warmup_steps}, "
            f"decay {self.decay})"
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * rate_factor(
            self.learning_rate_schedule,
            step,
            self.schedule_steps,
            self.warmup_steps,
            self.decay,
            self.min_learning_rate_ratio,
        )
