"""Kept weights: each element moves one step once, and overwritten values are not read."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from shardlab.check import check
from shardlab.language import Mesh, Op, OpKind, Program, Rank, Refused, Strategy, Value, trace
from shardlab.language.rules.refusals import PLACES
from shardlab.simulate.timeline import PUZZLE_COSTS, simulate
from shardlab.simulate.timeline.memory import Category, memory_in_bytes, peak_elsewhere
from tests.check import unsound_programs as unsound
from tests.check.offloading_programs import RIGHT, offloaded, state_away, sums_away, weights_away
from tests.check.programs import built_in
from tests.language.tapes import refusal
from tests.support.interpreter import Outcome, judge
from tests.support.mutations import places, with_tape
from tests.support.refusing import ExpectedRefusal, refusal_by, refusal_of, refuses, require_refusal


def refused(strategy: Strategy, microbatches: int = 2) -> tuple[Program, Refused]:
    program = trace(strategy, 2, 1, microbatches)
    return program, refusal_of(lambda: check(program))


def test_two_states_do_not_step_the_same_elements() -> None:
    program, refusal = refused(unsound.two_states_of_one_weight)
    updates = [at for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.UPDATE]
    require_refusal(refusal, "moved twice", rank=0, op=updates[1], layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG


@pytest.mark.parametrize("order", ["whole first", "half first"])
def test_two_states_do_not_step_the_same_elements_though_the_new_weight_is_saved_between(order: str) -> None:
    """What the step leaves has the right numbers: it was copied before the second state wrote over them."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states["whole first"] = rank.load_weights(0)
        rank.opt_states["half first"] = rank.load_opt_state(0, rank.index, rank.world)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        total = rank.grad_weights[0] = await rank.all_reduce(grad_weight)
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


def test_a_weight_that_has_arrived_is_not_updated_again() -> None:
    program, refusal = refused(unsound.stepped_after_it_arrived)
    require_refusal(refusal, "stepped again", layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG


def test_a_weight_that_arrives_in_other_memory_may_be_updated() -> None:
    program = trace(unsound.stepped_while_it_arrived_apart, 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_an_update_of_a_copy_does_not_overwrite_a_weight_in_flight() -> None:
    program, refusal = refused(unsound.sent_while_it_is_written)
    require_refusal(refusal, "in flight", layer=0)
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
    ("read", "expected"),
    [("after", refusal_by("written over", layer=0)), ("meanwhile", refusal_by("in flight", layer=0))],
)
def test_an_overwritten_weight_is_not_read(read: str, expected: ExpectedRefusal) -> None:
    """The specs are right, and so would the numbers be if the old slice still were somewhere."""
    with refuses(expected) as refusal_:
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
        grad_weight = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        total = rank.grad_weights[0] = await rank.all_reduce(grad_weight)
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
        for part in ("half", "whole") if first == "half" else ("whole", "half"):
            rank.weights[part] = rank.load_weight(0, *((rank.index, 2) if part == "half" else (0, 1)))
        rank.opt_states[0] = rank.load_opt_state(0, rank.index, 2)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights["whole"]))
        grad_weight = rank.backward(0, rank.activations[0], gradient, rank.weights["whole"])[0]
        total = await rank.reduce_scatter(grad_weight)
        rank.weights["half"], rank.opt_states[0] = rank.update(0, total, rank.weights["half"], rank.opt_states[0])
        rank.forward(0, rank.activations.pop(0), rank.weights["whole"])
        rank.weights["whole"] = await rank.all_gather(rank.weights["half"])

    return strategy


def test_a_state_steps_the_first_weight_that_contains_it() -> None:
    program = trace(loads_both("half"), 2, 1, 2)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right
    _, refusal = refused(loads_both("whole"))
    require_refusal(refusal, "written over", layer=0)


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
    ("read", "expected"),
    [("after", refusal_by("written over", layer=0)), ("meanwhile", refusal_by("in flight", layer=0))],
)
def test_an_overwritten_copy_is_not_read(read: str, expected: ExpectedRefusal) -> None:
    with refuses(expected) as refusal:
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
    require_refusal(refusal, "written over", layer=0)


