"""Layers as lists of primitives, by the kinds that models give them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.program.sizes import EXPERT, HEAD, SLICE, LayerKind, Sizes
from shardlab.rules.kind import Kind
from shardlab.rules.layers import Rules
from shardlab.rules.node import Layer, Node, Port
from shardlab.rules.spec import Space


def rules_of(sizes: Sizes, space: Space) -> Rules:
    """Find the rules of a model of these sizes; all programs of one shape share one object."""
    return _rules_of(sizes.kinds or (LayerKind.WHOLE,) * sizes.layers, sizes.tied, space)


@lru_cache(maxsize=64)
def _rules_of(kinds: tuple[LayerKind, ...], tied: bool, space: Space) -> Rules:
    return Rules(layers_of(kinds, tied=tied), space)


def layers_of(kinds: Sequence[LayerKind], *, tied: bool) -> list[Layer]:
    """Describe every layer of a model by its primitives."""
    count = len(kinds)
    made: list[Layer] = []
    for l, kind in enumerate(kinds):
        before = kinds[l - 1] if l else None
        after = next((k for k in range(l + 1, count) if kinds[k] in (LayerKind.NORM, LayerKind.DENSE)), -1)
        first = all(kinds[k] not in (LayerKind.NORM, LayerKind.DENSE) for k in range(l))
        x, y = Port("x", Kind.ACTIVATION, l), Port("y", Kind.ACTIVATION, l + 1)
        inputs, outputs = (x,), (y,)
        nodes, cut = _nodes(kind, l, count, before)
        if kind in (LayerKind.NORM, LayerKind.DENSE):
            if first:
                nodes = (Node("add", {"x": nodes[0].reads["x"]}, nodes[0].makes, nodes[0].weights), *nodes[1:])
            else:
                inputs = (x, Port("residual", Kind.RESIDUAL, l))
            if after >= 0:
                outputs = (y, Port("s", Kind.RESIDUAL, after))
        elif kind is LayerKind.PROJECT:
            outputs = (Port("q", Kind.QUERIES, l), Port("kv", Kind.KEYS_VALUES, l))
        is_tied = tied and l == count - 1
        made.append(Layer(kind.value, nodes, inputs, outputs, cut, 0 if is_tied else l, int(is_tied)))
    return made


def _nodes(kind: LayerKind, l: int, count: int, before: LayerKind | None) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """List a layer's primitives, and the indices that its parameters are cut along."""
    last = l == count - 1
    match kind:
        case LayerKind.WHOLE:
            return (Node("layer", {"x": "in"}, {"y": "out"}, {"w": "out in"}),), ()
        case LayerKind.NORM:
            add = Node("add", {"x": "in", "residual": "in"}, {"s": "in"})
            return (add, Node("norm", {"s": "in"}, {"y": "in"}, {"w": "in"}, frozenset({"in"}))), ()
        case LayerKind.DENSE:
            whole = frozenset({EXPERT})
            taken = "in expert" if before is LayerKind.EXPERTS else "in"
            combine = Node("combine", {"x": taken, "residual": "in"}, {"s": "in"}, {"w": "in"}, whole)
            return (combine, Node("dispatch", {"s": "in"}, {"y": "in" if last else "in expert"}, whole=whole)), ()
        case LayerKind.EXPERTS:
            return (Node("experts", {"x": "in expert"}, {"y": "out expert"}, {"w": "expert out in"}),), (EXPERT,)
        case LayerKind.PROJECT:
            return (Node("projection", {"x": "in"}, {"q": HEAD, "kv": HEAD}, {"w": "head in"}),), (HEAD,)
        case LayerKind.COLUMN:
            return (Node("column", {"x": "in"}, {"y": SLICE}, {"w": "slice in"}, takes_own=True),), (SLICE,)
        case LayerKind.ROW:
            index = HEAD if before is LayerKind.PROJECT else SLICE
            return (Node("row", {"x": index}, {"y": "out"}, {"w": f"{index} out"}),), (index,)
        case LayerKind.SLICED | LayerKind.TOKENWISE:
            mixes = kind is LayerKind.SLICED
            if l == 0:
                return (Node("lookup", {"x": ""}, {"y": "out"}, {"w": "slice out"}, mixes_tokens=mixes),), (SLICE,)
            if last:
                return (Node("logits", {"x": "in"}, {"y": SLICE}, {"w": "slice in"}, mixes_tokens=mixes),), (SLICE,)
            return (
                Node("linear", {"x": "in"}, {"h": SLICE}, {"w1": "slice in"}),
                Node("mix", {"h": SLICE}, {"a": SLICE}, mixes_tokens=mixes),
                Node("linear", {"a": SLICE}, {"y": "out"}, {"w2": "out slice"}),
            ), (SLICE,)
