"""The rules of the face: what it lets pass so that published solutions keep running."""

import asyncio
from typing import Any

import pytest

from shardlab.puzzles import Dist, Event, Model, OptState, PuzzleRefused, Weight, WeightGrad
from tests.puzzles.drive import gathered, models_of, results, run
from tests.support.refusing import refuses

SQUARE = 512 * 512


def updated(model: Model, layer: int = 0) -> Weight:
    """The layer's weight after an update from made-up gradients."""
    gradient = model.fake_grad(layer, range(model.BATCHES))
    return model.update(layer, gradient, *model.load_weights(layer))[0]


def test_a_model_by_itself_is_rank_1_of_1() -> None:
    model = Model(layers=2, batches=4)
    assert (model.rank, model.RANKS, model.LAYERS, model.BATCHES, model.time) == (1, 1, 2, 4, 0)
    assert Model().BATCHES == 1


def test_arguments_of_a_model_stand_in_the_published_order() -> None:
    dist = Dist(4)
    model = Model(2, dist, 3, 5)
    assert (model.rank, model.dist, model.LAYERS, model.BATCHES, model.RANKS) == (2, dist, 3, 5, 4)


def test_the_rank_is_looked_at_when_it_first_communicates() -> None:
    model = Model(layers=1)
    updated(model)
    for call in (model.allreduce(model.fake_grad(0, []), 0), model.pass_to(0, "x"), model.receive()):
        with refuses("unknown rank", error=PuzzleRefused):
            asyncio.run(call)


def test_the_gradient_of_activation_l_has_the_layer_l_minus_1() -> None:
    model = Model(layers=2)
    weight = [model.load_weights(l)[0] for l in range(2)]
    a0 = model.get_activation([0])
    a1 = model.forward(0, a0, weight[0])
    g2 = model.loss(model.forward(1, a1, weight[1]))
    _, g1 = model.backward(1, a1, g2, weight[1])
    _, g0 = model.backward(0, a0, g1, weight[0])
    assert [g2.layer, g1.layer, g0.layer] == [1, 0, -1]


def test_a_full_gradient_updates_a_shard() -> None:
    model = Model(layers=1, batches=2)
    weight, state = model.load_weights(0, 1, 4)
    new_weight, new_state = model.update(0, model.fake_grad(0, [0, 1]), weight, state)
    assert new_weight == Weight(0, 1, 1, {1}, 4)
    assert new_state == OptState(0, 1, 1, {1}, 4)


def test_a_full_gradient_counted_in_four_shards_does_so_too() -> None:
    model = Model(layers=1)
    shards: Any = range(4)  # any collection
    model.update(0, WeightGrad(0, 1, {0}, 1, shards, 4), *model.load_weights(0, 1, 2))


def test_a_shard_of_a_weight_may_be_updated_with_the_whole_optimizer_state() -> None:
    model = Model(layers=1)
    weight, state = model.load_weights(0, 1, 4)[0], model.load_weights(0)[1]
    assert model.update(0, model.fake_grad(0, [0]), weight, state) == (Weight(0, 1, 1, {1}, 4), OptState(0, 1, 1))


def test_a_made_up_gradient_of_nothing_is_zero() -> None:
    model = Model(layers=1, batches=2)
    zero, full = model.fake_grad(0, []), model.fake_grad(0, [0, 1])
    assert zero.batches == set()
    assert zero + full == full
    assert model.fake_grad(0) == zero


def test_old_copies_and_leftovers_may_stay() -> None:
    model = Model(layers=1)
    model.weights["old"], model.opt_states["old"] = model.load_weights(0)
    model.activations[0] = model.get_activation([0])
    gradient = model.fake_grad(0, [0])
    model.weights[0], model.opt_states[0] = model.update(0, gradient, model.weights["old"], model.opt_states["old"])
    model.set_final_weight(0, model.weights[0])
    Model.check([model])


def test_a_value_under_two_keys_counts_twice() -> None:
    model = Model(layers=1)
    model.weights[0], model.opt_states[0] = model.load_weights(0)
    assert model.memory() == 2 * SQUARE
    model.weights["again"] = model.weights[0]
    assert model.memory() == 3 * SQUARE


def test_the_check_accepts_replicas_and_shards_that_do_not_adjoin(capsys: pytest.CaptureFixture[str]) -> None:
    def solution(model: Model) -> None:
        model.weights[0], model.opt_states[0] = model.load_weights(0, model.rank * 2 % 3, 3)
        model.grad_weights[0] = model.fake_grad(0, [0])
        model.weights[0], _ = model.update(0, model.grad_weights[0], model.weights[0], model.opt_states[0])
        model.set_final_weight(0, model.weights[0])

    Model.check(run(solution, 4, layers=1))
    assert capsys.readouterr().out == "Correct!\n"


