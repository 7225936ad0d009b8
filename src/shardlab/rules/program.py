"""The rules of one program: those of each layer, and along which indices its values may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.program.sizes import LayerKind
from shardlab.program.values import Kind
from shardlab.rules.kinds import layers_of
from shardlab.rules.layer import GRADIENT_OF, LayerRules
from shardlab.rules.node import Layer
from shardlab.rules.spec import Space


class Rules:
    """What a program's layers make of values.

    Attributes:
        space: in what pieces the program counts.
        layers: each layer's rules.
        indices: for a kind of value and a layer, the indices along which it may be cut.
    """

    def __init__(self, layers: Sequence[Layer], space: Space) -> None:
        self.space = space
        self.layers = [LayerRules(layer, space) for layer in layers]
        self.indices: dict[tuple[Kind, int], tuple[str, ...]] = {}
        cuttable = {index for index, pieces in space.pieces if pieces > 1}
        for layer in layers:
            for port in (*layer.inputs, *layer.outputs):
                own = [i for node in layer.nodes for i in (node.reads | node.makes).get(port.tensor, "").split()]
                whole = {i for node in layer.nodes for i in node.whole}
                mine = tuple(sorted((set(own) - whole | ({"expert"} & set(own))) & cuttable))
                if mine:
                    self.indices[port.kind, port.layer] = self.indices[GRADIENT_OF[port.kind], port.layer] = mine


@lru_cache(maxsize=64)
def rules_of(kinds: tuple[LayerKind, ...], tied: bool, space: Space) -> Rules:
    """The rules of a model with layers of these kinds; the same for all programs of one shape."""
    return Rules(layers_of(kinds, tied=tied), space)
