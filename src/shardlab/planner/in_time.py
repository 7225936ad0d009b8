"""Questions that are asked as long as there is time, and how many were left out."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import Future

from shardlab.planner.problem import Problem
from shardlab.planner.shares import trace_seconds
from shardlab.planner.workers import Answer, Ask, Asked


class InTime:
    """Asks, and waits for answers, until a time.

    Args:
        problem: that is planned.
        ask: what answers.
        until: seconds of `time.monotonic`; later nothing is asked, and no answer waited for.

    Attributes:
        missed: how many answers were left out, by what they were about.
    """

    def __init__(self, problem: Problem, ask: Ask, until: float = math.inf) -> None:
        self.problem = problem
        self._ask, self._until = ask, until
        self.missed = Counter[str]()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def ask(self, asked: Asked) -> Future[Answer | None] | None:
        """Ask, if there is time (None: there is too little)."""
        takes = trace_seconds(self.problem.workload(asked.candidate)) if asked.shares else 0.0
        return self._ask(asked) if self.left > takes else None

    def answer(self, coming: Future[Answer | None] | None, about: str) -> Answer | None:
        """Wait for an answer (None: the code that runs plans does not accept the candidate, or time was up).

        Args:
            about: what is missed if there is no answer in time.
        """
        if coming is not None:
            try:
                return coming.result(None if self.left == math.inf else self.left)
            except TimeoutError:
                coming.cancel()
        self.missed[about] += 1
        return None

    def __str__(self) -> str:
        """What was left out, and how often: `what limits a family (4), an alternative (2)`."""
        return ", ".join(f"{about} ({count})" for about, count in self.missed.items())
