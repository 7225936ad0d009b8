"""Pipeline schedules from and to the CSV files of PyTorch.

Each row of a file is a rank. Each cell is empty (an idle slot) or an action `<stage><kind><microbatch>`:

    0F0,0F1,,0B0,0B1        compute actions only ("compute_only")
    1RECV_F0,1F0,1B0,...    also messages, gathers and reductions ("compute_comms")

Source: `_Action`, `_load_csv` and `_dump_csv` of torch.distributed.pipelining.schedules (torch 2.13). Torch 2.5 wrote
BW for a whole backward pass, and B and W for its halves; such files are read as well.

`import_csv` parses a file (`parse_cells`) and checks that every rank can follow it to its end (`check_rows`). An error
names the first cell at fault. `export_csv` writes a file.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Literal

from shardlab.common.errors import closest_name, why_unreadable
from shardlab.language import UserError
from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import (
    Recv,
    ReduceGrad,
    Reshard,
    Send,
    ShardedStep,
    Step,
    Steps,
    Unshard,
    insert_messages,
    insert_sharding_steps,
)

CsvFormat = Literal["compute_only", "compute_comms"]
"""Contents of a file, in PyTorch's words: only actions, or also messages and the steps of sharded stages."""


def import_csv(source: str | Path) -> Steps:
    """Return the steps of all ranks in a pipeline CSV.

    If the file has no messages, they are inserted.

    Args:
        source: text, or the path of a file, in one of the two formats of PyTorch.

    Raises:
        UserError: for a file that cannot be read or is no complete schedule, with row, column and reason.
    """
    if isinstance(source, Path):
        try:
            source = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read as a pipeline CSV: {why_unreadable(error)}") from error
    rows = parse_cells(source)
    ranks_of_stages = check_rows(rows)
    steps: Sequence[Sequence[ShardedStep]] = [[cell.step(ranks_of_stages) for cell in row] for row in rows]
    if not has_messages(rows):
        actions = [[step for step in row if isinstance(step, Action)] for row in steps]
        full_rows = insert_messages(actions, len(ranks_of_stages), ranks_of_stages.__getitem__)
        steps = [_insert_messages(row, messages) for row, messages in zip(steps, full_rows, strict=True)]
    microbatches = len({cell.microbatch for row in rows for cell in row if cell.kind in ACTIONS})
    return Steps(tuple(tuple(row) for row in steps), microbatches, ranks_of_stages)


def export_csv(steps: Steps, *, form: CsvFormat) -> str:
    """Return steps as a CSV text that PyTorch's pipelining loads with `form` as its argument `format`.

    Args:
        steps: steps of all ranks. Gathers and reductions are inserted if there are none.
        form: "compute_only", or "compute_comms" with messages and the steps of sharded stages.
    """
    if form == "compute_only":
        return write_csv([[step for step in row if isinstance(step, Action)] for row in steps.of_ranks])
    return write_csv([_sharded(row) for row in steps.of_ranks])


ACTIONS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}

SHARDING = {"UNSHARD": Unshard, "RESHARD": Reshard, "REDUCE_GRAD": ReduceGrad}

MESSAGES = {"SEND_F": (Send, True), "RECV_F": (Recv, True), "SEND_B": (Send, False), "RECV_B": (Recv, False)}

KINDS = (*ACTIONS, *SHARDING, *MESSAGES)


