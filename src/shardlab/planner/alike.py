"""A model whose blocks are alike, known by three of them: what holds of the second holds of all in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from shardlab.errors import UserError
from shardlab.models import Model, cut_for
from shardlab.program import Mesh
from shardlab.strategies.model_layers import model_layers

T = TypeVar("T")

KNOWN = 3
"""Blocks that are cut: the first, one in the middle, and the last."""


class AlikeBlocks:
    """A model in the layers of a plan.

    Args:
        model: whole.
        mesh: whose tp, cp and ep cut it.
        apart, ulysses: as `cut_for` takes them.

    Attributes:
        whole, short: the same model with three blocks at most, and what it is when it is cut.
        layers: how many the whole one has, cut.

    Raises:
        UserError: when the model does not divide.
    """

    def __init__(self, model: Any, mesh: Mesh, apart: bool, ulysses: int) -> None:
        def cut(blocks: int) -> Model:
            return cut_for(replace(model, layers=blocks), mesh, planned=True, attention_apart=apart, ulysses=ulysses)

        self.blocks = model.layers
        self.whole = replace(model, layers=min(KNOWN, model.layers))
        self.short = cut(self.whole.layers)
        self._more = max(0, model.layers - KNOWN)
        self._period = self.short.layers - cut(KNOWN - 1).layers if self._more else 0
        bounds = self.short.block_bounds
        self._first = bounds[1] if bounds and self._more else (self.short.layers - self._period) // 2
        self.layers = self.short.layers + self._more * self._period

    def all(self, known: Sequence[T]) -> list[T]:
        """What is known of every layer of the short model, of every layer of the whole one."""
        first, last = self._first, self._first + self._period
        return [*known[:first], *list(known[first:last]) * (1 + self._more), *known[last:]]

    @cached_property
    def pipeline_cuts(self) -> list[int]:
        """Layers before which a pipeline may cut, both ends included."""
        cuts = set(self._plain.pipeline_cuts)
        marked = [layer in cuts for layer in range(self.short.layers)]
        return [*(layer for layer, mark in enumerate(self.all(marked)) if mark), self.layers]

    @cached_property
    def recomputable(self) -> list[range]:
        """The layers of each block that can be computed again."""
        blocks = self._plain.recomputable
        if not self._more:
            return blocks
        middle = blocks[1]
        made = [range(middle.start + by, middle.stop + by) for by in self._shifts]
        after = self._shifts[-1]
        return [blocks[0], *made, *(range(block.start + after, block.stop + after) for block in blocks[2:])]

    @property
    def _shifts(self) -> range:
        return range(0, self._more * self._period + 1, self._period)

    @cached_property
    def _plain(self) -> Any:
        return model_layers(self.short.sizes(1, 1))


@lru_cache(maxsize=256)
def _alike(model: Any, mesh: Mesh, apart: bool, ulysses: int) -> AlikeBlocks | None:
    try:
        return AlikeBlocks(model, mesh, apart, ulysses)
    except UserError:
        return None


def alike_blocks(model: Any, mesh: Mesh, *, apart: bool = False, ulysses: int = 1) -> AlikeBlocks | None:
    """The model in the layers of plans on a mesh; None: the code that cuts models does not accept it."""
    return _alike(model, Mesh(cp=mesh.cp, tp=mesh.tp, ep=mesh.ep), apart or mesh.cp > 1, ulysses)
