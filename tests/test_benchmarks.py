"""Benchmarks run, in sizes that say nothing of speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_readme import recipe

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.xdist_group("ranks")


def run(words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    script, *rest = words.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *rest]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_plain_loop_and_ours_have_one_loss() -> None:
    done = run("gpu.py --cpu --no-compile --no-agreement --warm-up 1 --steps 4 --sequences 2 --json")
    assert done.returncode == 0, done.stderr
    plain, ours = json.loads(done.stdout)["loops"]
    assert (plain["loop"], ours["loop"]) == ("plain", "shardlab")
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert ours["tokens_per_second"] > 0


def test_a_table_shows_a_step_beside_its_prediction() -> None:
    done = run("gpu.py --cpu --no-compile --warm-up 1 --steps 2 --sequences 2")
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert "ms predicted" in done.stdout


def test_without_a_gpu_one_sentence_says_so() -> None:
    done = run("gpu.py")
    assert done.returncode == 1
    assert done.stderr == "gpu: torch sees no CUDA device here; a tiny model runs with --cpu\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_make_gpu_says_that_there_is_none_before_anything_runs() -> None:
    line = recipe("gpu")[0].removeprefix("@").replace(".venv/bin/python", sys.executable)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "make gpu: torch sees no GPU here\n"


def test_the_clocks_cost_is_a_ratio_for_each_model() -> None:
    done = run("clock_overhead.py --turns 2 --repeat 1 --json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["model"] for row in rows] == ["small", "tiny"]
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)


def test_constants_are_refitted_and_errors_told_of_sources_that_a_fit_has_not_seen(tmp_path: Path) -> None:
    rows = json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())
    few = [row for row in rows if row["id"].startswith(("mpt-h100_80gb-7b-s2048", "mpt-a100_40gb-7b-s2048"))]
    assert len({row["publication"] for row in few}) == 2
    (tmp_path / "runs.json").write_text(json.dumps(few))
    done = run(f"fit_devices.py {tmp_path / 'runs.json'}")
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    assert ["| constant", "runs", "now", "refitted |"] in lines
    assert any(line[0] == "| h100 attention.flash1.0" for line in lines)
    (all,) = (line for line in lines if line[0] == "| all")
    now, refitted, left_out = (float(each.strip(" |%")) for each in all[2:])
    assert refitted < 2 * now + 5
    assert left_out > refitted, "what only one source tells is not told without it"
