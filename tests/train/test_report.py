"""Report of a run, the profile of some of its steps, and its records in TensorBoard and Weights & Biases."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import UserError
from shardlab.models import GPT
from shardlab.train import report
from shardlab.train.config import LoggingConfig
from shardlab.train.job import Job, Tracing
from shardlab.train.loop import train_rank
from shardlab.train.report import Logger, open_loggers, require_loggers, usual_times, write_report
from shardlab.train.run import Summary, TrainingRun
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.jobs import run_of

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
JOB = Job("ddp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2)


def quietly(rank: int, run: TrainingRun) -> Summary | None:
    return train_rank(rank, torch.device("cpu"), run)


def test_a_report_tells_cost_and_prediction_and_shows_its_plots(ranks: World, tmp_path: Path) -> None:
    run = run_of(JOB, OptimizerConfig(schedule_steps=5, warmup_steps=1), tmp_path / "run")
    run = replace(run, config=replace(run.config, logging=LoggingConfig(price=3600.0)), peak=1e9)
    summary = ranks(2).call(quietly, run)[0]
    assert isinstance(summary, Summary)
    write_report(run, summary, 2 * summary.dt)
    text = (run.out / "report.md").read_text()
    assert ", 2.00 of the measured time |" in text
    assert f"| cost | {2 * summary.seconds:.4f} at 3600 a device-hour |" in text
    assert run.config.as_toml().strip() in text
    for name in ("plots.svg", "strategy.svg"):
        assert f"]({name})" in text
        assert "</svg>" in (run.out / name).read_text()
    metrics = run.out / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    again = "shardlab bench compute measures them"
    for peak, mfu, said in (
        (None, None, f"the device's peak FLOP/s are not known; {again}"),
        (1e9, None, f"steps were faster than the measured peak FLOP/s; {again} again"),
        (1e9, 0.25, "25.0%"),
    ):
        metrics.write_text("".join(json.dumps({**record, "mfu": mfu, "dt": summary.dt}) + "\n" for record in records))
        write_report(replace(run, peak=peak), summary, "nobody has measured")
        text = (run.out / "report.md").read_text()
        assert f"| MFU | {said} |" in text
        assert "| predicted step | nobody has measured |" in text


@given(usual=st.lists(st.floats(0.9, 1.1), min_size=8, max_size=50), slow=st.lists(st.floats(3.0, 100.0), max_size=2))
def test_the_histogram_of_step_times_has_the_usual_ones_alone(usual: list[float], slow: list[float]) -> None:
    times = [50.0, 20.0, *usual, *slow]
    records = [{"step": step, "dt": time} for step, time in enumerate(times)]
    assert usual_times(records, warm_up=2) == usual
    assert usual_times(records[:1], warm_up=2) == times[:1], "a run that is all warm-up shows what it has"


def test_memory_is_drawn_from_zero_and_rate_and_norm_are_drawn(ranks: World, tmp_path: Path) -> None:
    """The test reads the comments that matplotlib writes into the picture."""
    run = run_of(replace(JOB, strategy="fsdp"), OptimizerConfig(schedule_steps=5, warmup_steps=1), tmp_path / "run")
    summary = ranks(2).call(quietly, run)[0]
    assert isinstance(summary, Summary)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        write_report(run, summary, "nobody has measured")
    drawn = (run.out / "plots.svg").read_text()
    for label in ("learning rate", "norm of the gradient", "memory (MiB)"):
        assert f">{label}<" in drawn
    assert "the program computes none" not in drawn
    memory = drawn[drawn.index('id="axes_5"') : drawn.index('id="axes_6"')]
    ticks = [float(word) for word in re.findall(r">([\d.]+)</text>", memory[memory.index('id="matplotlib.axis_10"') :])]
    assert min(ticks) == 0 < max(ticks)


@pytest.mark.parametrize("trace", sampled([False, True], bool))
def test_profiled_steps_have_the_tapes_names_and_change_no_number(ranks: World, trace: bool, tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for steps in (None, (2, 4)):
        optimizer = OptimizerConfig(schedule_steps=5, warmup_steps=1)
        run = run_of(JOB, optimizer, tmp_path / str(steps), tracing=Tracing(warm_up=1, timed_steps=2, measured_steps=1))
        logging = LoggingConfig(profile_steps=steps, memory_snapshot=steps is not None, trace=trace)
        run = replace(run, config=replace(run.config, logging=logging))
        ranks(2).call(quietly, run)
        losses.append([json.loads(line)["loss"] for line in (run.out / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    for rank in range(2):
        events = json.loads((tmp_path / "(2, 4)" / f"profile-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert [name for name in names if name.startswith("step")] == ["step 2", "step 3"]
        assert names.count(f"forward {rank} (layer 1)") == 2
        assert any(name.startswith("backward") for name in names)
        assert any(event["name"] == "[memory]" for event in events)


METRICS = {"step": 3.0, "loss": 1.5, "mfu": None}


def logged(logger: Logger, steps: Iterable[int]) -> None:
    for step in steps:
        logger.log({**METRICS, "step": float(step)})
    logger.close()


def test_tensorboard_has_each_step_once_as_a_scalar_also_of_a_run_that_was_taken_back(tmp_path: Path) -> None:
    events: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    for since, end in ((None, 6), (6, 8), (3, 5)):
        (logger,) = open_loggers(LoggingConfig(tensorboard=True), tmp_path, {}, since)
        logged(logger, range(since or 0, end))
    written = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert written.Tags()["scalars"] == ["loss"]
    assert [event.step for event in written.Scalars("loss")] == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keep_one_offline_run_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = import_module("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    init = Mock(wraps=wandb.init)
    monkeypatch.setattr(wandb, "init", init)
    for since, rewinds in ((None, False), (2, False), (1, True)):
        (logger,) = open_loggers(LoggingConfig(wandb=True), tmp_path, {"seed": 7}, since, rewinds=rewinds)
        logged(logger, range(since or 0, 4))
    wandb.teardown()
    first, second, third = sorted(path.parent.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run = first.rpartition("-")[2]
    assert run in second
    assert run in third
    asked = [call.kwargs for call in init.call_args_list]
    assert (asked[1]["id"], asked[1]["resume"], asked[2]["resume_from"]) == (run, "allow", f"{run}?_step=0")


def test_nobody_imports_what_is_not_asked_for(tmp_path: Path) -> None:
    assert open_loggers(LoggingConfig(), tmp_path, {}) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_there(_: str) -> None:
        return None

    monkeypatch.setattr(report, "find_spec", none_is_there)
    require_loggers(LoggingConfig())
    with pytest.raises(UserError, match=f"--{name} needs the package {name}, which is missing: pip install {name}"):
        require_loggers(LoggingConfig(tensorboard=name == "tensorboard", wandb=name == "wandb"))
