"""The runs that are disturbed: one small model under strategies of every kind."""

from __future__ import annotations

MODEL = "--hidden-size 32 --layers 4 --seq-len 32 --microbatches 4 --micro-batch-size 2"
"""Small, so that what takes time is what is tested: starts, saves and ends."""

CASES: dict[str, str] = {
    "single": "--strategy single --ranks 1",
    "ddp": "--strategy ddp --ranks 2",
    "zero-1": "--strategy zero-1 --ranks 2",
    "fsdp": "--strategy fsdp --ranks 2",
    "hsdp": "--strategy hsdp --ranks 4",
    "1f1b": "--strategy 1f1b --ranks 2",
    "tp": "--tp 2",
    "3d": "--pp 2 --dp-shard 2 --tp 2 --schedule 1f1b",
}
"""Flags of `shardlab train`, by name."""


def words(case: str, steps: int, every: int) -> list[str]:
    """The words after `shardlab train` of a run that saves after every so many steps, and goes on by itself.

    Args:
        case: a name, or a file's strategy, which is run on 2 ranks.
    """
    saving = f"--steps {steps} --save-every {every} --resume auto"
    return f"{CASES.get(case, f'--strategy {case} --ranks 2')} {MODEL} {saving}".split()
