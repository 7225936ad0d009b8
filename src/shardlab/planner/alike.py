"""A model cut into a plan's layers, known by three of its blocks: all in the middle are alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from shardlab.errors import UserError
from shardlab.models import Blocks, cut_for
from shardlab.models.repeated import Repeated, sampled
from shardlab.program import Mesh
from shardlab.strategies.model_layers import ModelLayers, model_layers

T = TypeVar("T")


class AlikeBlocks:
    """A model in the layers of a plan.

    Args:
        model: whole.
        mesh: whose tp, cp and ep cut it, and the blocks of a tied model if it has pp.
        apart, ulysses: as `cut_for` takes them.

    Attributes:
        whole, short: the same model with three blocks, and what it is when it is cut.

    Raises:
        UserError: when the model does not divide.
    """

    def __init__(self, model: Blocks, mesh: Mesh, apart: bool, ulysses: int) -> None:
        self.whole = sampled(model)
        self.short = cut_for(self.whole, mesh, planned=True, attention_apart=apart, ulysses=ulysses)
        self._repeated = Repeated(self.short, model.layers - self.whole.layers)

    def all(self, known: Sequence[T]) -> list[T]:
        """Extend a list with an entry for each layer of the short model to all layers of the whole one."""
        return [known[layer] for layer in self._repeated.alike[:-1]]

    @cached_property
    def layers(self) -> ModelLayers:
        """The whole model's layers, as a plan needs to know them."""
        return model_layers(self._repeated.sizes(self.short.sizes(1, 1)))


@lru_cache(maxsize=256)
def _alike(model: Any, mesh: Mesh, apart: bool, ulysses: int) -> AlikeBlocks | None:
    try:
        return AlikeBlocks(model, mesh, apart, ulysses)
    except UserError:
        return None


def alike_blocks(model: Blocks, mesh: Mesh, *, apart: bool = False, ulysses: int = 1) -> AlikeBlocks | None:
    """The model in the layers of plans on a mesh; None: the code that cuts models does not accept it."""
    return _alike(model, Mesh(pp=min(mesh.pp, 2), cp=mesh.cp, tp=mesh.tp, ep=mesh.ep), apart or mesh.cp > 1, ulysses)
