"""Messages: what may be sent, which one a receive takes, and when."""

import asyncio
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Rank, UserError
from shardlab.learn.puzzles import Model, Weight, grade
from shardlab.learn.puzzles.values import WeightGrad
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import figures, gathered, models_of, results, run
from tests.support.processes import PATIENCE
from tests.support.warm import ROOT, WarmStarts

THINGS: list[Any] = [None, 0, "extra cheese", [1, 2], {"a": {1}}, object(), len, Weight(0, 1, 0), ValueError("x")]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_any_object_is_passed_and_keeps_its_identity(thing: Any) -> None:
    async def solution(model: Model) -> Any:
        return await model.pass_to(1, thing) if model.rank == 0 else await model.receive()

    assert results(solution, 2)[1] is thing


def work(model: Model, microbatches: int) -> None:
    """Let so much time pass."""
    model.weights[0], _ = model.load_weights(0)
    model.activations[0] = model.get_activation(range(microbatches))
    model.forward(0, model.activations[0], model.weights[0])


def test_a_pass_costs_0_2_and_so_does_a_receive() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            work(model, 3)
            await model.pass_to(1, "x")
        else:
            await model.receive()

    sender, receiver = run(solution, 2)
    assert (sender.log[-1].time, sender.time) == (3, 3.2)
    assert (receiver.log[-1].time, receiver.time) == (3.2, 3.4), "it starts when the message was sent"


def test_a_receiver_that_comes_later_does_not_wait() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "x")
        else:
            work(model, 5)
            await model.receive()

    assert run(solution, 2)[1].time == 5.2


@given(times=st.lists(st.integers(0, 4), min_size=2, max_size=5), seed=st.randoms(use_true_random=False))
def test_a_receive_takes_the_message_that_was_sent_first_and_of_two_the_lower_ranks(
    times: list[int], seed: Any
) -> None:
    async def solution(model: Model) -> list[int]:
        if model.rank == 0:
            return [await model.receive() for _ in times]
        work(model, times[model.rank - 1])
        for _ in range(seed.randint(0, 3)):
            await asyncio.sleep(0)
        await model.pass_to(0, model.rank)
        return []

    models = models_of(len(times) + 1, 1, 4)
    order = seed.sample(models, len(models))
    got = dict(zip([model.rank for model in order], asyncio.run(gathered(solution, order)), strict=True))[0]
    assert got == sorted(range(1, len(models)), key=lambda rank: (times[rank - 1], rank))


def test_a_mailbox_holds_one_message() -> None:
    entered: list[str] = []

    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "first")
            entered.append("first is in")
            await model.pass_to(1, "second")
            entered.append("second is in")
        else:
            await model.pass_to(2, "now")  # rank 2 takes it only after rank 0 has tried twice
            entered.append(await model.receive())
            entered.append(await model.receive())

    async def third(model: Model) -> None:
        await (model.receive() if model.rank == 2 else solution(model))

    run(third, 3)
    assert entered.index("first is in") < entered.index("first") < entered.index("second is in")


def test_waiting_for_room_takes_the_sender_no_time() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "first")
            await model.pass_to(1, "second")
        else:
            work(model, 9)
            await model.receive()
            await model.receive()

    assert [model.time for model in run(solution, 2, batches=9)] == [0.4, 9.4]


def test_a_rank_may_pass_a_message_to_itself() -> None:
    async def solution(model: Model) -> Any:
        await model.pass_to(model.rank, "note")
        return await model.receive()

    assert results(solution, 2) == ["note", "note"]


def test_messages_go_round_a_ring() -> None:
    async def solution(model: Model) -> int:
        total = carried = model.rank
        for _ in range(model.RANKS - 1):
            await model.pass_to((model.rank + 1) % model.RANKS, carried)
            carried = await model.receive()
            total += carried
        return total

    assert results(solution, 6) == [15] * 6


# Memory of values in no store counts from their creation to their last use.


SQUARE, ROW = 512 * 512, 512 * 256


