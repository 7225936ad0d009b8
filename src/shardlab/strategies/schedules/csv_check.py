"""Whether the words of a pipeline CSV are one whole schedule, and if not, which row and column is at fault and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlab.program import UserError
from shardlab.strategies.schedules.csv_format import ACTIONS, MESSAGES, Cell
from shardlab.strategies.schedules.csv_sharding import check_sharding

Rows = Sequence[Sequence[Cell]]


def has_messages(rows: Rows) -> bool:
    """Whether a file says when to send and receive; else that follows from its actions."""
    return any(cell.kind in MESSAGES for row in rows for cell in row)


def check_rows(rows: Rows) -> tuple[int, ...]:
    """Refuse what is not a schedule that every rank can follow to its end.

    Two ranks' messages must stand in one order at both ends, sends and receives together, so that a queue such as
    NCCL's cannot hang; torch's `defer_pp_recv` does not keep to this.

    Returns:
        The rank of every stage.

    Raises:
        UserError: naming the first cell at fault and the reason.
    """
    ranks = _ranks_of_stages(rows)
    table = Table(rows, ranks)
    table.check_each_row()
    table.check_complete()
    if table.messages:
        table.check_both_ends()
        table.check_order()
    table.check_progress()
    check_sharding(rows)
    return ranks


def _ranks_of_stages(rows: Rows) -> tuple[int, ...]:
    """A stage is on the rank that computes it."""
    first: dict[int, Cell] = {}
    for cell in (cell for row in rows for cell in row if cell.kind in ACTIONS):
        known = first.setdefault(cell.stage, cell)
        if known.row != cell.row:
            raise cell.refuse(
                f"stage {cell.stage} is already on rank {known.rank} (row {known.row}, column {known.column}); "
                "all its actions must stand in one row"
            )
    for before, stage in enumerate(sorted(first)):
        if stage != before:
            raise first[stage].refuse(f"no row has stage {before}; stages are numbered from 0 without a gap")
    for cell in (cell for row in rows for cell in row):
        if cell.stage not in first:
            raise cell.refuse(f"no row computes on stage {cell.stage}, the last stage is {len(first) - 1}")
        if first[cell.stage].row != cell.row:
            raise cell.refuse(f"stage {cell.stage} is on rank {first[cell.stage].rank}, move this to its row")
    return tuple(first[stage].rank for stage in range(len(first)))


class Table:
    """The words of all ranks by name, and what each must come after."""

    def __init__(self, rows: Rows, ranks: Sequence[int]) -> None:
        self.rows = rows
        self.ranks = ranks
        self.messages = has_messages(rows)
        self.cells: dict[str, Cell] = {}
        for cell in (cell for row in rows for cell in row if cell.microbatch is not None):
            # a whole backward pass is the work of its two halves
            kinds = (cell.kind, *{"B": "IW", "I": "B", "W": "B"}.get(cell.kind, ""))
            words = [f"{cell.stage}{kind}{cell.microbatch}" for kind in kinds]
            for known in (self.cells[word] for word in words if word in self.cells):
                raise cell.refuse(
                    f"this work is done twice, first as {known.word} in column {known.column}; remove one"
                )
            self.cells[cell.word] = cell

    def check_each_row(self) -> None:
        """Every step comes after what it needs on its own rank."""
        before: set[str] = set()
        for cell in self.cells.values():
            if cell.kind in MESSAGES:
                self._check_neighbour(cell)
            for needs in self._needs(cell):
                if not before.intersection(needs):
                    later = [self.cells[word] for word in needs if word in self.cells]
                    if later:
                        raise cell.refuse(f"it needs {later[0].word}, which comes only in column {later[0].column}")
                    raise cell.refuse(f"it needs {' or '.join(needs)}, which row {cell.row} does not have")
            before.add(cell.word)

    def _check_neighbour(self, cell: Cell) -> None:
        """A message goes to a stage that exists and is on another rank."""
        if not 0 <= cell.other_stage < len(self.ranks):
            where = "above" if cell.other_stage > 0 else "below"
            raise cell.refuse(f"there is no stage {where} stage {cell.stage} to exchange this with; remove it")
        if self.ranks[cell.other_stage] == cell.rank:
            raise cell.refuse(f"stages {cell.stage} and {cell.other_stage} are both on rank {cell.rank}; remove it")

    def _needs(self, cell: Cell) -> Iterator[tuple[str, ...]]:
        """What must come before a step in its own row; of each tuple one."""
        s, m = cell.stage, cell.microbatch
        if cell.kind in ("B", "I", "SEND_F"):
            yield (f"{s}F{m}",)
        if cell.kind == "W":
            yield (f"{s}I{m}",)
        if cell.kind == "SEND_B":
            yield (f"{s}B{m}", f"{s}I{m}")
        for stage, made in self._input(cell):
            if self.ranks[stage] == cell.rank:
                yield made
            elif self.messages:
                yield (f"{s}RECV_{'F' if cell.kind == 'F' else 'B'}{m}",)

    def _input(self, cell: Cell) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The stage that makes what an action reads, if any, and the words for making it."""
        s, m = cell.stage, cell.microbatch
        if cell.kind == "F" and s > 0:
            yield s - 1, (f"{s - 1}F{m}",)
        if cell.kind in ("B", "I") and s + 1 < len(self.ranks):
            yield s + 1, (f"{s + 1}B{m}", f"{s + 1}I{m}")

    def check_complete(self) -> None:
        """Every stage passes every microbatch forward and backward."""
        actions = [cell for cell in self.cells.values() if cell.kind in ACTIONS]
        last = max(actions, key=lambda cell: cell.microbatch or 0)
        for stage, rank in enumerate(self.ranks):
            for m in range((last.microbatch or 0) + 1):
                forward = self.cells.get(f"{stage}F{m}")
                if forward is None:
                    end = self.rows[rank][-1]
                    raise UserError(
                        f"row {end.row} (rank {rank}), column {end.column + 1}: the row ends without {stage}F{m}, "
                        f"although there is a microbatch {last.microbatch} ({last.word} in row {last.row}, "
                        f"column {last.column}); every stage takes every microbatch from 0"
                    )
                half = self.cells.get(f"{stage}I{m}")
                if half is None and f"{stage}B{m}" not in self.cells:
                    raise forward.refuse(f"its backward pass {stage}B{m}, or {stage}I{m} and {stage}W{m}, is missing")
                if half is not None and f"{stage}W{m}" not in self.cells:
                    raise half.refuse(f"the other half of the backward pass, {stage}W{m}, is missing")

    def _other_end(self, cell: Cell) -> str:
        """The word for a message at its other end."""
        what = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}[cell.kind]
        return f"{cell.other_stage}{what}{cell.microbatch}"

    def check_both_ends(self) -> None:
        """No send without its receive, no receive without its send."""
        for cell in self.cells.values():
            if cell.kind in MESSAGES and self._other_end(cell) not in self.cells:
                rank = self.ranks[cell.other_stage]
                raise cell.refuse(f"its other end {self._other_end(cell)} is missing in row {rank + 1} (rank {rank})")

    def check_order(self) -> None:
        """The messages between two ranks are the same in the same order on both."""
        between: dict[tuple[int, int], list[Cell]] = {}
        for cell in self.cells.values():
            if cell.kind in MESSAGES:
                between.setdefault((cell.rank, self.ranks[cell.other_stage]), []).append(cell)
        for (rank, peer), here in between.items():
            for mine, theirs in zip(here, between[peer, rank], strict=True):
                if self._other_end(mine) != theirs.word:
                    raise mine.refuse(
                        f"the messages of ranks {rank} and {peer} are in another order in row {theirs.row}, where "
                        f"{theirs.word} (column {theirs.column}) stands in place of {self._other_end(mine)}; "
                        "write them in one order in both rows"
                    )

    def check_progress(self) -> None:
        """Ranks that do their rows in parallel, each waiting for what others make, come to their ends."""
        at = [0] * len(self.rows)
        done: set[str] = set()
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row) and self._ready(row[at[rank]], done):
                    done.add(row[at[rank]].word)
                    at[rank] += 1
                    moved = True
        stuck = [row[i] for row, i in zip(self.rows, at, strict=True) if i < len(row)]
        if stuck:
            waiting = "; ".join(f"row {c.row}, column {c.column}: {c.word}" for c in stuck[1:])
            raise stuck[0].refuse(f"the schedule cannot go on, each of these waits for a later one ({waiting})")

    def _ready(self, cell: Cell, done: set[str]) -> bool:
        """Whether what an action reads has been made, and sent if it comes from another rank."""
        for stage, made in self._input(cell):
            if self.messages and self.ranks[stage] != cell.rank:
                made = (f"{stage}SEND_{'F' if cell.kind == 'F' else 'B'}{cell.microbatch}",)
            if not done.intersection(made):
                return False
        return True
