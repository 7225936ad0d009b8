"""Microbatches: each sequence once an epoch, whoever asks for them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.train.batches import VALIDATION_SEQUENCES, Batches
from shardlab.train.config import BatchRamp
from shardlab.train.data import Corpus
from shardlab.train.data.stream import SequenceStream, TokenRun
from shardlab.train.data.tokenizers import ByteTokenizer
from tests.support.thorough import examples
from tests.support.warm import WarmStarts

TEXT = bytes(i % 251 for i in range(5000))
BATCHES = Batches(Corpus.from_text(TEXT, seq_len=16), seq_len=16, micro_batch_size=4, microbatches=2, seed=0)


def corpus_of(tokens: int, starts: list[int]) -> Corpus:
    """Tokens 0, 1, 2, ... (large ones, so that each is another) in documents that begin at some of them."""
    stream = SequenceStream((TokenRun(np.arange(tokens, dtype=np.uint32), np.array(starts, np.int64)),))
    return Corpus(stream, stream, ByteTokenizer(), ())


LARGE = """
from pathlib import Path
import torch
from shardlab.train.data import Corpus
from shardlab.train.data.documents import map_text
from shardlab.train.batches import VALIDATION_SEQUENCES, Batches
from shardlab.train.steps import peak_memory

before = peak_memory(torch.device("cpu"))
batches = Batches(Corpus.from_text(map_text(Path("large")), 16), 16, 4, 4, 0)
assert batches.microbatch(0, 0)[0].shape == batches.validation(10**6)[0].shape == (4, 16)
assert batches.corpus.identity
print(peak_memory(torch.device("cpu")) - before)
"""


def test_of_a_large_file_a_rank_reads_what_it_trains_on(tmp_path: Path, warm: WarmStarts) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**9)
    done = warm.run(["-c", LARGE], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10**8, "a tenth of the file"


@given(step=st.integers(0, 10**6), microbatch=st.integers(0, 1))
def test_targets_are_the_next_bytes_of_the_training_part(step: int, microbatch: int) -> None:
    tokens, targets = BATCHES.microbatch(step, microbatch)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    training = BATCHES.corpus.training.runs[0].tokens.tobytes()
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert bytes([*row, target[-1]]) in training
        assert row[1:] == target[:-1]


def test_microbatches_are_a_function_of_seed_step_and_number() -> None:
    first = BATCHES.microbatch(3, 1)[0]
    torch.rand(10)
    assert torch.equal(first, BATCHES.microbatch(3, 1)[0])
    others = [BATCHES.microbatch(3, 0), BATCHES.microbatch(1, 1), Batches(BATCHES.corpus, 16, 4, 2, 1).microbatch(3, 1)]
    assert not any(torch.equal(first, tokens) for tokens, _ in others)


@settings(max_examples=examples(40))
@given(
    sequences=st.integers(1, 60),
    micro_batch_size=st.integers(1, 7),
    microbatches=st.integers(1, 7),
    seed=st.integers(0, 2**40),
)
def test_each_sequence_comes_once_an_epoch_over_all_microbatches(
    sequences: int, micro_batch_size: int, microbatches: int, seed: int
) -> None:
    batches = Batches(corpus_of(8 * sequences + 1, []), 8, micro_batch_size, microbatches, seed)
    steps = -(-3 * sequences // (micro_batch_size * microbatches))
    seen = [
        int(row[0]) // 8 for step in range(steps) for m in range(microbatches) for row in batches.microbatch(step, m)[0]
    ]
    for epoch in range(3):
        assert sorted(seen[epoch * sequences : (epoch + 1) * sequences]) == list(range(sequences))


RAMPS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda each: BatchRamp(tuple((sum(steps for steps, _ in each[:at]), count) for at, (_, count) in enumerate(each)))
)
"""Stages of some steps and microbatches each."""


@settings(max_examples=examples(40))
@given(ramp=RAMPS, sequences=st.integers(1, 40), micro_batch_size=st.integers(1, 3))
def test_each_sequence_comes_once_an_epoch_while_the_batch_grows(
    ramp: BatchRamp, sequences: int, micro_batch_size: int
) -> None:
    batches = Batches(corpus_of(8 * sequences + 1, []), 8, micro_batch_size, ramp.stages[-1][1], 3, ramp)
    steps = ramp.steps(-(-2 * sequences // micro_batch_size))
    seen: list[int] = []
    for step in range(steps):
        assert batches.sequences_before(step) == len(seen)
        microbatches = [batches.microbatch(step, m)[0] for m in range(ramp.microbatches(step))]
        assert batches.counted(step, len(microbatches)) == sum(tokens.numel() for tokens in microbatches)
        seen += [int(row[0]) // 8 for tokens in microbatches for row in tokens]
    assert len(seen) >= 2 * sequences > len(seen) - ramp.microbatches(steps - 1) * micro_batch_size
    for epoch in range(2):
        assert sorted(seen[epoch * sequences : (epoch + 1) * sequences]) == list(range(sequences))


def test_sequences_do_not_depend_on_how_a_step_is_cut_into_microbatches() -> None:
    """So neither do they on the ranks, which take microbatches each."""
    cuts = [Batches(BATCHES.corpus, 16, rows, 24 // rows, 5) for rows in (1, 2, 3, 8, 24)]
    for step in range(4):
        whole = [torch.cat([cut.microbatch(step, m)[0] for m in range(cut.microbatches)]) for cut in cuts]
        assert all(torch.equal(whole[0], other) for other in whole)


def test_a_position_follows_from_the_step() -> None:
    assert BATCHES.sequences_before(7) == 7 * 2 * 4
    assert BATCHES.epochs_before(7) == (7 * 8 / ((4500 - 1) // 16),)


@given(starts=st.sets(st.integers(1, 400)), step=st.integers(0, 50))
def test_a_target_that_begins_a_document_does_not_count_and_the_count_is_exact(starts: set[int], step: int) -> None:
    batches = Batches(corpus_of(401, sorted(starts)), 8, 3, 4, 1)
    counted = 0
    for microbatch in range(4):
        tokens, targets = batches.microbatch(step, microbatch)
        expected = torch.where(torch.isin(tokens + 1, torch.tensor(sorted(starts), dtype=torch.int64)), -1, tokens + 1)
        assert torch.equal(targets, expected)
        counted += int((targets >= 0).sum())
    assert batches.counted(step, 4) == max(1, counted)


def evaluated(batches: Batches) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets of the sequences that a validation counts, in their order."""
    microbatches = [batches.validation(number) for number in range(batches.validation_microbatches)]
    rows = [
        (row, row_targets)
        for tokens, targets in microbatches
        for row, row_targets in zip(tokens.tolist(), targets.tolist(), strict=True)
    ]
    return [(row, row_targets) for row, row_targets in rows if max(row_targets) >= 0]


