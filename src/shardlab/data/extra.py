"""Libraries that only some inputs and tokenizers need: the extra `data`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardlab.errors import UserError


def library(name: str, purpose: str) -> Any:
    """A module of the extra `data`, imported when it is first needed.

    Args:
        purpose: what it is needed for, as in "a Parquet file".

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs the Python package {package}, which is not installed; pip install 'shardlab[data]'"
        ) from None
