"""A plan written down in a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shardlab.errors import TooDeep, why_unreadable
from shardlab.program import UserError
from shardlab.program.nesting import parsed
from shardlab.strategies.plan import Plan


def read_plan(path: Path) -> Plan:
    """The plan in a file: the fields of `Plan`, and a table `mesh` of its axes' sizes.

    Raises:
        UserError: for a file that cannot be read, a field that a plan does not have, or a value that does not fit.
    """
    try:
        return Plan.from_dict(parsed(tomllib.loads, path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
