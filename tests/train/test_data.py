"""The text and its microbatches."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.errors import UserError
from shardlab.train.data import DEFAULT_BYTES, Batches, Corpus, default_text, map_text

TEXT = bytes(i % 251 for i in range(5000))
BATCHES = Batches(Corpus.split(TEXT, seq_len=16), seq_len=16, micro_batch_size=4, seed=0)


def test_the_default_text_is_python_of_a_few_megabytes_and_always_the_same() -> None:
    text = default_text()
    assert b"import " in text
    assert 1_000_000 < len(text) <= DEFAULT_BYTES
    assert text == default_text()


def test_nine_tenths_are_for_training_and_the_parts_are_the_text() -> None:
    corpus = Corpus.split(TEXT, seq_len=16)
    assert (len(corpus.training), len(corpus.validation)) == (4500, 500)
    assert bytes([*corpus.training.tolist(), *corpus.validation.tolist()]) == TEXT


def test_a_short_text_still_gives_each_part_a_sequence() -> None:
    corpus = Corpus.split(TEXT[:34], seq_len=16)
    assert (len(corpus.training), len(corpus.validation)) == (17, 17)
    batches = Batches(corpus, seq_len=16, micro_batch_size=4, seed=0)
    assert batches.microbatch(0, 0)[1].tolist() == [list(TEXT[1:17])] * 4
    assert batches.validation(0)[1].tolist() == [list(TEXT[18:34])] * 4
    assert batches.validation_count == 1


def test_a_text_too_short_is_refused_with_its_size_and_the_size_needed() -> None:
    with pytest.raises(UserError) as refusal:
        Corpus.split(TEXT[:33], seq_len=16, source="note.txt")
    sentence = str(refusal.value)
    assert sentence.startswith(
        "note.txt has 33 bytes but 34 are needed: 17 in the training part and 17 in the validation"
    )
    assert "\n" not in sentence


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "empty").touch()
    assert map_text(tmp_path / "text")[:] == TEXT
    assert map_text(tmp_path / "empty")[:] == b""


LARGE = """
import resource
from pathlib import Path
from shardlab.train.checksum import COMPARED, checksum
from shardlab.train.data import Batches, Corpus, map_text

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = map_text(Path("large"))
batches = Batches(Corpus.split(text, 16), 16, 4, 0)
assert batches.microbatch(0, 0)[0].shape == batches.validation(10**6)[0].shape == (4, 16)
checksum(text, COMPARED)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_of_a_large_file_a_rank_reads_what_it_trains_on(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**9)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", LARGE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    kib = int(done.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert kib < 100_000, "a tenth of the file"


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        map_text(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="is a folder"):
        map_text(tmp_path)


def test_what_has_no_random_places_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is a pipe, but text is read from random places"):
        map_text(tmp_path / "fifo")
    with pytest.raises(UserError, match="/dev/zero is a device"):
        map_text(Path("/dev/zero"))


@given(step=st.integers(0, 10**6), microbatch=st.integers(0, 10**4))
def test_targets_are_the_next_bytes_of_the_training_part(step: int, microbatch: int) -> None:
    tokens, targets = BATCHES.microbatch(step, microbatch)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    training = bytes(BATCHES.corpus.training.tolist())
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert bytes([*row, target[-1]]) in training
        assert row[1:] == target[:-1]


def test_microbatches_are_a_function_of_seed_step_and_number() -> None:
    first = BATCHES.microbatch(3, 1)[0]
    torch.rand(10)
    assert torch.equal(first, BATCHES.microbatch(3, 1)[0])
    others = [BATCHES.microbatch(3, 0), BATCHES.microbatch(1, 3), Batches(BATCHES.corpus, 16, 4, 1).microbatch(3, 1)]
    assert not any(torch.equal(first, tokens) for tokens, _ in others)


def test_the_first_and_the_last_place_are_both_drawn() -> None:
    batches = Batches(Corpus.split(TEXT[:36], seq_len=16), seq_len=16, micro_batch_size=64, seed=0)
    assert set(batches.microbatch(0, 0)[0][:, 0].tolist()) == set(range(3))


def test_validation_goes_through_the_text_in_order_and_begins_anew() -> None:
    sequences = torch.cat([BATCHES.validation(i)[0] for i in range(BATCHES.validation_count)])
    assert BATCHES.validation_count == (500 - 1) // 16 // 4
    assert sequences.flatten().tolist() == BATCHES.corpus.validation[: sequences.numel()].tolist()
    assert torch.equal(BATCHES.validation(31)[0], BATCHES.validation(0)[0])
