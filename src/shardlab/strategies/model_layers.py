"""Questions that a plan asks of a model: where it may be cut, and how each layer is. They are asked here alone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from shardlab.program import Sizes, UserError
from shardlab.rules.kind import Kind
from shardlab.rules.node import Layer
from shardlab.rules.pieces import counted
from shardlab.strategies.plan import Plan


def model_layers(sizes: Sizes) -> ModelLayers:
    """The layers of a model of these sizes; the same object for all models of one shape."""
    return _model_layers(sizes.signatures, sizes.blocks)


@dataclass(frozen=True)
class ModelLayers:
    """A model's layers, as a plan needs to know them.

    Attributes:
        layers: each layer's signature: what it takes and makes, and whose weight it computes with.
        blocks: where blocks begin and the last one ends, if not every layer is one (empty: each layer is a block).
    """

    layers: tuple[Layer, ...]
    blocks: tuple[int, ...]

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Layers that compute with each weight, by the layer that has it."""
        users: dict[int, tuple[int, ...]] = {}
        for number, layer in enumerate(self.layers):
            users[layer.weight] = (*users.get(layer.weight, ()), number)
        return users

    def cut_axes(self, layer: int) -> tuple[str, ...]:
        """The mesh axes over which a layer's parameters may be sliced, outermost first; every other rank has all.

        Ranks that cut sequences share their experts: what all of them would compute alike, each does for some.
        """
        return self._cut_axes[layer]

    @cached_property
    def _cut_axes(self) -> list[tuple[str, ...]]:
        axes = {"expert": ("cp", "ep")}
        return [tuple(axis for index in layer.cut for axis in axes.get(index, ("tp",))) for layer in self.layers]

    @cached_property
    def feeding_attention(self) -> frozenset[int]:
        """The layers that make queries, keys and values: attention lies between each of them and the next layer."""
        return frozenset(l for l, layer in enumerate(self.layers) if layer.projects)

    @cached_property
    def pipeline_cuts(self) -> list[int]:
        """Layers before which a pipeline may cut, both ends included: all, or those that take a residual."""
        if not any(layer.carries for layer in self.layers):
            return list(range(len(self.layers) + 1))
        taking = [l for l, layer in enumerate(self.layers) if any(port.kind is Kind.RESIDUAL for port in layer.inputs)]
        return [0, *taking, len(self.layers)]

    @property
    def pipeline_units(self) -> int:
        """The most stages that a pipeline may have."""
        return len(self.pipeline_cuts) - 1

    @property
    def units_text(self) -> str:
        """Words for these units in a message."""
        if self.blocks and self.pipeline_units < len(self.layers):
            halves, blocks = self.pipeline_units - 1, len(self.blocks) - 1
            return f"{counted(halves, 'half-block')} of {counted(blocks, 'block')}, and the head,"
        return counted(self.pipeline_units, "layer" if self.pipeline_units == len(self.layers) else "part")

    @cached_property
    def recomputable(self) -> list[range]:
        """The layers of each block that can be computed again, in order.

        In half-blocks, a block reaches from its first norm up to the next block's; the embedding before the blocks and
        the head after them keep what they need. In a mixture, these are each block's experts.
        """
        if self.blocks:
            return [range(start, stop) for start, stop in pairwise(self.blocks)]
        experts = [layer for layer in range(len(self.layers)) if "ep" in self.cut_axes(layer)]
        return [range(layer, layer + 1) for layer in experts or range(len(self.layers))]

    def gathered_with(self, layer: int) -> int:
        """A number that layers share whose weights are gathered together: those of one block, as FSDP wraps it."""
        return self._gathered_with[layer]

    @cached_property
    def _gathered_with(self) -> list[int]:
        layers = range(len(self.layers))
        return [bisect_right(self.blocks, layer) for layer in layers] if self.blocks else list(layers)

    def reduced_with(self, layer: int) -> int:
        """A number that layers share whose gradients count together as one block's.

        The embedding counts as part of the first block and the head as part of the last, as where blocks are whole.
        """
        return bisect_right((self.blocks or self.pipeline_cuts)[1:-1], layer)

    @cached_property
    def _attention_inside(self) -> bool:
        """Whether attention lies within a layer, or layers are whole blocks."""
        sliced = [layer for layer in self.layers if layer.sliced]
        return not sliced or any(layer.mixes_tokens for layer in sliced)

    def _is_cut_along(self, axis: str) -> bool:
        return any(axis in axes for axes in self._cut_axes)

    def require(self, plan: Plan) -> None:
        """Refuse a plan whose mesh or recomputation asks for finer layers than these.

        Raises:
            UserError: with the layers that are wanted.
        """
        mesh = plan.mesh
        if mesh.tp > 1 and not self._is_cut_along("tp"):
            raise UserError(
                f"the mesh has tp {mesh.tp}, which works on half-blocks, but this model's layers are whole; give "
                "Sizes.half_blocks or those of models.cut"
            )
        if mesh.ep > 1 and not self._is_cut_along("ep"):
            raise UserError(
                f"the mesh has ep {mesh.ep}, which cuts mixtures of experts, but this model has none; give "
                "Sizes.mixture or those of models.cut"
            )
        if mesh.cp > 1 and self._is_cut_along("ep") and "cp" in plan.shard_optimizer:
            raise UserError(
                f"the plan shards over cp, but the {mesh.cp} ranks of cp share a mixture's experts, so that none is on "
                "all of them; shard over dp_shard"
            )
        if plan.attention_apart and self._attention_inside:
            cuts = f"the mesh has cp {mesh.cp}, which cuts sequences"
            what = cuts if mesh.cp > 1 else "selective recomputation was asked for"
            raise UserError(
                f"{what}, but attention is not a step of its own in this model's layers; give Sizes.context_blocks or "
                "those of models.cut with attention_apart=True"
            )


_model_layers = lru_cache(maxsize=64)(ModelLayers)