def in_variables(model: Model) -> None:
    """The first puzzle with nothing in a store."""
    depth = model.LAYERS
    weights_and_states = [model.load_weights(l) for l in range(depth)]
    acts = [model.get_activation(range(model.BATCHES))]
    for l in range(depth):
        acts.append(model.forward(l, acts[l], weights_and_states[l][0]))
    grad = model.loss(acts[depth])
    grad_weights: list[WeightGrad] = []
    for l in reversed(range(depth)):
        grad_weight, grad = model.backward(l, acts[l], grad, weights_and_states[l][0])
        grad_weights.append(grad_weight)
    for l, grad_weight in zip(reversed(range(depth)), grad_weights, strict=True):
        weight, _ = model.update(l, grad_weight, *weights_and_states[l])
        model.set_final_weight(l, weight)


def test_a_solution_in_variables_takes_the_memory_of_one_in_stores() -> None:
    hidden, stored = (run(solution, 1, 2, 4) for solution in (in_variables, solutions.standard))
    assert [event.memory for event in hidden[0].log[:5]] == [event.memory for event in stored[0].log[:5]]
    assert figures(hidden) == figures(stored)
    assert not any(hidden[0].stores())


def test_hiding_values_does_not_solve_a_puzzle() -> None:
    result = grade("grad_accum", in_variables)
    assert result.peak_memory == 2_621_440
    assert result.verdict == "Correct, but too much memory."


def memory_of(solution: Callable[[Model], object]) -> list[float]:
    (model,) = run(solution, 1, layers=2)
    return [event.memory for event in model.log]


def test_a_value_taken_out_of_its_store_and_put_back_was_there_all_the_time() -> None:
    def solution(model: Model, hides: bool) -> None:
        model.weights[0], _ = model.load_weights(0)
        model.weights[1], _ = model.load_weights(1)
        model.activations[0] = model.get_activation([0])
        model.activations[1] = model.forward(0, model.activations[0], model.weights[0])
        hidden = model.weights.pop(0) if hides else None
        model.activations[2] = model.forward(1, model.activations[1], model.weights[1])
        if hidden:
            model.weights[0] = hidden
        model.loss(model.activations[2])

    assert memory_of(lambda model: solution(model, True)) == memory_of(lambda model: solution(model, False))


@pytest.mark.parametrize("verb", ["pop", "keep"])
def test_a_value_popped_for_its_last_use_counts_at_that_use(verb: str) -> None:
    def solution(model: Model) -> None:
        model.weights[0], _ = model.load_weights(0)
        model.activations[0] = model.get_activation([0])
        out = model.forward(0, model.activations.pop(0) if verb == "pop" else model.activations[0], model.weights[0])
        model.forward(1, out, Weight(1, 2, 0))

    kept_elements = ROW if verb == "keep" else 0
    assert memory_of(solution) == [SQUARE + ROW, 2 * SQUARE + ROW + kept_elements]


def test_terms_of_a_sum_count_until_they_are_added() -> None:
    def solution(model: Model) -> None:
        first, second = model.fake_grad(0, [0]), model.fake_grad(0, [1])
        model.activations[0] = model.get_activation([0])
        model.forward(0, model.activations[0], Weight(0, 2, 0))
        total = first + second
        model.forward(0, model.activations[0], Weight(0, 2, 0))
        model.grad_weights[0] = total
        model.forward(0, model.activations[0], Weight(0, 2, 0))

    assert memory_of(solution) == [3 * SQUARE + ROW, 2 * SQUARE + ROW, 2 * SQUARE + ROW]


def test_a_value_in_a_message_counts_for_who_sends_it_and_then_for_who_has_it() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, (model.fake_grad(0, []), "and this"))
        else:
            gradient, _ = await model.receive()
            model.activations[0] = model.get_activation([0])
            model.forward(0, model.activations[0], Weight(0, 2, 0))
            model.grad_weights[0] = gradient + model.fake_grad(0, [0])

    sender, receiver = run(solution, 2)
    assert [event.memory for event in sender.log] == [SQUARE]
    assert [event.memory for event in receiver.log] == [0, 2 * SQUARE + ROW]


def test_a_value_sent_to_oneself_is_not_hidden() -> None:
    async def solution(model: Model) -> None:
        model.activations[0] = model.get_activation([0])
        await model.pass_to(model.rank, model.load_weights(0)[0])
        model.forward(0, model.activations[0], Weight(0, 2, 0))
        model.weights[0] = await model.receive()

    (model,) = run(solution, 1)
    assert [event.memory for event in model.log] == [SQUARE + ROW, 2 * SQUARE + ROW, SQUARE + ROW]