@dataclass(frozen=True)
class Cell:
    """Cell of the file, with its position.

    Attributes:
        row: row, counted from 1 as in an editor. The rank is one less.
        column: column, counted from 1.
        kind: one of `KINDS`.
        stage: stage of the action; for a message, the stage at this end.
        microbatch: microbatch (None: a step of a sharded stage).
        old_text: text of the cell in the file, if that is in the format of torch 2.5 ("": it is in today's format).
    """

    row: int
    column: int
    kind: str
    stage: int
    microbatch: int | None
    old_text: str = ""

    @property
    def rank(self) -> int:
        return self.row - 1

    @property
    def word(self) -> str:
        """Text of the cell, which is unique in a file."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def step(self, ranks_of_stages: Sequence[int]) -> ShardedStep:
        """Return the step of the cell. All stages that it names must have a rank."""
        if self.microbatch is None:
            return SHARDING[self.kind](self.stage)
        if self.kind in ACTIONS:
            return ACTIONS[self.kind](self.stage, self.microbatch)
        kind, forward = MESSAGES[self.kind]
        return kind(self.stage, self.microbatch, forward, ranks_of_stages[self.other_stage])

    @property
    def other_stage(self) -> int:
        """Stage at the other end of a message: the next one for SEND_F and RECV_B, otherwise the previous one."""
        return self.stage + (1 if self.kind in ("SEND_F", "RECV_B") else -1)

    @property
    def other_end(self) -> str:
        """Text of the cell at the other end of a message."""
        turned = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
        return f"{self.other_stage}{turned[self.kind]}{self.microbatch}"

    def refuse(self, reason: str) -> UserError:
        """Return an error with the position of the cell and what is wrong with it."""
        word = f"{self.old_text} (today {self.word})" if self.old_text else self.word
        return UserError(f"row {self.row} (rank {self.rank}), column {self.column}, {word}: {reason}")


Rows = Sequence[Sequence[Cell]]
"""Cells of each rank in order, without idle slots."""


def parse_cells(text: str) -> list[list[Cell]]:
    """Return the cells of each rank, without idle slots and without empty lines at the end.

    An overlapped pair `(0F1;3B0)OVERLAP_F_B` becomes two cells in the same column, in the order in which torch computes
    them. The information that a runtime may run them at the same time is lost.

    Raises:
        UserError: for a cell that is no action, and for a rank without actions.
    """
    try:
        lines = list(csv.reader(text.removeprefix("\ufeff").rstrip().splitlines()))
    except csv.Error as error:
        raise UserError(f"this is no pipeline CSV ({error}); give one row per rank, as 0F0,0F1,0B0,0B1") from error
    if not lines:
        raise UserError("the pipeline CSV is empty; give one row per rank, as 0F0,0F1,0B0,0B1")
    rows = [
        [cell for column, word in enumerate(line, 1) for cell in _cells(word.strip(), row, column)]
        for row, line in enumerate(lines, 1)
    ]
    for row, line in enumerate(rows, 1):
        if not line:
            raise UserError(f"row {row} (rank {row - 1}), column 1: the rank does nothing; give it a stage's actions")
    return _as_today(rows)


def write_csv(steps: Sequence[Sequence[ShardedStep]]) -> str:
    """Return the steps of each rank as a row of cells. Parsing the text gives the same steps."""
    return "".join(",".join(_word(step) for step in row) + "\n" for row in steps)


def check_rows(rows: Rows) -> tuple[int, ...]:
    """Check that every rank can follow the schedule to its end.

    Returns:
        The rank of each stage.

    Raises:
        UserError: with the first cell at fault and the reason.
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


