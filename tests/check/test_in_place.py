"""The weights that a rank keeps: each element moves one step once, and what was written over is not read."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import OpKind, Program, Rank, Refused, Strategy, Value, trace
from tests.check import unsound_programs as unsound
from tests.support.interpreter import Outcome, judge
from tests.support.refusing import Told, refusal_of, refuses, tells, told


def refused(strategy: Strategy, microbatches: int = 2) -> tuple[Program, Refused]:
    program = trace(strategy, 2, 1, microbatches)
    return program, refusal_of(lambda: check(program))


def test_two_states_do_not_step_the_same_elements() -> None:
    program, refusal = refused(unsound.two_states_of_one_weight)
    updates = [at for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.UPDATE]
    tells(refusal, "moved twice", rank=0, op=updates[1], layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG


@pytest.mark.parametrize("order", ["whole first", "half first"])
def test_two_states_do_not_step_the_same_elements_though_the_new_weight_is_saved_between(order: str) -> None:
    """What the step leaves has the right numbers: it was copied before the second state wrote over them."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states["whole first"] = rank.load_weights(0)
        rank.opt_states["half first"] = rank.load_opt_state(0, rank.index, rank.world)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        made = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        total = rank.grad_weights[0] = await rank.all_reduce(made)
        copy = rank.weights["copy"] = await rank.all_reduce(rank.weights[0], reduction="mean")
        other = "half first" if order == "whole first" else "whole first"
        first, rank.opt_states[order] = rank.update(0, total, rank.weights.pop(0), rank.opt_states[order])
        rank.weights["new"] = first
        new = await (rank.all_reduce(first, reduction="mean") if order == "whole first" else rank.all_gather(first))
        rank.weights[0] = new
        del rank.weights["new"]
        _, rank.opt_states[other] = rank.update(0, total, copy, rank.opt_states[other])
        del rank.weights["copy"]

    program, refusal = refused(strategy)
    assert refusal.rule == "moved twice"
    assert judge(program).reason == "rank 0 writes layer 0 twice in a step"


def test_what_has_arrived_in_its_place_is_not_stepped_again() -> None:
    program, refusal = refused(unsound.stepped_after_it_arrived)
    tells(refusal, "stepped again", layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG


def test_what_arrives_beside_it_leaves_it_to_be_stepped() -> None:
    program = trace(unsound.stepped_while_it_arrived_apart, 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_what_is_being_sent_is_not_written_by_an_update_that_was_given_a_copy() -> None:
    program, refusal = refused(unsound.sent_while_it_is_written)
    tells(refusal, "in flight", layer=0)
    assert judge(program).outcome is Outcome.BROKEN


def updates_a_copy(read: str) -> Strategy:
    """The update is given a gathered copy of the weight, and what was loaded is read before or after it, or not."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0, rank.index, rank.world)
        full = rank.weights["full"] = await rank.all_gather(rank.weights[0])
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], full))
        total = await rank.reduce_scatter(rank.backward(0, rank.activations[0], gradient, full)[0])
        if read == "before":
            await rank.all_gather(rank.weights[0])
        if read == "meanwhile":
            rank.all_gather(rank.weights[0])
        rank.weights["new"], rank.opt_states[0] = rank.update(0, total, full, rank.opt_states[0])
        if read == "after":
            await rank.all_gather(rank.weights[0])

    return strategy


@pytest.mark.parametrize("read", ["never", "before"])
def test_a_copy_of_a_weight_may_be_updated_in_its_place(read: str) -> None:
    program = trace(updates_a_copy(read), 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


@pytest.mark.parametrize(
    ("read", "why"), [("after", told("written over", layer=0)), ("meanwhile", told("in flight", layer=0))]
)
def test_what_an_update_has_written_over_is_not_read(read: str, why: Told) -> None:
    """The specs are right, and so would the numbers be if the old slice still were somewhere."""
    with refuses(why) as refusal_:
        check(trace(updates_a_copy(read), 2, 1, 2))
    assert "weights[0] (shard 0 of 2)" in str(refusal_.value)


def halves(order: tuple[int, int]) -> Strategy:
    """A rank has a whole weight and a state of each half of it, and steps them one after the other."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        for half in range(2):
            rank.opt_states[half] = rank.load_opt_state(0, half, 2)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        made = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        total = rank.grad_weights[0] = await rank.all_reduce(made)
        copy = rank.weights["copy"] = await rank.all_reduce(rank.weights[0], reduction="mean")
        new: dict[int, Value] = {}
        for half, old in zip(order, (rank.weights[0], copy), strict=True):
            rank.weights["new", half], rank.opt_states[half] = rank.update(0, total, old, rank.opt_states[half])
            new[half] = rank.weights["new", half]
        rank.weights[0] = await rank.all_gather(new[rank.index])

    return strategy


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_states_of_disjoint_slices_step_one_weight(order: tuple[int, int]) -> None:
    program = trace(halves(order), 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def loads_both(first: str) -> Strategy:
    """A half and the whole of one weight, and a state of the half; the whole is read after the half was stepped."""

    async def strategy(rank: Rank) -> None:
        for which in ("half", "whole") if first == "half" else ("whole", "half"):
            rank.weights[which] = rank.load_weight(0, *((rank.index, 2) if which == "half" else (0, 1)))
        rank.opt_states[0] = rank.load_opt_state(0, rank.index, 2)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights["whole"]))
        made = rank.backward(0, rank.activations[0], gradient, rank.weights["whole"])[0]
        total = await rank.reduce_scatter(made)
        rank.weights["half"], rank.opt_states[0] = rank.update(0, total, rank.weights["half"], rank.opt_states[0])
        rank.forward(0, rank.activations.pop(0), rank.weights["whole"])
        rank.weights["whole"] = await rank.all_gather(rank.weights["half"])

    return strategy


def test_a_state_steps_the_first_weight_that_contains_it() -> None:
    program = trace(loads_both("half"), 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right
    _, refusal = refused(loads_both("whole"))
    tells(refusal, "written over", layer=0)


def steps_a_copy(read: str) -> Strategy:
    """The weight is kept on the host; of the copy that is stepped a slice is read before or after that, or not."""

    async def strategy(rank: Rank) -> None:
        rank.opt_states[0] = rank.load_opt_state(0)
        weight = rank.weights[0] = await rank.reload(rank.load_weight(0, place="host"))
        half = rank.weights["half"] = rank.slice(weight, 1, 2)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], weight))
        total = await rank.all_reduce(rank.backward(0, rank.activations[0], gradient, weight)[0])
        if read == "before":
            await rank.offload(half)
        if read == "meanwhile":
            rank.offload(half)
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, weight, rank.opt_states[0])
        if read == "after":
            await rank.offload(half)
        rank.weights[0] = await rank.offload(rank.weights[0])

    return strategy


