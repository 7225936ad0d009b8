"""Arenas: no two values have a byte in common while both are needed, and the step needs no more memory than before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.check.buffers import ALIGNMENT, Arena, BufferBytes, arenas_of, buffers_of
from shardlab.check.in_place import InPlace
from shardlab.common.errors import Refused
from shardlab.language import Op, OpKind, Program, trace
from shardlab.language.ops import COMMUNICATION
from shardlab.models import GPT
from shardlab.simulate.passes import run_named
from shardlab.simulate.passes.bucket import arena
from shardlab.simulate.passes.reorder import CannotApply
from shardlab.simulate.timeline.memory import CATEGORIES, Category, memory_in_bytes
from shardlab.strategies import STRATEGIES
from shardlab.strategies.load import load
from shardlab.strategies.pipeline import pipeline
from tests.check.programs import built_in
from tests.simulate.passes.late_programs import checked
from tests.support.passing import is_right
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.thorough import examples

MODEL = GPT(layers=4, hidden_size=64, heads=2, vocab_size=32, seq_len=4)
"""Of more parameters than activations."""

LONG = replace(MODEL, seq_len=64)


def with_arena(program: Checked) -> Checked:
    """A program whose buffers lie in an arena; it passes the check."""
    return check(replace(program.program, tapes=arena(program, 1)))


def of_model(name: str, model: GPT = MODEL) -> Checked:
    """A built-in strategy on two ranks."""
    entry = load(name)
    return check(trace(entry.program, entry.grid(2), model.sizes(2, 4), 4))


def random_subject(seed: int) -> Program:
    return random_program(random_shape(seed)) if seed % 2 else random_plan(seed, ranks=4).program


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6))
def test_nothing_in_an_arena_is_written_over_before_it_is_read_for_the_last_time(seed: int) -> None:
    plain = check(random_subject(seed))
    try:
        rewritten = with_arena(plain)
    except CannotApply:
        assume(False)
        return
    is_right(rewritten.program)
    assert [memory.peak for memory in memory_in_bytes(rewritten)] <= [memory.peak for memory in memory_in_bytes(plain)]
    for rank, tape in enumerate(rewritten.program.tapes):
        size = BufferBytes(rewritten.program, rewritten.specs)
        bytes_of = {op.outputs[0]: size(rewritten.specs[rank][op.outputs[0]]) for op in tape if op.offset >= 0}
        for number, writer in reads(tape, bytes_of):
            assert number == writer, f"value {number} lies where {writer} has been written since"


def reads(tape: list[Op], bytes_of: dict[int, int]) -> Iterator[tuple[int, int]]:
    """For each value of the arena that an op reads: its number, and that of the last one written to its bytes."""
    in_place, waits = InPlace(tape), {op.handle: at for at, op in enumerate(tape) if op.kind is OpKind.WAIT}
    origin: dict[int, int] = {}  # number of a value to that of the one where it lies
    spans: dict[int, range] = {}
    last_written: dict[int, int] = {}  # every 16th byte to the value there
    later: dict[int, list[int]] = {}  # a WAIT's index to what its communication reads until then
    for at, op in enumerate(tape):
        for number in (*later.get(at, ()), *(() if op.kind is OpKind.FREE else op.inputs)):
            if number in origin:
                yield from ((origin[number], last_written[byte]) for byte in spans[origin[number]])
        if op.kind in COMMUNICATION:
            later.setdefault(waits[op.handle], []).extend((*op.inputs, *op.outputs))
        for number in op.outputs[:1]:
            older = in_place.fused.get(at, op.inputs)[0] if at in in_place.first_input | in_place.fused.keys() else -1
            older = in_place.accumulates.get(at, older)
            if op.offset >= 0:
                origin[number] = number
                spans[number] = range(op.offset // 16, (op.offset + bytes_of[number]) // 16)
                last_written |= dict.fromkeys(spans[number], number)
            elif older in origin:
                origin[number] = origin[older]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_arena_is_as_large_as_what_lies_there_at_its_fullest(name: str) -> None:
    """Within 5 %: best fit is no proof of the least, but the least is what it finds."""
    plain = check(built_in(name))
    rewritten = with_arena(plain)
    size = BufferBytes(rewritten.program, rewritten.specs)
    for rank, rank_arena in enumerate(arenas_of(rewritten.program, rewritten.specs)):
        live = most_at_once(rank_arena, size, rewritten, rank)
        assert live <= rank_arena.bytes <= 1.05 * live
    for old, new in zip(memory_in_bytes(plain), memory_in_bytes(rewritten), strict=True):
        assert new.peak <= old.peak


def most_at_once(rank_arena: Arena, size: BufferBytes, program: Checked, rank: int) -> int:
    live = [0] * (len(program.program.tapes[rank]) + 1)
    for buffer, _ in rank_arena.buffers:
        for at in range(buffer.begin, buffer.end):
            live[at] += size.total(buffer, program.specs[rank])
    return max(live)


def test_all_that_takes_turns_lies_at_one_offset() -> None:
    """Weights that are gathered for one layer after the other."""
    rewritten = with_arena(of_model("fsdp", LONG))
    gathers = [op.offset for op in rewritten.program.tapes[0] if op.kind is OpKind.ALL_GATHER]
    assert sum(offset >= 0 for offset in gathers) > 4
    assert {offset for offset in gathers if offset >= 0} == {0}
    memory, _ = memory_in_bytes(rewritten)
    rank_arena, _ = arenas_of(rewritten.program, rewritten.specs)
    assert dict(zip(CATEGORIES, memory.by_category, strict=True))[Category.ARENA] == rank_arena.bytes > 0
    assert min(memory.during) >= rank_arena.bytes


def test_what_would_lie_beside_activations_that_are_gone_by_then_stays_where_it_is() -> None:
    """Data parallelism has its gradients when activations are gone: an arena of both would hold both all the time."""
    program = of_model("ddp", LONG)
    buffers = buffers_of(program.program.tapes[0], program.specs[0], program.program.sizes)
    (rank_arena, _) = arenas_of(with_arena(program).program, program.specs)
    assert len(rank_arena.buffers) < len(buffers) == MODEL.layers


def test_gradients_that_are_reduced_together_lie_side_by_side() -> None:
    rewritten = run_named(of_model("ddp"), "bucket=1,arena")[-1].checked
    (rank_arena, _) = arenas_of(rewritten.program, rewritten.specs)
    (buffer,) = [buffer for buffer, _ in rank_arena.buffers]
    assert len(buffer.values) == MODEL.layers
    offsets = {op.outputs[0]: op.offset for op in rewritten.program.tapes[0] if op.offset >= 0}
    size = BufferBytes(rewritten.program, rewritten.specs)
    lengths = [size(rewritten.specs[0][number]) for number in buffer.values]
    assert [offsets[number] for number in buffer.values] == [sum(lengths[:n]) for n in range(len(lengths))]


def overlapping(tape: list[Op], random: Random) -> Iterator[list[Op]]:
    """Each value moved to another one's offset."""
    in_arena = [at for at, op in enumerate(tape) if op.offset >= 0]
    for one in in_arena:
        for other in random.sample(in_arena, min(4, len(in_arena))):
            yield [op._replace(offset=tape[other].offset) if at == one else op for at, op in enumerate(tape)]


