"""Pipeline schedules from and to PyTorch's CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from shardlab.errors import why_unreadable
from shardlab.program import UserError
from shardlab.strategies.schedules.actions import Action
from shardlab.strategies.schedules.csv_check import check_rows
from shardlab.strategies.schedules.csv_format import ACTIONS, cells, write_csv
from shardlab.strategies.schedules.csv_messages import has_messages
from shardlab.strategies.schedules.messages import Send, Step, with_messages
from shardlab.strategies.schedules.sharding import ShardedStep, with_sharding
from shardlab.strategies.schedules.steps import Steps

Form = Literal["compute_only", "compute_comms"]
"""Steps that a file has: the actions alone, or also messages and the steps of sharded stages, in torch's words."""


def import_csv(source: str | Path) -> Steps:
    """The schedule in a pipeline CSV, ready to be followed.

    A file without messages gets them here; one with messages is taken as it stands.

    Args:
        source: a text, or the path of a file, in one of torch's two forms.

    Raises:
        UserError: for a file that cannot be read or that is no schedule, with row, column and reason.
    """
    if isinstance(source, Path):
        try:
            source = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read as a pipeline CSV: {why_unreadable(error)}") from error
    rows = cells(source)
    ranks_of_stages = check_rows(rows)
    steps: Sequence[Sequence[ShardedStep]] = [[cell.step(ranks_of_stages) for cell in row] for row in rows]
    if not has_messages(rows):
        todo = [[step for step in row if isinstance(step, Action)] for row in steps]
        sent = with_messages(todo, len(ranks_of_stages), ranks_of_stages.__getitem__)
        steps = [_woven(row, messages) for row, messages in zip(steps, sent, strict=True)]
    microbatches = len({cell.microbatch for row in rows for cell in row if cell.kind in ACTIONS})
    return Steps(tuple(tuple(row) for row in steps), microbatches, ranks_of_stages)


def _woven(row: Sequence[ShardedStep], sent: Sequence[Step]) -> list[ShardedStep]:
    """A rank's actions with their messages, and the steps of sharded stages between the actions as before.

    What an action makes is sent before anything else is done, since another rank waits for it.
    """
    woven: list[ShardedStep] = []
    at = 0
    for step in row:
        if not isinstance(step, Action):
            woven.append(step)
            continue
        after = sent.index(step, at) + 1
        while after < len(sent) and isinstance(sent[after], Send):
            after += 1
        woven += sent[at:after]
        at = after
    return [*woven, *sent[at:]]


def csv_of_steps(steps: Steps, *, form: Form) -> str:
    """Steps as a CSV that torch's pipelining loads with the same `format`.

    Args:
        steps: every rank's; sharding is added only if they have none.
        form: "compute_only", or "compute_comms" with messages and the steps of sharded stages.
    """
    if form == "compute_only":
        return write_csv([[step for step in row if isinstance(step, Action)] for row in steps.of_ranks])
    return write_csv([_sharded(row) for row in steps.of_ranks])


def _sharded(row: Sequence[ShardedStep]) -> Sequence[ShardedStep]:
    plain = [step for step in row if isinstance(step, Step)]
    return with_sharding(plain) if len(plain) == len(row) else row
