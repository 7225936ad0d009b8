"""Text from a model in training, computed by all ranks as their strategy lays the model over them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check import Checked, check_forward, forward_only
from shardlab.execute import Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.execute.compute import Instruction
from shardlab.execute.state import State
from shardlab.models.tensors import Choice
from shardlab.models.tensors.seeding import generator_of
from shardlab.program import Op, OpKind
from shardlab.rules.pieces import bits
from shardlab.train.job import Job
from shardlab.train.launch import backend_of
from shardlab.train.sample import for_text

HURRY = 2.0
"""Seconds after which a text ends where it is, if a rank was asked to end."""


class Window:
    """A text's last tokens as a microbatch of one sequence, filled up at its end; others are the same, and not read.

    Attributes:
        last: place of the last token in the sequence.
    """

    micro_batch_size = 1

    def __init__(self, seq_len: int) -> None:
        self._tokens, self._targets = torch.zeros(1, seq_len, dtype=torch.int64), torch.full((1, seq_len), -1)
        self.last = 0

    def show(self, text: Sequence[int]) -> None:
        """Put the end of a text there."""
        seen = text[-self._tokens.shape[1] :]
        self.last = len(seen) - 1
        self._tokens[0, : len(seen)] = torch.tensor(seen)

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self._tokens, self._targets

    def counted(self, step: int, microbatches: int) -> int:
        return 1


class ParallelWriter:
    """One rank's part of writing texts: what the loss of microbatch 0 follows from, checked like any other program.

    The logits of the text's last token are taken where that loss is computed, on whichever ranks have them, and all
    ranks draw the same token from them. Nothing is kept of earlier tokens, so that each costs a whole sequence.

    Args:
        job: what is trained, and how; dropout is left out, and no expert drops a token.
        checked: its program.
        of: the training's state, whose weights are taken.
        choice: how tokens are drawn.
        asked: whether this rank is asked to end.
        groups: where process groups are kept.
    """

    def __init__(
        self, job: Job, checked: Checked, of: State, choice: Choice, asked: Callable[[], bool], groups: Groups
    ) -> None:
        device, cut = of.settings.device, replace(job, model=for_text(job.model)).cut
        half = check_forward(forward_only(checked, 1), 1)
        self._choice, self._asked, self._vocab_size = choice, asked, job.model.vocab_size
        self._window = Window(job.model.seq_len)
        settings = Settings(job.seed, job.numbers, device)
        self._executor = Executor(
            half, of.rank, cut, self._window, settings, backend_of(device.type), groups=groups, of=of
        )
        owners = owners_of_logits(half)
        instructions = self._executor.instructions
        for at, op in enumerate(self._executor.state.tape):
            if op.kind is OpKind.LOSS:
                mine = {cell for (cell, _), owner in owners.items() if owner == (of.rank, at)}
                instructions[at] = self._reader(op, mine)
        self._scores = torch.zeros(self._vocab_size + 1, device=device)

    def _reader(self, op: Op, mine: set[int]) -> Instruction:
        """Take, instead of a loss, the last token's logits, if it is in a piece of the text that is told here."""
        state = self._executor.state
        spec, values = state.specs[op.inputs[0]], state.values
        places = {token: place for place, token in enumerate(state.shapes.tokens(spec))}
        first = state.first_token(spec) if spec.form.slices else 0
        seq_len = state.model.seq_len

        def read() -> None:
            last = self._window.last
            if last * spec.form.space.sequence // seq_len in mine:
                logits: Tensor = values[op.inputs[0]][0, places[last]]
                known = max(0, min(len(logits), self._vocab_size - first))
                self._scores[first : first + known] = logits[:known]

        return read

    def go_on(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then write `count`, or fewer if a rank is asked to end; every rank calls this.

        Raises:
            UserError: when the model's scores are not numbers.
        """
        text, generator = list(tokens), generator_of("generate", self._choice.seed)
        began = time.monotonic()
        for _ in range(count):
            self._window.show(text)
            self._executor.state.step = 0
            self._scores.zero_()
            self._executor.step()
            self._scores[-1] = float(self._asked() and time.monotonic() - began > HURRY)
            dist.all_reduce(self._scores)
            if self._scores[-1] > 0:
                return
            text.append(self._choice.draw(self._scores[:-1], generator))
            yield text[-1]


def owners_of_logits(checked: Checked) -> dict[tuple[int, object], tuple[int, int]]:
    """(piece of microbatch 0, slices of the vocabulary) to the (rank, op) of the first LOSS that has these logits."""
    owners: dict[tuple[int, object], tuple[int, int]] = {}
    for rank, tape in enumerate(checked.program.tapes):
        for at, op in enumerate(tape):
            if op.kind is OpKind.LOSS:
                spec = checked.specs[rank][op.inputs[0]]
                for cell in bits(spec.cells & (1 << spec.form.space.sequence) - 1):
                    owners.setdefault((cell, spec.form.slices), (rank, at))
    return owners
