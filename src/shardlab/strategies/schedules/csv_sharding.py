"""Check that a pipeline CSV gathers weights before they are used and reduces gradients when they are whole.

A file that never says UNSHARD, or never REDUCE_GRAD, leaves that to whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.strategies.schedules.csv_format import ACTIONS, Cell, Rows


def check_sharding(rows: Rows) -> None:
    """Refuse weights used while sharded and gradients reduced too early, twice or never.

    Raises:
        UserError: naming the cell and the reason.
    """
    kinds = {cell.kind for row in rows for cell in row}
    for row in rows:
        if kinds & {"UNSHARD", "RESHARD"}:
            _check_weights(row)
        if "REDUCE_GRAD" in kinds:
            _check_gradients(row)


def _check_weights(row: Sequence[Cell]) -> None:
    """A stage's weights are whole from UNSHARD to RESHARD, and sharded when the step begins and ends."""
    whole: dict[int, Cell] = {}
    for cell in row:
        since = whole.get(cell.stage)
        if cell.kind == "UNSHARD":
            if since is not None:
                raise cell.refuse(f"stage {cell.stage} is whole since column {since.column}; reshard it or remove this")
            whole[cell.stage] = cell
        elif cell.kind == "RESHARD" or cell.kind in ACTIONS:
            if since is None:
                raise cell.refuse(f"stage {cell.stage} is sharded here; put {cell.stage}UNSHARD before it")
            if cell.kind == "RESHARD":
                del whole[cell.stage]
    for stage, cell in whole.items():
        raise cell.refuse(f"stage {stage} is still whole when the row ends; put {stage}RESHARD after its last action")


def _check_gradients(row: Sequence[Cell]) -> None:
    """A stage's gradients are reduced once, after the last backward pass that adds to them."""
    last = {cell.stage: cell for cell in row if cell.kind in ("B", "W")}
    reduced: dict[int, Cell] = {}
    for cell in (cell for cell in row if cell.kind == "REDUCE_GRAD"):
        known = reduced.setdefault(cell.stage, cell)
        if known is not cell:
            raise cell.refuse(f"the gradients of stage {cell.stage} are already reduced in column {known.column}")
        after = last[cell.stage]
        if row.index(cell) < row.index(after):
            raise cell.refuse(f"{after.word} (column {after.column}) still adds to these gradients; reduce after it")
    for stage, cell in last.items():
        if stage not in reduced:
            raise cell.refuse(f"nothing reduces the gradients of stage {stage}; put {stage}REDUCE_GRAD after this")
