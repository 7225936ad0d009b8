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
        micro_batch_size: sequences of a microbatch.
    """

    sequences: int | None = None
    microbatches: int | None = None
    micro_batch_size: int | None = None

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
        micro_batch_size, microbatches = self.micro_batch_size or 1, self.microbatches or devices
        if self.sequences is not None:
            if self.micro_batch_size is None and self.microbatches is not None:
                micro_batch_size = max(1, self.sequences // self.microbatches)
            microbatches = self.microbatches or self.sequences // micro_batch_size
            if microbatches * micro_batch_size != self.sequences:
                what = counted(self.microbatches, "microbatch") if self.microbatches else "microbatches"
                each = f" of {counted(self.micro_batch_size, 'sequence')}" if self.micro_batch_size else ""
                unit = (self.microbatches or 1) * (self.micro_batch_size or 1)
                remedy = (
                    "leave out one of the three"
                    if self.microbatches and self.micro_batch_size
                    else f"give a multiple of {unit}"
                )
                raise UserError(
                    f"a global batch of {counted(self.sequences, 'sequence')} cannot be cut into {what}{each}; {remedy}"
                )
        if self.microbatches is None and data_ranks is not None and microbatches % data_ranks:
            raise UserError(self._undivided(microbatches, micro_batch_size, data_ranks, devices))
        return microbatches, micro_batch_size

    def _undivided(self, microbatches: int, micro_batch_size: int, data_ranks: int, devices: int) -> str:
        why = f" (a microbatch for each of the cluster's {devices:,} devices)" if self.sequences is None else ""
        each = f", in microbatches of {micro_batch_size}," if micro_batch_size > 1 else ""
        down, unit = microbatches - microbatches % data_ranks, micro_batch_size * data_ranks
        sizes = f"{down * micro_batch_size} or {down * micro_batch_size + unit}" if down else f"{unit}"
        batch = counted(microbatches * micro_batch_size, "sequence")
        return (
            f"the global batch of {batch}{why}{each} does not divide among "
            f"{data_ranks} data-parallel ranks; give --global-batch {sizes}"
        )


AS_USUAL = BatchRequest()
"""Default batch: a microbatch of one sequence for each device."""