@given(micro_batch_size=st.integers(1, 80), microbatches=st.integers(1, 3))
def test_validation_counts_the_same_sequences_however_a_batch_is_cut(micro_batch_size: int, microbatches: int) -> None:
    batches = replace(BATCHES, micro_batch_size=micro_batch_size, microbatches=microbatches)
    held_out = BATCHES.corpus.validation.runs[0].tokens.tolist()
    starts = range(0, len(held_out) - 16, 16)
    assert evaluated(batches) == [(held_out[at : at + 16], held_out[at + 1 : at + 17]) for at in starts]


@pytest.mark.parametrize("micro_batch_size", [1, 7, 64, 100])
def test_of_a_long_text_validation_takes_as_many_sequences(micro_batch_size: int) -> None:
    batches = Batches(corpus_of(5000, []), 8, micro_batch_size, 1, 0)
    assert [row[0] for row, _ in evaluated(batches)] == [8 * number for number in range(VALIDATION_SEQUENCES)]


def test_a_short_text_still_gives_each_part_a_sequence() -> None:
    batches = Batches(Corpus.from_text(TEXT[:34], seq_len=16), 16, 4, 1, 0)
    assert batches.microbatch(0, 0)[1].tolist() == [list(TEXT[1:17])] * 4
    assert evaluated(batches) == [(list(TEXT[17:33]), list(TEXT[18:34]))]
