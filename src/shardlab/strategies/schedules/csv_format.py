"""The words of PyTorch's pipelining CSV, and the steps that they mean.

Each row is a rank; each cell is empty (an idle time slot) or a word `<stage><kind><microbatch>`:

    0F0,0F1,,0B0,0B1        a file of compute actions only ("compute_only")
    1RECV_F0,1F0,1B0,...    a file that also says when to send, receive, gather and reduce ("compute_comms")

Source: `_Action`, `_load_csv` and `_dump_csv` of torch.distributed.pipelining.schedules (torch 2.13). Torch 2.5 wrote
BW for a whole backward pass, and B and W for its halves; such files are read as well.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardlab.errors import closest
from shardlab.program import UserError
from shardlab.strategies.schedules.actions import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.messages import Recv, Send
from shardlab.strategies.schedules.sharding import ReduceGrad, Reshard, ShardedStep, Unshard

ACTIONS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
SHARDING = {"UNSHARD": Unshard, "RESHARD": Reshard, "REDUCE_GRAD": ReduceGrad}
MESSAGES = {"SEND_F": (Send, True), "RECV_F": (Recv, True), "SEND_B": (Send, False), "RECV_B": (Recv, False)}
KINDS = (*ACTIONS, *SHARDING, *MESSAGES)

_NAMES: dict[type, str] = {step: kind for kind, step in (*ACTIONS.items(), *SHARDING.items())}
OLD_BACKWARD = "BW"
"""A whole backward pass in a file of torch 2.5, in which B is the input half."""

MEANT = {"Bw": "W", "Bx": "I", "Bi": "I", OLD_BACKWARD: "B", "BI": "I", "DGRAD": "I", "WGRAD": "W", "FORWARD": "F"} | {
    "BACKWARD": "B",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
    "WEIGHT": "W",
}
"""Kinds as others spell them, such as torch's own enumeration."""

_WORD = re.compile(rf"([0-9]{{1,9}})({'|'.join((*KINDS, OLD_BACKWARD))})([0-9]{{0,9}})")
_LOOKS_LIKE = re.compile(r"([0-9]{1,9})\W*([A-Z]\w*?)\W*([0-9]{0,9})", re.IGNORECASE)
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Cell:
    """A word and its place in the file.

    Attributes:
        row: counted from 1, as an editor shows it; the rank is one less.
        column: counted from 1.
        kind: one of `KINDS`.
        stage: the stage that acts; of a message the one at this end.
        microbatch: None for sharding.
        written: the word as the file has it, if that is another.
    """

    row: int
    column: int
    kind: str
    stage: int
    microbatch: int | None
    written: str = ""

    @property
    def rank(self) -> int:
        return self.row - 1

    @property
    def word(self) -> str:
        """Write the step as a cell has it; within a file a word names the step."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def step(self, ranks_of_stages: Sequence[int]) -> ShardedStep:
        """Make the step that the word means; every stage that it speaks of must have a rank."""
        if self.microbatch is None:
            return SHARDING[self.kind](self.stage)
        if self.kind in ACTIONS:
            return ACTIONS[self.kind](self.stage, self.microbatch)
        kind, forward = MESSAGES[self.kind]
        return kind(self.stage, self.microbatch, forward, ranks_of_stages[self.other_stage])

    @property
    def other_stage(self) -> int:
        """The stage at the other end of a message: a sender of outputs and a receiver of gradients have it above."""
        return self.stage + (1 if self.kind in ("SEND_F", "RECV_B") else -1)

    @property
    def other_end(self) -> str:
        """The word for a message at its other end."""
        turned = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
        return f"{self.other_stage}{turned[self.kind]}{self.microbatch}"

    def refuse(self, reason: str) -> UserError:
        """The error that says what is wrong with the word, and where."""
        word = f"{self.written} (today {self.word})" if self.written else self.word
        return UserError(f"row {self.row} (rank {self.rank}), column {self.column}, {word}: {reason}")


Rows = Sequence[Sequence[Cell]]
"""Every rank's words in order, idle slots left out."""


def cells(text: str) -> list[list[Cell]]:
    """Every rank's words; idle slots are left out, and empty lines at the end of the file.

    An overlapped `(0F1;3B0)OVERLAP_F_B` becomes two cells at one place, in the order in which torch computes them too.
    What is lost is that a runtime may run them at the same time.

    Raises:
        UserError: for a word that is none, and for a rank without any.
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


def _as_today(rows: Rows) -> list[list[Cell]]:
    """Make today's kinds of those of torch 2.5: a file of it has a BW, or no I and a B beside the W of its half."""
    words = {cell.word for row in rows for cell in row}
    kinds = {cell.kind for row in rows for cell in row}

    def today(cell: Cell) -> Cell:
        if cell.kind == OLD_BACKWARD:
            return replace(cell, kind="B", written=cell.word)
        is_half = OLD_BACKWARD in kinds or ("I" not in kinds and f"{cell.stage}W{cell.microbatch}" in words)
        return replace(cell, kind="I", written=cell.word) if cell.kind == "B" and is_half else cell

    return [[today(cell) for cell in row] for row in rows]


def _cells(word: str, row: int, column: int) -> Iterator[Cell]:
    """The actions that a word stands for: none, one, or the two of an overlapped pair."""
    if not word:
        return
    overlapped = _OVERLAP.fullmatch(word)
    for part in overlapped.groups() if overlapped else (word,):
        found = _WORD.fullmatch(part.strip())
        stage, kind, microbatch = found.groups() if found else ("", "", "")
        if (kind in SHARDING) == bool(microbatch) or (overlapped and kind not in (*ACTIONS, OLD_BACKWARD)):
            raise UserError(f"row {row} (rank {row - 1}), column {column}: {word!r} is no action; {_remedy(word)}")
        yield Cell(row, column, kind, int(stage), int(microbatch) if microbatch else None)


def _remedy(word: str) -> str:
    """What was probably meant, or else how an action is written."""
    found = _LOOKS_LIKE.fullmatch(word)
    if found and found[2].upper() in ("SEND_F_RECV_B", "SEND_B_RECV_F"):
        return "write each of the two messages in a cell of its own"
    near = (MEANT.get(found[2]) or MEANT.get(found[2].upper()) or closest(found[2], KINDS)) if found else None
    if found and near and (near in SHARDING or found[3]):
        return f"did you mean {found[1]}{near}{'' if near in SHARDING else found[3]}?"
    return (
        "write <stage><kind><microbatch> with F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B, as 2F0 or 3SEND_F1, "
        "<stage> with UNSHARD, RESHARD or REDUCE_GRAD, as 0UNSHARD, or (0F1;3B0)OVERLAP_F_B"
    )


def write_csv(steps: Sequence[Sequence[ShardedStep]]) -> str:
    """Every rank's steps as a row of words; reading them again gives the same steps."""
    return "".join(",".join(_word(step) for step in row) + "\n" for row in steps)


def _word(step: ShardedStep) -> str:
    if isinstance(step, Send | Recv):
        kind = ("SEND" if isinstance(step, Send) else "RECV") + ("_F" if step.forward else "_B")
        return f"{step.stage}{kind}{step.microbatch}"
    if isinstance(step, Unshard | Reshard | ReduceGrad):
        return f"{step.stage}{_NAMES[type(step)]}"
    return f"{step.stage}{_NAMES[type(step)]}{step.microbatch}"
