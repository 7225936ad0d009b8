"""Costs of pipeline stages, from the text of --costs or from a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardlab.common.errors import UserError, suggest_name
from shardlab.common.fields import read_settings
from shardlab.common.files import read_file
from shardlab.planner.schedule_search.problem import StageCosts

KINDS = ("forward", "input", "weight", "activation", "kept")
"""Names of a stage's costs, in the order of the fields of `StageCosts`."""


@dataclass(frozen=True)
class CostsFile:
    """Contents of a costs file, with one number for each stage. All times have one unit, and all memory has one unit.

    Attributes:
        forward, input, weight: times of the forward pass and of the two halves of the backward pass.
        activation: memory of one microbatch's activations.
        kept: part of this memory that stays until the weight half of the backward pass (None: all of it).
        message: time of a message between two ranks.
        source: where the figures come from.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...] | None = None
    message: float = 0.0
    source: str = ""


def read_costs(text: str | None, ranks: int, stages_per_rank: int) -> tuple[tuple[StageCosts, ...], float]:
    """Return the costs of all stages and the time of a message.

    Args:
        text: path of a TOML file (`CostsFile`), or NAME=VALUE,... with the same names (None: no values). In the second
            form, each value except `message` is a rank's total, divided among its stages, and missing values are 1. In
            both forms, a missing `kept` is `activation`, and a missing `message` is 0.
        ranks, stages_per_rank: size of the pipeline.

    Raises:
        UserError: for an unknown name, a value that is not a number, or a list whose length is not the number of
            stages.
    """
    stages = ranks * stages_per_rank
    if text is None or not text.endswith(".toml"):
        words = _words(text or "")
        message = words.pop("message", 0.0)
        kept_memory = words.pop("kept", words.get("activation", 1.0))
        values = (words.get(name, 1.0) for name in KINDS[:-1])
        return (StageCosts(*(value / stages_per_rank for value in (*values, kept_memory))),) * stages, message
    table = read_settings(CostsFile, read_file(Path(text), "TOML"), text)
    columns = {kind: getattr(table, kind) for kind in KINDS}
    columns["kept"] = columns["kept"] or columns["activation"]
    for kind, column in columns.items():
        if len(column) != stages:
            raise UserError(
                f"{text}: {kind} has {len(column)} numbers, but {ranks} ranks with {stages_per_rank} stages each have "
                f"{stages} stages; give one for each"
            )
    return tuple(map(StageCosts, *columns.values())), table.message


def _words(text: str) -> dict[str, float]:
    """Parse NAME=VALUE,... into a dictionary of numbers."""
    table: dict[str, float] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in (*KINDS, "message"):
            raise UserError(f"--costs has no {name!r}; {suggest_name(name, [*KINDS, 'message'])}")
        try:
            table[name] = float(value)
        except ValueError:
            raise UserError(f"--costs gives {name} as {value!r}; give a number, such as {name}=1.5") from None
    return table
