"""Global batch of a priced step and its microbatches: equal for every plan, unless options say more."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.program import UserError
from shardlab.rules.pieces import counted


@dataclass(frozen=True)
class BatchRequest:
    """Options about the global batch; None for those that the command line leaves out.

    Attributes:
        sequences: of the global batch.
        microbatches: of the global batch.
        rows: sequences of a microbatch.
    """

    sequences: int | None = None
    microbatches: int | None = None
    rows: int | None = None

    def cut(self, devices: int, data_ranks: int | None) -> tuple[int, int]:
        """Microbatches of the global batch, and the sequences of each.

        By default there is a microbatch of one sequence for each device of the cluster, whatever the plan: so commands
        for one cluster are steps of as many tokens.

        Args:
            devices: of the cluster, whether they are used or not.
            data_ranks: among how many ranks a plan deals the microbatches (None: no plan, the program says).

        Raises:
            UserError: when the options contradict each other, or the batch does not divide.
        """
        rows, microbatches = self.rows or 1, self.microbatches or devices
        if self.sequences is not None:
            if self.rows is None and self.microbatches is not None:
                rows = max(1, self.sequences // self.microbatches)
            microbatches = self.microbatches or self.sequences // rows
            if microbatches * rows != self.sequences:
                what = counted(self.microbatches, "microbatch") if self.microbatches else "microbatches"
                each = f" of {counted(self.rows, 'sequence')}" if self.rows else ""
                unit = (self.microbatches or 1) * (self.rows or 1)
                remedy = (
                    "leave out one of the three" if self.microbatches and self.rows else f"give a multiple of {unit}"
                )
                raise UserError(
                    f"a global batch of {counted(self.sequences, 'sequence')} cannot be cut into {what}{each}; {remedy}"
                )
        if self.microbatches is None and data_ranks is not None and microbatches % data_ranks:
            raise UserError(self._undivided(microbatches, rows, data_ranks, devices))
        return microbatches, rows

    def _undivided(self, microbatches: int, rows: int, data_ranks: int, devices: int) -> str:
        why = f" (a microbatch for each of the cluster's {devices:,} devices)" if self.sequences is None else ""
        each = f", in microbatches of {rows}," if rows > 1 else ""
        down, unit = microbatches - microbatches % data_ranks, rows * data_ranks
        sizes = f"{down * rows} or {down * rows + unit}" if down else f"{unit}"
        return (
            f"the global batch of {counted(microbatches * rows, 'sequence')}{why}{each} does not divide among "
            f"{data_ranks} data-parallel ranks; give --global-batch {sizes}"
        )


AS_USUAL = BatchRequest()
"""Nothing is said: a microbatch of one sequence for each device."""
