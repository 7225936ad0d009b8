"""Checks that are made before the ranks of a training run start, and messages for a run that fails or is interrupted.

`checked_to_run` traces a strategy, applies its passes and checks it for a job. `failures_as_exit` is a context around
the run of the ranks: it prints the error of a failed rank, records the end of the run in its folder, and exits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from shardlab.check import Checked
from shardlab.check.replicas import compared_ranks, replicas_of, results_of
from shardlab.check.report import Retrace
from shardlab.cli.plan_options import checked
from shardlab.cli.train.this_machine import require_free_memory
from shardlab.common.user_code import file_and_name
from shardlab.execute.optimizers.settings import OptimizerConfig, want_scalable
from shardlab.language import Op, OpKind, Refused, UserError, World
from shardlab.language.pass_names import needs_norm
from shardlab.simulate.passes import apply_passes
from shardlab.starting import INTERRUPTED
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.faults import LineOf, RankFailed, is_lost
from shardlab.train.history import End, describe_saved, note_end, record_inode, remove_incomplete
from shardlab.train.job import Job
from shardlab.train.launch.environment import find_launch_environment
from shardlab.train.launch.ranks import backend_of, device_type


def checked_to_run(entry: StrategyEntry, job: Job, config: OptimizerConfig) -> Checked:
    """Check a strategy for a job before any rank starts. The job stores the rewritten program for its ranks.

    Raises:
        Refused: if the program is wrong, or does not run on the backend of the ranks.
        UserError: if the strategy does not compute the gradient norm that clipping or float16 needs, or if this host
            has too little free memory.
    """
    entry.require_ops(job.ranks, job.model.layers, job.microbatches)
    proof = apply_passes(checked(entry, job.ranks, job.sizes, job.microbatches), entry.passes_on(job.ranks))
    job.set_checked(proof)
    want_scalable(job.numbers, proof)
    if (clip := config.clip) is not None and not any(
        op.kind is OpKind.NORM for tape in proof.program.tapes for op in tape
    ):
        problem = f"the gradient norm, which {entry.name} does not compute"
        plan = "take fsdp or a plan, such as zero-3"
        remedy = plan if needs_norm(entry.passes_on(job.ranks)) else "leave out the pass update-early"
        raise UserError(f"--clip {clip} limits {problem}; {remedy}, or --clip none")
    launched = find_launch_environment(os.environ)
    if launched is None:
        require_free_memory(proof, range(job.ranks))
    if (why_not := proof.why_not(backend_of(device_type(job.ranks)))) is not None:
        raise why_not
    return proof


def require_audit(proof: Checked, name: str) -> None:
    """Refuse --audit-every for a program without redundant results.

    Raises:
        UserError: if every result is kept and computed by one rank only.
    """
    if not compared_ranks(replicas_of(proof), results_of(proof)):
        raise UserError(
            f"--audit-every compares results that several ranks keep or compute, but {name} has no such "
            "results; leave it out, or add an axis of data parallelism"
        )


def line_lookup(entry: StrategyEntry, job: Job) -> LineOf:
    """Return a function that finds the line of a user's file which issued an op of a rank.

    The function also finds ops that passes have moved, or put into a bucket or an arena. It returns "" for ops that
    passes have added, and for all ops of a built-in strategy.
    """
    path, _ = file_and_name(entry.name)
    if path is None:
        return lambda rank, op: ""

    @cache
    def trace_entry() -> tuple[Retrace, list[dict[Op, int]], list[list[Op]]]:
        retrace = Retrace(entry.program, str(path), World(entry.grid(job.ranks), job.sizes, job.microbatches))
        numbers = [{_without_pass_fields(op): number for number, op in enumerate(ops)} for ops in retrace.tapes]
        return retrace, numbers, job.checked().program.tapes

    def line(rank: int, index: int) -> str:
        retrace, numbers, tapes = trace_entry()
        number = numbers[rank].get(_without_pass_fields(tapes[rank][index]))
        return "" if number is None else f" ({path}:{retrace.line(rank, number)})"

    return line


def _without_pass_fields(op: Op) -> Op:
    """Return an op without the fields that passes set."""
    return op._replace(batch=-1, offset=-1)


def refuse_restart(count: int, out: Path | None, save_every: int | str | None) -> None:
    """Refuse a run that a launcher restarted after a failure, if it would start from step 0 and lose its progress.

    Args:
        count: number of restarts.
        out: folder of the failed run, if --out was given.
        save_every: value of --save-every. If it was given, a run without a checkpoint failed before its first one.
            Nothing is lost then, and the run starts again in its folder.

    Raises:
        UserError: if --out or --save-every is missing.
    """
    if out is None or save_every is None:
        saved_text = "its results are in the last folder of runs" if out is None else describe_saved(out)
        raise UserError(
            f"the launcher restarted this run (restart {count}), and a restarted run does not begin again at "
            f"step 0; give --out FOLDER and --save-every 10m, so that it can resume; {saved_text}"
        )


@contextmanager
def failures_as_exit(out: Path | None = None, *, exits: bool = True) -> Generator[None, None, None]:
    """Convert failures of ranks in this context into messages and exit statuses.

    If a rank fails, its traceback is printed last, and the exit status is 1. After an interrupt, it is 130.

    Args:
        out: output folder of a training run, whose contents the messages describe (None: the run has none).
        exits: whether to exit the process. Otherwise `RankFailed` or `KeyboardInterrupt` is raised, for a caller in
            Python.
    """
    old_inode = out and record_inode(out)

    def note(end: End, reason: str) -> None:
        environment = find_launch_environment(os.environ)
        if out is not None and (environment is None or environment.rank == 0):
            note_end(out, end, old_inode, reason)

    try:
        yield
    except RankFailed as failure:
        lines = str(failure).splitlines()
        note("failed", " ".join(dict.fromkeys((lines[0], lines[-1]))))
        if out is not None:
            if find_launch_environment(os.environ) is None:  # a launcher's other ranks may still write
                remove_incomplete(out)
            print(f"shardlab: the run failed; {describe_saved(out)}", file=sys.stderr)
        if not exits:
            raise
        report = f"{failure.report}\n\n" if failure.report else ""
        print(f"{report}shardlab: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
    except (UserError, Refused) as error:
        note("failed", str(error))
        raise
    except Exception as error:  # in a launcher's world this process is a rank
        note("failed", f"{type(error).__name__}: {error}".splitlines()[0])
        environment = find_launch_environment(os.environ)
        if out is not None and environment is not None and environment.rank == 0:
            print(f"shardlab: the run failed; {describe_saved(out)}", file=sys.stderr)
        if environment is None or not is_lost(error):
            raise
        print(f"shardlab: rank {environment.rank} lost its connection, because another rank ended", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt as interrupt:
        note("interrupted", str(interrupt))
        if out is not None and find_launch_environment(os.environ) is None:  # a launcher's other ranks may still write
            remove_incomplete(out)
        report_interrupted(out, str(interrupt))
        if not exits:
            raise
        raise SystemExit(INTERRUPTED) from None


def report_interrupted(out: Path | None, reason: str = "") -> None:
    """Print that a run was interrupted, and describe what its folder contains."""
    words = ["interrupted", reason and f": {reason}", "" if out is None else f"; {describe_saved(out)}"]
    print(f"shardlab: {''.join(words)}", file=sys.stderr)
