"""Training runs, made of a job and an optimizer."""

from __future__ import annotations

from pathlib import Path

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.train.config import DataConfig, LoggingConfig, LoopConfig, StrategyConfig, TrainingConfig
from shardlab.train.job import Job, Tracing
from shardlab.train.run import TrainingRun


def run_of(
    job: Job,
    optimizer: OptimizerConfig,
    out: Path,
    *,
    data: tuple[str, ...] = (),
    init: Path | None = None,
    tracing: Tracing | None = None,
) -> TrainingRun:
    """A run of as many steps as the optimizer's schedule has; it is traced if it is said how."""
    config = TrainingConfig(
        model=job.model,
        plan=StrategyConfig(job.strategy, job.ranks, job.name),
        data=DataConfig(data),
        optimizer=optimizer,
        train=LoopConfig(optimizer.schedule_steps, job.microbatches, job.micro_batch_size, job.seed, init),
        logging=LoggingConfig(trace=tracing is not None),
    )
    return TrainingRun(config, out, "shardlab train", tracing or Tracing())
