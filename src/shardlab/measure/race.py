"""Jobs in turns: what is predicted to be about equally fast is run on the same processes, step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shardlab.data import DataSource
from shardlab.optimizers import OptimizerConfig

FAR = {3: 1.25, 8: 1.1}
"""After so many rounds, a job whose step takes so many times the shortest one is not run again."""


@dataclass(frozen=True)
class Race:
    """How long jobs take turns.

    Attributes:
        rounds: how often each runs at most.
        seconds: after which no other round begins.
        always: places of jobs that go on however slow they are.
        optimizer: its settings.
        data: where the tokens come from (nothing: the default text).
        init: the folder of weights whose tokenizer makes tokens of texts (None: they are bytes).
    """

    rounds: int = 40
    seconds: float = 30.0
    always: Collection[int] = ()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: Sequence[DataSource] = ()
    init: Path | None = None

    def going_on(self, running: Sequence[int], times: Sequence[Sequence[float]]) -> list[int]:
        """Places of the jobs that run in the next round.

        Args:
            running: those that ran in the last one.
            times: seconds of each job's steps so far.
        """
        far = FAR.get(max(map(len, times)))
        if far is None:
            return [*running]
        least = min(median(each) for each in times)
        return [at for at in running if at in self.always or median(times[at]) < far * least]