def freed_later(tape: list[Op], _: Random) -> Iterator[list[Op]]:
    """Each end of a value at the end of the step: its room is then taken by others while it lives."""
    for number in [op.outputs[0] for op in tape if op.offset >= 0]:
        free = next((at for at, op in enumerate(tape) if op.kind is OpKind.FREE and op.inputs[0] == number), None)
        if free is not None:
            yield [*tape[:free], *tape[free + 1 :], tape[free]]


@pytest.mark.parametrize("mutants", [overlapping, freed_later])
def test_rooms_that_overlap_are_refused(mutants: Callable[[list[Op], Random], Iterator[list[Op]]]) -> None:
    """And only these: what is let pass is written over nowhere."""
    refused = 0
    for name in ("fsdp", "zero-3", "1f1b", "zb-h1"):
        rewritten = with_arena(of_model(name))
        tape = rewritten.program.tapes[0]
        size = BufferBytes(rewritten.program, rewritten.specs)
        bytes_of = {op.outputs[0]: size(rewritten.specs[0][op.outputs[0]]) for op in tape if op.offset >= 0}
        for mutant in mutants(tape, Random(name)):
            refusal = refused_as(replace(rewritten.program, tapes=[mutant, *rewritten.program.tapes[1:]]))
            if refusal is None:
                assert all(number == writer for number, writer in reads(mutant, bytes_of))
            else:
                assert refusal.rule == "room taken"
                assert "of the arena are to hold" in str(refusal)
                refused += 1
    assert refused > 1


def refused_as(program: Program) -> Refused | None:
    try:
        check(program)
    except Refused as refusal:
        return refusal
    return None


@pytest.mark.parametrize(
    ("kind", "offset", "says"),
    [
        (OpKind.RECV, ALIGNMENT // 2, "buffers begin at multiples of 64 bytes"),
        (OpKind.FORWARD, 0, "the executor does not choose where its result lies"),
        (OpKind.SEND, 0, "the executor does not choose where its result lies"),
        (OpKind.UPDATE, 0, "the executor does not choose where its result lies"),
    ],
)
def test_an_offset_that_is_none_of_a_room_is_refused(kind: OpKind, offset: int, says: str) -> None:
    plain = checked(pipeline, 2)
    rank, at = next(
        (r, i) for r, tape in enumerate(plain.program.tapes) for i, op in enumerate(tape) if op.kind is kind
    )
    tapes = [list(tape) for tape in plain.program.tapes]
    tapes[rank][at] = tapes[rank][at]._replace(offset=offset)
    with pytest.raises(Refused, match=says) as refusal:
        check(replace(plain.program, tapes=tapes))
    assert refusal.value.rule == "wrong offset"


def test_offsets_are_found_anew_where_a_tape_has_some() -> None:
    once = with_arena(of_model("zero-3"))
    assert with_arena(once).program == once.program
