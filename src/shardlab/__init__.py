"""Write a parallel-training strategy once: it is checked, drawn, timed and really run.

Values, stores and timelines show themselves as pictures in a notebook. The drawing, and matplotlib with it, is
imported when the first one does. `shardlab.train(...)` trains; the package `shardlab.train` has the parts of that.
"""

from __future__ import annotations

from shardlab import starting

starting.leave_when_interrupted()  # before all other imports, which take a while

import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from shardlab import language, train  # noqa: E402
from shardlab.language import Store, Value  # noqa: E402
from shardlab.language.ops import picture  # noqa: E402
from shardlab.simulate.timeline import Timeline  # noqa: E402


@picture.register(Timeline)
def _(timeline: Timeline) -> str:
    from shardlab.draw import timeline_svg

    return timeline_svg(timeline)


@picture.register(Value)
def _(value: Value) -> str:
    from shardlab.draw import value_svg

    return value_svg(value)


@picture.register(Store)
def _(store: Store) -> str | None:
    from shardlab.draw import store_svg

    return store_svg(store)


if TYPE_CHECKING:
    from shardlab.train import Callback
    from shardlab.train.run import Summary


class _CallablePackage(ModuleType):
    """The package `shardlab.train`, which is also the function that trains."""

    def __call__(
        self,
        strategy: str | Callable[..., Any] | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> Summary | None:
        """Train a language model, as the command `shardlab train` does.

        Ranks are processes of this machine; under torchrun, srun or mpiexec this process is one of them. The results
        are in a folder, as the command leaves them.

        Args:
            strategy: name, path/to/file.py:function, or the function itself, which must be in a file.
            callbacks: observers of the training (`shardlab.train.Callback`), of which every rank gets a copy. They may
                be of a class that this script or notebook defines.
            settings: options of the command by name, with `_` for `-`: ranks=2, hidden_size=64, learning_rate=1e-3,
                data=["text.txt"], out="runs/first". A flag is True, or False for its opposite; None is left out.

        Returns:
            Results of the training; None on ranks other than 0 of a launcher's world.

        Raises:
            UserError: for what the command refuses.
            RankFailed: when a rank fails or hangs.
            KeyboardInterrupt: when the training was interrupted before it could save.
        """
        from shardlab.cli.train.from_python import train as function

        return function(strategy, callbacks=callbacks, **settings)


sys.modules["shardlab.program"] = language  # its name in strategy files of earlier runs
sys.modules[train.__name__].__class__ = _CallablePackage
