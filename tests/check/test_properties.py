"""Any program that is right by construction traces, passes the check, and is judged right by the numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import ChannelModel, check
from shardlab.language import OpKind
from tests.support.passing import is_right, is_right_everywhere
from tests.support.random_attention import random_attention
from tests.support.random_experts import random_experts
from tests.support.random_plans import Planned, plans
from tests.support.random_programs import Shape, random_program, shapes
from tests.support.thorough import examples


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
    done: dict[tuple[str, int], int] = {}
    halves = {
        OpKind.BACKWARD: ("input", "weight"),
        OpKind.BACKWARD_INPUT: ("input",),
        OpKind.BACKWARD_WEIGHT: ("weight",),
    }
    for tape, specs in zip(program.tapes, checked.specs, strict=True):
        for op in tape:
            for half in halves.get(op.kind, ()):
                mask = specs[op.inputs[0]].microbatches
                assert not done.get((half, op.layer), 0) & mask
                done[half, op.layer] = done.get((half, op.layer), 0) | mask
    every = (1 << shape.microbatches) - 1
    assert done == {(half, layer): every for half in ("input", "weight") for layer in range(shape.layers)}
