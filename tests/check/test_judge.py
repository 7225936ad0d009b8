"""The judge of the other tests is tested itself: what it calls right, wrong, hanging and broken, and what it knows."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest

from shardlab.program import OpKind, Program, Strategy, trace
from tests.check.programs import JUDGED, built_in, exchanged, gradients_swapped
from tests.support import interpreter, interpreter_rooted, pieces, toy_halves, toy_layers
from tests.support.interpreter import Outcome, initial, judge
from tests.support.mutations import MUTATIONS, changed, moved, places, with_tape
from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Piece
from tests.support.toy_halves import TOKENS, Halves
from tests.support.toy_layers import backward_input, backward_weight, batch_rows, forward_layer
from tests.train.user_programs import split_fsdp, split_pipeline, zero_1

WHOLE = [(1, 1, 1), (1, 3, 4)]
DATA = [(1, 1, 1), (2, 2, 4), (3, 2, 3), (4, 3, 8)]
REPLICAS = [(2, 2, 4), (4, 3, 8)]
BY_RANK = [(1, 1, 1), (2, 4, 2), (3, 3, 4), (4, 8, 4)]
LOOPS = [(1, 1, 1), (2, 4, 3), (3, 3, 4), (4, 9, 6)]
TWICE = [(1, 2, 2), (2, 4, 4), (3, 7, 6)]
GRID = [(1, 1, 1), (4, 4, 2), (6, 4, 6), (16, 8, 8)]
BLOCKS = [(4, 1, 2), (8, 2, 4)]
SIZES = {  # ranks, layers or blocks, microbatches
    **dict.fromkeys(("single", "grad_accum"), WHOLE),
    **dict.fromkeys(("ddp", "wsdp", "fsdp", "zero-1", "zero-2", "zero-3"), DATA),
    **dict.fromkeys(("hsdp", "partially-sharded"), REPLICAS),
    **dict.fromkeys(("pipeline", "gpipe"), BY_RANK),
    **dict.fromkeys(("1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2"), LOOPS),
    **dict.fromkeys(("zb-v", "dualpipe-v"), TWICE),
    **dict.fromkeys(("pipeline_fsdp", "breadth-first-fsdp"), GRID),
    **dict.fromkeys(("3d", "4d"), BLOCKS),
    "tensor_parallel": [(2, 1, 2), (4, 2, 1)],
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in JUDGED for size in SIZES[name]])
def test_every_strategy_is_judged_right(name: str, size: tuple[int, int, int]) -> None:
    assert judge(built_in(name, *size)).outcome is Outcome.RIGHT


def test_the_judge_knows_neither_rules_nor_checks() -> None:
    taken: set[str] = set()
    for module in (interpreter, interpreter_rooted, pieces, toy_halves, toy_layers):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                taken |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert {name for name in taken if name.startswith("shardlab")} == {
        "shardlab.program.Op",
        "shardlab.program.OpKind",
        "shardlab.program.Program",
    }
    parts = ("tests.support.pieces.", "tests.support.toy_halves.", "tests.support.toy_layers.")
    taken.remove("tests.support.interpreter_rooted")
    assert all(name.startswith(parts) for name in taken if name.startswith("tests"))


def test_the_toy_networks_backward_is_the_derivative_of_its_forward() -> None:
    """A layer is quadratic in each weight and input, so a central difference is exact."""
    weight, x = initial(0)[0], batch_rows((0, 1))
    _, z = forward_layer(0, x, weight)
    dy = batch_rows((5, 6))
    dx, dz = backward_input(z, dy, weight)
    dw = backward_weight(x, dz)
    half = pow(2, -1, PRIME)

    def change(step_x: np.ndarray, step_w: np.ndarray) -> int:
        ahead, _ = forward_layer(0, (x + step_x) % PRIME, (weight + step_w) % PRIME)
        behind, _ = forward_layer(0, (x - step_x) % PRIME, (weight - step_w) % PRIME)
        return int(((ahead - behind) % PRIME * half % PRIME * dy % PRIME).sum() % PRIME)

    for place in (0, 7, WIDTH * WIDTH - 1):
        assert change(np.zeros_like(x), np.eye(1, weight.size, place, dtype=np.int64)[0]) == dw[place]
    for row, column in ((0, 0), (1, WIDTH - 1)):
        step = np.zeros_like(x)
        step[row, column] = 1
        assert change(step, np.zeros_like(weight)) == dx[row, column]


NORMS = (False, True, False, True, False, True, False)
"""Which layers of two half-blocks are norms."""


@pytest.mark.parametrize("layer", range(len(NORMS)))
def test_the_half_blocks_backward_is_the_derivative_of_their_forward(layer: int) -> None:
    """Each output is a polynomial of degree 4 or less in any one number, whose derivative five points give exactly."""
    network, where = Halves(NORMS), tuple(range(2 * TOKENS))
    is_norm, last = NORMS[layer], layer == len(NORMS) - 1
    given = [Piece(where, batch_rows(where)), Piece(tuple(range(ELEMENTS)), initial(layer)[0])]
    if is_norm and layer > 1:
        given.append(Piece(where, batch_rows(tuple(row + 50 for row in where))))
    outputs, kept = network.forward(layer, given)
    above = [Piece(where, batch_rows(tuple(row + 90 + 9 * i for row in where))) for i in range(len(outputs))]
    read = [given[0], above[0], given[1], *above[1:]]
    below, half = network.backward_input(layer, read, kept)
    gradients = [below[0], network.backward_weight(layer, given[0], above[0], half), *below[1:]]
    assert len(outputs) == (2 if is_norm and layer < len(NORMS) - 2 else 1)
    assert len(gradients) == len(given)
    assert outputs[0].columns == (tuple(range(WIDTH)) if last else ())

    def value(place: int, index: int, step: int) -> int:
        """The sum of all outputs, each times its gradient, with one number of one input changed."""
        moved = list(given)
        data = moved[place].data.copy()
        data.reshape(-1)[index] = (data.reshape(-1)[index] + step) % PRIME
        moved[place] = Piece(moved[place].where, data)
        made, _ = network.forward(layer, moved)
        return sum(int((y.data * dy.data % PRIME).sum()) for y, dy in zip(made, above, strict=True)) % PRIME

    for place, gradient in enumerate(gradients):
        for index in (0, 7, gradient.data.size // 2 + 1, gradient.data.size - 1):
            ahead, behind = (value(place, index, step) - value(place, index, -step) for step in (1, 2))
            derivative = (8 * ahead - behind) * pow(12, -1, PRIME) % PRIME
            assert derivative == gradient.data.reshape(-1)[index]


def test_slices_of_half_blocks_add_up_to_the_whole() -> None:
    """Terms of a body's branch and of its input's gradient; and the loss of slices of the logits, with their sums."""
    network, where = Halves(NORMS), tuple(range(TOKENS))
    x, weight = Piece(where, batch_rows(where)), Piece(tuple(range(ELEMENTS)), initial(2)[0])
    dy = Piece(where, batch_rows(tuple(row + 9 for row in where)))
    cuts = [slice(i * ELEMENTS // 3, (i + 1) * ELEMENTS // 3) for i in range(3)]
    slices = [Piece(weight.where[cut], weight.data[cut]) for cut in cuts]

    def through(layer: int, part: Piece) -> tuple[Piece, Piece]:
        (y,), kept = network.forward(layer, [x, part])
        (dx,), _ = network.backward_input(layer, [x, y if layer == 6 else dy, part], kept)
        return y, dx

    for layer in (0, 2):
        y, dx = through(layer, weight)
        terms = [through(layer, part) for part in slices]
        assert (sum(term.data for term, _ in terms) % PRIME == y.data).all()
        assert (sum(term.data for _, term in terms) % PRIME == dx.data).all()
    logits, _ = through(6, weight)
    parts = [through(6, part)[0] for part in slices]
    (stats, *_) = pieces.combined(OpKind.ALL_GATHER, [network.stats(part) for part in parts], TOKENS)
    losses = [network.loss([part, stats]).data for part in parts]
    assert (np.concatenate(losses, axis=1) == network.loss([logits]).data).all()


def outcomes(kind: str, program: Program) -> set[Outcome]:
    return {judge(mutant).outcome for mutant in MUTATIONS[kind](program)}


def first(program: Program, kind: OpKind, rank: int = 0) -> int:
    return next(at for r, at, _ in places(program, kind) if r == rank)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("missing reduce", "ddp"),
        ("double reduce", "ddp"),
        ("weight left stale", "single"),
        ("second update", "single"),
        ("missing reduce", "pipeline_fsdp"),
    ],
)
def test_gradients_and_updates_missing_or_doubled_are_wrong(kind: str, strategy: str) -> None:
    verdicts = outcomes(kind, built_in(strategy))
    assert Outcome.RIGHT not in verdicts
    assert verdicts & {Outcome.WRONG, Outcome.BROKEN}
    if kind != "missing reduce" or strategy == "ddp":  # a shard's place filled with a whole gradient cannot be used
        assert Outcome.WRONG in verdicts


def test_another_microbatch_is_wrong() -> None:
    program = built_in("ddp")
    at = first(program, OpKind.LOAD_BATCH)
    op = program.tapes[0][at]
    theirs = program.tapes[1][first(program, OpKind.LOAD_BATCH, rank=1)]
    verdict = judge(changed(program, 0, at, op._replace(holds=theirs.holds)))
    assert verdict.outcome is Outcome.WRONG
    assert verdict.reason == "rank 0 does not end with layer 0 updated"


def test_messages_that_change_places_are_wrong() -> None:
    """Nothing breaks and nothing hangs: the numbers alone are others."""
    assert judge(gradients_swapped(swapped=False)).right
    assert judge(gradients_swapped(swapped=True)).outcome is Outcome.WRONG


def test_an_update_with_the_gradient_of_another_layer_is_wrong() -> None:
    program = built_in("single")
    a, b = (at for _, at, _ in places(program, OpKind.UPDATE))
    one, other = program.tapes[0][a], program.tapes[0][b]
    tape = [op for op in program.tapes[0] if op.inputs not in (one.inputs[:1], other.inputs[:1])]  # not freed before
    a, b = tape.index(one), tape.index(other)
    tape[a] = one._replace(inputs=(other.inputs[0], *one.inputs[1:]))
    tape[b] = other._replace(inputs=(one.inputs[0], *other.inputs[1:]))
    ends = [op for op in program.tapes[0] if op.inputs in (one.inputs[:1], other.inputs[:1])]
    assert judge(with_tape(program, 0, [*tape, *ends])).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("kind", "user", "outcome"),
    [
        ("weight half of another microbatch", split_pipeline, Outcome.BROKEN),
        ("weight half before its input half", split_fsdp, Outcome.BROKEN),
        ("whole backward and a weight half", split_fsdp, Outcome.BROKEN),
        ("norm without a layer", zero_1, Outcome.WRONG),
        ("part of the norm twice", zero_1, Outcome.WRONG),
        ("norm of an unfinished gradient", zero_1, Outcome.WRONG),
        ("update with a part of the norm", split_fsdp, Outcome.WRONG),
        ("update without the norm", zero_1, Outcome.WRONG),
        ("state of another shard", zero_1, Outcome.BROKEN),
        ("new weight not gathered", zero_1, Outcome.WRONG),
    ],
)
def test_mistakes_in_halves_slices_and_norms_are_found(kind: str, user: Strategy, outcome: Outcome) -> None:
    program = trace(user, 2, 2, 2)
    assert judge(program).right
    assert outcome in outcomes(kind, program)


def test_a_slice_that_nobody_updates_is_wrong() -> None:
    program = built_in("single", 1, 2, 1)
    tape = [op for op in program.tapes[0] if op.kind is OpKind.LOAD_BATCH]
    end = [op._replace(inputs=tape[0].outputs) for op in program.tapes[0] if op.kind is OpKind.FREE]
    verdict = judge(with_tape(program, 0, [*tape, end[0]]))
    assert verdict.outcome is Outcome.WRONG
    assert verdict.reason == "some elements are updated nowhere"


def test_a_message_that_is_never_sent_hangs() -> None:
    assert outcomes("dropped send", built_in("pipeline")) == {Outcome.HANGS}


def test_two_ranks_that_both_receive_first_hang() -> None:
    program = trace(exchanged("send first"), 2, 1, 2)
    for rank in range(2):
        recv = first(program, OpKind.RECV, rank)
        send = first(program, OpKind.SEND, rank)
        program = moved(moved(program, rank, recv + 1, send), rank, recv + 1, send)  # its wait first, then itself
    assert judge(program).outcome is Outcome.HANGS


def test_a_collective_that_a_member_leaves_out_hangs() -> None:
    assert outcomes("collective dropped on one rank", built_in("ddp")) == {Outcome.HANGS}


@pytest.mark.parametrize(
    ("kind", "strategy", "reason"),
    [
        ("dropped recv", "pipeline", "does not live"),
        ("early free", "single", "does not live"),
        ("missing free", "single", "left over"),
        ("missing wait", "fsdp", "does not live"),
        ("duplicated op", "single", "written over"),
        ("missing gather", "fsdp", "not a whole layer"),
        ("collective of another kind", "fsdp", "disagree"),
        ("wait for another handle", "ddp", "not in flight"),
        ("malformed op", "ddp", "other inputs or outputs"),
    ],
)
def test_what_cannot_be_executed_is_broken(kind: str, strategy: str, reason: str) -> None:
    verdicts = [judge(mutant) for mutant in MUTATIONS[kind](built_in(strategy))]
    assert any(verdict.outcome is Outcome.BROKEN and reason in verdict.reason for verdict in verdicts)


def test_a_message_that_nobody_receives_is_broken() -> None:
    program = built_in("pipeline")
    send = first(program, OpKind.SEND)
    op = program.tapes[0][send]
    again = [op._replace(handle=77), next(o for o in program.tapes[0] if o.handle == op.handle and o is not op)]
    again[1] = again[1]._replace(handle=77)
    verdict = judge(changed(program, 0, send, op, *again))
    assert verdict.outcome is Outcome.BROKEN
