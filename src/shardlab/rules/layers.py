"""The rules of one program: those of each layer, and along which indices its values may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.rules import update
from shardlab.rules.kind import Kind
from shardlab.rules.layer import GRADIENT_OF, LayerRules
from shardlab.rules.node import Layer
from shardlab.rules.pieces import Holds
from shardlab.rules.spec import Form, Space, Spec


@lru_cache(maxsize=64)
def rules_of(layers: tuple[Layer, ...], space: Space) -> Rules:
    """The rules of these layers; one object for all programs of one shape, since it learns as it is used."""
    return Rules(layers, space)


class Rules:
    """What a program's ops make of values.

    Attributes:
        space: in what pieces the program counts.
        layers: each layer's rules.
        indices: for a kind of value and a layer, the indices along which it may be cut.
    """

    def __init__(self, layers: Sequence[Layer], space: Space) -> None:
        self.space = space
        self.layers = [LayerRules(layer, space) for layer in layers]
        self._updates: dict[tuple[int | Form, ...], tuple[Spec, Spec]] = {}
        self.indices: dict[tuple[Kind, int], tuple[str, ...]] = {}
        names = {index for index, _ in space.pieces}
        for layer in layers:
            for port in (*layer.inputs, *layer.outputs):
                tensors = [tensors for node in layer.nodes for tensors in (node.reads, node.makes)]
                own = {index for indices in tensors for index in indices.get(port.tensor, "").split()}
                if mine := tuple(sorted(own & names)):
                    self.indices[port.kind, port.layer] = self.indices[GRADIENT_OF[port.kind], port.layer] = mine

    def update(self, layer: int, given: Sequence[Spec], trained: int) -> tuple[Spec, Spec]:
        """The (weight, optimizer state) that an update makes of (gradient, weight, optimizer state[, norm]).

        Args:
            trained: the layers that are known to be trained, as a bit set; a norm must be of all of them.

        Raises:
            Refused: as `shardlab.rules.update.update` does.
        """
        key = (trained, *[spec[0] for spec in given])
        made = self._updates.get(key)
        if made is None or made[0][0].layer != layer or given[0][1] != update.full_sum(given[0][0]):
            parameters = Holds(trained, len(self.layers))
            made = self._updates[key] = update.update(layer, *given, trained=parameters)
        return made
