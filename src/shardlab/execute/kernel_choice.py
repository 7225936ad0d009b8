"""Choice of kernels for products: the same on all ranks of a run, and in the next run on this machine.

Rank 0 measures the products that came up in the first step (`shardlab.models.tensors.compute`), unless an earlier run
on this machine has. Two kernels round differently, so replicas and resumed runs are bitwise equal only if they choose
alike: all ranks are told the choices, and a run's checkpoints have them.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.common.files import cache_folder, processor_name, write_atomically
from shardlab.models.tensors.compute import KERNEL_CHOICES, Product, is_onednn_faster

Choices = Mapping[Product, bool]
"""Whether oneDNN computes a product, and not torch's own kernel."""


@dataclass(frozen=True)
class KeptChoices:
    """Choices that were measured on this machine, in a file beside its profile.

    Attributes:
        path: the file. One that cannot be read, or is of another machine or torch, has no choices.
    """

    path: Path = field(default_factory=lambda: cache_folder() / "products.json")

    def read(self, threads: int) -> dict[Product, bool]:
        """Return the choices for so many threads."""
        return self._table().get(threads, {})

    def add(self, threads: int, chosen: Choices) -> dict[Product, bool]:
        """Keep choices, unless the file cannot be written; those that it has already prevail.

        Returns:
            All choices for so many threads.
        """
        table = self._table()
        table[threads] = {**chosen, **table.get(threads, {})}
        rows = {str(count): rows_of(each) for count, each in table.items()}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"machine": _machine(), "threads": rows}) + "\n")
        return table[threads]

    def _table(self) -> dict[int, dict[Product, bool]]:
        """Return all choices, by the number of threads."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["machine"] != _machine():
                return {}
            return {int(threads): choices_of(rows) for threads, rows in found["threads"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def choose_products(device: torch.device, kept: KeptChoices | None = None, *, alone: bool = False) -> bool:
    """Choose kernels for the products that have come up on any rank; all ranks call this together.

    Args:
        device: of this rank; there is a choice on CPUs alone.
        kept: choices of earlier runs (None: this machine's).
        alone: choose for this rank, which calls it without the others.

    Returns:
        Whether there was anything to choose.
    """
    if device.type != "cpu":
        return False
    mine = [product for product, onednn in KERNEL_CHOICES.items() if onednn is None]
    everyone = [mine] * (1 if alone else dist.get_world_size())
    if not alone:
        dist.all_gather_object(everyone, mine)
    wanted = sorted({product for theirs in everyone for product in theirs})
    if not wanted:
        return False
    chosen = [_chosen_here(wanted, kept or KeptChoices()) if alone or dist.get_rank() == 0 else {}]
    if not alone:
        dist.broadcast_object_list(chosen, 0)
    KERNEL_CHOICES.update(chosen[0])
    return True


def kept_by_rank_0(kept: KeptChoices | None = None) -> Choices:
    """Return what rank 0 has of earlier runs' choices; all ranks call this together."""
    found: list[Choices] = [{}]
    if dist.get_rank() == 0:
        found = [(kept or KeptChoices()).read(torch.get_num_threads())]
    dist.broadcast_object_list(found, 0)
    return found[0]


def rows_of(chosen: Mapping[Product, bool | None]) -> list[list[int]]:
    """Return choices for a JSON file. Where nothing was chosen, torch's own kernel computes."""
    return [[*map(int, product), int(bool(onednn))] for product, onednn in sorted(chosen.items())]


def choices_of(rows: Sequence[Sequence[Any]]) -> dict[Product, bool]:
    """Return the choices that a JSON file has.

    Raises:
        TypeError, ValueError: it has something else.
    """
    found: dict[Product, bool] = {}
    for rows_, inputs, outputs, bias, backward, onednn in rows:
        found[Product(int(rows_), int(inputs), int(outputs), bool(bias), bool(backward))] = bool(onednn)
    return found


@cache
def _machine() -> dict[str, str]:
    return {"processor": processor_name(), "torch": version("torch")}


def _chosen_here(wanted: Sequence[Product], kept: KeptChoices) -> dict[Product, bool]:
    """Choose kernels on this rank, and keep the choices for later runs."""
    threads = torch.get_num_threads()
    known = kept.read(threads)
    if fresh := {product: is_onednn_faster(product) for product in wanted if product not in known}:
        known = kept.add(threads, fresh)
    return {product: known[product] for product in wanted}