def test_popping_raises_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    async def solution(model: Model) -> None:
        solutions.load_all(model)
        model.activations[0] = model.get_activation([model.rank])
        for l in range(model.LAYERS):
            model.activations[l + 1] = model.forward(l, model.activations[l], model.weights[l])
        grad = model.loss(model.activations.pop(model.LAYERS))
        for l in reversed(range(model.LAYERS)):
            grad_weight, grad = model.backward(l, model.activations.pop(l), grad, model.weights[l])
            model.grad_weights[l] = await model.allreduce(grad_weight, l)
        for l in range(model.LAYERS):
            state = model.opt_states.pop(l)
            model.weights[l], model.opt_states[l] = model.update(l, model.grad_weights.pop(l), model.weights[l], state)
        solutions.hand_in(model, range(model.LAYERS))

    Model.check(run(solution, 4, 2, 4))
    assert capsys.readouterr().out == "Correct!\n"
    assert str(grade("ddp", solution)).endswith("\nSolved.")


# Programs that do not end are stopped: by Ctrl-C, and at a bound.


async def spins(model: Model) -> None:
    while True:
        pass


async def yields(model: Model) -> None:
    while True:
        await asyncio.sleep(0)


async def sleeps(model: Model) -> None:
    await asyncio.Event().wait()


async def computes(model: Model) -> None:
    solutions.load_all(model)
    model.activations[0] = model.get_activation([0])
    while True:
        model.forward(0, model.activations[0], model.weights[0])


async def catches_all(model: Model) -> None:
    for _ in range(3):
        try:
            while True:
                pass
        except BaseException:
            pass


async def stays_asleep(model: Model) -> None:
    """Does not let the event loop end: it is not to be cancelled."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def strategy(rank: Rank) -> None:
    while True:
        pass


ENDLESS = [spins, yields, sleeps, computes, catches_all, stays_asleep, strategy]


@pytest.mark.parametrize("solution", ENDLESS, ids=lambda solution: solution.__name__)
def test_a_solution_that_never_ends_is_stopped_with_a_sentence(solution: Any) -> None:
    verdict = grade("ddp", solution, seconds=0.1).verdict
    assert verdict.startswith("Wrong: the solution had not ended after 0.1 s")
    assert verdict.endswith("; make its loops end, or give it more time: grade(..., seconds=1).")
    if solution not in (yields, sleeps, stays_asleep):
        code = solution.__code__
        number = int(verdict.split("test_communication.py:")[1].split(";")[0])
        assert code.co_firstlineno < number <= max(line for _, _, line in code.co_lines() if line)


def test_a_solution_beyond_the_time_limit_is_stopped() -> None:
    turns = [0]

    async def solution(model: Model) -> None:
        while True:
            turns[0] += 1

    grade("ddp", solution, seconds=0.2)
    turns_at_stop = turns[0]
    time.sleep(0.1)
    assert turns[0] == turns_at_stop > 0


def test_a_picture_of_far_too_many_events_is_not_drawn() -> None:
    result = grade("ddp", solutions.ddp)
    result.models[0].log *= 10_000
    assert "<img" not in result._repr_html_()
    with pytest.raises(UserError, match="too many for a picture of at most 20,000"):
        result.draw()


def test_a_solution_may_have_any_time() -> None:
    assert grade("ddp", solutions.ddp, seconds=math.inf).solved
    for seconds in (0, -1, math.nan):
        with pytest.raises(UserError, match="give more than 0"):
            grade("ddp", solutions.ddp, seconds=seconds)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise")
@pytest.mark.parametrize("solution", ENDLESS, ids=lambda solution: solution.__name__)
def test_ctrl_c_ends_an_endless_solution(solution: Any, warm: WarmStarts) -> None:
    name = solution.__name__
    program = f"from {__name__} import *; print('go', flush=True); grade('ddp', {name}, seconds=120)"
    pipe = subprocess.PIPE
    with warm.start(["-c", program], stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert errors.strip().endswith("KeyboardInterrupt")