@pytest.mark.parametrize("read", ["never", "before"])
def test_a_slice_of_a_copy_may_outlive_the_update_of_the_copy(read: str) -> None:
    program = trace(steps_a_copy(read), 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


@pytest.mark.parametrize(
    ("read", "why"), [("after", told("written over", layer=0)), ("meanwhile", told("in flight", layer=0))]
)
def test_what_an_update_has_written_over_in_a_copy_is_not_read(read: str, why: Told) -> None:
    with refuses(why) as refusal:
        check(trace(steps_a_copy(read), 2, 1, 2))
    assert "weights[0] (shard 1 of 2)" in str(refusal.value)


async def reads_a_slice_in_the_next_forward(rank: Rank) -> None:
    """Both halves of a copy are put together after its update: they are what the update has written."""
    rank.opt_states[0] = rank.load_opt_state(0)
    weight = rank.weights[0] = await rank.reload(rank.load_weight(0, place="host"))
    for half in range(2):
        rank.weights["half", half] = rank.slice(weight, half, 2)
    rank.activations[0] = rank.load_batch([rank.index])
    gradient = rank.loss(rank.forward(0, rank.activations[0], weight))
    total = await rank.all_reduce(rank.backward(0, rank.activations.pop(0), gradient, weight)[0])
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, weight, rank.opt_states[0])
    old = rank.concatenate(rank.weights.pop(("half", half)) for half in range(2))
    rank.activations[0] = rank.load_batch([0])
    rank.forward(0, rank.activations.pop(0), old, save=False)
    rank.weights[0] = await rank.offload(rank.weights[0])


def test_slices_of_a_copy_are_not_the_old_weight_after_its_update() -> None:
    _, refusal = refused(reads_a_slice_in_the_next_forward)
    tells(refusal, "written over", layer=0)


async def steps_one_memory_twice(rank: Rank) -> None:
    """A half that is kept on the host is stepped where the whole is kept on the device, which is then stepped too."""
    rank.weights["half"] = rank.load_weight(0, 0, 2, place="host")
    rank.opt_states["half"] = rank.load_opt_state(0, 0, 2)
    rank.weights["whole"], rank.opt_states["whole"] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights["whole"]))
    made = rank.backward(0, rank.activations.pop(0), gradient, rank.weights["whole"])[0]
    total = rank.grad_weights[0] = await rank.all_reduce(made)
    half = rank.slice(rank.weights["whole"], 0, 2)
    rank.weights["new"], rank.opt_states["half"] = rank.update(0, total, half, rank.opt_states["half"])
    rank.weights["whole"], rank.opt_states["whole"] = rank.update(
        0, total, rank.weights["whole"], rank.opt_states["whole"]
    )
    rank.weights["half"] = await rank.offload(rank.weights.pop("new"))
    del rank.grad_weights[0]


def test_two_updates_do_not_step_one_memory_though_each_weight_is_kept_apart() -> None:
    program, refusal = refused(steps_one_memory_twice)
    tells(refusal, "moved twice", layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG
