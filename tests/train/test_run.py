"""What a run is on record as."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardlab.execute import OptimizerConfig
from shardlab.models import GPT
from shardlab.train.described import job_of
from shardlab.train.job import Job
from shardlab.train.world import RankPlace, RunningWorld
from tests.train.runs import run_of

JOB = Job("ddp", 2, 4, GPT(layers=2, hidden_size=16, heads=2, seq_len=16), 2, seed=7)
WORLD = RunningWorld([RankPlace(0, "here", "cpu", {})], "gloo", "shardlab", {"torch": version("torch")})


def test_a_record_has_all_that_it_takes_to_repeat_the_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    optimizer = OptimizerConfig(learning_rate=0.5, schedule_steps=9, warmup_steps=1)
    run = run_of(JOB, optimizer, tmp_path / "run", data=(str(tmp_path / "text"),))
    record = json.loads(json.dumps(run.record(run.corpus(), JOB.checked(), WORLD)))
    assert job_of(record) == JOB
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
