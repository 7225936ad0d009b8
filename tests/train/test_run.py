"""Records of a run, and the tokenizer with which it reads its data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from shardlab.common.errors import UserError
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import GPT
from shardlab.train.data import Documents, Input
from shardlab.train.data.prepare import prepare
from shardlab.train.data.tokenizers import HuggingFace
from shardlab.train.job import Job, job_from_dict
from shardlab.train.run import TrainingRun
from shardlab.train.world import RankPlace, RunningWorld
from tests.support import tokenizer_files
from tests.train.huggingface.folders import random_run
from tests.train.jobs import run_of

JOB = Job("ddp", 2, 4, GPT(layers=2, hidden_size=16, heads=2, seq_len=16), 2, seed=7)
WORLD = RunningWorld([RankPlace(0, "here", "cpu", {})], "gloo", "shardlab", {"torch": version("torch")})


def test_a_record_has_all_that_it_takes_to_repeat_the_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    optimizer = OptimizerConfig(learning_rate=0.5, schedule_steps=9, warmup_steps=1)
    run = run_of(JOB, optimizer, tmp_path / "run", data=(str(tmp_path / "text"),))
    record = json.loads(json.dumps(run.record(run.corpus(), JOB.checked(), WORLD)))
    assert job_from_dict(record) == JOB
    assert (record["command"], record["seed"], record["strategy"]) == ("shardlab train", 7, "ddp")
    settings: dict[str, Any] = record["optimizer_settings"]
    settings["betas"] = tuple(settings["betas"])
    assert OptimizerConfig(**settings) == optimizer
    assert record["data"] == [
        {
            "source": str(tmp_path / "text"),
            "bytes": 256,
            "sha256": hashlib.sha256(bytes(range(256))).hexdigest(),
            "of": "the whole text",
            "share": 1.0,
        }
    ]
    assert record["versions"]["torch"] == version("torch")
    assert record["program"] == JOB.checked().program.fingerprint()


def folder_of(path: Path, library_tokenizer: Any, vocab_size: int) -> Path:
    """Weights with a tokenizer beside them."""
    model = replace(JOB.model, vocab_size=vocab_size)
    return random_run(path, model, tokenizer=HuggingFace(library_tokenizer.to_str().encode()))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("is it so? " * 80)
    return tmp_path / "a.txt"


def run_from(init: Path, data: Path, vocab_size: int) -> TrainingRun:
    job = replace(JOB, model=replace(JOB.model, vocab_size=vocab_size))
    return run_of(
        job, OptimizerConfig(schedule_steps=2, warmup_steps=0), init.parent / "run", data=(str(data),), init=init
    )


def test_a_text_becomes_tokens_of_the_weights_that_a_run_begins_with(text: Path, tmp_path: Path) -> None:
    library_tokenizer = tokenizer_files.byte_fallback(["is", "it"], bos=True)
    init = folder_of(tmp_path / "init", library_tokenizer, library_tokenizer.get_vocab_size())
    corpus = run_from(init, text, library_tokenizer.get_vocab_size()).corpus()
    assert corpus.training.runs[0].tokens[:4].tolist() == library_tokenizer.encode("is it so?").ids[:4]
    assert corpus.tokenizer.begin == (1,)


def test_a_run_that_goes_on_reads_a_text_as_it_did(text: Path, tmp_path: Path) -> None:
    """By the tokenizer in its own folder, also where the weights that it began with are gone."""
    library_tokenizer = tokenizer_files.byte_fallback(["is", "it"])
    folder_of(tmp_path / "run", library_tokenizer, library_tokenizer.get_vocab_size())
    run = replace(run_from(tmp_path / "gone", text, library_tokenizer.get_vocab_size()), continues=True)
    assert run.corpus().training.runs[0].tokens[:4].tolist() == library_tokenizer.encode("is it so?").ids[:4]


def test_tokens_beyond_the_model_s_vocabulary_are_refused_only_if_they_occur(text: Path, tmp_path: Path) -> None:
    library_tokenizer = tokenizer_files.byte_level()
    library_tokenizer.add_special_tokens(["[PAD]"])
    init = folder_of(tmp_path / "init", library_tokenizer, 257)
    data = prepare([Input.guess(text)], tmp_path / "data", str(init)).folder
    for source in (text, data):
        assert run_from(init, source, 257).corpus().tokenizer.vocab_size == 258
    used = prepare([Documents([[1, 2, 257] * 80])], tmp_path / "used", str(init)).folder
    with pytest.raises(UserError, match=r"tokens go up to 257 .* is 257; leave that token out"):
        run_from(init, used, 257).corpus()


def test_data_of_another_tokenizer_than_the_weights_are_refused(text: Path, tmp_path: Path) -> None:
    init = folder_of(tmp_path / "init", tokenizer_files.byte_level(), 257)
    data = prepare([Input.guess(text)], tmp_path / "data", "bytes").folder
    with pytest.raises(UserError, match=r"data has another tokenizer \(bytes, 256 tokens\) than"):
        run_from(init, data, 257).corpus()


def test_weights_without_a_tokenizer_take_prepared_data_and_refuse_a_text(text: Path, tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    library_tokenizer = tokenizer_files.byte_level()
    library_tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = prepare([Input.guess(text)], tmp_path / "data", str(tmp_path / "tokenizer.json")).folder
    assert run_from(tmp_path / "init", data, 257).corpus().tokenizer.vocab_size == 257
    with pytest.raises(UserError, match=r"init has no tokenizer .*, and a vocabulary of 257 tokens is not"):
        run_from(tmp_path / "init", text, 257).corpus()