async def steps_one_memory_twice(rank: Rank) -> None:
    """A half that is kept on the host is stepped where the whole is kept on the device, which is then stepped too."""
    rank.weights["half"] = rank.load_weight(0, 0, 2, place="host")
    rank.opt_states["half"] = rank.load_opt_state(0, 0, 2)
    rank.weights["whole"], rank.opt_states["whole"] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights["whole"]))
    grad_weight = rank.backward(0, rank.activations.pop(0), gradient, rank.weights["whole"])[0]
    total = rank.grad_weights[0] = await rank.all_reduce(grad_weight)
    half = rank.slice(rank.weights["whole"], 0, 2)
    rank.weights["new"], rank.opt_states["half"] = rank.update(0, total, half, rank.opt_states["half"])
    rank.weights["whole"], rank.opt_states["whole"] = rank.update(
        0, total, rank.weights["whole"], rank.opt_states["whole"]
    )
    rank.weights["half"] = await rank.offload(rank.weights.pop("new"))
    del rank.grad_weights[0]


def test_two_updates_do_not_step_one_memory_though_each_weight_is_kept_apart() -> None:
    program, refusal = refused(steps_one_memory_twice)
    require_refusal(refusal, "moved twice", layer=0, doubled=(0,))
    assert judge(program).outcome is Outcome.WRONG


# Values in the host's memory and on the disk: what is computed there, how they come back, what is refused.


@pytest.mark.parametrize("program_of", RIGHT)
def test_offloaded_and_reloaded_values_are_accepted_and_right(program_of: Strategy) -> None:
    program = trace(program_of, 2, 2, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_offloaded_values_take_no_memory_of_the_device() -> None:
    """The optimizer's state is never there, and weights are only while they are computed with."""
    sums, state = (memory_in_bytes(check(trace(program, 2, 4, 4)))[0] for program in (sums_away, state_away))
    assert dict(zip(Category, sums.by_category, strict=True))[Category.OPTIMIZER] == 0
    assert sums.peak < state.peak


def test_offloaded_values_are_counted_in_their_place() -> None:
    """All weights and optimizer states, and one gradient that is on its way to its update."""
    checked = check(trace(offloaded, 2, 4, 4))
    sizes = checked.program.sizes
    assert peak_elsewhere(checked) == {"host": sum(sizes.weights) + sum(sizes.opt_states) + sizes.weights[0]}
    assert peak_elsewhere(check(trace(state_away, 2, 4, 4))) == {"disk": sum(sizes.opt_states)}


def test_copies_go_on_beside_compute_and_their_links_carry_one_at_a_time() -> None:
    timeline = simulate(check(trace(copies_at_once, 1, 3, 1)), PUZZLE_COSTS)
    copies = [event for event in timeline.events[0] if event.kind is OpKind.RELOAD]
    assert [event.start for event in copies] == pytest.approx([0.0, 0.2, 0.4])


async def copies_at_once(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, place="host")
    reloads = [rank.reload(rank.weights[l]) for l in rank.layers]
    rank.activations[0] = rank.load_batch(rank.microbatches)
    weights = [await handle for handle in reloads]
    for l in rank.layers:
        rank.weights[l, "here"] = weights[l]
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l, "here"])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights.pop((l, "here")))
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, await rank.offload(grad_weight), rank.weights[l], rank.opt_states[l]
        )


async def load_layer(rank: Rank, place: str = "host") -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0, place=place)
    rank.activations[0] = rank.load_batch(rank.microbatches)


async def finished(rank: Rank) -> None:
    """A finished gradient, where the weight lies."""
    await load_layer(rank)
    weight = await rank.reload(rank.weights[0])
    grad = rank.loss(rank.forward(0, rank.activations[0], weight, save=False))
    rank.weights[0, "here"] = weight = await rank.reload(rank.weights[0])
    rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], grad, weight)


