"""Check that the sends and receives of a pipeline CSV fit together.

Two ranks' messages must stand in one order at both ends, sends and receives together, so that a queue such as NCCL's
cannot hang. What torch 2.13 writes with its option `defer_pp_recv` crosses sends, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlab.strategies.schedules.csv_format import MESSAGES, Cell, Rows


def has_messages(rows: Rows) -> bool:
    """Whether a file says when to send and receive; else that follows from its actions."""
    return any(_messages(rows))


def check_neighbours(rows: Rows, ranks_of_stages: Sequence[int]) -> None:
    """Every message goes to a stage that exists and is on another rank.

    Raises:
        UserError: naming the cell and the reason.
    """
    for cell in _messages(rows):
        if not 0 <= cell.other_stage < len(ranks_of_stages):
            where = "above" if cell.other_stage > 0 else "below"
            raise cell.refuse(f"there is no stage {where} stage {cell.stage} to exchange this with; remove it")
        if ranks_of_stages[cell.other_stage] == cell.rank:
            raise cell.refuse(f"stages {cell.stage} and {cell.other_stage} are both on rank {cell.rank}; remove it")


def check_messages(rows: Rows, ranks_of_stages: Sequence[int]) -> None:
    """Refuse a send without its receive, a receive without its send, and another order at either end.

    Raises:
        UserError: naming the cell and the reason.
    """
    words = {cell.word for cell in _messages(rows)}
    between: dict[tuple[int, int], list[Cell]] = {}
    for cell in _messages(rows):
        peer = ranks_of_stages[cell.other_stage]
        if cell.other_end not in words:
            raise cell.refuse(f"its other end {cell.other_end} is missing in row {peer + 1} (rank {peer})")
        between.setdefault((cell.rank, peer), []).append(cell)
    for (rank, peer), here in between.items():
        for mine, theirs in zip(here, between[peer, rank], strict=True):
            if mine.other_end != theirs.word:
                raise mine.refuse(
                    f"the messages of ranks {rank} and {peer} are in another order in row {theirs.row}, where "
                    f"{theirs.word} (column {theirs.column}) stands in place of {mine.other_end}; "
                    "write them in one order in both rows, or a queue such as NCCL's hangs"
                )


def _messages(rows: Rows) -> Iterator[Cell]:
    return (cell for row in rows for cell in row if cell.kind in MESSAGES)
