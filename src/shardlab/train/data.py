"""The text that is trained on, and the microbatches cut from it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import mmap
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.errors import UserError
from shardlab.models.tensors import generator_of
from shardlab.program.files import want_file

DEFAULT_BYTES = 4_000_000
"""The default text ends here at the latest: enough for minutes of training, and read at once."""

Text = bytes | mmap.mmap
"""Bytes; those of a user's file stay in it, mapped into memory, so that no rank reads more than it trains on."""


def default_text() -> bytes:
    """A text that every machine has: the source of Python's standard library, module after module by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py"), key=lambda file: file.name):
        text += file.read_bytes()
        if len(text) >= DEFAULT_BYTES:
            break
    if not text:
        raise UserError(f"the source of Python's standard library is not in {folder}; name a text of your own instead")
    return bytes(text[:DEFAULT_BYTES])


def map_text(path: Path) -> Text:
    """Map a user's text into memory.

    Raises:
        UserError: when it is no file, or cannot be read or mapped.
    """
    want_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error


@dataclass(frozen=True)
class Corpus:
    """A text in two parts: one is trained on, the other only judged by. Both are (bytes,), views of the text."""

    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    @classmethod
    def split(cls, text: Text, seq_len: int, source: str = "the text") -> Corpus:
        """The first nine tenths for training, the rest for validation, each with `seq_len` tokens at least.

        Args:
            source: what an error calls the text.

        Raises:
            UserError: when it is too short for that.
        """
        needed = seq_len + 1  # a sequence and the byte that comes next
        if len(text) < 2 * needed:
            raise UserError(
                f"{source} has {len(text)} bytes but {2 * needed} are needed: {needed} in the training part and "
                f"{needed} in the validation part (a sequence of {seq_len} and the next byte); "
                "take a longer text or a smaller block"
            )
        tokens = np.frombuffer(text, np.uint8)
        held_out = max(len(text) // 10, needed)
        return cls(tokens[:-held_out], tokens[-held_out:])


@dataclass(frozen=True)
class Batches:
    """Microbatches of sequences, with the next byte of each token as its target.

    Attributes:
        seq_len: tokens of a sequence.
        rows: sequences of a microbatch.
        seed: of the run.
    """

    corpus: Corpus
    seq_len: int
    micro_batch_size: int
    seed: int

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 (rows, block), from random places: a function of seed, step and microbatch."""
        generator = generator_of("batch", self.seed, step, microbatch)
        starts = torch.randint(len(self.corpus.training) - self.seq_len, (self.micro_batch_size,), generator=generator)
        return self._cut(self.corpus.training, starts)

    def counted(self, step: int, microbatches: int) -> int:
        """Targets that count in a step: all of them."""
        return microbatches * self.micro_batch_size * self.seq_len

    @property
    def validation_count(self) -> int:
        """How many microbatches cover the validation part once; at least 1."""
        return max(1, self._validation_sequences // self.micro_batch_size)

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets as above, from one place after the other; at the end it begins anew."""
        sequences = (
            torch.arange(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
            % self._validation_sequences
        )
        return self._cut(self.corpus.validation, sequences * self.seq_len)

    @property
    def _validation_sequences(self) -> int:
        return (len(self.corpus.validation) - 1) // self.seq_len

    def _cut(self, text: NDArray[np.uint8], starts: Tensor) -> tuple[Tensor, Tensor]:
        places = (starts[:, None] + torch.arange(self.seq_len)).numpy()
        return torch.from_numpy(text[places]).long(), torch.from_numpy(text[places + 1]).long()
