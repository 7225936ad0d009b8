"""TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardlab.language import UserError
from shardlab.train import report
from shardlab.train.config import LoggingConfig
from shardlab.train.report import Logger, open_loggers, require_loggers

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
