"""Calls of the rules with values that do not fit, by a name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlab.common.errors import of_layer
from shardlab.language import Holds, Kind, Mesh, OpKind, Sizes, Spec
from shardlab.language.rules import arithmetic, attention, collectives, optimizer_step, refusals
from shardlab.language.rules.kinds import WHOLE, factor_of
from shardlab.language.rules.layer_rules import LayerRules
from shardlab.language.rules.spec import Term
from tests.language.rules.toys import Toy
from tests.support.random_plans import routed

Calls = dict[str, Callable[[], object]]

WHOLE_BLOCKS = Toy(Sizes.puzzle(1), microbatches=2)
BODIES = Toy(Sizes.half_blocks(1), Mesh(tp=2), 2)
"""Bodies 0, 2, 4, 6 and norms 1, 3, 5, cut along heads, features and the vocabulary; two slices of each sequence."""

EXPERTS = Toy(routed(2), Mesh(ep=2))
"""Layer 4 sends tokens to experts, 5 has these, 6 combines what they make."""


def rows(kind: Kind, cells: int, toy: Toy = BODIES, layer: int = 1, **form: Any) -> Spec:
    return toy.spec_of(kind, layer, cells, **form)


def buffers(microbatches: int, experts: int = 0, layer: int = 5) -> Spec:
    """Buffers of some experts, as a bit set (0: of all)."""
    return EXPERTS.spec_of(Kind.ACTIVATION, layer, microbatches, slices={"expert": experts} if experts else {})


def exchanged(*members: Spec) -> Callable[[], object]:
    return lambda: EXPERTS.meet(OpKind.ALL_TO_ALL, *members)


def scaled(by: int, kind: Kind = Kind.GRAD_WEIGHT) -> Spec:
    return arithmetic.scale(rows(kind, by), factor_of(by))


def queries(cells: int, **form: Any) -> Spec:
    return rows(Kind.QUERIES, cells, **form)


def keys(cells: int, **form: Any) -> Spec:
    return rows(Kind.KEYS_VALUES, cells, **form)


def layer_of(toy: Toy, number: int) -> LayerRules:
    return toy.rules.layers[number]


def weight_of(toy: Toy, layer: int, holds: Holds = WHOLE) -> Spec:
    return toy.spec_of(Kind.WEIGHT, layer, 0, holds)


def parted(layer: int, part: Holds) -> Callable[[], object]:
    """A forward pass to a part of the experts."""
    given = EXPERTS.spec_of(Kind.ACTIVATION, layer, 0b1)
    return lambda: layer_of(EXPERTS, layer).forward([given], weight_of(EXPERTS, layer), part=part)


def routed_back(term: int) -> object:
    """A backward pass of what was sent to expert 0, given the routing's gradient of others."""
    gradients = [
        EXPERTS.spec_of(Kind.GRAD_ACTIVATION, 5, 0b1, slices={"expert": 0b01}),
        EXPERTS.spec_of(Kind.GRAD_ROUTING, 6, 0b1, term=Term(("expert",), term)),
    ]
    return layer_of(EXPERTS, 4).backward(EXPERTS.spec_of(Kind.ACTIVATION, 4, 0b1), gradients, weight_of(EXPERTS, 4))


def unevenly_scaled() -> object:
    gradients = [
        rows(Kind.GRAD_ACTIVATION, 0b1, layer=2),
        arithmetic.scale(rows(Kind.GRAD_RESIDUAL, 0b1, layer=3), factor_of(2)),
    ]
    return layer_of(BODIES, 1).backward(rows(Kind.ACTIVATION, 0b1), gradients, weight_of(BODIES, 1))


def term(index: str) -> Spec:
    return rows(Kind.ACTIVATION, 0b1, term=Term((index,), 0b1))


ATTENDED = attention.attend(1, queries(0b10), keys(0b01))

