"""Samples of the suite. `make verify-all` runs all cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import pytest

T = TypeVar("T")


def sampled(cases: Iterable[T], keep: Callable[[T], bool]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, of which the suite runs only the ones to keep.

    A tuple has a value for each name.
    """

    def others(case: T) -> Any:
        values = cast(tuple[Any, ...], case) if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.thorough)

    return [case if keep(case) else others(case) for case in cases]


def examples(count: int) -> int:
    """Return how many examples hypothesis draws: `count` in `make verify-all`, a fifth in the suite.

    A test that counts its own examples by this needs the mark `hypothesis`, by which `make verify-all` finds it.
    """
    return count if os.environ.get("SHARDLAB_TESTS") == "thorough" else max(1, count // 5)
