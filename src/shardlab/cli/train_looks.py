"""Whether a run has the steps that are to be looked at closely: traced, profiled, or both."""

from __future__ import annotations

from shardlab.program import UserError
from shardlab.train.config import TrainingConfig


def want_looks(config: TrainingConfig, traced: int, *, resumed: bool) -> None:
    """Refuse a run without those steps.

    Args:
        traced: steps that a trace is of.
        resumed: whether the run goes on.

    Raises:
        UserError: saying what is wrong.
    """
    steps = config.train.steps
    if config.logging.trace and steps < traced:
        raise UserError(f"--trace needs {traced} steps, but --steps is {steps}; give more")
    first_step, end = config.logging.profile_steps or (0, 0)
    if config.logging.memory_snapshot and not end:
        raise UserError(
            "--memory-snapshot records the steps of --profile-steps; give them, too, as in --profile-steps 3:5"
        )
    if end > steps:
        raise UserError(f"--profile-steps {first_step}:{end} needs {end} steps, but --steps is {steps}; give more")
    ramp, looked = config.train.ramp, {"--profile-steps": (first_step, end)} if end else {}
    if config.logging.trace:
        looked["--trace"] = 0, traced
    for flag, (begin, stop) in looked.items():
        if ramp.stage(begin) != ramp.stage(stop - 1):
            raise UserError(
                f"{flag} covers steps {begin} to {stop - 1}, but the batch ramp {config.train.batch_ramp} changes "
                "the batch between them; change it before or after"
            )
    if config.logging.trace and resumed:
        raise UserError("--trace records the first steps of a run, which are already done; trace a new run")
