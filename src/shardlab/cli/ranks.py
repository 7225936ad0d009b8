"""What the command line makes of processes that fail or are interrupted."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from shardlab.check import Checked
from shardlab.program import OpKind, Refused, UserError
from shardlab.train.launch import RankFailed, backend_of, pick_device


def refuse_hanging(checked: Checked) -> None:
    """Refuse, before any rank is started, a program that does not run on the backend that they would use.

    Raises:
        Refused: with the deadlock, or with what cannot be communicated.
    """
    why_not = checked.why_not(backend_of(pick_device(0)))
    if why_not is not None:
        raise Refused(why_not)


def refuse_clipping(checked: Checked, clip: float | None, name: str) -> None:
    """Refuse to clip what computes no norm.

    Raises:
        UserError: if so.
    """
    if clip is not None and not any(op.kind is OpKind.NORM for tape in checked.program.tapes for op in tape):
        raise UserError(
            f"--clip {clip} limits the gradient's norm, which {name} does not compute; take a plan, such as zero-3"
        )


@contextmanager
def failures_as_exit(out: Path | None = None) -> Generator[None, None, None]:
    """A rank's failure prints its traceback, last, and exits with 1; Ctrl-C or SIGTERM exits with 130.

    Args:
        out: the folder in which an interrupted run has left what it had.
    """
    try:
        yield
    except RankFailed as failure:
        print(f"shardlab: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SignalException):
        kept = f"; what it had trained is in {out}" if out is not None and out.exists() else ""
        print(f"shardlab: interrupted{kept}", file=sys.stderr)
        raise SystemExit(130) from None
