"""Cases for which others stand in the suite: `make verify-all` runs them as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sampled(cases: Iterable[T], keep: Callable[[T], bool]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, of which the suite runs only those to keep."""
    return [case if keep(case) else pytest.param(case, marks=pytest.mark.thorough) for case in cases]
