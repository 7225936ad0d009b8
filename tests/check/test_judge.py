"""The judge of the other tests is tested itself: what it calls right, wrong, hanging and broken, and what it knows."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys

import pytest

from shardlab.language import Mesh, OpKind, Program, Strategy, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.check.programs import built_in, exchanged, gradients_swapped
from tests.support.interpreter import Outcome, judge
from tests.support.mutations import MUTATIONS, changed, moved, places, with_tape
from tests.support.random_plans import Planned
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
    **dict.fromkeys(("single", "grad-accum"), WHOLE),
    **dict.fromkeys(("ddp", "wsdp", "fsdp", "zero-1", "zero-2", "zero-3"), DATA),
    **dict.fromkeys(("hsdp", "partially-sharded"), REPLICAS),
    **dict.fromkeys(("pipeline", "gpipe"), BY_RANK),
    **dict.fromkeys(("1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2"), LOOPS),
    **dict.fromkeys(("zb-v", "dualpipe-v"), TWICE),
    **dict.fromkeys(("pipeline-fsdp", "breadth-first-fsdp"), GRID),
    **dict.fromkeys(("3d", "4d"), BLOCKS),
    "column-parallel": [(2, 1, 2), (3, 3, 2), (4, 2, 3)],
    "tensor-parallel": [(2, 1, 2), (4, 2, 1)],
    "context-parallel": [(2, 1, 2), (3, 2, 1), (4, 1, 1)],
    "expert-parallel": [(2, 1, 2), (3, 2, 3), (4, 1, 8)],
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in STRATEGIES for size in SIZES[name]])
def test_every_strategy_is_judged_right(name: str, size: tuple[int, int, int]) -> None:
    assert judge(built_in(name, *size)).outcome is Outcome.RIGHT


def imports(module: str) -> set[str]:
    """What a module takes from shardlab, itself and through its own parts."""
    taken: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = node.module == "tests.support"
            taken |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {str(node.module)}
            if node.module and node.module.startswith("shardlab"):
                taken |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name for name in taken if name.startswith("tests.")}
    found = {name for name in taken if name.startswith("shardlab")}
    return found.union(*map(imports, parts))


def test_the_judge_knows_neither_rules_nor_checks() -> None:
    """Only what a tape is: none of its parts, and nothing that these import, takes more from shardlab."""
    assert imports("tests.support.interpreter") == {
        "shardlab.language",
        "shardlab.language.Op",
        "shardlab.language.OpKind",
        "shardlab.language.Program",
    }


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
        ("missing reduce", "pipeline-fsdp"),
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


RING = Planned(Plan(Mesh(cp=3)), 2, "context", 1)
HEADS = Planned(Plan(Mesh(cp=2, tp=2), context="ulysses"), 2, "context", 1)
SLICED = Planned(Plan(Mesh(ep=2, tp=2)), 2, "routed", 2)
SHARED = Planned(Plan(Mesh(cp=2)), 2, "routed apart", 1)
MIXTURE = Planned(Plan(Mesh(ep=2), "zb-h1"), 2, "mixture", 4)
TIED = Planned(Plan(Mesh(pp=2)), 2, "tied", 2)


@pytest.mark.parametrize(
    ("kind", "plan", "outcome"),
    [
        ("block met twice", RING, Outcome.WRONG),
        ("block left out", RING, Outcome.WRONG),
        ("attended in part", RING, Outcome.WRONG),
        ("another block sent", RING, Outcome.WRONG),
        ("hop the other way", RING, Outcome.WRONG),
        ("hop left out", RING, Outcome.WRONG),
        ("exchange left out", MIXTURE, Outcome.BROKEN),
        ("exchanged twice", MIXTURE, Outcome.BROKEN),
        ("value of another exchange", MIXTURE, Outcome.WRONG),
        ("exchange left out", HEADS, Outcome.WRONG),
        ("exchange in another order", HEADS, Outcome.WRONG),
        ("exchange in another order", HEADS, Outcome.RIGHT),
        ("value of another exchange", HEADS, Outcome.WRONG),
        ("exchange in another order", SLICED, Outcome.WRONG),
        ("missing reduce", SLICED, Outcome.WRONG),
        ("double reduce", SLICED, Outcome.WRONG),
        ("reduced after it is used", SLICED, Outcome.WRONG),
        ("collectives of one value in another order", SLICED, Outcome.RIGHT),
        ("slice of another rank", SLICED, Outcome.WRONG),
        ("another part of the experts", SHARED, Outcome.WRONG),
        ("carried of another pass", SHARED, Outcome.WRONG),
        ("missing reduce", SHARED, Outcome.WRONG),
        ("carried of another pass", MIXTURE, Outcome.WRONG),
        ("slice of another rank", MIXTURE, Outcome.WRONG),
        ("use of a tied weight left out", TIED, Outcome.WRONG),
        ("use of a tied weight twice", TIED, Outcome.WRONG),
        ("squares of a tied weight twice", TIED, Outcome.WRONG),
        ("head updated as if alone", TIED, Outcome.WRONG),
    ],
)
def test_mistakes_in_attention_experts_and_ties_are_found(kind: str, plan: Planned, outcome: Outcome) -> None:
    program = plan.program
    assert judge(program).right
    mutants = (mutant for mutant in MUTATIONS[kind](program) if mutant.tapes != program.tapes)
    assert any(judge(mutant).outcome is outcome for mutant in itertools.islice(mutants, 100))


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
