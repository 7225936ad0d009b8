"""JSON of a comparison, with all that it takes to make it again."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Protocol

from shardlab.measure.saving import this_machine
from shardlab.measure.side_by_side.pairs import Size, StrategyPair
from shardlab.measure.side_by_side.results import Compared


@dataclass(frozen=True)
class PairRow:
    """A pair with one size.

    Attributes:
        pair, size: which.
        compared: what was found; None if nothing was.
        why_not: in that case the reason.
        failed: whether something went wrong.
    """

    pair: StrategyPair
    size: Size
    compared: Compared | None = None
    why_not: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """All that is known of it."""
        model = self.size.model
        return {
            "strategy": self.pair.name,
            "pytorch": self.pair.api,
            "passes": self.pair.passes,
            "size": self.size.name,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "parameters": model.parameter_count,
            "tokens": self.size.tokens,
            "why_not": self.why_not or None,
            **(self.compared.as_dict() if self.compared else {}),
        }


class BenchRow(Protocol):
    """What was found of a pair."""

    def as_dict(self) -> dict[str, Any]:
        """All that is known of it."""
        ...


def as_json(rows: Sequence[BenchRow], ranks: int, turns: int, flags: str, load: float) -> dict[str, Any]:
    """Rows, and what they were measured on; seconds and bytes throughout.

    Args:
        flags: of the command, beside those.
        load: processes that wished to run before the first pair, the mean over a minute.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "command": f"shardlab bench strategies --ranks {ranks} --turns {turns} {flags}",
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "ranks": ranks,
        "rows": [row.as_dict() for row in rows],
    }
