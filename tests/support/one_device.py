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
    layer: int, weight: Array, state: Array, gradient: Array, norm: int = 0, directions: Array | int = 0
) -> tuple[Array, Array]:
    gradient = gradient * (norm + 1) % PRIME
    new_state = (11 * state + gradient * gradient + layer) % PRIME
    return (weight + 5 * new_state - 3 * gradient + directions) % PRIME, new_state


def direction(layer: int, state: Array, gradient: Array, norm: int = 0) -> Array:
    gradient = gradient * (norm + 1) % PRIME
    return (13 * state + 7 * gradient * state % PRIME + layer + 1) % PRIME


def matrix_directions(matrices: int, positions: tuple[int, ...], values: Array) -> Array:
    """Direction of each element, which depends on its whole matrix, for a layer with this many matrices."""
    size = ELEMENTS // matrices
    whole = np.zeros(ELEMENTS, np.int64)
    whole[list(positions)] = values
    mask = np.zeros(ELEMENTS, np.bool_)
    mask[list(positions)] = True
    sums = (whole * (np.arange(ELEMENTS) + 1) % PRIME).reshape(matrices, size).sum(1) % PRIME
    complete = [bool(mask[at : at + size].all()) for at in range(0, ELEMENTS, size)]
    if not all(complete[place // size] for place in positions):
        raise BrokenTape("a part of a matrix is stepped by itself")
    return (np.repeat(sums, size) * (whole + 1) % PRIME)[list(positions)]


def initial(layer: int) -> tuple[Array, Array]:
    places = np.arange(ELEMENTS, dtype=np.int64) + 1000 * (layer + 1)
    return places**3 % PRIME, places**2 % PRIME


def squares(layer: int, places: tuple[int, ...], gradient: Array) -> int:
    """A part of the norm; it depends on positions, so that the squares of another slice give another number."""
    factors = np.array(places, np.int64) + 1000 * layer
    return int((gradient * gradient % PRIME * factors % PRIME).sum() % PRIME)


@cache
def one_device(
    network: Network, microbatches: int, clips: bool, frozen: frozenset[int] = frozenset()
) -> list[tuple[Array, Array]]:
    """(weight, state) of each layer with weights; frozen layers do not change, and do not count in the norm."""
    layer_gradients = list(enumerate(gradients(network, microbatches)))
    parts = [squares(layer, EVERYWHERE, dw) for layer, dw in layer_gradients if layer not in frozen]
    norm = sum(parts) % PRIME if clips else 0
    stepped: list[tuple[Array, Array]] = []
    for layer, dw in layer_gradients:
        weight, state = initial(layer)
        matrices, moves = network.matrices[layer], 0
        if matrices:
            moves = matrix_directions(matrices, EVERYWHERE, direction(layer, state, dw, norm))
        stepped.append((weight, state) if layer in frozen else update_slice(layer, weight, state, dw, norm, moves))
    return stepped


def gradients(network: Network, microbatches: int) -> list[Array]:
    """Gradients of the whole batch; the gradient of a tied weight is the sum over both uses."""
    weights = [Piece(EVERYWHERE, initial(network.weight_of(layer))[0]) for layer in range(len(network.kinds))]
    passes: list[tuple[Piece, Any, list[Piece]]] = []  # of each layer: its input, what it kept, queries and the rest
    value = network.batch(tuple(range(microbatches)))
    carried: dict[str, list[Piece]] = {}  # by the kind of layer that takes it next
    for number, (layer, weight) in enumerate(zip(network.layers, weights, strict=True)):
        kind = network.kinds[number]
        (output, *others), ctx = layer.forward([value, weight, *carried.pop(kind, [])])
        if kind == "project":
            attended = network.attend(number, output, *others)
            passes.append((value, ctx, [output, *others, attended]))
            value = attended
        else:
            passes.append((value, ctx, []))
            value = output
            if kind in HANDS_ON:
                carried[HANDS_ON[kind]] = others
    gradient = network.loss([value])
    carried_gradients: dict[str, list[Piece]] = {}  # gradients of what is carried, by the kind of layer that took it
    weight_gradients: list[Array] = []
    for number in reversed(range(len(weights))):
        layer, weight, (value, ctx, met) = network.layers[number], weights[number], passes[number]
        kind = network.kinds[number]
        grad_outputs = carried_gradients.pop(HANDS_ON[kind], []) if kind in HANDS_ON else []
        if met:
            gradient, of_keys_values = network.attend_backward(number, met[0], met[1], met[2], gradient)
            grad_outputs = [of_keys_values]
        (grad_input, *others), half = layer.backward_input([value, gradient, weight, *grad_outputs], ctx)
        weight_gradients.insert(0, layer.backward_weight(value, gradient, half).data)
        gradient, carried_gradients[kind] = grad_input, others
    if network.tied:
        weight_gradients[0] = (weight_gradients[0] + weight_gradients.pop()) % PRIME
    return weight_gradients
