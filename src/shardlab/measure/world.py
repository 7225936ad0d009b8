"""World of the measuring ranks: teams of every size, and common decisions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab.measure.cases import Team


class MeasuringRanks:
    """This rank among all.

    Args:
        rank: its number.
        device: its device.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = dist.get_world_size()
        self.device = device

    def team(self, size: int) -> Team:
        """This rank's team when the world splits into teams of neighbours; every rank calls this."""
        first = self.rank // size * size
        ranks = tuple(range(first, first + size))
        group = dist.group.WORLD if size == self.size else dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Team(group, ranks, self.rank - first, self.device)

    def most(self, number: float) -> float:
        """Find the largest of all ranks' numbers."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def sum(self, number: float) -> float:
        """Add up all ranks' numbers."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def mean(self, number: float) -> float:
        """Find the mean of all ranks' numbers."""
        return self.sum(number) / self.size

    def meet(self) -> None:
        """Wait until all ranks have come, and their devices have done what they were given."""
        self.sum(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reduced(self, number: float, how: dist.ReduceOp.RedOpType) -> float:
        x = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=how)
        return float(x)
