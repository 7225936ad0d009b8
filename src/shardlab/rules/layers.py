"""The rules of one program: those of each layer, and along which indices its values may be cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardlab.rules import attention, update
from shardlab.rules.index import INDICES
from shardlab.rules.kind import Kind
from shardlab.rules.layer import GRADIENT_OF, LayerRules
from shardlab.rules.node import Layer
from shardlab.rules.pieces import Holds
from shardlab.rules.spec import Form, Space, Spec, new_spec


@lru_cache(maxsize=64)
def rules_of(layers: tuple[Layer, ...], space: Space, directed: frozenset[int] = frozenset()) -> Rules:
    """The rules of these layers; one object for all programs of one shape, since it learns as it is used."""
    return Rules(layers, space, directed)


class Rules:
    """What a program's ops make of values.

    Attributes:
        space: in what pieces the program counts.
        layers: each layer's rules.
        directed: layers with matrices that the optimizer steps whole, and in how many pieces of their parameters, of
            which each has matrices of its own.
        indices: for a kind of value and a layer, the indices along which it may be cut.
    """

    def __init__(self, layers: Sequence[Layer], space: Space, directed: Iterable[int] = ()) -> None:
        self.space = space
        stacked = {index for index, each in INDICES.items() if each.stacked}
        self.directed = {l: math.prod(space.count(i) for i in layers[l].cut if i in stacked) for l in directed}
        self.layers = [LayerRules(layer, space) for layer in layers]
        self._updates: dict[tuple[int | Form, ...], tuple[Spec, Spec]] = {}
        self._attended: dict[tuple[int | Form, ...], Form] = {}
        self._attended_back: dict[tuple[int | Form, ...], tuple[Form, Form]] = {}
        self.indices: dict[tuple[Kind, int], tuple[str, ...]] = {}
        names = {index for index, _ in space.pieces}
        for layer in layers:
            for port in (*layer.inputs, *layer.outputs):
                tensors = [tensors for node in layer.nodes for tensors in (node.reads, node.makes)]
                own = {index for indices in tensors for index in indices.get(port.tensor, "").split()}
                if mine := tuple(sorted(own & names)):
                    self.indices[port.kind, port.layer] = self.indices[GRADIENT_OF[port.kind], port.layer] = mine

    def update(self, layer: int, given: Sequence[Spec], trained: int) -> tuple[Spec, Spec]:
        """What an update makes of (gradient, weight, optimizer state[, norm][, direction]): the new weight and state.

        Args:
            trained: the layers that are known to be trained, as a bit set; a norm must be of all of them.

        Raises:
            Refused: as `shardlab.rules.update.update` does.
        """
        key = (trained, *[spec[0] for spec in given])
        made = self._updates.get(key)
        if made is None or made[0][0].layer != layer or given[0][1] != update.full_sum(given[0][0]):
            gradient, weight, opt_state, *others = given
            norm, direction = update.norm_and_direction(others)
            made = self._updates[key] = update.update(
                layer,
                gradient,
                weight,
                opt_state,
                norm,
                direction,
                trained=Holds(trained, len(self.layers)),
                pieces=self.directed.get(layer),
            )
        return made

    def direction(self, layer: int, given: Sequence[Spec], trained: int) -> Spec:
        """What `update.direction` makes of (gradient, optimizer state[, norm]).

        Args:
            trained: as for `update`.

        Raises:
            Refused: as that does.
        """
        parameters = Holds(trained, len(self.layers))
        return update.direction(layer, *given, trained=parameters, pieces=self.directed.get(layer))

    def attend(self, layer: int, queries: Spec, keys_values: Spec) -> Spec:
        """What `attention.attend` makes.

        Raises:
            Refused: as that does.
        """
        form, cells, joined = queries
        (of, ours), (of_keys, theirs) = self._met(cells, keys_values[1])
        key = (layer, form, keys_values[0], ours, theirs)
        made = self._attended.get(key) if of == of_keys else None
        if made is None:
            made = self._attended[key] = attention.attend(layer, queries, keys_values)[0]
        return new_spec(Spec, (made, cells, joined))

    def attend_backward(
        self, layer: int, queries: Spec, keys_values: Spec, attention_output: Spec, gradient: Spec
    ) -> tuple[Spec, Spec]:
        """What `attention.attend_backward` makes.

        Raises:
            Refused: as that does.
        """
        (form, cells, joined), (keys_form, keys_cells, keys_joined) = queries, keys_values
        (of, ours), (of_keys, theirs) = self._met(cells, keys_cells)
        key = (layer, form, keys_form, attention_output[0], gradient[0], ours, theirs)
        known = of == of_keys and attention_output[1] == cells == gradient[1]
        made = self._attended_back.get(key) if known else None
        if made is None:
            grads = attention.attend_backward(layer, queries, keys_values, attention_output, gradient)
            made = self._attended_back[key] = grads[0][0], grads[1][0]
        return new_spec(Spec, (made[0], cells, joined)), new_spec(Spec, (made[1], keys_cells, keys_joined))

    def _met(self, cells: int, keys_cells: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(microbatches, slices of each) of queries, and of keys and values."""
        sequence = self.space.sequence
        return attention.pattern(cells, sequence), attention.pattern(keys_cells, sequence)