RULES: Calls = {
    "masked keys": lambda: attention.attend(1, queries(0b01), keys(0b10)),
    "merged terms": lambda: BODIES.meet(OpKind.ALL_REDUCE, ATTENDED, ATTENDED),
    "not exchanged": lambda: WHOLE_BLOCKS.meet(
        OpKind.ALL_TO_ALL, *[rows(Kind.ACTIVATION, cells, WHOLE_BLOCKS, 0) for cells in (0b01, 0b10)]
    ),
    "not gathered": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, 0b11, slices={"head": piece}) for piece in (1, 2)]
    ),
    "other indices": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, 0b11, slices={"ffn": n, "head": n}) for n in (1, 2)]
    ),
    "other factors": lambda: arithmetic.add_two(scaled(1), scaled(2)),
    "frozen in the norm": lambda: optimizer_step.want_no_frozen(
        of_layer("update", 1), rows(Kind.SCALAR, 0), Holds(0b01, 2)
    ),
    "missing microbatches, of cut sequences": lambda: optimizer_step.norm(7, 1, rows(Kind.GRAD_WEIGHT, 0b0011)),
    "missing terms, of keys": lambda: attention.attend_backward(
        1, queries(0b10), keys(0b01), ATTENDED, rows(Kind.GRAD_ACTIVATION, 0b10, layer=2)
    ),
    "other tokens, of keys": lambda: attention.attend(1, queries(0b0011), keys(0b1100)),
    "other tokens, of one microbatch": lambda: attention.attend(1, queries(0b0110), keys(0b0110)),
    "wrong layer, of queries": lambda: attention.attend(2, queries(0b01), keys(0b01)),
    "other pieces, of keys": lambda: attention.attend(1, queries(0b01), keys(0b01, slices={"head": 0b01})),
    "unknown slice": lambda: collectives.slice_of(rows(Kind.WEIGHT, 0), 3, 2),
    "unknown slice, of a layer that deals nothing": parted(5, Holds(1, 2)),
    "wrong kind, sliced": lambda: collectives.slice_of(rows(Kind.SCALAR, 0), 0, 2),
    "wrong kind, scaled": lambda: arithmetic.scale(rows(Kind.WEIGHT, 0), factor_of(2)),
    "wrong factor": lambda: arithmetic.scale(rows(Kind.GRAD_WEIGHT, 0b1), factor_of(0)),
    "does not divide, sliced": lambda: collectives.slice_of(rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS), 0, 2),
    "does not divide, slices of sequences": lambda: collectives.slice_of(rows(Kind.ACTIVATION, 0b1), 0, 2),
    "does not divide, into parts of the experts": parted(4, Holds(1, 3)),
    "does not divide, experts": exchanged(*(buffers(1 << n) for n in range(3))),
    "does not divide, one expert": exchanged(*(buffers(1 << n, 0b01) for n in range(2))),
    "does not divide, microbatches": exchanged(buffers(0b1, 0b01), buffers(0b1, 0b10)),
    "other order, of experts": exchanged(buffers(0b11, 0b10), buffers(0b11, 0b01)),
    "other tokens, of experts": exchanged(buffers(0b0011, 0b01), buffers(0b1100, 0b10)),
    "other tokens, more of them": exchanged(buffers(0b1), buffers(0b110)),
    "other values, exchanged": exchanged(buffers(0b1), buffers(0b1, 0b01)),
    "other values, gathered": lambda: BODIES.meet(
        OpKind.ALL_GATHER, *[rows(Kind.ACTIVATION, cells, slices={"ffn": cells}) for cells in (1, 2)]
    ),
    "other factors, gathered": lambda: BODIES.meet(OpKind.ALL_GATHER, scaled(1), scaled(2)),
    "other factors, of one pass": unevenly_scaled,
    "other sums": lambda: arithmetic.add_two(term("ffn"), term("head")),
    "other pieces, of experts": lambda: layer_of(EXPERTS, 5).forward(
        [buffers(0b1, 0b01)], weight_of(EXPERTS, 5, Holds(0b10, 2))
    ),
    "other pieces, of the routing": lambda: routed_back(0b10),
    "other dtypes": lambda: arithmetic.cast(rows(Kind.GRAD_WEIGHT, 0b1), "float7"),
    "other dtypes, of one sum": lambda: arithmetic.add_two(
        rows(Kind.GRAD_WEIGHT, 0b1), arithmetic.cast(rows(Kind.GRAD_WEIGHT, 0b10), "bfloat16")
    ),
    "other dtypes, of what is computed with": lambda: layer_of(WHOLE_BLOCKS, 0).forward(
        [rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS, 0)], arithmetic.cast(weight_of(WHOLE_BLOCKS, 0), "bfloat16")
    ),
    "elsewhere": lambda: refusals.offload(weight_of(WHOLE_BLOCKS, 0), "attic"),
    "elsewhere, on the disk": lambda: refusals.offload(rows(Kind.GRAD_WEIGHT, 0b1), "disk"),
    "elsewhere, on the device": lambda: refusals.reload(weight_of(WHOLE_BLOCKS, 0)),
    "elsewhere, computed with": lambda: layer_of(WHOLE_BLOCKS, 0).forward(
        [rows(Kind.ACTIVATION, 0b1, WHOLE_BLOCKS, 0)], refusals.offload(weight_of(WHOLE_BLOCKS, 0), "host")
    ),
    "elsewhere, of one sum": lambda: arithmetic.add_two(
        rows(Kind.GRAD_WEIGHT, 0b1), refusals.offload(rows(Kind.GRAD_WEIGHT, 0b10), "host")
    ),
    "wrong kind, offloaded": lambda: refusals.offload(rows(Kind.SCALAR, 0), "host"),
    "missing terms, offloaded": lambda: refusals.offload(term("ffn"), "host"),
    "wrong kind, cast": lambda: arithmetic.cast(rows(Kind.SCALAR, 0), "bfloat16"),
    "wrong step, cast": lambda: arithmetic.cast(rows(Kind.WEIGHT, 0, step=1), "bfloat16"),
}
