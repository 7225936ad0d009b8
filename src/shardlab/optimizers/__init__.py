"""Optimizers' settings, without the tensors that they act on."""

from shardlab.optimizers.adamw import AdamW
from shardlab.optimizers.schedules import Schedule, rate_factor

__all__ = ["AdamW", "Schedule", "rate_factor"]
