"""Any program that is right by construction traces, passes the check, and is judged right by the numbers."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardlab.check import ChannelModel, check
from shardlab.check.deadlock import Replay, queues_empty
from shardlab.language import Mesh, OpKind, Program, Refused, Spec, Strategy, World, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.check.programs import built_in, exchanged, gradients_swapped
from tests.support.channel_judge import hangs
from tests.support.interpreter import Outcome, judge
from tests.support.mutations import MUTATIONS, changed, move_op, places, with_tape
from tests.support.passing import is_right, is_right_everywhere
from tests.support.random_layers import random_attention, random_experts
from tests.support.random_plans import Planned, plans
from tests.support.random_programs import Shape, chatter, program_of, random_program, shapes
from tests.support.thorough import examples, sampled
from tests.train.user_programs import split_fsdp, split_pipeline, zero_1


@settings(max_examples=examples(150))  # and many more in `tests.support.long_run`
@given(shapes())
def test_right_programs_pass_and_compute_the_right_numbers(shape: Shape) -> None:
    checked = is_right(random_program(shape))
    assert checked.models[ChannelModel.BUFFERED] is None
    assert checked.models[ChannelModel.IN_ORDER] is None


@settings(max_examples=examples(30))
@given(plans())
def test_any_plan_is_right_on_any_channel(shape: Planned) -> None:
    """Whole layers and half-blocks, every mapping of shards to axes, every schedule."""
    is_right_everywhere(shape.program)


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_queries_may_meet_blocks_in_any_way_that_is_right(seed: int) -> None:
    """Slices dealt to any rank, blocks sent straight to where they are seen, gradients added up in any order."""
    checked = is_right(random_attention(seed))
    assert checked.models[ChannelModel.RENDEZVOUS] is None


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_buffers_of_any_number_of_microbatches_may_travel_together(seed: int) -> None:
    """Any dealing of microbatches, recomputed experts, halves of backward passes as late as may be."""
    is_right_everywhere(random_experts(seed))


@settings(max_examples=examples(60))
@given(shapes())
def test_the_check_derives_a_spec_of_every_value_and_a_meeting_of_every_communication(shape: Shape) -> None:
    program = random_program(shape)
    checked = check(program)
    for tape, specs, communication_of in zip(program.tapes, checked.specs, checked.communication_of, strict=True):
        assert set(specs) == {number for op in tape for number in op.outputs}
        assert set(communication_of) == {op.handle for op in tape if op.handle >= 0}
    for communication in checked.communications:
        ops = [program.tapes[member.rank][member.op] for member in communication.participants]
        if communication.group is None:
            assert [op.kind for op in ops] == [OpKind.SEND, OpKind.RECV]
        else:
            assert {(op.kind, op.group) for op in ops} == {(ops[0].kind, communication.group)}


@settings(max_examples=examples(60))
@given(shapes())
def test_a_program_is_traced_to_the_same_tapes_every_time(shape: Shape) -> None:
    assert random_program(shape).fingerprint() == random_program(shape).fingerprint()


@settings(max_examples=examples(60))
@given(shapes())
def test_every_microbatch_passes_every_layer_once_in_each_direction(shape: Shape) -> None:
    """Counted on the tapes: the specs that the check derived, not what tracing believed."""
    program = random_program(shape)
    checked = check(program)
    masks: dict[tuple[str, int], int] = {}
    halves = {
        OpKind.BACKWARD: ("input", "weight"),
        OpKind.BACKWARD_INPUT: ("input",),
        OpKind.BACKWARD_WEIGHT: ("weight",),
    }
    for tape, specs in zip(program.tapes, checked.specs, strict=True):
        for op in tape:
            for half in halves.get(op.kind, ()):
                mask = specs[op.inputs[0]].microbatches
                assert not masks.get((half, op.layer), 0) & mask
                masks[half, op.layer] = masks.get((half, op.layer), 0) | mask
    all_microbatches = (1 << shape.microbatches) - 1
    assert masks == {(half, layer): all_microbatches for half in ("input", "weight") for layer in range(shape.layers)}


# The judge of the other tests is tested itself: its verdicts right, wrong, hanging and broken, and its imports.


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
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v"), TWICE),
    **dict.fromkeys(("pipeline-fsdp", "breadth-first-fsdp"), GRID),
    **dict.fromkeys(("3d", "4d"), BLOCKS),
    "column-parallel": [(2, 1, 2), (3, 3, 2), (4, 2, 3)],
    "tensor-parallel": [(2, 1, 2), (4, 2, 1)],
    "context-parallel": [(2, 1, 2), (3, 2, 1), (4, 1, 1)],
    "expert-parallel": [(2, 1, 2), (3, 2, 3), (4, 1, 8)],
}


@pytest.mark.parametrize(
    ("name", "size"),
    sampled([(name, size) for name in STRATEGIES for size in SIZES[name]], lambda case: case[1] in SIZES[case[0]][1:3]),
)
def test_every_strategy_is_found_right(name: str, size: tuple[int, int, int]) -> None:
    assert judge(built_in(name, *size)).outcome is Outcome.RIGHT


def imports(module: str) -> set[str]:
    """Return the modules of shardlab that a module imports, directly or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = node.module == "tests.support"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {str(node.module)}
            if node.module and node.module.startswith("shardlab"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name for name in names if name.startswith("tests.")}
    modules = {name for name in names if name.startswith("shardlab")}
    return modules.union(*map(imports, parts))


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


