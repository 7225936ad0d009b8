"""What the launch tests run on every rank."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from shardlab.program import UserError


def sum_of_ranks(rank: int, device: torch.device, addend: int) -> float:
    total = torch.ones(1, device=device) * rank
    dist.all_reduce(total)
    return total.item() + addend


def raise_on(rank: int, device: torch.device, failing: int) -> None:
    if rank == failing:
        raise ValueError("the batch is a fish")
    dist.barrier()


def die_on(rank: int, device: torch.device, failing: int) -> None:
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def complain(rank: int, device: torch.device) -> None:
    if rank == 1:
        raise UserError("the fish is not a batch; give a batch")
    dist.barrier()