class Table:
    """Cells of all ranks by their text, and checks of their order.

    Args:
        rows: cells of each rank.
        ranks: rank of each stage.
    """

    def __init__(self, rows: Rows, ranks: Sequence[int]) -> None:
        self.rows = rows
        self.ranks = ranks
        self.messages = has_messages(rows)
        self.cells: dict[str, Cell] = {}
        for cell in (cell for row in rows for cell in row if cell.microbatch is not None):
            # a whole backward pass is the work of its two halves
            kinds = (cell.kind, *{"B": "IW", "I": "B", "W": "B"}.get(cell.kind, ""))
            words = [f"{cell.stage}{kind}{cell.microbatch}" for kind in kinds]
            for earlier in (self.cells[word] for word in words if word in self.cells):
                raise cell.refuse(
                    f"this work is done twice, first as {earlier.word} in column {earlier.column}; remove one"
                )
            self.cells[cell.word] = cell

    def check_each_row(self) -> None:
        """Check that every step comes after the steps of its rank that it needs. Forward steps are checked first."""
        places = {word: place for place, word in enumerate(self.cells)}
        for cell in sorted(self.cells.values(), key=lambda cell: cell.kind not in ("F", "SEND_F", "RECV_F")):
            for needs in self._needs(cell):
                cells = [self.cells[word] for word in needs if word in self.cells]
                if not cells:
                    raise cell.refuse(f"it needs {' or '.join(needs)}, which row {cell.row} does not have")
                if all(places[other.word] > places[cell.word] for other in cells):
                    raise cell.refuse(f"it needs {cells[0].word}, which comes only in column {cells[0].column}")

    def check_complete(self) -> None:
        """Check that every stage has a forward and a backward pass for every microbatch."""
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
        """Check that all ranks reach the ends of their rows if they run in parallel and wait for each other."""
        positions = [0] * len(self.rows)
        finished: set[str] = set()
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(self.rows):
                while positions[rank] < len(row) and self._ready(row[positions[rank]], finished):
                    finished.add(row[positions[rank]].word)
                    positions[rank] += 1
                    progress = True
        stuck = [row[i] for row, i in zip(self.rows, positions, strict=True) if i < len(row)]
        if stuck:
            others = ", ".join(f"{cell.word} (row {cell.row}, column {cell.column})" for cell in stuck[1:])
            raise stuck[0].refuse(f"the schedule cannot go on: this and {others} wait for each other")

    def _needs(self, cell: Cell) -> Iterator[tuple[str, ...]]:
        """Yield groups of words. One word of each group must come before `cell` in the same row."""
        s, m = cell.stage, cell.microbatch
        if cell.kind in ("B", "I", "SEND_F"):
            yield (f"{s}F{m}",)
        if cell.kind == "W":
            yield (f"{s}I{m}",)
        if cell.kind == "SEND_B":
            yield (f"{s}B{m}", f"{s}I{m}")
        for stage, words in self._input(cell):
            if self.ranks[stage] == cell.rank:
                yield words
            elif self.messages:
                yield (f"{s}RECV_{'F' if cell.kind == 'F' else 'B'}{m}",)

    def _input(self, cell: Cell) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the stage whose output an action reads, with the cells that compute that output."""
        s, m = cell.stage, cell.microbatch
        if cell.kind == "F" and s > 0:
            yield s - 1, (f"{s - 1}F{m}",)
        if cell.kind in ("B", "I") and s + 1 < len(self.ranks):
            yield s + 1, (f"{s + 1}B{m}", f"{s + 1}I{m}")

    def _ready(self, cell: Cell, finished: set[str]) -> bool:
        """Return whether the input of an action has been computed, and sent if it comes from another rank."""
        for stage, words in self._input(cell):
            if self.messages and self.ranks[stage] != cell.rank:
                words = (f"{stage}SEND_{'F' if cell.kind == 'F' else 'B'}{cell.microbatch}",)
            if not finished.intersection(words):
                return False
        return True


def check_neighbours(rows: Rows, ranks_of_stages: Sequence[int]) -> None:
    """Check that every message goes to a stage that exists and is on another rank.

    Raises:
        UserError: with the cell and the reason.
    """
    for cell in _messages(rows):
        if not 0 <= cell.other_stage < len(ranks_of_stages):
            side = "above" if cell.other_stage > 0 else "below"
            raise cell.refuse(f"there is no stage {side} stage {cell.stage} to exchange this with; remove it")
        if ranks_of_stages[cell.other_stage] == cell.rank:
            raise cell.refuse(f"stages {cell.stage} and {cell.other_stage} are both on rank {cell.rank}; remove it")


def check_messages(rows: Rows, ranks_of_stages: Sequence[int]) -> None:
    """Check that sends and receives match, and have the same order at both ends.

    All messages between two ranks, sends and receives together, must have one order at both ends. Otherwise a queue
    such as NCCL's can hang. Torch 2.13 with its option `defer_pp_recv` writes crossed sends, which are refused.

    Raises:
        UserError: with the cell and the reason.
    """
    words = {cell.word for cell in _messages(rows)}
    channels: dict[tuple[int, int], list[Cell]] = {}
    for cell in _messages(rows):
        peer = ranks_of_stages[cell.other_stage]
        if cell.other_end not in words:
            raise cell.refuse(f"its other end {cell.other_end} is missing in row {peer + 1} (rank {peer})")
        channels.setdefault((cell.rank, peer), []).append(cell)
    for (rank, peer), cells in channels.items():
        for message, other in zip(cells, channels[peer, rank], strict=True):
            if message.other_end != other.word:
                raise message.refuse(
                    f"the messages of ranks {rank} and {peer} are in another order in row {other.row}, where "
                    f"{other.word} (column {other.column}) stands in place of {message.other_end}; "
                    "write them in one order in both rows, or a queue such as NCCL's hangs"
                )


def check_sharding(rows: Rows) -> None:
    """Check that weights are gathered before use, and that complete gradients are reduced once.

    A file without UNSHARD, or without REDUCE_GRAD, leaves this to the runtime.

    Raises:
        UserError: with the cell and the reason.
    """
    kinds = {cell.kind for row in rows for cell in row}
    for row in rows:
        if kinds & {"UNSHARD", "RESHARD"}:
            _check_weights(row)
        if "REDUCE_GRAD" in kinds:
            _check_gradients(row)


def has_messages(rows: Rows) -> bool:
    """Return whether a file has messages. If not, they follow from its actions."""
    return any(_messages(rows))


_NAMES: dict[type, str] = {step: kind for kind, step in (*ACTIONS.items(), *SHARDING.items())}

OLD_BACKWARD = "BW"
"""Kind of a whole backward pass in files of torch 2.5, in which B is the input half."""

SYNONYMS = {"Bw": "W", "Bx": "I", "Bi": "I", OLD_BACKWARD: "B", "BI": "I", "DGRAD": "I", "WGRAD": "W"} | {
    "FORWARD": "F",
    "BACKWARD": "B",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
    "WEIGHT": "W",
}
"""Other spellings of kinds, such as those of torch's enumeration, for suggestions in error messages."""

