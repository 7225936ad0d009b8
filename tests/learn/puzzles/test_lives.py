"""Memory of values that stand in no store: it counts from their making to their last use."""

from collections.abc import Callable

import pytest

from shardlab.learn.puzzles import Model, grade
from shardlab.learn.puzzles.values import Weight, WeightGrad
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import figures, run

SQUARE, ROW = 512 * 512, 512 * 256


def in_variables(model: Model) -> None:
    """The first puzzle with nothing in a store."""
    depth = model.LAYERS
    loaded = [model.load_weights(l) for l in range(depth)]
    acts = [model.get_activation(range(model.BATCHES))]
    for l in range(depth):
        acts.append(model.forward(l, acts[l], loaded[l][0]))
    grad = model.loss(acts[depth])
    grad_weights: list[WeightGrad] = []
    for l in reversed(range(depth)):
        grad_weight, grad = model.backward(l, acts[l], grad, loaded[l][0])
        grad_weights.append(grad_weight)
    for l, grad_weight in zip(reversed(range(depth)), grad_weights, strict=True):
        weight, _ = model.update(l, grad_weight, *loaded[l])
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

    kept = ROW if verb == "keep" else 0
    assert memory_of(solution) == [SQUARE + ROW, 2 * SQUARE + ROW + kept]


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
