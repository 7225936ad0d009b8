"""The puzzles' layers as nodes: a matrix, or a block of several layers where tensor, context or expert parallelism
slices it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.rules.compose import Written, layers_of
from shardlab.rules.node import Layer, Node

_MATRIX = Node("matrix", {"x": "width"}, {"x": "width"}, {"w": "width in"}, atomic=True)
_NORM = Node("norm", {"s": "width"}, {"x": "width"}, {"w": "width"}, whole=frozenset({"width"}))
_ADD = Node("add", {"x": "width", "s": "width"}, {"s": "width"})
_EMBED = Node("embed", {"x": "width"}, {"s": "width"})
_LOOKUP = Node("lookup", {"x": ""}, {"x": "width"}, {"w": "vocab width"}, atomic=True)
_SCORES = Node("scores", {"x": "width"}, {"x": "vocab"}, {"w": "vocab width"}, takes_own=True)
_UP = Node("linear", {"x": "width"}, {"x": "ffn"}, {"w1": "ffn width"})
_DOWN = Node("linear", {"x": "ffn"}, {"x": "width"}, {"w2": "width ffn"})
_PROJECT = Node("projection", {"x": "width"}, {"q": "head", "kv": "head"}, {"w1": "head width"})
_ATTEND = Node("attend", {"q": "head", "kv": "head"}, {"x": "head"}, mixes_tokens=True, atomic=True)
_OUTPUT = Node("linear", {"x": "head"}, {"x": "width"}, {"w2": "width head"})
_DISPATCH = Node("dispatch", {"x": "width"}, {"x": "expert width"}, deals=frozenset({"expert"}), mixes_tokens=True)
_EXPERTS = Node("experts", {"x": "expert width"}, {"x": "expert width"}, {"w": "expert width in"})
_COMBINE = Node("combine", {"x": "expert width"}, {"x": "width"})
_ROUTE = Node(
    "route", {"x": "width"}, {"gates": ""}, {"w": "choice width"}, frozenset({"width"}), mixes_tokens=True, affine=True
)
_EXPERTS_UP = Node("experts", {"x": "expert width"}, {"x": "expert ffn"}, {"w1": "expert ffn width"})
_EXPERTS_DOWN = Node("experts", {"x": "expert ffn"}, {"x": "expert width"}, {"w2": "expert width ffn"})
_GATED = Node("combine", {"x": "expert width", "gates": ""}, {"x": "width"}, whole=frozenset({"width"}))
_COLUMNS = [
    Node("column", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"}, takes_own=True),
    Node("column", {"x": "ffn"}, {"x": "width"}, {"w": "width ffn"}, takes_own=True),
]

_FIRST_NORM: Written = ("norm", (_EMBED, _NORM), ())
_LATER_NORM: Written = ("norm", (_ADD, _NORM), ())
_EMBEDDING: Written = ("embedding", (_LOOKUP,), ("vocab",))
_ATTENTION: list[Written] = [
    ("projection", (_PROJECT,), ("head",)),
    ("attention", (_ATTEND,), ()),
    ("output", (_OUTPUT,), ("head",)),
]
_HEAD: Written = ("head", (_SCORES,), ("vocab",))


def whole(layers: int) -> tuple[Layer, ...]:
    """Layers that are matrices and are not sliced."""
    return layers_of([("whole", (_MATRIX,), ())] * layers)


def columns(layers: int) -> tuple[Layer, ...]:
    """Matrices whose slices make features of their output."""
    return layers_of([("column", (_COLUMNS[l % 2],), ("width" if l % 2 else "ffn",)) for l in range(layers)])


def half_blocks(blocks: int, *, tied: bool = False) -> tuple[Layer, ...]:
    """Bodies and norms: embedding, of each block attention and feed-forward, head."""
    attention: Written = ("attention", (_PROJECT, _ATTEND, _OUTPUT), ("head",))
    feed_forward: Written = ("feed-forward", (_UP, _DOWN), ("ffn",))
    return layers_of(_between_norms([_EMBEDDING, *([attention, feed_forward] * blocks), _HEAD]), tied=tied)


def context_blocks(blocks: int) -> tuple[Layer, ...]:
    """Bodies and norms, where each block's body is an attention in two layers, which take each token alone."""
    return layers_of(_between_norms([_EMBEDDING, *([_ATTENTION] * blocks), _HEAD]))


def expert_blocks(blocks: int) -> tuple[Layer, ...]:
    """Bodies and norms: of each block an attention in two layers, and a mixture that routes, computes and combines."""
    mixture: list[Written] = [
        ("routing", (_ROUTE, _DISPATCH), ()),
        ("experts", (_EXPERTS_UP, _EXPERTS_DOWN), ("expert", "ffn")),
        ("combining", (_GATED,), ()),
    ]
    return layers_of(_between_norms([_EMBEDDING, *([_ATTENTION, mixture] * blocks), _HEAD]))


def mixture(blocks: int) -> tuple[Layer, ...]:
    """Layers without experts, and experts: what the first ones do is a sum and a norm, and a dispatch."""
    first: Written = ("non-expert", (_EMBED, _NORM, _DISPATCH), ())
    later: Written = ("non-expert", (_COMBINE, _ADD, _NORM, _DISPATCH), ())
    last: Written = ("non-expert", (_COMBINE, _ADD, _NORM), ())
    experts: Written = ("experts", (_EXPERTS,), ("expert",))
    return layers_of([first, experts, *(each for _ in range(blocks - 1) for each in (later, experts)), last])


def _between_norms(bodies: Sequence[Written | list[Written]]) -> list[Written]:
    """Bodies, some of several layers, with a norm before each but the first."""
    found: list[Written] = []
    for number, body in enumerate(bodies):
        if number:
            found.append(_FIRST_NORM if number == 1 else _LATER_NORM)
        found += body if isinstance(body, list) else [body]
    return found
