"""Runs that save checkpoints, on ranks that are there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.train.config import SavingConfig
from shardlab.train.job import Job
from shardlab.train.run import TrainingRun
from tests.train.jobs import run_of, train_plainly

STEPS = 5


def saving_run(
    job: Job, out: Path, resume: Path | None = None, optimizer: OptimizerConfig | None = None, ramp: str | None = None
) -> TrainingRun:
    """A run of 5 steps, which is saved after 2, 4 and 5 of them."""
    run = run_of(job, optimizer or OptimizerConfig(schedule_steps=STEPS, warmup_steps=1), out)
    precision = replace(run.config.precision, precision=job.precision)
    train = replace(run.config.train, batch_ramp=ramp)
    config = replace(run.config, train=train, precision=precision, saving=SavingConfig(save_every=2))
    return replace(run, config=config, resume=resume, continues=resume is not None)


def trained(rank: int, run: TrainingRun) -> None:
    """Train on every rank."""
    train_plainly(rank, run)
