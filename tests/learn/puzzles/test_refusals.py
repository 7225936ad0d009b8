"""Mistakes are refused in a sentence with rank, op, layer and elements."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from shardlab.language import UserError
from shardlab.learn.puzzles import Activation, Dist, Model, OptState, PuzzleRefused, Weight, WeightGrad
from tests.learn.puzzles.drive import results, run
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses


def forward_and_loss(model: Model) -> None:
    model.weights[0], model.opt_states[0] = model.load_weights(0)
    model.activations[0] = model.get_activation(range(model.BATCHES))
    model.activations[1] = model.forward(0, model.activations[0], model.weights[0])
    model.grad_activations[1] = model.loss(model.activations[1])


def backward(model: Model) -> None:
    model.grad_weights[0], model.grad_activations[0] = model.backward(
        0, model.activations[0], model.grad_activations[1], model.weights[0]
    )


def update(model: Model) -> None:
    model.weights[0], model.opt_states[0] = model.update(
        0, model.grad_weights[0], model.weights[0], model.opt_states[0]
    )


def whole_step() -> Model:
    model = Model(rank=0, layers=1)
    forward_and_loss(model)
    backward(model)
    update(model)
    return model


# Solutions that the published library accepts.


def test_a_gradient_reduced_twice_is_refused() -> None:
    async def solution(model: Model) -> None:
        model.grad_weights[0] = WeightGrad(0, 1, {model.rank}, 2)
        model.grad_weights[0] = await model.allreduce(model.grad_weights[0], 0)
        model.grad_weights[0] = await model.allreduce(model.grad_weights[0], 0)

    with pytest.raises(
        AssertionError, match=r"\.py:\d+: rank 0, op 1 allreduce\(grad_weights\[0\]\): microbatches 0-1 would be"
    ):
        run(solution, 2, layers=1, batches=2)


def test_a_microbatch_that_two_ranks_ran_is_refused() -> None:
    async def solution(model: Model) -> None:
        model.grad_weights[2] = WeightGrad(2, 3, {model.rank // 2}, 2)
        model.grad_weights[2] = await model.scatterreduce(model.grad_weights[2], 2)

    with refuses("counted twice", rank=0, op=0, layer=2, doubled=(0,), error=PuzzleRefused):
        run(solution, 4, layers=3, batches=2)


def test_a_microbatch_added_twice_is_refused() -> None:
    model = Model(rank=0, layers=1)
    forward_and_loss(model)
    backward(model)
    with refuses("counted twice", rank=0, op=3, layer=0, doubled=(0,), error=PuzzleRefused):
        model.grad_weights[0] + model.grad_weights[0]


def test_a_backward_pass_through_an_updated_weight_is_refused() -> None:
    model = whole_step()
    with refuses("stale weight", rank=0, op=4, layer=0, error=PuzzleRefused):
        backward(model)


def test_a_backward_pass_through_a_stale_copy_is_refused() -> None:
    model = Model(rank=0, layers=1)
    forward_and_loss(model)
    backward(model)
    model.weights["copy"] = model.weights[0]
    update(model)
    with refuses("stale weight", rank=0, op=4, layer=0, error=PuzzleRefused):
        model.backward(0, model.activations[0], model.grad_activations[1], model.weights["copy"])


def test_a_gathered_copy_of_what_was_updated_is_stale() -> None:
    async def solution(model: Model) -> None:
        model.weights[0], model.opt_states[0] = model.load_weights(0, model.rank, 2)
        model.weights["whole"] = await model.allgather(model.weights[0], 0)
        model.grad_weights[0] = model.fake_grad(0, [0])
        update(model)
        model.forward(0, model.get_activation([0]), model.weights["whole"])

    with refuses("stale weight", layer=0, error=PuzzleRefused):
        run(solution, 2, layers=1)


def test_a_stale_shard_is_not_gathered() -> None:
    async def solution(model: Model) -> None:
        model.weights[0], model.opt_states[0] = model.load_weights(0, model.rank, 2)
        model.weights["old"] = model.weights[0]
        model.grad_weights[0] = model.fake_grad(0, [0])
        update(model)
        await model.allgather(model.weights["old"], 0)

    with refuses("stale weight", layer=0, error=PuzzleRefused):
        run(solution, 2, layers=1)


def test_a_weight_loaded_after_its_update_is_stale_until_a_new_model_starts_a_new_run() -> None:
    model = whole_step()
    model.weights[0], model.opt_states[0] = model.load_weights(0)
    with refuses("stale weight", layer=0, error=PuzzleRefused):
        backward(model)
    whole_step()


def test_updating_twice_is_refused() -> None:
    with refuses("wrong step", rank=0, op=4, layer=0, error=PuzzleRefused):
        update(whole_step())


def test_old_and_new_shards_are_not_gathered_together() -> None:
    async def solution(model: Model) -> None:
        model.weights[0] = Weight(0, 1, model.rank, {model.rank}, 2)
        await model.allgather(model.weights[0], 0)

    with refuses("other values", layer=0, error=PuzzleRefused):
        run(solution, 2, layers=1)


# Solutions that it refuses too.


def arguments(model: Model) -> dict[str, Any]:
    return {"inp": model.activations[0], "grad": model.grad_activations[1], "weight": model.weights[0]}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"weight": Weight(1, 2, 0)}, refusal_by("wrong layer", layer=0)),
        ({"weight": Weight(0, 2, 0, {1, 2}, 4)}, refusal_by("partial weight", layer=0, missing=(0, 3))),
        ({"weight": None}, refusal_by("no value", layer=0)),
        ({"weight": OptState(0, 2, 0)}, refusal_by("wrong kind", layer=0)),
        ({"inp": Activation(1, 2, {0}, 2)}, refusal_by("wrong layer", layer=0)),
        ({"inp": Activation(0, 2, {0}, 2)}, refusal_by("other tokens", layer=0)),
        ({"grad": Activation(1, 2, {0, 1}, 2)}, refusal_by("wrong kind", layer=0)),
        ({"grad": "pizza"}, refusal_by("no value", layer=0)),
    ],
)
def test_a_backward_pass_with_a_wrong_argument_is_refused(wrong: dict[str, Any], expected: ExpectedRefusal) -> None:
    model = Model(rank=0, layers=1, batches=2)
    forward_and_loss(model)
    with refuses(expected, error=PuzzleRefused):
        model.backward(0, **arguments(model) | wrong)
    assert len(model.log) == 2, "what is refused is not logged"
    assert model.time == 2, "and takes no time"


def test_a_forward_pass_wants_its_own_input_and_a_complete_weight() -> None:
    model = Model(rank=0, layers=2)
    weight, _ = model.load_weights(0, 0, 2)
    with refuses("partial weight", rank=0, op=0, layer=0, missing=(1,), error=PuzzleRefused):
        model.forward(0, model.get_activation([0]), weight)
    with refuses("wrong layer", layer=1, error=PuzzleRefused):
        model.forward(1, model.get_activation([0]), model.load_weights(1)[0])


def test_the_loss_reads_the_last_activation() -> None:
    model = Model(rank=0, layers=2)
    with refuses("wrong layer", rank=0, op=0, layer=2, error=PuzzleRefused):
        model.loss(model.get_activation([0]))


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (WeightGrad(0, 1, {2, 3}, 4), refusal_by("missing microbatches", layer=0, missing=(0, 1))),
        (WeightGrad(0, 1, set(range(5)), 5), refusal_by("unknown microbatch", layer=0)),
        (WeightGrad(1, 2, set(range(4)), 4), refusal_by("wrong layer", layer=0)),
        (WeightGrad(0, 1, set(range(4)), 4, {0}, 4), refusal_by("missing slices", layer=0, missing=(1,))),
        (None, refusal_by("no value", layer=0)),
    ],
)
def test_an_update_wants_the_gradient_of_the_whole_batch(gradient: WeightGrad, expected: ExpectedRefusal) -> None:
    model = Model(rank=0, layers=1, batches=4)
    with refuses(expected, error=PuzzleRefused):
        model.update(0, gradient, *model.load_weights(0, 1, 4))


def test_a_whole_weight_is_not_updated_with_a_shard_of_the_optimizer_state() -> None:
    model = Model(rank=0, layers=1)
    with refuses("missing slices", layer=0, error=PuzzleRefused):
        model.update(0, model.fake_grad(0, [0]), model.load_weights(0)[0], model.load_weights(0, 0, 2)[1])


def test_the_tutorials_error_is_an_assertion_error() -> None:
    model = Model(layers=2, batches=4)
    with pytest.raises(AssertionError, match="microbatches 0-1"):
        model.update(0, model.fake_grad(0, [2, 3]), *model.load_weights(0))


@pytest.mark.parametrize("name", ["allreduce", "scatterreduce"])
def test_only_gradients_of_one_layer_are_reduced(name: str) -> None:
    def solution(model: Model) -> Any:
        return getattr(model, name)(WeightGrad(model.rank, 2, {model.rank}, 2), 0)

    with refuses("other values", layer=0, error=PuzzleRefused):
        results(solution, 2)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("allreduce", Weight(0, 1, 0), refusal_by("no term", layer=0)),
        ("allgather", Activation(0, 1, {0}, 1), refusal_by("wrong kind", layer=0)),
        ("scatterreduce", WeightGrad(0, 1, set(), 1, {0}, 2), refusal_by("partial", layer=0)),
    ],
)
def test_a_collective_of_the_wrong_thing_is_refused(name: str, value: object, expected: ExpectedRefusal) -> None:
    with refuses(expected, error=PuzzleRefused):
        results(lambda model: getattr(model, name)(value, 0), 2)


def test_a_value_meets_no_other_object() -> None:
    with refuses("no value", layer=0, error=PuzzleRefused):
        results(lambda model: model.allreduce(model.rank or model.fake_grad(0, []), 0), 2)


def test_different_collectives_do_not_meet() -> None:
    def solution(model: Model) -> Any:
        gradient = WeightGrad(0, 1, {model.rank}, 2)
        return model.allreduce(gradient, 0) if model.rank else model.scatterreduce(gradient, 0)

    with refuses("other order", layer=0, error=PuzzleRefused):
        results(solution, 2)


@pytest.mark.parametrize("to", [-1, 2])
def test_a_message_to_a_rank_that_does_not_exist_is_refused(to: int) -> None:
    with refuses("unknown rank", op=0, error=PuzzleRefused):
        results(lambda model: model.pass_to(to, "x"), 2)


def test_a_store_keeps_values_only() -> None:
    model = Model(rank=0)
    model.activations[0] = "pizza"  # pyright: ignore[reportArgumentType]
    with refuses("no value", error=PuzzleRefused):
        model.memory()


# The check.


def finals(*weights: Weight | None) -> list[Model]:
    models = [Model(rank=rank, dist=Dist(4), layers=1) for rank in range(len(weights))]
    for model, weight in zip(models, weights, strict=True):
        if weight is not None:
            model.set_final_weight(0, weight)
    return models


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (list[Model], refusal_by("wrong number")),
        (lambda: finals(None, None), refusal_by("not kept", layer=0)),
        (lambda: finals(Weight(0, 1, 0)), refusal_by("wrong step", layer=0)),
        (lambda: finals(None, Weight(0, 1, 2)), refusal_by("wrong step", layer=0)),
        (lambda: finals(Weight(1, 2, 1)), refusal_by("wrong step", layer=0)),
        (
            lambda: finals(Weight(0, 1, 1, {0}, 4), Weight(0, 1, 1, {2}, 4)),
            refusal_by("missing slices", layer=0, missing=(1, 3)),
        ),
        (lambda: finals(cast(Any, "pizza")), refusal_by("no value", layer=0)),
    ],
)
def test_the_check_refuses_what_is_not_updated_once(
    models: Callable[[], list[Model]], expected: ExpectedRefusal
) -> None:
    with refuses(expected, error=PuzzleRefused):
        Model.check(models())


@pytest.mark.parametrize("make", [lambda: Dist(0), lambda: Model(layers=0), lambda: Model(batches=-1)])
def test_counts_below_one_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="give 1 or more"):
        make()


def test_a_refusal_under_asyncio_names_the_rank_that_is_wrong() -> None:
    async def solution(model: Model) -> None:
        model.storage()
        await model.pass_to((model.rank + 1) % 3, model.rank)
        if await model.receive() == 1:
            model.loss(model.get_activation([0]))

    with refuses("wrong layer", rank=2, op=2, layer=2, error=PuzzleRefused):
        run(solution, 3)
