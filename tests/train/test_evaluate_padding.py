"""Evaluation pads sequences only as far as a batch needs, with the same result as if all were padded to the end."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Mesh
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.strategies import Plan
from shardlab.train.data.tokenizers import HuggingFace
from shardlab.train.evaluate import TextJob, widths_of
from shardlab.train.job import Job
from tests.support import tokenizer_files
from tests.train.huggingface.folders import random_run

SIZES: dict[str, Any] = {"layers": 1, "hidden_size": 16, "heads": 2}


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    multiple=st.sampled_from([1, 16, 48]),
    together=st.integers(1, 16),
)
def test_widths_hold_every_sequence_and_cost_no_more_than_one(lengths: list[int], multiple: int, together: int) -> None:
    widths = widths_of(np.array(lengths), 5000, multiple, together)
    assert widths == sorted(set(widths))
    assert max(lengths) <= widths[-1] < max(lengths) + multiple
    assert all(width % multiple == 0 or width == 5000 for width in widths)
    held = np.searchsorted(widths, lengths)
    rows = np.bincount(held, minlength=len(widths))
    assert rows.all(), "each width has a sequence"
    cost = (-(-rows // together) * together * np.array(widths)).sum()
    assert cost <= -(-len(lengths) // together) * together * widths[-1]


def test_documents_of_one_length_have_one_width() -> None:
    assert widths_of(np.full(1000, 64), 64, 16, 16) == [64]
    assert widths_of(np.append(np.full(1000, 64), 9), 64, 16, 16) == [64], "a rest is not worth a program of its own"
    assert widths_of(np.full(8, 17), 131_072, 16, 16) == [32]


def texts_of(folder: Path, lengths: list[int]) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": "abcdefgh " * n}) + "\n" for n in lengths))
    return folder / "a.jsonl"


def job_of(model: Blocks, folder: Path, batches: int | None = None) -> TextJob:
    job = Job(Plan(Mesh()), 1, 1, model, 1)
    return TextJob((job,), folder / "run", folder / "a.jsonl", model.seq_len, batches)


def test_each_sequence_is_computed_once_in_the_narrowest_width(tmp_path: Path) -> None:
    model = Llama(**SIZES, seq_len=131_072)
    random_run(tmp_path / "run", model)
    texts_of(tmp_path, [3, 100, 2, 3, 40, 2])
    whole = job_of(model, tmp_path)
    text = whole.text()
    fitted = whole.with_widths(text)
    assert [job.model.seq_len for job in fitted.jobs] == [32, 368, 912]
    seen: list[int] = []
    for job, batches in zip(fitted.jobs, fitted.batches_of(text), strict=True):
        for number in range(batches.count):
            tokens, targets = batches.microbatch(number, 0)
            assert tokens.shape == (1, job.model.seq_len)
            seen.append(int((targets >= 0).sum()))
    assert seen == [17, 17, 26, 26, 359, 899]
    assert fitted.bytes(text) == sum(seen)


def test_some_batches_are_those_from_the_beginning_of_the_text(tmp_path: Path) -> None:
    model = Llama(**SIZES, seq_len=4096)
    random_run(tmp_path / "run", model)
    texts_of(tmp_path, [30, 2, 3, 200])
    some = job_of(model, tmp_path, batches=3)
    text = some.text()
    fitted = some.with_widths(text)
    assert sum(batches.count for batches in fitted.batches_of(text)) == 3
    assert fitted.jobs[-1].model.seq_len < 1000
    assert fitted.bytes(text) == 9 * (30 + 2 + 3) - 3


def test_experts_with_bounded_places_see_what_they_saw(tmp_path: Path) -> None:
    """Padding of a sequence takes slots of experts."""
    model = Mixtral(**SIZES, seq_len=64, experts=2, capacity_factor=1.0)
    random_run(tmp_path / "run", model)
    texts_of(tmp_path, [1, 2])
    whole = job_of(model, tmp_path)
    assert whole.with_widths(whole.text()) is whole
    free = replace(whole, jobs=(replace(whole.jobs[0], model=replace(model, capacity_factor=None)),))
    assert free.with_widths(free.text()).jobs[-1].model.seq_len == 32


def test_a_pad_token_beyond_the_model_s_vocabulary_is_no_hindrance(tmp_path: Path) -> None:
    library_tokenizer = tokenizer_files.byte_level()
    library_tokenizer.add_special_tokens(["[PAD]"])
    model = GPT(**SIZES, seq_len=64, vocab_size=257)
    random_run(tmp_path / "run", model, tokenizer=HuggingFace(library_tokenizer.to_str().encode()))
    texts_of(tmp_path, [1, 2])
    assert int(job_of(model, tmp_path).text().run.tokens.max()) == 256


@pytest.mark.parametrize("multiple", [2, 6])
def test_widths_can_be_sliced_by_every_rank(tmp_path: Path, multiple: int) -> None:
    model = Llama(**SIZES, seq_len=4096)
    random_run(tmp_path / "run", model)
    texts_of(tmp_path, [2, 30, 200])
    whole = job_of(model, tmp_path)
    ranked = replace(whole, jobs=(replace(whole.jobs[0], ranks=multiple),))
    assert all(job.model.seq_len % (2 * multiple) == 0 for job in ranked.with_widths(ranked.text()).jobs)