@cache
def right_program(plan: Planned) -> Program:
    """Return a plan's program, which is judged once."""
    assert judge(plan.program).right
    return plan.program


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
    program = right_program(plan)
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
        program = move_op(move_op(program, rank, recv + 1, send), rank, recv + 1, send)  # its wait first, then itself
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
def test_a_program_that_cannot_be_executed_is_broken(kind: str, strategy: str, reason: str) -> None:
    verdicts = [judge(mutant) for mutant in MUTATIONS[kind](built_in(strategy))]
    assert any(verdict.outcome is Outcome.BROKEN and reason in verdict.reason for verdict in verdicts)


def test_a_message_that_nobody_receives_is_broken() -> None:
    program = built_in("pipeline")
    send = first(program, OpKind.SEND)
    op = program.tapes[0][send]
    resent = [op._replace(handle=77), next(o for o in program.tapes[0] if o.handle == op.handle and o is not op)]
    resent[1] = resent[1]._replace(handle=77)
    verdict = judge(changed(program, 0, send, op, *resent))
    assert verdict.outcome is Outcome.BROKEN


# Specs of tracing are those that the check derives from the tapes alone, on larger meshes as well.


@settings(max_examples=examples(100))
@given(shapes())
def test_tracing_and_the_check_give_every_value_one_spec(shape: Shape) -> None:
    world = World(shape.mesh, shape.layers, shape.microbatches)
    checked = check(world.run(program_of(shape)))
    for rank, specs in zip(world.ranks, checked.specs, strict=True):
        values = enumerate(rank._values)
        believed = {number: value if isinstance(value, Spec) else value.spec for number, value in values}
        assert believed == {number: specs[number] for number in believed}


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 2, 4), (4, 2, 2), (1, 4, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_programs_of_8_to_16_ranks_pass_and_are_right(mesh: tuple[int, int, int], seed: int) -> None:
    pp, replicate, shard = mesh
    program = random_program(Shape(pp, replicate, shard, pp + seed, replicate * shard * 2 + seed, seed))
    is_right(program)


# The check of channel models agrees with ranks and channels that step at random.


REORDERINGS = ("late wait", "swapped neighbours", "broken batch")
"""Changes that often leave the numbers right, but move communication about."""


@settings(max_examples=examples(60))
@given(shapes(), st.integers(0, 10**6))
def test_a_program_hangs_under_a_model_exactly_if_the_check_says_so(shape: Shape, seed: int) -> None:
    program = random_program(shape)
    random = Random(seed)
    for candidate in [program, *_reordered(program, random)]:
        with suppress(Refused):
            agree(candidate, check(candidate).models, random)


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6))
def test_ranks_that_talk_in_crossing_orders_hang_exactly_if_the_check_says_so(seed: int) -> None:
    program = chatter(seed)
    assume(program is not None)
    assert program is not None
    agree(program, check(program).models, Random(seed))


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6))
def test_a_single_queue_that_empties_is_one_that_a_replay_with_all_waits_ends(seed: int) -> None:
    program = chatter(seed)
    assume(program is not None)
    assert program is not None
    checked = check(program)
    replay = Replay(program, checked.communications, checked.communication_of, ChannelModel.QUEUED)
    assert queues_empty(program, checked.communications) == (replay.deadlock() is None)


def agree(program: Program, models: Mapping[ChannelModel, str | None], random: Random) -> None:
    for model in ChannelModel:
        assert hangs(program, model, random.randrange(10**6)) == (models[model] is not None), model


@settings(max_examples=examples(200))
@given(shapes(), st.integers(0, 10**6))
def test_a_stricter_model_never_passes_what_a_more_lenient_one_fails(shape: Shape, seed: int) -> None:
    """The exception is a message between an exchange and a single call, which use two communicators."""
    for program in (random_program(shape), chatter(seed)):
        models = check(program).models if program is not None else {}
        if HALF_EXCHANGED in (models.get(ChannelModel.QUEUED_PER_PAIR) or ""):
            del models[ChannelModel.QUEUED_PER_PAIR]
        verdicts = [deadlock is None for deadlock in models.values()]
        assert verdicts == sorted(verdicts, reverse=True)


HALF_EXCHANGED = "one is part of an exchange and the other is not"


def _reordered(program: Program, random: Random) -> list[Program]:
    mutants = [list(MUTATIONS[name](program)) for name in REORDERINGS]
    return [random.choice(some) for some in mutants if some]


@settings(max_examples=examples(100))
@given(shapes())
def test_a_deadlock_names_at_least_two_ranks_and_the_ops_between_them(shape: Shape) -> None:
    for text in check(random_program(shape)).models.values():
        if text is not None:
            assert text.startswith("deadlock: rank ")
            assert len(set(re.findall(r"rank \d+", text))) > 1
            assert "(its op " in text
