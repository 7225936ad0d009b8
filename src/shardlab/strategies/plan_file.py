"""A plan written down in a TOML file."""

from __future__ import annotations

from pathlib import Path

from shardlab.program import UserError
from shardlab.program.nesting import read_file
from shardlab.strategies.plan import Plan


def read_plan(path: Path) -> Plan:
    """The plan in a file: the fields of `Plan`, and a table `mesh` of its axes' sizes.

    Raises:
        UserError: for a file that cannot be read, a field that a plan does not have, or a value that does not fit.
    """
    written = read_file(path, "TOML")
    try:
        return Plan.from_dict(written)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
