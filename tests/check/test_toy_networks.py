"""The judge's toy layers: each one's backward pass is the derivative of its forward, and slices add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from shardlab.language import OpKind
from tests.support.judged_collectives import combined
from tests.support.one_device import initial
from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, Column, Piece, labels, owned
from tests.support.toy_layers import batch_rows
from tests.support.toy_network import Network
from tests.support.toy_routing import EXPERTS

QUERIES, KEYS_VALUES = labels(range(WIDTH), "query"), labels(range(WIDTH), "key", "value")

TOKENS = 4
HALVES = ("sliced", "norm", "sliced", "norm", "sliced", "norm", "sliced")
CONTEXT = ("tokenwise", "norm", "project", "row", "norm", "project", "row", "norm", "tokenwise")
COLUMNS = ("column", "column", "row", "column")
MIXTURE = ("norm", "experts", "norm", "experts", "norm")
ROUTED = ("tokenwise", "norm", "sliced", "norm", "routing", "experts", "combining", "norm", "tokenwise")
NETWORKS = {
    "whole": Network(("whole", "whole")),
    "halves": Network(HALVES, TOKENS),
    "context": Network(CONTEXT, TOKENS),
    "mixture": Network(MIXTURE),
    "gated": Network(MIXTURE, gates=True),
    "routed": Network(ROUTED, TOKENS, slices=(2, 3), gates=True),
    "columns": Network(COLUMNS, TOKENS),
}
LAYERS = [(name, layer) for name, network in NETWORKS.items() for layer in range(len(network.kinds))]


def some(rows: int, width: int, seed: int, columns: tuple[Column, ...] = ()) -> Piece:
    """Numbers, the same every time."""
    many = batch_rows(tuple(1000 * seed + i for i in range(rows * -(-width // WIDTH))))
    return Piece(tuple(range(rows)), many.reshape(rows, -1)[:, :width], columns)


def weight_of(layer: int) -> Piece:
    return Piece(tuple(range(ELEMENTS)), initial(layer)[0])


def inputs_of(network: Network, layer: int) -> list[Piece]:
    """What a layer is given, of two microbatches."""
    kind, before = network.kinds[layer], network.kinds[layer - 1] if layer else ""
    rows = 2 * network.sequence
    x = some(rows, 2 * WIDTH if before == "project" else WIDTH, 1, EXPERTS if "experts" in (kind, before) else ())
    carried = int(kind == "norm" and kind in network.kinds[:layer]) + (network.gates and before == "experts")
    return [x, weight_of(layer), *(some(rows, WIDTH, 2 + number) for number in range(carried))]


def assert_derivative(
    forward: Callable[[list[Piece]], list[Piece]], given: list[Piece], above: list[Piece], gradients: list[Piece]
) -> None:
    """Outputs are polynomials of degree 8 or less in any one number: eight points give the derivative exactly."""

    def value(place: int, index: int, step: int) -> int:
        """The sum of all outputs, each times its gradient, with one number of one input changed."""
        moved = list(given)
        data = moved[place].data.copy()
        data.reshape(-1)[index] = (data.reshape(-1)[index] + step) % PRIME
        moved[place] = Piece(moved[place].where, data, moved[place].columns)
        made = forward(moved)
        return sum(int((y.data * dy.data % PRIME).sum()) for y, dy in zip(made, above, strict=True)) % PRIME

    assert len(gradients) == len(given)
    for place, gradient in enumerate(gradients):
        for index in (0, 7, gradient.data.size // 2 + 1, gradient.data.size - 1):
            apart = (value(place, index, step) - value(place, index, -step) for step in (1, 2, 3, 4))
            times = (672, -168, 32, -3)
            derivative = sum(a * b for a, b in zip(times, apart, strict=True)) * pow(840, -1, PRIME) % PRIME
            assert derivative == gradient.data.reshape(-1)[index] % PRIME, f"input {place}, number {index}"


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_backward_pass_is_the_derivative_of_the_forward(name: str, layer: int) -> None:
    network = NETWORKS[name]
    toy, given = network.layer(layer), inputs_of(network, layer)
    outputs, kept = toy.forward(given)
    above = [some(len(y.where), y.data.shape[1], 7 + i, y.columns) for i, y in enumerate(outputs)]
    above[0].scale = 0  # so nothing adds a gradient of its own
    below, half = toy.backward_input([given[0], above[0], given[1], *above[1:]], kept)
    gradients = [below[0], toy.backward_weight(given[0], above[0], half), *below[1:]]
    read = given
    if layer and network.kinds[layer - 1] == "project":  # the gradient is that of what it reads: mix * weights
        met = given[0].data[:, :WIDTH] * given[0].data[:, WIDTH:] % PRIME
        ones = np.ones_like(met)
        read = [Piece(given[0].where, np.concatenate([met, ones], axis=1)), *given[1:]]
        gradients[0] = Piece(read[0].where, np.concatenate([below[0].data, below[0].data * met % PRIME], axis=1))
    assert_derivative(lambda changed: toy.forward(changed)[0], read, above, gradients)


@pytest.mark.parametrize(("name", "layer"), [("gated", 0), ("routed", 4)])
def test_what_routing_adds_to_its_gradient_is_multiplied_by_the_scale_of_gradients(name: str, layer: int) -> None:
    toy, given = NETWORKS[name].layer(layer), inputs_of(NETWORKS[name], layer)
    outputs, kept = toy.forward(given)
    zero, *others = [replace(y, data=np.zeros_like(y.data)) for y in outputs]
    once, twice = (
        toy.backward_input([given[0], replace(zero, scale=scale), given[1], *others], kept)[0][0].data
        for scale in (1, 2)
    )
    assert once.any()
    assert (twice == 2 * once % PRIME).all()


def test_attentions_backward_pass_is_the_derivative_of_what_the_next_layer_reads() -> None:
    network, layer = NETWORKS["context"], 2
    queries, block = some(2 * TOKENS, WIDTH, 1), some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)

    def read(pieces: list[Piece]) -> list[Piece]:
        both = network.attend(layer, *pieces)
        return [Piece(both.where, both.data[:, :WIDTH] * both.data[:, WIDTH:] % PRIME)]

    above = some(2 * TOKENS, WIDTH, 3)
    made = network.attend_backward(layer, queries, block, network.attend(layer, queries, block), above)
    assert_derivative(read, [queries, block], [above], list(made))


def total(pieces: Iterable[Piece]) -> Array:
    """The sum of equally placed numbers."""
    return np.sum([piece.data for piece in pieces], axis=0) % PRIME


def cut(piece: Piece, rows: list[int]) -> Piece:
    return Piece(tuple(piece.where[i] for i in rows), piece.data[rows], piece.columns)


def test_queries_that_meet_all_blocks_in_any_order_have_attended_to_all() -> None:
    """Forward, and the gradients of both: of the queries over the blocks, of a block over the queries."""
    network, layer = NETWORKS["context"], 2
    queries, block = some(2 * TOKENS, WIDTH, 1), some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)
    gradient = some(2 * TOKENS, WIDTH, 3)
    attended = network.attend(layer, queries, block)
    whole = network.attend_backward(layer, queries, block, attended, gradient)
    parts = [[i for i in range(2 * TOKENS) if i % TOKENS in places] for places in ((3,), (0, 2), (1,))]
    assert (total(network.attend(layer, queries, cut(block, part)) for part in parts) == attended.data).all()
    met = [network.attend_backward(layer, queries, cut(block, part), attended, gradient) for part in parts]
    assert (total(dq for dq, _ in met) == whole[0].data).all()
    for part, (_, dkv) in zip(parts, met, strict=True):
        assert (dkv.data == whole[1].data[part]).all()
    met = [
        network.attend_backward(layer, cut(queries, part), block, cut(attended, part), cut(gradient, part))
        for part in parts
    ]
    assert (total(dkv for _, dkv in met) == whole[1].data).all()


def test_no_query_sees_a_later_key_or_another_sequence() -> None:
    network, queries = NETWORKS["context"], some(2 * TOKENS, WIDTH, 1)
    block = some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)
    for query, key in ((0, 1), (2, 3), (4, 3), (7, 0)):
        assert not network.attend(2, cut(queries, [query]), cut(block, [key])).data.any()
    assert network.attend(2, cut(queries, [5]), cut(block, [4])).data.any()


def slices_of(piece: Piece, count: int) -> list[Piece]:
    cuts = [slice(i * ELEMENTS // count, (i + 1) * ELEMENTS // count) for i in range(count)]
    if piece.data.ndim == 1:
        return [Piece(piece.where[part], piece.data[part]) for part in cuts]
    return [Piece(piece.where, piece.data[:, part], piece.columns[part]) for part in cuts]


def test_slices_of_half_blocks_add_up_to_the_whole() -> None:
    """Terms of a body's branch and of its input's gradient; and the loss of slices of the logits, with their sums."""
    network = NETWORKS["halves"]
    x, dy, weight = some(TOKENS, WIDTH, 1), some(TOKENS, WIDTH, 2), weight_of(2)

    def through(layer: int, part: Piece) -> tuple[Piece, Piece]:
        (y,), kept = network.layer(layer).forward([x, part])
        (dx,), _ = network.layer(layer).backward_input([x, y if layer == 6 else dy, part], kept)
        return y, dx

    for layer in (0, 2):
        y, dx = through(layer, weight)
        terms = [through(layer, part) for part in slices_of(weight, 3)]
        assert (total(term for term, _ in terms) == y.data).all()
        assert (total(term for _, term in terms) == dx.data).all()
    logits, _ = through(6, weight)
    parts = [through(6, part)[0] for part in slices_of(weight, 3)]
    (stats, *_) = combined(OpKind.ALL_GATHER, [network.stats(part) for part in parts], TOKENS)
    losses = [network.loss([part, stats]).data for part in parts]
    assert (np.concatenate(losses, axis=1) == network.loss([logits]).data).all()


def test_slices_of_columns_lie_side_by_side_and_rows_take_them_as_they_are() -> None:
    """Whoever has which slice, what is gathered is in order; of a complete gradient a column takes its own."""
    network, weight, other = NETWORKS["columns"], weight_of(1), weight_of(2)
    column, row, x, dy = network.layer(1), network.layer(2), some(TOKENS, WIDTH, 1), some(TOKENS, WIDTH, 2)
    (y,), kept = column.forward([x, weight])
    (made,), _ = row.forward([y, other])
    (dx,), _ = column.backward_input([x, dy, weight], kept)
    (between,), _ = row.backward_input([y, dy, other], kept)
    slices: list[Piece] = []
    terms: list[Piece] = []
    below: list[Piece] = []
    for part, after in zip(slices_of(weight, 3), slices_of(other, 3), strict=True):
        (slice_,), kept = column.forward([x, part])
        slices.append(slice_)
        below.append(column.backward_input([x, dy, part], kept)[0][0])
        (term,), kept = row.forward([slice_, after])
        terms.append(term)
        (gradient,), _ = row.backward_input([slice_, dy, after], kept)
        columns = np.array([number for _, number in gradient.columns], np.int64)
        assert (gradient.data == between.data[:, columns]).all()
    gathered = combined(OpKind.ALL_GATHER, slices[::-1], TOKENS)[0]
    assert gathered.columns == y.columns
    assert (gathered.data == y.data).all()
    assert (total(terms) == made.data).all()
    assert (total(below) == dx.data).all()


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (2, 3), (4, 2)])
def test_experts_on_many_ranks_make_what_they_make_on_one(ep: int, tp: int) -> None:
    """Buffers travel to their experts and back, in both directions; slices of experts make terms."""
    network, rows = Network(MIXTURE, slices=(ep, tp)), 2 * ep
    experts = network.layer(1)
    x, dy, weight = some(rows, WIDTH, 1, EXPERTS), some(rows, WIDTH, 2, EXPERTS), weight_of(1)
    mine = [list(range(2 * rank, 2 * rank + 2)) for rank in range(ep)]
    (y,), kept = experts.forward([x, weight])
    (dx,), half = experts.backward_input([x, dy, weight], kept)
    own = experts.backward_weight(x, dy, half)
    to = combined(OpKind.ALL_TO_ALL, [cut(x, part) for part in mine], 1)
    of = combined(OpKind.ALL_TO_ALL, [cut(dy, part) for part in mine], 1)
    made: list[list[Piece]] = [[] for _ in range(ep)]
    below: list[list[Piece]] = [[] for _ in range(ep)]
    grads: list[Piece] = []
    for rank, part in enumerate(slices_of(weight, ep * tp)):
        inbox, gradient = to[rank // tp], of[rank // tp]
        (results,), kept = experts.forward([inbox, part])
        (lower,), half = experts.backward_input([inbox, gradient, part], kept)
        made[rank // tp] += owned([results], inbox)
        below[rank // tp] += owned([lower], inbox)
        grads.append(experts.backward_weight(inbox, gradient, half))
    assert (np.concatenate([part.data for part in grads]) == own.data).all()
    for whole, terms in ((y, made), (dx, below)):
        parts = [combined(OpKind.ALL_REDUCE, each, 1)[0] for each in terms]
        for part, back in zip(mine, combined(OpKind.ALL_TO_ALL, parts, 1), strict=True):
            assert (back.where, back.columns) == (tuple(part), EXPERTS)
            assert (back.data == whole.data[part]).all()


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), (3, 2), (3, 4), (2, 3)])
def test_heads_exchanged_for_sequence_slices_attend_as_on_one_device(cp: int, tp: int) -> None:
    """Each rank's heads are dealt once more, for an early and a late slice of every sequence; and back."""
    tokens = 2 * cp
    network, layer = Network(CONTEXT, tokens), 2
    queries, block = some(2 * tokens, WIDTH, 1, QUERIES), some(2 * tokens, 2 * WIDTH, 2, KEYS_VALUES)
    gradient = some(2 * tokens, WIDTH, 3, labels(range(WIDTH), "feature"))
    attended = network.attend(layer, queries, block)
    expected = [attended, *network.attend_backward(layer, queries, block, attended, gradient)]
    mine = [[row for row in range(2 * tokens) if row % tokens in (rank, tokens - 1 - rank)] for rank in range(cp)]
    for slice_ in range(tp):

        def exchanged(pieces: list[Piece]) -> list[Piece]:
            return combined(OpKind.ALL_TO_ALL, pieces, tokens)

        def heads(piece: Piece, slice_: int = slice_) -> Piece:
            here = [n for n, (_, head) in enumerate(piece.columns) if head * tp // WIDTH == slice_]
            return Piece(piece.where, piece.data[:, here], tuple(piece.columns[n] for n in here))

        given = [exchanged([cut(heads(piece), rows) for rows in mine]) for piece in (queries, block, gradient)]
        made: list[list[Piece]] = [[], [], []]
        for q, kv, dy in zip(*given, strict=True):
            mixed = network.attend(layer, q, kv)
            for found, piece in zip(made, [mixed, *network.attend_backward(layer, q, kv, mixed, dy)], strict=True):
                found += owned([piece], q)
        for whole, parts in zip(expected, made, strict=True):
            for rows, back in zip(mine, exchanged(parts), strict=True):
                assert (back.where, back.columns) == (tuple(rows), heads(whole).columns)
                assert (back.data == heads(whole).data[rows]).all()


def test_gradients_of_keys_and_values_are_dealt_to_whom_the_pieces_belonged() -> None:
    """An early run and a late one for each rank, if it gave these; rows that nobody has put together go in runs."""
    whole = some(4, 2 * WIDTH, 1, KEYS_VALUES)
    gathered, _ = combined(OpKind.ALL_GATHER, [cut(whole, [0, 3]), cut(whole, [1, 2])], 4)
    assert (gathered.where, gathered.columns) == (whole.where, KEYS_VALUES)
    for columns in (slice(0, 2 * WIDTH), slice(6, 12)):
        (given,) = owned([Piece(whole.where, whole.data[:, columns], KEYS_VALUES[columns])], gathered)
        parts = combined(OpKind.REDUCE_SCATTER, [given, given], 4)
        assert [part.where for part in parts] == [(0, 3), (1, 2)]
        assert all((part.data == 2 * given.data[list(part.where)] % PRIME).all() for part in parts)
    plain = Piece(whole.where, whole.data)
    assert [part.where for part in combined(OpKind.REDUCE_SCATTER, [plain, plain], 4)] == [(0, 1), (2, 3)]
