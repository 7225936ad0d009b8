"""Collectives on one tensor under torch's newest names: 2.13 renamed two of them, and warns at the old names."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _first(*names: str) -> Callable[..., Any]:
    """Of these functions the first that this torch has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather_single = _first("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first("reduce_scatter_single", "reduce_scatter_tensor")
