"""What a rank holds during a backward pass of a stage: activations, gathered weights, gradients on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardlab.planner.layer_floors import LayerFloors, between
from shardlab.planner.rank_orders import Part
from shardlab.strategies.gathering import uses_of, visited
from shardlab.strategies.model_layers import ModelLayers

Gathers = Literal["", "layers", "left"]
"""Which weights of the stage are gathered: none, the layer's and those gathered ahead, or all that the pass is yet to
use."""

Gradients = Literal["", "new", "moving", "ending"]
"""Which gradients of the stage take room: none, since they are added to older ones; the pass's own; those that are
being reduced; or these, and those that will be."""


class LayerHolds(NamedTuple):
    """Memory that a rank holds during a layer's backward pass on a microbatch.

    Attributes:
        kept: bytes of this microbatch's activations, of the stage's layers, by the part of the pass.
        used, ahead: elements of gathered weights: of the layer's, and of others.
        left: elements of all weights that the pass is yet to use.
        gradients: elements of gradients, by what is done with them.
    """

    kept: Mapping[Part, float]
    used: float
    ahead: float
    left: float
    gradients: Mapping[Gradients, float]


@dataclass(frozen=True)
class PassHolds:
    """How weights and gradients are held.

    Attributes:
        part: of the pass.
        gathers, gradients: which of them, beside a rank's own slices.
        weight_bytes, gradient_bytes: of an element.
        ahead: the share of a weight that is gathered before it is used.
    """

    part: Part
    gathers: Gathers
    gradients: Gradients
    weight_bytes: float
    gradient_bytes: float
    ahead: float = 1.0

    def bytes(self, layer: LayerHolds) -> float:
        """Bytes during a layer's pass."""
        gathered = {"": 0.0, "layers": layer.used + self.ahead * layer.ahead, "left": layer.left}[self.gathers]
        gradients = layer.gradients[self.gradients] * self.gradient_bytes
        return layer.kept[self.part] + gathered * self.weight_bytes + gradients


def pass_holds(floors: LayerFloors, model: ModelLayers, stage: range) -> list[LayerHolds]:
    """List what a rank holds during the backward pass of each of a stage's layers, the last layer first.

    Where the stage ends the model, the entry before them is of the loss.
    """
    elements = {layer: between(floors.weights, range(layer, layer + 1)) for layer in stage}
    order = [layer for layer in reversed(stage) if elements[layer]]
    gathered, moving = _gathered(model, order, elements), _moving(model, order, elements)
    nothing, all = (0.0, 0.0), sum(elements.values())
    found: list[LayerHolds] = []
    if stage.stop == len(model.layers):
        kept = between(floors.kept, stage) + floors.logits
        none: dict[Gradients, float] = {"": 0.0, "new": 0.0, "moving": 0.0, "ending": all}
        found.append(
            LayerHolds({"whole": kept, "input": kept, "weight": 0.0}, *gathered.get(stage[-1], nothing), all, none)
        )
    again = {layer: run.start for run in floors.again for layer in run}
    for layer in reversed(stage):
        first = max(again.get(layer, layer + 1), stage.start)
        kept = between(floors.kept, range(stage.start, first)) + between(floors.whole, range(first, layer + 1))
        halved = between(floors.halved, range(stage.start, layer + 1))
        parts: dict[Part, float] = {
            "whole": kept,
            "input": kept + between(floors.halved, range(layer + 1, stage.stop)),
            "weight": halved,
        }
        rest = between(floors.weights, range(stage.start, layer))
        reduced = moving.get(layer, 0.0)
        gradients: dict[Gradients, float] = {
            "": 0.0,
            "new": all - rest,
            "moving": reduced,
            "ending": rest + reduced,
        }
        found.append(LayerHolds(parts, *gathered.get(layer, nothing), rest + elements[layer], gradients))
    return found


def _gathered(model: ModelLayers, order: Sequence[int], elements: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Elements of each layer's weight, and of those that are gathered while it computes: its block's and the next's."""
    found: dict[int, tuple[float, float]] = {}
    uses = uses_of(list(visited(model, order, ())), "layer")
    for place, layer in enumerate(order):
        window: dict[int, float] = {}
        for use in uses[place:]:
            if use.run > uses[place].run + 1:
                break
            window[use.layer] = elements.get(use.layer, 0.0)
        used = window.pop(uses[place].layer)
        found[layer] = used, sum(window.values())
    return found


def _moving(model: ModelLayers, order: Sequence[int], elements: dict[int, float]) -> dict[int, float]:
    """Elements of each layer's gradient, and of those before it that are still being reduced (`GradientReducer`)."""
    blocks: dict[int, float] = {}
    for layer in order:
        block = model.reduced_with(layer)
        blocks[block] = blocks.get(block, 0.0) + elements[layer]
    room = max(blocks.values(), default=0.0)
    in_flight = deque[float]()
    found: dict[int, float] = {}
    for layer in order:
        found[layer] = elements[layer] + sum(in_flight)
        while in_flight and elements[layer] + sum(in_flight) > room:
            in_flight.popleft()
        in_flight.append(elements[layer])
    return found
