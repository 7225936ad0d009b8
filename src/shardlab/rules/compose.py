"""Layers composed of nodes: what crosses from one layer to another is what one makes and another reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardlab.rules.kind import Kind
from shardlab.rules.node import Layer, Node, Port

ORDER = ("x", "q", "kv", "s", "gates", "choices", "slots")
"""The tensors by which layers meet, in the order in which a layer takes and makes them: the activation first."""

Written = tuple[str, Sequence[Node], tuple[str, ...]]
"""A layer's name for a reader, its nodes, and the indices that its parameters are cut along."""


Tensors = Iterable[str]
"""Names of tensors."""


def crossing(layers: Sequence[Sequence[tuple[Tensors, Tensors]]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The tensors that each layer is given, and those that it makes for others, from what each node reads and makes.

    A tensor's name is used again and again, and stands for the last one that was made.
    """
    inputs: list[set[str]] = [set() for _ in layers]
    outputs: list[set[str]] = [set() for _ in layers]
    made: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for reads, makes in layer:
            for name in reads:
                maker = made.get(name)
                if maker != number:
                    inputs[number].add(name)
                    if maker is not None:
                        outputs[maker].add(name)
            made |= dict.fromkeys(makes, number)
    outputs[-1] = {"x"}
    return [(_ordered(taken), _ordered(given)) for taken, given in zip(inputs, outputs, strict=True)]


def is_attention(reads: Sequence[Tensors]) -> bool:
    """Whether nodes that read these tensors are an attention alone, which is an op of its own and no layer."""
    return len(reads) == 1 and set(reads[0]) == {"q", "kv"}


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)))


def layers_of(written: Sequence[Written], *, tied: bool = False) -> tuple[Layer, ...]:
    """A model's layers, composed of nodes; an attention alone between two is none.

    Args:
        tied: whether the last layer computes with the first one's weight.
    """
    crossed = crossing([[(node.reads, node.makes) for node in nodes] for _, nodes, _ in written])
    layers = [
        (each, *met)
        for each, met in zip(written, crossed, strict=True)
        if not is_attention([node.reads for node in each[1]])
    ]
    made: list[Layer] = []
    for l, ((name, nodes, cut), taken, given) in enumerate(layers):
        readers = {
            tensor: next((r for r in range(l + 1, len(layers)) if tensor in layers[r][1]), -1) for tensor in given
        }
        last = tied and l == len(layers) - 1
        inputs, outputs = _ports(taken, l, dict.fromkeys(taken, l)), _ports(given, l + 1, readers)
        made.append(_numbered(Layer(name, tuple(nodes), inputs, outputs, cut, 0 if last else l, int(last))))
    return tuple(made)


CARRIED = {"s": Kind.RESIDUAL, "gates": Kind.ROUTING, "choices": Kind.ROUTING}
"""Kind of value in which a tensor is carried beside the activation."""


def carried_of(names: Sequence[str]) -> dict[Kind, tuple[str, ...]]:
    """The tensors that are carried beside the first of those by which layers meet, by kind, in order."""
    kinds = dict.fromkeys(CARRIED[name] for name in names[1:])
    return {kind: tuple(name for name in names[1:] if CARRIED[name] is kind) for kind in kinds}


def _ports(names: Sequence[str], activation: int, readers: Mapping[str, int]) -> tuple[Port, ...]:
    """The ports of some tensors: the first is the activation of that number, others go to the layers that read them."""
    first = names[0]
    if first == "q":
        return Port("q", Kind.QUERIES, activation - 1), Port("kv", Kind.KEYS_VALUES, activation - 1)
    carried = [Port(tensors[0], kind, readers[tensors[0]]) for kind, tensors in carried_of(names).items()]
    return (Port(first, Kind.ACTIVATION, activation), *carried)


def _numbered(layer: Layer) -> Layer:
    """The layer with a name of its own for every tensor."""
    now = {port.tensor: port.tensor for port in layer.inputs}
    nodes: list[Node] = []
    for number, node in enumerate(layer.nodes):
        reads = {now.get(name, name): indices for name, indices in node.reads.items()}
        now |= {name: f"{name}{number}" for name in node.makes}
        nodes.append(replace(node, reads=reads, makes={now[name]: indices for name, indices in node.makes.items()}))
    outputs = tuple(port._replace(tensor=now[port.tensor]) for port in layer.outputs)
    return replace(layer, nodes=tuple(nodes), outputs=outputs)
