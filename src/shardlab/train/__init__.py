"""Training, evaluation and sampling of a program on real ranks.

Read `loop.py` first: the training of one rank, from set-up to summary. Then `steps.py`, its optimizer steps and the
interface of callbacks, and `callbacks.py`, the callbacks of every training. `run.py` and `config.py` have the settings
of a run, `config_sources.py` the presets, files and flags from which they come. `checkpoints.py` saves and resumes
runs, `evaluate.py` and `sample.py` use trained weights, and `faults.py` reports ranks that die or hang. The
subpackages: `launch` starts the ranks, `data` reads text, `checkpoint` and `huggingface` read and write weights, and
`verification` compares the results of strategies with those of one device.

The package itself is callable: `shardlab.train(...)` trains from a script or a notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.train.steps import Callback, StepResult, Training


__all__ = ["Callback", "StepResult", "Training"]


def __getattr__(name: str) -> Any:
    """Import a name of `steps.py` on first use, since that module imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardlab.train import steps

    return getattr(steps, name)
