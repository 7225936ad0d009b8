"""Results of one device: each layer's weight and state after the step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.support.pieces import ELEMENTS, PRIME, Array, BrokenTape, Piece
from tests.support.toy_layers import EVERYWHERE
from tests.support.toy_network import HANDS_ON, Network

# The optimizer is any function of weight, state and gradient.


def update_slice(
    layer: int, weight: Array, state: Array, gradient: Array, norm: int = 0, way: Array | int = 0
) -> tuple[Array, Array]:
    gradient = gradient * (norm + 1) % PRIME
    new_state = (11 * state + gradient * gradient + layer) % PRIME
    return (weight + 5 * new_state - 3 * gradient + way) % PRIME, new_state


def direction(layer: int, state: Array, gradient: Array, norm: int = 0) -> Array:
    gradient = gradient * (norm + 1) % PRIME
    return (13 * state + 7 * gradient * state % PRIME + layer + 1) % PRIME


def way_of_whole(matrices: int, where: tuple[int, ...], values: Array) -> Array:
    """Direction of each element, which depends on its whole matrix, for a layer with this many matrices."""
    size = ELEMENTS // matrices
    whole = np.zeros(ELEMENTS, np.int64)
    whole[list(where)] = values
    held = np.zeros(ELEMENTS, np.bool_)
    held[list(where)] = True
    sums = (whole * (np.arange(ELEMENTS) + 1) % PRIME).reshape(matrices, size).sum(1) % PRIME
    complete = [bool(held[at : at + size].all()) for at in range(0, ELEMENTS, size)]
    if not all(complete[place // size] for place in where):
        raise BrokenTape("a part of a matrix is stepped by itself")
    return (np.repeat(sums, size) * (whole + 1) % PRIME)[list(where)]


def initial(layer: int) -> tuple[Array, Array]:
    places = np.arange(ELEMENTS, dtype=np.int64) + 1000 * (layer + 1)
    return places**3 % PRIME, places**2 % PRIME


def squares(layer: int, places: tuple[int, ...], gradient: Array) -> int:
    """A part of the norm; it depends on positions, so that the squares of another slice give another number."""
    where = np.array(places, np.int64) + 1000 * layer
    return int((gradient * gradient % PRIME * where % PRIME).sum() % PRIME)


@cache
def one_device(
    network: Network, microbatches: int, clips: bool, frozen: frozenset[int] = frozenset()
) -> list[tuple[Array, Array]]:
    """(weight, state) of each layer with weights; frozen layers do not change, and do not count in the norm."""
    made = list(enumerate(gradients(network, microbatches)))
    parts = [squares(layer, EVERYWHERE, dw) for layer, dw in made if layer not in frozen]
    norm = sum(parts) % PRIME if clips else 0
    stepped: list[tuple[Array, Array]] = []
    for layer, dw in made:
        weight, state = initial(layer)
        matrices, way = network.matrices[layer], 0
        if matrices:
            way = way_of_whole(matrices, EVERYWHERE, direction(layer, state, dw, norm))
        stepped.append((weight, state) if layer in frozen else update_slice(layer, weight, state, dw, norm, way))
    return stepped


def gradients(network: Network, microbatches: int) -> list[Array]:
    """Gradients of the whole batch; the gradient of a tied weight is the sum over both uses."""
    weights = [Piece(EVERYWHERE, initial(network.weight_of(layer))[0]) for layer in range(len(network.kinds))]
    passes: list[tuple[Piece, Any, list[Piece]]] = []  # of each layer: its input, what it kept, queries and the rest
    value = network.batch(tuple(range(microbatches)))
    carried: dict[str, list[Piece]] = {}  # by the kind of layer that takes it next
    for number, (layer, weight) in enumerate(zip(network.layers, weights, strict=True)):
        kind = network.kinds[number]
        (made, *others), kept = layer.forward([value, weight, *carried.pop(kind, [])])
        if kind == "project":
            attended = network.attend(number, made, *others)
            passes.append((value, kept, [made, *others, attended]))
            value = attended
        else:
            passes.append((value, kept, []))
            value = made
            if kind in HANDS_ON:
                carried[HANDS_ON[kind]] = others
    gradient = network.loss([value])
    above: dict[str, list[Piece]] = {}  # gradients of what is carried, by the kind of layer that took it
    found: list[Array] = []
    for number in reversed(range(len(weights))):
        layer, weight, (value, kept, met) = network.layers[number], weights[number], passes[number]
        kind = network.kinds[number]
        beside = above.pop(HANDS_ON[kind], []) if kind in HANDS_ON else []
        if met:
            gradient, of_keys_values = network.attend_backward(number, met[0], met[1], met[2], gradient)
            beside = [of_keys_values]
        (below, *others), half = layer.backward_input([value, gradient, weight, *beside], kept)
        found.insert(0, layer.backward_weight(value, gradient, half).data)
        gradient, above[kind] = below, others
    if network.tied:
        found[0] = (found[0] + found.pop()) % PRIME
    return found