USES: dict[str, Callable[[Rank], object]] = {
    "forward": lambda rank: rank.forward(0, rank.activations[0], rank.weights[0]),
    "send": lambda rank: rank.send(rank.weights[0], to=1 - rank.index),
    "all_gather": lambda rank: rank.all_gather(rank.weights[0]),
    "all_reduce": lambda rank: rank.all_reduce(rank.weights[0], reduction="mean"),
    "broadcast": lambda rank: rank.broadcast(rank.weights[0] if rank.index == 0 else None, root=0),
    "cast": lambda rank: rank.cast(rank.weights[0], "bfloat16"),
    "offload": lambda rank: rank.offload(rank.weights[0], "disk"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_elsewhere_is_neither_computed_with_nor_sent(use: str, place: str) -> None:
    async def strategy(rank: Rank) -> None:
        await load_layer(rank, place)
        USES[use](rank)

    with pytest.raises(Refused) as caught:
        trace(strategy, 2, 1, 2)
    assert (caught.value.rule, caught.value.rank) == ("elsewhere", 0)
    assert "reload it first" in str(caught.value)


async def scaled_away(rank: Rank) -> None:
    await finished(rank)
    rank.scale(await rank.offload(rank.grad_weights[0]), 2)


async def summed_apart(rank: Rank) -> None:
    await finished(rank)
    rank.add(await rank.offload(rank.grad_weights[0]), rank.zero_gradient(0))


async def updated_apart(rank: Rank) -> None:
    await finished(rank)
    rank.update(0, rank.grad_weights[0], rank.weights[0], rank.opt_states[0])


async def updated_without_its_state(rank: Rank) -> None:
    await finished(rank)
    rank.update(0, rank.grad_weights[0], rank.weights[0, "here"], rank.opt_states[0])


async def gradient_on_the_disk(rank: Rank) -> None:
    await finished(rank)
    rank.offload(rank.grad_weights[0], "disk")


async def reloaded_twice(rank: Rank) -> None:
    await load_layer(rank)
    rank.reload(await rank.reload(rank.weights[0]))


async def to_the_attic(rank: Rank) -> None:
    await load_layer(rank)
    rank.offload(rank.activations[0], "attic")


async def loaded_from_the_attic(rank: Rank) -> None:
    await load_layer(rank, "attic")


async def squares_away(rank: Rank) -> None:
    await finished(rank)
    rank.offload(rank.norm(0, rank.grad_weights[0]))


async def ends_elsewhere(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=False))
    grad_weight, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    new, rank.opt_states[0] = rank.update(0, grad_weight, rank.weights[0], rank.opt_states[0])
    rank.weights[0] = await rank.offload(new)


async def state_in_two_places(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.opt_states["copy"] = await rank.offload(rank.opt_states[0])
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=False))
    grad_weight, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    rank.weights[0], rank.opt_states[0] = rank.update(0, grad_weight, rank.weights[0], rank.opt_states[0])
    del rank.opt_states["copy"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (scaled_away, refusal_by("elsewhere", layer=0)),
        (summed_apart, refusal_by("elsewhere", layer=0)),
        (updated_apart, refusal_by("elsewhere", layer=0)),
        (updated_without_its_state, refusal_by("elsewhere", layer=0)),
        (gradient_on_the_disk, refusal_by("elsewhere", layer=0)),
        (reloaded_twice, refusal_by("elsewhere", layer=0)),
        (to_the_attic, refusal_by("elsewhere", layer=0)),
        (loaded_from_the_attic, refusal_by("elsewhere", layer=0)),
        (squares_away, refusal_by("wrong kind")),
    ],
)
def test_ops_off_the_device_that_no_backend_has_are_refused(strategy: Strategy, expected: ExpectedRefusal) -> None:
    require_refusal(refusal(strategy, ranks=1, layers=1), expected)


def test_a_step_leaves_a_weight_where_it_was_loaded() -> None:
    with pytest.raises(Refused, match=r"the step ends without the updated weights\[0\]"):
        check(trace(ends_elsewhere, 1, 1, 1))


def test_an_optimizers_state_is_in_one_place_at_a_time() -> None:
    """Right in numbers; but what an optimizer keeps moves, and is not copied."""
    program = trace(state_in_two_places, 1, 1, 1)
    assert judge(program).right
    assert "an optimizer state is in one place at a time" in str(check(program).why_not("gloo"))


def test_every_program_here_is_of_its_own_kind() -> None:
    places = {program: {op.place for op in trace(program, 2, 2, 2).tapes[0]} for program in RIGHT}
    assert places[offloaded] == {"", "host"}
    assert places[weights_away] == {"", "host", "disk"}


# The members of a group issue its collectives in one order; on NCCL, all groups that share ranks do.


def two_groups(shard_first: set[int], axis: str = "dp_shard") -> Strategy:
    """One layer on all ranks; those in `shard_first` issue a gather along an axis first, others the reduction."""

    async def program(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0, rank.coordinate(axis), 2)
        full = await rank.all_gather(rank.weights[0], axis=axis)
        rank.activations[0] = rank.load_batch([rank.index])
        rank.activations[1] = rank.forward(0, rank.activations[0], full)
        gradient = rank.loss(rank.activations[1])
        full = await rank.all_gather(rank.weights[0], axis=axis)
        rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], gradient, full)
        if rank.index in shard_first:
            extra = rank.all_gather(rank.weights[0], axis=axis)
            total = rank.all_reduce(rank.grad_weights[0])
        else:
            total = rank.all_reduce(rank.grad_weights[0])
            extra = rank.all_gather(rank.weights[0], axis=axis)
        await extra
        update = rank.update(0, await total, rank.weights[0], rank.opt_states[0])
        rank.weights[0], rank.opt_states[0] = update

    return program


