"""Many strategies verified one after the other, on processes that are started once for each number of ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardlab.execute.communicator import Groups
from shardlab.program import Refused, UserError
from shardlab.train.cases import Case
from shardlab.train.launch import run_ranks
from shardlab.train.verdict import TOLERANCE
from shardlab.train.verify import verify_rank


@dataclass(frozen=True)
class CaseResult:
    """Result of a case.

    Attributes:
        case: what was verified.
        error: the largest error of loss, gradients and weights; infinite if it did not run.
        refused: why it did not run, if it did not.
    """

    case: Case
    error: float
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def verify_all(cases: Sequence[Case], steps: int) -> list[CaseResult]:
    """Verify all cases, on each number of ranks those that need as many; progress is shown on stderr.

    Raises:
        RankFailed: when a rank raised.
    """
    found: dict[Case, CaseResult] = {}
    for ranks in sorted({case.ranks for case in cases}):
        here = [case for case in cases if case.ranks == ranks]
        found |= {result.case: result for result in run_ranks(ranks, verify_cases, here, steps)}
    return [found[case] for case in cases]


def verify_cases(rank: int, device: torch.device, cases: Sequence[Case], steps: int) -> list[CaseResult]:
    """Verify one rank's part of all cases, each on as many ranks as there are; rank 0 shows the progress."""
    results: list[CaseResult] = []
    groups: Groups = {}
    with CaseProgress(cases, shown=rank == 0) as progress:
        for case in cases:
            try:
                verdict = verify_rank(rank, device, case.job(), steps, groups)
                worst = max(verdict.loss_error, verdict.gradient_error, verdict.weight_error)
                result = CaseResult(case, worst)
            except (Refused, UserError) as error:  # every rank traces the same, so all come here or none
                result = CaseResult(case, math.inf, str(error))
            results.append(result)
            progress.show(result)
    return results


class CaseProgress(Progress):
    """A live bar in a terminal, and in a pipe a line for each case."""

    def __init__(self, cases: Sequence[Case], *, shown: bool) -> None:
        console = Console(file=sys.stderr, highlight=False)
        self._printed = shown and not console.is_terminal
        super().__init__(
            TextColumn(f"{cases[0].ranks} ranks" if cases else ""),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not shown or self._printed,
        )
        self._task = self.add_task("starting", total=len(cases))

    def show(self, result: CaseResult) -> None:
        """A case has ended."""
        text = f"{result.case}: {result.refused or format(result.error, '.1e')}"
        self.update(self._task, advance=1, description=text)
        if self._printed:
            print(f"{result.case.ranks} ranks  {text}", file=sys.stderr, flush=True)
