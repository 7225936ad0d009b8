"""Values in the host's memory and on the disk: what is computed there, how they come back, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.check import check
from shardlab.common.errors import Refused
from shardlab.language import OpKind, Rank, Strategy, trace
from shardlab.language.rules.refusals import PLACES
from shardlab.simulate.timeline import simulate
from shardlab.simulate.timeline.memory import Category, memory_in_bytes, peak_elsewhere
from tests.check.offloading_programs import RIGHT, offloaded, state_away, sums_away, weights_away
from tests.language.tapes import refusal
from tests.support.interpreter import judge
from tests.support.refusing import Told, tells, told


@pytest.mark.parametrize("program_of", RIGHT)
def test_what_lies_elsewhere_and_comes_back_is_accepted_and_right(program_of: Strategy) -> None:
    program = trace(program_of, 2, 2, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_what_lies_elsewhere_takes_no_memory_of_the_device() -> None:
    """The optimizer's state is never there, and weights are only while they are computed with."""
    away, here = (memory_in_bytes(check(trace(each, 2, 4, 4)))[0] for each in (sums_away, state_away))
    assert dict(zip(Category, away.by_category, strict=True))[Category.OPTIMIZER] == 0
    assert away.peak < here.peak


def test_what_lies_elsewhere_is_counted_there() -> None:
    """All weights and optimizer states, and one gradient that is on its way to its update."""
    checked = check(trace(offloaded, 2, 4, 4))
    sizes = checked.program.sizes
    assert peak_elsewhere(checked) == {"host": sum(sizes.weights) + sum(sizes.opt_states) + sizes.weights[0]}
    assert peak_elsewhere(check(trace(state_away, 2, 4, 4))) == {"disk": sum(sizes.opt_states)}


def test_copies_go_on_beside_compute_and_their_links_carry_one_at_a_time() -> None:
    timeline = simulate(check(trace(copies_at_once, 1, 3, 1)))
    copies = [event for event in timeline.events[0] if event.kind is OpKind.RELOAD]
    assert [event.start for event in copies] == pytest.approx([0.0, 0.2, 0.4])


async def copies_at_once(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, place="host")
    coming = [rank.reload(rank.weights[l]) for l in rank.layers]
    rank.activations[0] = rank.load_batch(rank.microbatches)
    weights = [await handle for handle in coming]
    for l in rank.layers:
        rank.weights[l, "here"] = weights[l]
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l, "here"])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        made, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights.pop((l, "here")))
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, await rank.offload(made), rank.weights[l], rank.opt_states[l]
        )


async def loaded(rank: Rank, place: str = "host") -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0, place=place)
    rank.activations[0] = rank.load_batch(rank.microbatches)


async def finished(rank: Rank) -> None:
    """A finished gradient, where the weight lies."""
    await loaded(rank)
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
        await loaded(rank, place)
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
    await loaded(rank)
    rank.reload(await rank.reload(rank.weights[0]))


async def to_the_attic(rank: Rank) -> None:
    await loaded(rank)
    rank.offload(rank.activations[0], "attic")


async def loaded_from_the_attic(rank: Rank) -> None:
    await loaded(rank, "attic")


async def squares_away(rank: Rank) -> None:
    await finished(rank)
    rank.offload(rank.norm(0, rank.grad_weights[0]))


async def ends_elsewhere(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=False))
    made, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    new, rank.opt_states[0] = rank.update(0, made, rank.weights[0], rank.opt_states[0])
    rank.weights[0] = await rank.offload(new)


async def state_in_two_places(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.opt_states["copy"] = await rank.offload(rank.opt_states[0])
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=False))
    made, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    rank.weights[0], rank.opt_states[0] = rank.update(0, made, rank.weights[0], rank.opt_states[0])
    del rank.opt_states["copy"]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (scaled_away, told("elsewhere", layer=0)),
        (summed_apart, told("elsewhere", layer=0)),
        (updated_apart, told("elsewhere", layer=0)),
        (updated_without_its_state, told("elsewhere", layer=0)),
        (gradient_on_the_disk, told("elsewhere", layer=0)),
        (reloaded_twice, told("elsewhere", layer=0)),
        (to_the_attic, told("elsewhere", layer=0)),
        (loaded_from_the_attic, told("elsewhere", layer=0)),
        (squares_away, told("wrong kind")),
    ],
)
def test_what_no_op_does_elsewhere_is_refused(strategy: Strategy, said: Told) -> None:
    tells(refusal(strategy, ranks=1, layers=1), said)


def test_a_step_leaves_a_weight_where_it_was_loaded() -> None:
    with pytest.raises(Refused, match=r"the step ends without weights\[0\] \(step 1\)"):
        check(trace(ends_elsewhere, 1, 1, 1))


def test_an_optimizers_state_is_in_one_place_at_a_time() -> None:
    """Right in numbers; but what an optimizer keeps moves, and is not copied."""
    program = trace(state_in_two_places, 1, 1, 1)
    assert judge(program).right
    assert "an optimizer state is in one place at a time" in str(check(program).why_not("gloo"))


def test_every_program_here_is_of_its_own_kind() -> None:
    places = {each: {op.place for op in trace(each, 2, 2, 2).tapes[0]} for each in RIGHT}
    assert places[offloaded] == {"", "host"}
    assert places[weights_away] == {"", "host", "disk"}