MESH = Mesh(dp_replicate=2, dp_shard=2)


@pytest.mark.parametrize("shard_first", [set[int](), {0, 1, 2, 3}])
def test_groups_that_share_ranks_pass_in_one_order(shard_first: set[int]) -> None:
    program = trace(two_groups(shard_first), MESH, 1, 4)
    assert not any(check(program).models.values())
    assert judge(program).right


@pytest.mark.parametrize("shard_first", [{0}, {1}, {3}, {0, 2}, {0, 1, 2}])
def test_groups_that_share_two_ranks_are_refused_on_nccl_alone_in_different_orders(shard_first: set[int]) -> None:
    """The numbers are right and gloo runs it: but two communicators may block each other on devices."""
    program = trace(two_groups(shard_first), MESH, 1, 4)
    assert judge(program).right
    checked = check(program)
    assert checked.backends() == ["gloo"]
    deadlock = str(checked.why_not("nccl"))
    call = r"rank (\d)'s all_(?:reduce|gather)\(layer 0\) on (world|dp_shard) \(its op \d+\)"
    match = re.search(rf"which is queued behind {call}, which is queued behind {call}", deadlock)
    assert match, deadlock
    assert len({int(match[1]), int(match[3])} & shard_first) == 1
    assert {match[2], match[4]} == {"world", "dp_shard"}


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_ranks_that_share_no_second_group_may_differ(axis: str) -> None:
    """Ranks 0 and 3 meet only in the world, so their gathers along the axis need not stand in one order with it."""
    first = {0, 1} if axis == "dp_shard" else {0, 2}
    program = trace(two_groups(first, axis), MESH, 1, 4)
    assert not any(check(program).models.values())


def test_an_axis_that_is_the_whole_world_is_another_group() -> None:
    """Two ranks, two communicators over both of them."""
    assert check(trace(two_groups({0}), Mesh(dp_shard=2), 1, 2)).backends() == ["gloo"]
    assert check(trace(two_groups({0, 1}), Mesh(dp_shard=2), 1, 2)).backends() == ["gloo", "nccl"]


def collectives(program: Program, rank: int, kind: OpKind) -> list[int]:
    return [at for r, at, _ in places(program, kind) if r == rank]


def refused_of_order(program: Program, rank: int, tape: list[Op]) -> Refused:
    return refusal_of(lambda: check(with_tape(program, rank, tape)))


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_of_one_group_in_another_order_are_refused_naming_both_ranks(rank: int) -> None:
    """Two gathers of other layers change places, with what belongs to them."""
    program = built_in("fsdp")
    tape = list(program.tapes[rank])
    one, other = collectives(program, rank, OpKind.ALL_GATHER)[:2]
    a, b = tape[one], tape[other]
    tape[one] = a._replace(inputs=b.inputs, layer=b.layer)
    tape[other] = b._replace(inputs=a.inputs, layer=a.layer)
    require_refusal(refused_of_order(program, rank, tape), "other order", rank=1, op=5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.ALL_GATHER])
def test_collectives_of_another_kind_are_refused_naming_both_ranks(rank: int, kind: OpKind) -> None:
    program = built_in("fsdp")
    tape = list(program.tapes[rank])
    at = collectives(program, rank, OpKind.REDUCE_SCATTER)[0]
    tape[at] = tape[at]._replace(kind=kind)
    sentence = str(refused_of_order(program, rank, tape))
    call = r"(all_reduce|all_gather|reduce_scatter)\(grad_weights\[1\] \(microbatch [01]\)\)"
    match = re.match(rf"rank (\d), op {at} {call} on world: rank (\d) meets it with {call} \(its op {at}\)", sentence)
    assert match, sentence
    assert {match[1], match[3]} == {"0", "1"}
    assert {match[2], match[4]} == {kind.value, "reduce_scatter"}


def test_collectives_of_another_layer_are_refused_while_tracing_too() -> None:
    async def program(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
        for l in rank.layers if rank.index else reversed(rank.layers):
            rank.all_gather(rank.weights[l])

    with refuses("other order", layer=0):
        trace(program, 2, 2, 2)
