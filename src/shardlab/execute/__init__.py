"""A tape on torch.distributed."""

from shardlab.execute.executor import Executor
from shardlab.execute.optimizer import AdamW
from shardlab.execute.state import Sampler, Settings

__all__ = ["AdamW", "Executor", "Sampler", "Settings"]
