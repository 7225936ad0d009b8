"""Execution of a checked program on torch.distributed.

Read `executor` first: it turns each op of a rank's tape into one call. `state` has the rank's tensors, and
`tape_analysis` the facts of the tape that are known before it runs. `compute_ops`, `update_ops` and `communication_ops`
have the call of each kind of op. `optimizers` updates slices of parameters, `transport` moves tensors between ranks,
and `recording` measures real steps. Torch is imported when one of the names below is first used, because some modules
do not need it.
"""

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
