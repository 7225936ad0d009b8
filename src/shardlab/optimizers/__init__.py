"""Optimizers' settings, without the tensors that they act on."""

from shardlab.optimizers.config import OptimizerConfig
from shardlab.optimizers.schedules import Schedule, rate_factor

__all__ = ["OptimizerConfig", "Schedule", "rate_factor"]