_WORD = re.compile(rf"([0-9]{{1,9}})({'|'.join((*KINDS, OLD_BACKWARD))})([0-9]{{0,9}})")

_LOOKS_LIKE = re.compile(r"([0-9]{1,9})\W*([A-Z]\w*?)\W*([0-9]{0,9})", re.IGNORECASE)

_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


def _ranks_of_stages(rows: Rows) -> tuple[int, ...]:
    """Return the rank of each stage: the one with most of the stage's actions. An action on another rank is refused."""
    counts: dict[int, Counter[int]] = {}
    for cell in (cell for row in rows for cell in row if cell.kind in ACTIONS):
        counts.setdefault(cell.stage, Counter())[cell.rank] += 1
    ranks = {stage: counter.most_common(1)[0][0] for stage, counter in counts.items()}
    gap = next(stage for stage in count() if stage not in ranks)
    for cell in (cell for row in rows for cell in row):
        if cell.stage not in ranks:
            raise cell.refuse(f"no row computes on stage {cell.stage}; add its actions or remove this")
        if ranks[cell.stage] != cell.rank:
            rank, counter = ranks[cell.stage], counts[cell.stage]
            if counter[rank] == counter[cell.rank]:
                raise cell.refuse(
                    f"row {rank + 1} does as much of stage {cell.stage}, which is on one rank; remove one"
                )
            raise cell.refuse(f"stage {cell.stage} is on rank {rank}, and all its words must stand in row {rank + 1}")
        if cell.stage > gap:
            raise cell.refuse(f"no row has stage {gap}; stages are numbered from 0 without a gap")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _as_today(rows: Rows) -> list[list[Cell]]:
    """Convert kinds of torch 2.5. A file of that version has a BW, or it has no I, but B and W of one microbatch."""
    words = {cell.word for row in rows for cell in row}
    kinds = {cell.kind for row in rows for cell in row}

    def today(cell: Cell) -> Cell:
        if cell.kind == OLD_BACKWARD:
            return replace(cell, kind="B", old_text=cell.word)
        is_half = OLD_BACKWARD in kinds or ("I" not in kinds and f"{cell.stage}W{cell.microbatch}" in words)
        return replace(cell, kind="I", old_text=cell.word) if cell.kind == "B" and is_half else cell

    return [[today(cell) for cell in row] for row in rows]


