"""Write a parallel-training strategy once: it is checked, drawn, timed and really run.

The functions that a script or a notebook needs are here: `trace`, `check`, `simulate`, `predict`, `plan`, `verify`,
`train` and `draw`, with `Plan` and `Model` (see `shardlab.api`). Four of them share their names with packages:
`shardlab.train(...)` trains, and `from shardlab.train import Callback` imports from the package.

A notebook shows values, stores and timelines as pictures. The package that draws them, and with it matplotlib, is
imported for the first picture. Torch and the planner are imported by the functions that need them.
"""

from __future__ import annotations

from shardlab import starting

starting.leave_when_interrupted()  # before all other imports, which take a while

import inspect  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from importlib import import_module  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from shardlab import api, language  # noqa: E402
from shardlab.api import plan, predict, trace, verify  # noqa: E402
from shardlab.language import Refused, Store, UserError, Value  # noqa: E402
from shardlab.language.ops import picture  # noqa: E402
from shardlab.simulate.timeline.timeline import Timeline  # noqa: E402

if TYPE_CHECKING:
    from shardlab.api import check, draw, simulate, train
    from shardlab.models import Model
    from shardlab.strategies.plan.plan import Plan

__all__ = ["Model", "Plan", "Refused", "UserError"]
__all__ += ["check", "draw", "plan", "predict", "simulate", "trace", "train", "verify"]

LAZY = {"Model": "shardlab.models", "Plan": "shardlab.strategies.plan.plan"}
"""Names of the classes that are imported on first use, each with its module."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)


class _CallablePackage(ModuleType):
    """Package that can be called as the function of the same name.

    `inspect.signature` follows `__wrapped__` to the function. `help` shows the docstring of the package, which begins
    with that of the function.
    """

    __wrapped__: Callable[..., Any]

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self.__wrapped__(*arguments, **settings)

    def __reduce__(self) -> tuple[object, ...]:  # cloudpickle knows modules only by their exact class
        return import_module, (self.__name__,)


def _draw(function: str, thing: object) -> str | None:
    return getattr(import_module("shardlab.draw"), function)(thing)


for function in (api.check, api.draw, api.simulate, api.train):
    package = import_module(f"shardlab.{function.__name__}")
    package.__class__ = _CallablePackage
    setattr(package, "__wrapped__", function)  # noqa: B010
    about = f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"
    package.__doc__ = f"{about}\n\nThe package:\n\n{package.__doc__}"

for kind, name in {Timeline: "timeline_svg", Value: "value_svg", Store: "store_svg"}.items():
    picture.register(kind, partial(_draw, name))

sys.modules["shardlab.program"] = language  # the name by which strategy files of earlier runs import it
