"""The rules of one program: those of each layer, and along which indices its values may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.rules import attention, update
from shardlab.rules.kind import Kind
from shardlab.rules.layer import GRADIENT_OF, LayerRules
from shardlab.rules.node import Layer
from shardlab.rules.pieces import Holds
from shardlab.rules.spec import Form, Space, Spec, new_spec


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