def _cells(word: str, row: int, column: int) -> Iterator[Cell]:
    """Yield the actions of a cell's text: none, one, or the two of an overlapped pair."""
    if not word:
        return
    overlapped = _OVERLAP.fullmatch(word)
    for part in overlapped.groups() if overlapped else (word,):
        match = _WORD.fullmatch(part.strip())
        stage, kind, microbatch = match.groups() if match else ("", "", "")
        if (kind in SHARDING) == bool(microbatch) or (overlapped and kind not in (*ACTIONS, OLD_BACKWARD)):
            raise UserError(f"row {row} (rank {row - 1}), column {column}: {word!r} is no action; {_remedy(word)}")
        yield Cell(row, column, kind, int(stage), int(microbatch) if microbatch else None)


def _remedy(word: str) -> str:
    """Return a suggestion: a similar action, or the format of actions."""
    match = _LOOKS_LIKE.fullmatch(word)
    if match and match[2].upper() in ("SEND_F_RECV_B", "SEND_B_RECV_F"):
        return "write each of the two messages in a cell of its own"
    kind = match[2] if match else ""
    near = SYNONYMS.get(kind) or SYNONYMS.get(kind.upper()) or (closest_name(kind, KINDS) if kind else None)
    if match and near and (near in SHARDING or match[3]):
        return f"did you mean {match[1]}{near}{'' if near in SHARDING else match[3]}?"
    return (
        "write <stage><kind><microbatch> with F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B, as 2F0 or 3SEND_F1, "
        "<stage> with UNSHARD, RESHARD or REDUCE_GRAD, as 0UNSHARD, or (0F1;3B0)OVERLAP_F_B"
    )


def _word(step: ShardedStep) -> str:
    if isinstance(step, Send | Recv):
        kind = ("SEND" if isinstance(step, Send) else "RECV") + ("_F" if step.forward else "_B")
        return f"{step.stage}{kind}{step.microbatch}"
    if isinstance(step, Unshard | Reshard | ReduceGrad):
        return f"{step.stage}{_NAMES[type(step)]}"
    return f"{step.stage}{_NAMES[type(step)]}{step.microbatch}"


def _messages(rows: Rows) -> Iterator[Cell]:
    return (cell for row in rows for cell in row if cell.kind in MESSAGES)


def _insert_messages(row: Sequence[ShardedStep], with_messages: Sequence[Step]) -> list[ShardedStep]:
    """Insert messages between a rank's actions and steps of sharded stages.

    The output of an action is sent before any other step, because another rank waits for it.
    """
    merged: list[ShardedStep] = []
    index = 0
    for step in row:
        if not isinstance(step, Action):
            merged.append(step)
            continue
        end = with_messages.index(step, index) + 1
        while end < len(with_messages) and isinstance(with_messages[end], Send):
            end += 1
        merged += with_messages[index:end]
        index = end
    return [*merged, *with_messages[index:]]


def _sharded(row: Sequence[ShardedStep]) -> Sequence[ShardedStep]:
    steps = [step for step in row if isinstance(step, Step)]
    return insert_sharding_steps(steps) if len(steps) == len(row) else row


def _check_weights(row: Sequence[Cell]) -> None:
    """Check that a stage's weights are whole from UNSHARD to RESHARD, and sharded when the step begins and ends."""
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
    """Check that a stage's gradients are reduced once, after the last backward pass that adds to them."""
    last = {cell.stage: cell for cell in row if cell.kind in ("B", "W")}
    reduced: dict[int, Cell] = {}
    for cell in (cell for cell in row if cell.kind == "REDUCE_GRAD"):
        first = reduced.setdefault(cell.stage, cell)
        if first is not cell:
            raise cell.refuse(f"the gradients of stage {cell.stage} are already reduced in column {first.column}")
        final = last[cell.stage]
        if row.index(cell) < row.index(final):
            raise cell.refuse(f"{final.word} (column {final.column}) still adds to these gradients; reduce after it")
    for stage, cell in last.items():
        if stage not in reduced:
            raise cell.refuse(f"nothing reduces the gradients of stage {stage}; put {stage}REDUCE_GRAD after this")
