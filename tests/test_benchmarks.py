"""Benchmarks run, in sizes that say nothing of speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.measure.profile import this_machine
from tests.cli.test_plan_options_cluster import profile_of
from tests.support.ranks import Ranks
from tests.support.warm import WarmStarts
from tests.test_readme import recipe

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.starts_ranks


Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(warm: WarmStarts) -> Run:
    """Run a script of benchmarks/ on CPUs."""

    def run(words: str) -> subprocess.CompletedProcess[str]:
        script, *rest = words.split()
        return warm.run([str(ROOT / "benchmarks" / script), *rest], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})

    return run


def test_shared_memory_and_messages_take_turns_with_gloos_own_collectives(run: Run) -> None:
    process = run("messages.py --kilobytes 16 4096 --turns 2 --json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)
    assert [(row["collective"], row["kilobytes"]) for row in rows] == [
        (name, size) for size in (16, 4096) for name in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert all(row["shared"] > 0 and row["messages"] > 0 and row["gloo"] > 0 for row in rows)


def test_products_take_turns_with_torchs_own(run: Run) -> None:
    process = run("products.py --widths 32 --tokens 16 --turns 2 --json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)
    assert [(row["inputs"], row["outputs"]) for row in rows] == [(32, 96), (32, 32), (32, 128), (128, 32)]
    assert all(row["forward_ratio"] > 0 and row["backward_ratio"] > 0 for row in rows)


def test_the_plain_loop_and_ours_have_one_loss(run: Run) -> None:
    process = run("gpu.py --cpu --no-compile --no-agreement --warm-up 1 --steps 4 --sequences 2 --json")
    assert process.returncode == 0, process.stderr
    plain, ours = json.loads(process.stdout)["loops"]
    assert (plain["loop"], ours["loop"]) == ("plain", "shardlab")
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert ours["tokens_per_second"] > 0


def test_a_small_step_takes_turns_with_a_plain_loop(run: Run) -> None:
    process = run("small_step.py --turns 3 --json")
    assert process.returncode == 0, process.stderr
    seconds = json.loads(process.stdout)
    for clock in ("cpu", "wall"):
        assert min(seconds[clock].values()) > 0


@pytest.mark.thorough
def test_a_table_shows_a_step_beside_its_prediction(run: Run) -> None:
    process = run("gpu.py --cpu --no-compile --warm-up 1 --steps 2 --sequences 2")
    assert process.returncode == 0, process.stderr
    assert "tokens/s" in process.stdout
    assert "ms predicted" in process.stdout


def test_without_a_gpu_one_sentence_says_so(run: Run) -> None:
    process = run("gpu.py")
    assert process.returncode == 1
    assert process.stderr == "gpu: torch sees no CUDA device here; a tiny model runs with --cpu\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_make_gpu_says_that_there_is_none_before_anything_runs() -> None:
    line = recipe("gpu")[0].removeprefix("@").replace(".venv/bin/python", sys.executable)
    process = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == "make gpu: torch sees no GPU here\n"


def test_the_clocks_cost_is_a_ratio_for_each_model(run: Run) -> None:
    process = run("clock_overhead.py --turns 2 --repeat 1 --json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)
    assert [row["model"] for row in rows] == ["small", "tiny"]
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)


def overhead() -> Any:
    """benchmarks/overhead.py as a module."""
    spec = importlib.util.spec_from_file_location("overhead", ROOT / "benchmarks" / "overhead.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["overhead"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overhead_of_ddp(rank: int) -> dict[str, Any]:
    module = overhead()
    return module.on_a_rank(rank, torch.device("cpu"), "ddp", module.Options(turns=3, functions=3))


def test_the_executors_overhead_is_what_plain_pytorch_does_not_take(ranks: Callable[[int], Ranks]) -> None:
    measured = ranks(2).call(overhead_of_ddp)[0]
    assert measured["ops"] == sum(kind["ops"] for kind in measured["kinds"].values())
    assert min(measured["step"], measured["plain"]) > 0
    assert len(measured["functions"]) == 3
    figures = overhead().figures(measured)
    assert figures["overhead_us_an_op"] == pytest.approx((figures["step_us"] - figures["plain_us"]) / measured["ops"])
    parts = overhead().parts_of(measured)
    assert sum(part["plain_us"] for part in parts.values()) == pytest.approx(figures["plain_us"])
    assert parts["between ops"]["us"] > 0


def test_overheads_of_two_checkouts_are_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    module, turns = overhead(), list[Path]()

    def measured_in(tree: Path, *_: object) -> dict[str, float]:
        turns.append(tree)
        return {"step": 10e-6, "plain": 4e-6, "ops": 3} if tree == ROOT else {"step": 16e-6, "ops": 3}

    monkeypatch.setattr(module, "measured_in", measured_in)
    comparison = module.compared("ddp", Path("other"), module.Options(repeat=3))
    assert (comparison["ratio"], comparison["overhead_us"], comparison["against_us"]) == pytest.approx((0.5, 2.0, 4.0))
    assert turns == [Path("other"), ROOT, ROOT, Path("other"), Path("other"), ROOT]


def test_constants_are_refitted_and_errors_reported_for_sources_that_a_fit_has_not_seen(
    run: Run, tmp_path: Path
) -> None:
    rows = json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())
    chosen_rows = [row for row in rows if row["id"].startswith(("mpt-h100_80gb-7b-s2048", "mpt-a100_40gb-7b-s2048"))]
    assert len({row["publication"] for row in chosen_rows}) == 2
    (tmp_path / "runs.json").write_text(json.dumps(chosen_rows))
    process = run(f"fit_devices.py {tmp_path / 'runs.json'}")
    assert process.returncode == 0, process.stderr
    lines = [line.split(" | ") for line in process.stdout.splitlines()]
    assert ["| constant", "runs", "now", "refitted |"] in lines
    assert any(line[0] == "| h100 attention.flash1.0" for line in lines)
    (all,) = (line for line in lines if line[0] == "| all")
    now, refitted, left_out = (float(cell.strip(" |%")) for cell in all[2:])
    assert refitted < 2 * now + 5
    assert left_out > refitted, "what only one source tells is not told without it"


def regeneration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/regenerate.py as a module, which imports scripts beside it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("regenerate")


def test_the_committed_errors_are_what_the_committed_runs_give(run: Run) -> None:
    process = run("regenerate.py --check --quick")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.thorough
def test_the_committed_errors_and_tables_are_what_all_committed_runs_give(run: Run) -> None:
    process = run("regenerate.py --check")
    assert process.returncode == 0, process.stdout + process.stderr


def test_files_that_do_not_follow_from_the_runs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another constant, another measurement, and a publisher that no fit leaves out."""
    regenerate = regeneration(monkeypatch)
    fits = regenerate.read_fits()
    assert not list(regenerate.stale_fits(fits))
    other = replace(fits, now={**fits.now, "h100 memory": 0.5})
    (sentence,) = regenerate.stale_fits(other)
    assert sentence.startswith("fits.json: h100 memory is ")
    assert "and was 0.5; run `python benchmarks/regenerate.py`" in sentence
    (row,) = (row for row in regenerate.rows_of(regenerate.RUNS, 1) if row["id"] == "kf-05-7B-tp4")
    assert not list(regenerate.wrong_errors(fits, [row]))
    slower = {**row, "measured": {"iteration_s": 2.6}}
    (sentence,) = regenerate.wrong_errors(fits, [slower])
    assert sentence.startswith("errors.toml: kf-05-7B-tp4 has an error of time of -0.4")
    assert list(regenerate.unfitted(fits, [{**row, "publication": "Nobody"}])) == [
        "fits.json: no fit is without Nobody; run `python benchmarks/regenerate.py`"
    ]