def test_shards_that_are_gathered_may_be_replicated() -> None:
    async def solution(model: Model) -> Weight:
        model.weights[0], _ = model.load_weights(0, model.rank % 2, 2)
        return await model.allgather(model.weights[0], 0)

    assert results(solution, 4, layers=1) == [Weight(0, 1, 0)] * 4


def test_values_made_by_hand_with_plain_sets_are_reduced_by_any_model() -> None:
    gradients = [WeightGrad(0, 1, {rank}, 4) for rank in range(4)]
    assert (
        results(lambda model: model.allreduce(gradients[model.rank], 0), 4, layers=1)
        == [WeightGrad(0, 1, {0, 1, 2, 3}, 4)] * 4
    )


def test_gradients_in_four_shards_are_summed_and_scattered() -> None:
    gradients = [WeightGrad(0, 1, {rank}, 4, {0, 1, 2, 3}, 4) for rank in range(4)]
    assert results(lambda model: model.scatterreduce(gradients[model.rank], 0), 4, layers=1) == [
        WeightGrad(0, 1, {0, 1, 2, 3}, 4, {rank}, 4) for rank in range(4)
    ]


def test_values_may_come_from_another_model() -> None:
    one, other = Model(layers=1, batches=4), Model(layers=1, batches=4)
    weight, state = one.load_weights(0)
    other.update(0, one.fake_grad(0, range(4)), weight, state)
    one.update(0, one.fake_grad(0, range(4)), weight, state)  # its own run has not updated it yet


def test_a_dist_may_be_used_again_and_a_new_model_starts_a_new_run() -> None:
    async def half(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "left behind")

    async def whole(model: Model) -> str | None:
        return await model.pass_to(1, "new") if model.rank == 0 else await model.receive()

    dist = Dist(2)
    for _ in range(2):
        asyncio.run(gathered(half, models_of(2, dist=dist)))
        assert asyncio.run(gathered(whole, models_of(2, dist=dist))) == [None, "new"]


def test_the_storage_is_the_five_stores() -> None:
    model = Model()
    assert all(
        mine is theirs
        for mine, theirs in zip(
            model.storage(),
            (model.weights, model.opt_states, model.activations, model.grad_activations, model.grad_weights),
            strict=True,
        )
    )


def test_the_status_names_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(layers=2, batches=4)
    model.activations[0, "a"] = model.get_activation([2, 3])
    model.status()
    assert "activations: (0, 'a'): activations[0] (microbatches 2-3)\n" in capsys.readouterr().out


def test_the_log_says_what_happened_when_and_at_what_memory() -> None:
    async def solution(model: Model) -> None:
        model.activations[0] = model.get_activation([0, 1])
        model.weights[0], model.opt_states[0] = model.load_weights(0)
        model.activations[1] = model.forward(0, model.activations[0], model.weights[0])
        model.grad_activations[1] = model.loss(model.activations[1])
        model.grad_weights[0], _ = model.backward(0, model.activations[0], model.grad_activations[1], model.weights[0])
        model.grad_weights[0] = await model.allreduce(model.grad_weights[0], 0)
        model.update(0, model.grad_weights[0], model.weights[0], model.opt_states[0])
        await model.pass_to(0, "note")
        await model.receive()

    (model,) = run(solution, 1, layers=1, batches=2)
    row, square, both = 2 * 512 * 256, 512 * 512, frozenset({0, 1})
    assert model.log == [
        Event("forward", 0, 0, 0, 2, 2 * square + row, both),
        Event("loss", 1, 0, 2, 0, 2 * square + 2 * row),
        Event("backward", 0, 0, 2, 2, 2 * square + 3 * row, both),
        Event("allreduce", 0, 0, 4, 0.3, 3 * square + 3 * row),
        Event("update", None, 0, 4.3, 0.5, 3 * square + 3 * row),
        Event("pass", None, 0, 4.8, 0.2, 3 * square + 3 * row, to=0),
        Event("pass", None, 0, 5.0, 0.2, 3 * square + 3 * row, source=0),
    ]
    assert model.time == 5.2


def test_anything_that_can_be_added_and_combined_is_reduced_and_gathered() -> None:
    assert results(lambda model: model.allreduce(model.rank, 0), 4) == [6] * 4
    with refuses("no value", layer=0, error=PuzzleRefused):
        results(lambda model: model.allgather(model.rank, 0), 2)


class Grumpy:
    def __add__(self, other: object) -> object:
        raise KeyError("not with me")


def test_what_objects_raise_as_they_are_added_is_raised_on_every_rank() -> None:
    async def main() -> list[Any]:
        calls = [model.allreduce(Grumpy(), 0) for model in models_of(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [repr(outcome) for outcome in asyncio.run(main())] == ["KeyError('not with me')"] * 3
