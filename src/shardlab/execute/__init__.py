"""A tape on torch.distributed."""

from shardlab.execute.executor import Executor
from shardlab.execute.state import Sampler, Settings
from shardlab.optimizers import AdamW

__all__ = ["AdamW", "Executor", "Sampler", "Settings"]
