"""Steps in turns: PyTorch's, ours, the floor, and again, in the same processes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.products import choose_products
from shardlab.measure.side_by_side.contender import Contender
from shardlab.measure.side_by_side.memory import made_and_measured
from shardlab.measure.side_by_side.pairs import Size, StrategyPair
from shardlab.measure.side_by_side.results import Compared, Side
from shardlab.measure.side_by_side.sides import SIDES, Make, makers
from shardlab.models.tensors.onednn import choices
from shardlab.program.duration import TICK

WARM_UP = 3
"""First steps of each side: memory is taken for the first time, connections are made. Memory is of the last."""


def compare_rank(rank: int, device: torch.device, pair: StrategyPair, size: Size, turns: int) -> Compared:
    """One rank's part of a comparison; every rank gives the same.

    Args:
        turns: steps of each side that are timed.
    """
    ranks = dist.get_world_size()
    return compare_sides(makers(pair, size, ranks, rank, device), turns, device)


def compare_sides(makes: Mapping[str, Make], turns: int, device: torch.device) -> Compared:
    """Make all sides and have them take turns; `makes` has what makes each of `SIDES`."""
    found, losses = in_turns(makes, [(SIDES[1], SIDES[0], *SIDES[2:]), SIDES], turns, device)
    return Compared(found["ours"], found["theirs"], found["floor"], *(losses[side] for side in SIDES[1::-1]))


def in_turns(
    makes: Mapping[str, Make], orders: Sequence[Sequence[str]], turns: int, device: torch.device
) -> tuple[dict[str, Side], dict[str, list[float]]]:
    """Make contenders, let them warm up one after the other, and then take turns.

    Args:
        makes: what makes each, by name.
        orders: in which they train a step, turn about; all ranks have the same.
        turns: steps of each that are timed.

    Returns:
        The timed steps of each, and the mean loss of every step, those before the timed ones included.
    """
    with choices({}):
        return _in_turns(makes, orders, turns, device)


def _in_turns(
    makes: Mapping[str, Make], orders: Sequence[Sequence[str]], turns: int, device: torch.device
) -> tuple[dict[str, Side], dict[str, list[float]]]:
    contenders: dict[str, Contender] = {}
    losses: dict[str, list[Tensor]] = {}
    peaks: dict[str, int] = {}
    for side, make in makes.items():
        contenders[side], losses[side], peaks[side] = made_and_measured(make, WARM_UP, device)
    choose_products(device)
    seconds: dict[str, list[float]] = {side: [] for side in makes}
    computing: dict[str, list[float]] = {side: [] for side in makes}
    gc.collect()
    for turn in range(turns):
        for side in orders[turn % len(orders)]:
            loss, took, computed = _timed(contenders[side], device)
            losses[side].append(loss)
            seconds[side].append(took)
            computing[side].append(computed)

    def over_ranks(numbers: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(total, how)
        return total.tolist()

    ranks = dist.get_world_size()
    found = {
        side: Side(
            over_ranks(seconds[side], dist.ReduceOp.MAX),
            [total / ranks for total in over_ranks(computing[side], dist.ReduceOp.SUM)],
            int(over_ranks([float(peaks[side])], dist.ReduceOp.MAX)[0]),
        )
        for side in makes
    }
    return found, {side: _means(losses[side]) for side in makes}


def _timed(contender: Contender, device: torch.device) -> tuple[Tensor, float, float]:
    """One step: its loss, its seconds, and those for which this thread had a core."""
    dist.barrier()
    began, had = time.perf_counter(), time.thread_time()
    loss = contender.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return loss, max(TICK, time.perf_counter() - began), time.thread_time() - had


def _means(losses: Sequence[Tensor]) -> list[float]:
    """Mean loss of each step over the tokens of all ranks."""
    total = torch.stack([*losses])
    dist.all_reduce(total)
    return (total[:, 0] / total[:, 1]).tolist()
