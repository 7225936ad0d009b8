"""A tape on torch.distributed. Torch is imported with the first of these names: modules beside them need none."""

from typing import TYPE_CHECKING

from shardlab.execute.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    from shardlab.execute.executor import Executor
    from shardlab.execute.settings import Sampler, Settings


__all__ = ["Executor", "OptimizerConfig", "Sampler", "Settings"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'executor' if name == 'Executor' else 'settings'}"), name)
