"""Check that the words of a pipeline CSV are one whole schedule; if not, name the row and column at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from shardlab.program import UserError
from shardlab.strategies.schedules.csv_format import ACTIONS, Cell, Rows
from shardlab.strategies.schedules.csv_messages import check_messages, check_neighbours, has_messages
from shardlab.strategies.schedules.csv_sharding import check_sharding


def check_rows(rows: Rows) -> tuple[int, ...]:
    """Refuse what is not a schedule that every rank can follow to its end.

    Returns:
        The rank of every stage.

    Raises:
        UserError: naming the first cell at fault and the reason.
    """
    ranks = _ranks_of_stages(rows)
    table = Table(rows, ranks)
    check_neighbours(rows, ranks)
    table.check_each_row()
    table.check_complete()
    check_messages(rows, ranks)
    table.check_progress()
    check_sharding(rows)
    return ranks


def _ranks_of_stages(rows: Rows) -> tuple[int, ...]:
    """A stage is on the rank that does most of its actions, and all of them must be there."""
    counts: dict[int, Counter[int]] = {}
    for cell in (cell for row in rows for cell in row if cell.kind in ACTIONS):
        counts.setdefault(cell.stage, Counter())[cell.rank] += 1
    ranks = {stage: on.most_common(1)[0][0] for stage, on in counts.items()}
    gap = next(stage for stage in count() if stage not in ranks)
    for cell in (cell for row in rows for cell in row):
        if cell.stage not in ranks:
            raise cell.refuse(f"no row computes on stage {cell.stage}; add its actions or remove this")
        if ranks[cell.stage] != cell.rank:
            rank, on = ranks[cell.stage], counts[cell.stage]
            if on[rank] == on[cell.rank]:
                raise cell.refuse(
                    f"row {rank + 1} does as much of stage {cell.stage}, which is on one rank; remove one"
                )
            raise cell.refuse(f"stage {cell.stage} is on rank {rank}, and all its words must stand in row {rank + 1}")
        if cell.stage > gap:
            raise cell.refuse(f"no row has stage {gap}; stages are numbered from 0 without a gap")
    return tuple(ranks[stage] for stage in range(len(ranks)))


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
        """Every step comes after what it needs on its own rank; what is missing forward is missed backward as well."""
        places = {word: place for place, word in enumerate(self.cells)}
        for cell in sorted(self.cells.values(), key=lambda cell: cell.kind not in ("F", "SEND_F", "RECV_F")):
            for needs in self._needs(cell):
                found = [self.cells[word] for word in needs if word in self.cells]
                if not found:
                    raise cell.refuse(f"it needs {' or '.join(needs)}, which row {cell.row} does not have")
                if all(places[other.word] > places[cell.word] for other in found):
                    raise cell.refuse(f"it needs {found[0].word}, which comes only in column {found[0].column}")

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
            others = ", ".join(f"{cell.word} (row {cell.row}, column {cell.column})" for cell in stuck[1:])
            raise stuck[0].refuse(f"the schedule cannot go on: this and {others} wait for each other")

    def _ready(self, cell: Cell, done: set[str]) -> bool:
        """Whether what an action reads has been made, and sent if it comes from another rank."""
        for stage, made in self._input(cell):
            if self.messages and self.ranks[stage] != cell.rank:
                made = (f"{stage}SEND_{'F' if cell.kind == 'F' else 'B'}{cell.microbatch}",)
            if not done.intersection(made):
                return False
        return True