def test_only_the_figures_of_a_table_that_follow_from_the_runs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    regenerate = regeneration(monkeypatch)
    rows = [{"publication": name} for name in ("A", "A", "B")]
    errors = [(0.01, None), (-0.03, 0.2), (0.1, None)]
    refit = regenerate.Refit(rows, errors, errors, [(2 * time, memory) for time, memory in errors])
    page = """\
| step time | in | mean | worst | bias | out | mean |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| A | 9 | 9 % | 9 % | 9 % | 7 | 7.0 % |
| all | 9 | 9 % | 9 % | 9 % | 7 | 7.0 % |

| publisher | devices | recipe | runs | time: first | now | left out | memory: first | now | left out |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| B | x | y | 3 | 8.0 % | 9 % | 9 % |  |  |  |
| all |  |  | 3 | 8.0 % | 9 % | 9 % |  |  |  |
"""
    assert (
        regenerate.page_text(page, refit)
        == """\
| step time | in | mean | worst | bias | out | mean |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| A | 2 | 2.0 % | 3.0 % | -1.0 % | 7 | 7.0 % |
| all | 3 | 4.7 % | 10.0 % | +2.7 % | 7 | 7.0 % |

| publisher | devices | recipe | runs | time: first | now | left out | memory: first | now | left out |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| B | x | y | 3 | 8.0 % | 10.0 % | 20.0 % |  |  |  |
| all |  |  | 3 | 8.0 % | 10.0 % | 20.0 % |  |  |  |
"""
    )


def test_every_plan_of_a_space_is_run_and_the_chosen_one_is_among_them(run: Run, tmp_path: Path) -> None:
    machine = this_machine()
    if machine.places != 2:
        pytest.skip("needs two cores: a machine is profiled on a rank for each, and these plans are for two ranks")
    profile = profile_of(machine).write(tmp_path / "profile.json")
    process = run(f"plan_agreement.py --profile {profile} --cases 2 --rounds 1 --json")
    assert process.returncode == 0, process.stderr
    (case,) = json.loads(process.stdout)["cases"]
    families = {plan["family"] for plan in case["plans"]}
    assert families == {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "PP"}
    assert case["chosen"]["predicted"] <= 1.02 * min(plan["predicted"] for plan in case["plans"])
    assert case["best"]["measured"] == min(plan["measured"] for plan in case["plans"])
    assert case["regret"] == pytest.approx(case["chosen"]["measured"] / case["best"]["measured"] - 1)
    assert case["best"]["measured"] <= case["raced"]["measured"] <= case["chosen"]["measured"]
    assert case["regret_raced"] == pytest.approx(case["raced"]["measured"] / case["best"]["measured"] - 1)
