"""Choice between two kernels for each large matrix product on a CPU: torch's own kernel, and oneDNN's.

All ranks of a run make the same choices, and so do later runs on this machine. After the first step, rank 0 times both
kernels on the products of that step (`shardlab.models.tensors.compute`), unless an earlier run on this machine has done
so. The kernels round differently, so replicas and resumed runs are bitwise equal only if they use the same kernels.
Therefore all ranks use the choices of rank 0, and checkpoints contain them.
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
from shardlab.execute.transport.collectives import gather_objects
from shardlab.models.tensors.compute import KERNEL_CHOICES, Product, is_onednn_faster

Choices = Mapping[Product, bool]
"""Whether oneDNN computes a product (else torch's own kernel), by product."""


@dataclass(frozen=True)
class KeptChoices:
    """Choices that were measured on this machine, in a file beside its profile.

    Attributes:
        path: the file. If it cannot be read, or is from another machine or version of torch, no choices are read.
    """

    path: Path = field(default_factory=lambda: cache_folder() / "products.json")

    def read(self, threads: int) -> dict[Product, bool]:
        """Return the choices that were measured with this number of threads."""
        return self._table().get(threads, {})

    def add(self, threads: int, choices: Choices) -> dict[Product, bool]:
        """Add choices to the file, if it can be written. Choices that are already in the file take precedence.

        Returns:
            All choices for this number of threads.
        """
        table = self._table()
        table[threads] = {**choices, **table.get(threads, {})}
        rows = {str(count): rows_of(entry) for count, entry in table.items()}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"machine": _machine(), "threads": rows}) + "\n")
        return table[threads]

    def _table(self) -> dict[int, dict[Product, bool]]:
        """Return all choices in the file, by the number of threads."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document["machine"] != _machine():
                return {}
            return {int(threads): choices_of(rows) for threads, rows in document["threads"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def choose_products(device: torch.device, choices_file: KeptChoices | None = None, *, alone: bool = False) -> bool:
    """Choose kernels for the products that occurred on any rank and have no choice yet. All ranks call this together.

    Args:
        device: device of this rank. There is a choice only on CPUs.
        choices_file: file with the choices of earlier runs (None: this machine's).
        alone: whether only this rank calls the function, and chooses for its own products.

    Returns:
        Whether kernels were chosen.
    """
    if device.type != "cpu":
        return False
    own_products = [product for product, onednn in KERNEL_CHOICES.items() if onednn is None]
    everyone = [own_products] if alone else gather_objects(own_products)
    products = sorted({product for rank_products in everyone for product in rank_products})
    if not products:
        return False
    choices = [_choose_here(products, choices_file or KeptChoices()) if alone or dist.get_rank() == 0 else {}]
    if not alone:
        dist.broadcast_object_list(choices, 0)
    KERNEL_CHOICES.update(choices[0])
    return True


def choices_of_rank_0(choices_file: KeptChoices | None = None) -> Choices:
    """Return rank 0's choices from earlier runs. All ranks call this together."""
    choices: list[Choices] = [{}]
    if dist.get_rank() == 0:
        choices = [(choices_file or KeptChoices()).read(torch.get_num_threads())]
    dist.broadcast_object_list(choices, 0)
    return choices[0]


def rows_of(choices: Mapping[Product, bool | None]) -> list[list[int]]:
    """Return choices as rows of a JSON file. A product without a choice (None) is written as torch's own kernel."""
    return [[*map(int, product), int(bool(onednn))] for product, onednn in sorted(choices.items())]


def choices_of(rows: Sequence[Sequence[Any]]) -> dict[Product, bool]:
    """Return the choices in rows of a JSON file, as written by `rows_of`.

    Raises:
        TypeError, ValueError: if the rows do not have this form.
    """
    choices: dict[Product, bool] = {}
    for rows_, inputs, outputs, bias, backward, onednn in rows:
        choices[Product(int(rows_), int(inputs), int(outputs), bool(bias), bool(backward))] = bool(onednn)
    return choices


@cache
def _machine() -> dict[str, str]:
    return {"processor": processor_name(), "torch": version("torch")}


def _choose_here(products: Sequence[Product], choices_file: KeptChoices) -> dict[Product, bool]:
    """Choose kernels on this rank, and keep the choices for later runs."""
    threads = torch.get_num_threads()
    choices = choices_file.read(threads)
    if fresh := {product: is_onednn_faster(product) for product in products if product not in choices}:
        choices = choices_file.add(threads, fresh)
    return {product: choices[product] for product in products}
