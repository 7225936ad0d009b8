"""The history of a run agrees with the contents of its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardlab.train.history import describe_saved, remove_incomplete


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run of two steps with weights."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    (tmp_path / "weights.safetensors").write_bytes(b"")
    return tmp_path


def test_weights_are_of_the_last_step_on_record(out: Path) -> None:
    assert describe_saved(out) == f"the weights after 2 steps are in {out}/weights.safetensors"


def test_a_line_that_a_crash_has_torn_is_no_matter(out: Path) -> None:
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert describe_saved(out) == f"the weights after 2 steps are in {out}/weights.safetensors"


def test_weights_from_before_the_run_was_resumed_are_not_passed_off_as_new_ones(out: Path) -> None:
    (out / "run.json").write_text(json.dumps({"began": "2026-01-02T03:04:05+00:00"}))
    os.utime(out / "weights.safetensors", (1.0, 1.0))
    (out / "checkpoints" / "step-000001").mkdir(parents=True)
    (out / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")
    (out / "checkpoints" / "step-000003.part").mkdir()
    assert describe_saved(out) == (
        f"the weights in {out}/weights.safetensors are from before the run was resumed; on record are 2 steps "
        f"(metrics.jsonl); go on after step 1 with: shardlab train --resume {out}"
    )


def test_only_what_shardlab_was_writing_is_swept_away(tmp_path: Path) -> None:
    mine = [
        "plots.svg.shardlab.part",
        "weights-00001-of-00002.safetensors.shardlab.part",
        "checkpoints/step-000002.part/x",
        "checkpoints/step-000001.old.part/x",
    ]
    others = [
        "film.part",
        ".tmpAbC123",
        "checkpoints/mine.part/x",
        "checkpoints/step-000002/x",
    ]
    for name in (*mine, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_incomplete(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(others)
