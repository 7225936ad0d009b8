"""Training, evaluation and sampling of a program on real ranks.

`loop.py` is the training of one rank, from set-up to summary; `steps.py` has its steps and the callbacks that observe
them, `callbacks.py` those of every training. `launch.py` starts the ranks. The package itself is callable:
`shardlab.train(...)` trains from a script or a notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.train.steps import Callback, StepResult, Training


__all__ = ["Callback", "StepResult", "Training"]


def __getattr__(name: str) -> Any:
    """Import a name of `steps.py` when it is asked for, since it needs torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardlab.train import steps

    return getattr(steps, name)
