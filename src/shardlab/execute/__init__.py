"""A tape on torch.distributed."""

from shardlab.execute.executor import Executor
from shardlab.execute.state import Sampler, Settings
from shardlab.optimizers import OptimizerConfig

__all__ = ["Executor", "OptimizerConfig", "Sampler", "Settings"]
