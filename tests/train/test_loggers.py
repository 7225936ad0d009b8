"""TensorBoard and Weights & Biases."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.program import UserError
from shardlab.train import loggers
from shardlab.train.config import LoggingConfig
from shardlab.train.loggers import loggers_of, require_loggers

METRICS = {"step": 3.0, "loss": 1.5, "mfu": None}


def test_tensorboard_has_what_is_known(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (logger,) = loggers_of(LoggingConfig(tensorboard=True), tmp_path, {})
    logger.log(METRICS)
    logger.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events.read_bytes()
    assert b"loss" in written
    assert b"mfu" not in written


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keep_an_offline_run_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (logger,) = loggers_of(LoggingConfig(wandb=True), tmp_path, {"seed": 7})
    logger.log(METRICS)
    logger.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_nobody_imports_what_is_not_asked_for(tmp_path: Path) -> None:
    assert loggers_of(LoggingConfig(), tmp_path, {}) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_there(_: str) -> None:
        return None

    monkeypatch.setattr(loggers, "find_spec", none_is_there)
    require_loggers(LoggingConfig())
    with pytest.raises(UserError, match=f"--{name} needs the package {name}, which is missing: pip install {name}"):
        require_loggers(LoggingConfig(tensorboard=name == "tensorboard", wandb=name == "wandb"))
