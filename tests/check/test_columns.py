"""Mistakes on the tapes of layers cut by columns, and by heads and sequences: each is refused by the check alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.check import check
from shardlab.language import Mesh, Op, OpKind, Program, Refused, Sizes, Strategy, trace
from shardlab.strategies.column_parallel import column_parallel
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from tests.support.refusing import refuses

TWO = Mesh(tp=2)
HEADS = Plan(Mesh(cp=2, tp=2), sequence_parallel=True)
PROGRAMS: dict[str, Callable[[], Program]] = {
    "columns": lambda: traced(column_parallel, TWO, Sizes.columns(3)),
    "heads": lambda: traced(planned(HEADS), HEADS.mesh, Sizes.context_blocks(1)),
    "recomputed": lambda: traced(planned(Plan(TWO, recompute="full")), TWO, Sizes.half_blocks(2)),
}
Change = Callable[[Op], Op]


def traced(strategy: Strategy, mesh: Mesh, sizes: Sizes) -> Program:
    return trace(strategy, mesh, sizes, 2)


def everywhere(program: Program, change: Change) -> None:
    """Make one mistake on every rank."""
    for tape in program.tapes:
        tape[:] = [change(op) for op in tape]


def another_collective(kind: OpKind, wrong: OpKind, layer: int) -> Change:
    return lambda op: op._replace(kind=wrong) if op.kind is kind and op.layer == layer else op


def without(program: Program, kind: OpKind, layer: int) -> None:
    """What a collective gives is taken to be what it was given."""
    for tape in program.tapes:
        at, op = next((at, op) for at, op in enumerate(tape) if op.kind is kind and op.layer == layer)
        (given,), (made,) = op.inputs, op.outputs
        kept = [
            each
            for i, each in enumerate(tape)
            if i != at and not (each.kind is OpKind.WAIT and each.handle == op.handle)
        ]
        kept = [each for each in kept if each.kind is not OpKind.FREE or each.inputs != (given,)]
        swap = {made: given}
        tape[:] = [each._replace(inputs=tuple(swap.get(n, n) for n in each.inputs)) for each in kept]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_program_passes(name: str) -> None:
    check(PROGRAMS[name]())


@pytest.mark.parametrize(
    ("kind", "wrong", "layer"),
    [
        (OpKind.ALL_GATHER, OpKind.ALL_REDUCE, 1),
        (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, 2),
        (OpKind.ALL_GATHER, OpKind.ALL_REDUCE, 3),
        (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, 1),
        (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, 2),
    ],
)
def test_columns_are_gathered_and_terms_are_summed(kind: OpKind, wrong: OpKind, layer: int) -> None:
    program = PROGRAMS["columns"]()
    everywhere(program, another_collective(kind, wrong, layer))
    with pytest.raises(Refused):
        check(program)


@pytest.mark.parametrize(("kind", "layer"), [(OpKind.ALL_GATHER, 1), (OpKind.ALL_REDUCE, 2), (OpKind.ALL_REDUCE, 1)])
def test_what_is_not_put_together_is_refused(kind: OpKind, layer: int) -> None:
    program = PROGRAMS["columns"]()
    without(program, kind, layer)
    with pytest.raises(Refused):
        check(program)


def test_terms_of_a_projections_gradient_are_reduced() -> None:
    program = PROGRAMS["heads"]()
    project = next(l for l, layer in enumerate(program.sizes.signatures) if layer.projects)
    everywhere(program, another_collective(OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, project))
    with pytest.raises(Refused):
        check(program)


def test_heads_of_another_rank_are_refused() -> None:
    """Rank 0's projection is of the other rank's heads."""
    program = PROGRAMS["heads"]()
    project = next(l for l, layer in enumerate(program.sizes.signatures) if layer.projects)
    tape = program.tapes[0]
    at = next(i for i, op in enumerate(tape) if op.kind is OpKind.LOAD_WEIGHT and op.layer == project)
    other = next(op.holds for op in program.tapes[1] if op.kind is OpKind.LOAD_WEIGHT and op.layer == project)
    tape[at] = tape[at]._replace(holds=other)
    with refuses("other pieces", layer=2):
        check(program)


def test_a_block_that_was_not_computed_again_has_no_backward_pass() -> None:
    program = PROGRAMS["recomputed"]()
    tape = program.tapes[0]
    loss = next(at for at, op in enumerate(tape) if op.kind is OpKind.LOSS)
    at = next(i for i, op in enumerate(tape) if i > loss and op.kind is OpKind.FORWARD)
    del tape[at]
    with pytest.raises(Refused):
        check(program)
