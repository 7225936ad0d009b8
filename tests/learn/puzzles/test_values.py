"""The five values: what they hold, what they sum, and what may be done with them."""

import asyncio
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import Rule
from shardlab.language import Refused, UserError
from shardlab.learn.puzzles import (
    Activation,
    ActivationGrad,
    Dist,
    Event,
    Model,
    OptState,
    Puzzle,
    PuzzleRefused,
    Weight,
    WeightGrad,
    draw,
    draw_group,
    find,
)
from shardlab.learn.puzzles.model import timeline_of
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import figures, gathered, models_of, results, run
from tests.support.refusing import refuses

SHARDED = [Weight(1, 3, 0), OptState(1, 3, 0), WeightGrad(1, 3, {0, 1}, 4)]
SHARD = 512 * 512 / 4


def test_arguments_stand_in_the_published_order() -> None:
    weight = Weight(2, 5, 1, {0}, 4)
    assert (weight.layer, weight.layers, weight.step, weight.shards, weight.total) == (2, 5, 1, {0}, 4)
    state = OptState(2, 5, 1, {3}, 4)
    assert (state.layer, state.layers, state.step, state.shards, state.total) == (2, 5, 1, {3}, 4)
    gradient = WeightGrad(2, 5, {0, 1}, 4, {3}, 4)
    assert (gradient.batches, gradient.total_batches, gradient.shards, gradient.total) == ({0, 1}, 4, {3}, 4)
    for kind in (Activation, ActivationGrad):
        value = kind(2, 5, {1}, 4)
        assert (value.layer, value.layers, value.batches, value.total_batches) == (2, 5, {1}, 4)


def test_arguments_have_the_published_names() -> None:
    assert WeightGrad(layer=0, layers=1, batches={1}, total_batches=4, shards={1}, total=4).memory() == SHARD
    assert Weight(layer=0, layers=1, step=0).is_complete()
    assert OptState(layer=0, layers=1, step=0, shards={1}, total=2).memory() == 512 * 256


@pytest.mark.parametrize("collection", [set, frozenset, list, tuple])
def test_shards_and_microbatches_may_be_any_collection(collection: type) -> None:
    assert WeightGrad(0, 1, collection([1, 0]), 4, collection([2]), 4) == WeightGrad(0, 1, {0, 1}, 4, {2}, 4)
    assert Activation(0, 1, collection([3]), 4).batches == frozenset({3})


def test_memory_is_the_share_held() -> None:
    assert Weight(0, 1, 0, {0, 2}, 4).memory() == 2 * SHARD
    assert Weight(0, 1, 0, {1}, 3).memory() == 1 / 3 * 512 * 512
    assert Activation(0, 1, {0, 3}, 4).memory() == ActivationGrad(0, 1, {0, 3}, 4).memory() == 2 * 512 * 256


@pytest.mark.parametrize("whole", SHARDED)
def test_a_complete_value_of_four_shards_equals_one_of_one(whole: Weight) -> None:
    four = replace(whole, shards={0, 1, 2, 3}, total=4)
    assert four == whole
    assert hash(four) == hash(whole)
    assert four.is_complete()
    assert replace(whole, shards={0, 1}, total=4) == replace(whole, shards={0}, total=2) != whole


@pytest.mark.parametrize("whole", SHARDED)
@given(total=st.integers(1, 8), data=st.data())
def test_shards_combine_to_the_whole_in_any_order(whole: Weight, total: int, data: st.DataObject) -> None:
    first, *rest = data.draw(st.permutations([whole.shard(i, total) for i in range(total)]))
    for piece in rest:
        assert not first.is_complete()
        first = first.combine(piece)
    assert first == whole


def test_pieces_need_not_adjoin_and_may_overlap() -> None:
    ends = Weight(0, 1, 0, {0}, 4).combine(Weight(0, 1, 0, {2}, 4))
    assert ends.shards == {0, 2}
    assert ends.combine(ends) == ends


def test_different_totals_are_counted_in_common_pieces() -> None:
    assert Weight(0, 1, 0, {0}, 2).combine(Weight(0, 1, 0, {2}, 4)).shards == {0, 1, 2}


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        (Weight(1, 2, 0, {1}, 2), "other values"),
        (Weight(0, 2, 1, {1}, 2), "other values"),
        (OptState(0, 2, 0, {1}, 2), "other values"),
        ("extra cheese", "no value"),
    ],
)
def test_pieces_of_different_values_are_not_combined(other: Weight, rule: Rule) -> None:
    with refuses(rule, error=PuzzleRefused, layer=0):
        Weight(0, 2, 0, {0}, 2).combine(other)


def test_gradients_that_sum_different_microbatches_are_not_combined() -> None:
    with refuses("other values", layer=0, error=PuzzleRefused):
        WeightGrad(0, 1, {0}, 2, {0}, 2).combine(WeightGrad(0, 1, {1}, 2, {1}, 2))


def test_only_a_complete_value_is_cut_into_pieces_that_exist() -> None:
    with refuses("partial", layer=0, error=PuzzleRefused):
        Weight(0, 1, 0, {0}, 2).shard(0, 2)
    with refuses("unknown slice", layer=0, error=PuzzleRefused):
        Weight(0, 1, 0).shard(4, 4)


@given(parts=st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=5))
def test_gradients_add_up_unless_a_microbatch_comes_twice(parts: list[set[int]]) -> None:
    total, expected = WeightGrad(0, 1, set(), 10), set[int]()
    for part in parts:
        gradient = WeightGrad(0, 1, part, 10)
        if expected & part:
            with refuses("counted twice", layer=0, doubled=tuple(sorted(expected & part)), error=PuzzleRefused):
                total + gradient
        else:
            total = total + gradient
            expected |= part
    assert total.batches == expected


def test_only_gradients_of_one_layer_and_slice_are_added() -> None:
    with refuses("other values", layer=0, error=PuzzleRefused):
        WeightGrad(0, 2, {0}, 2) + WeightGrad(1, 2, {1}, 2)
    with refuses("other slices", layer=0, error=PuzzleRefused):
        WeightGrad(0, 2, {0}, 2, {0}, 2) + WeightGrad(0, 2, {1}, 2, {1}, 2)
    with pytest.raises(TypeError):
        WeightGrad(0, 2, {0}, 2) + 1  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("shards", [(), (4,), (-1,), ("a",), (0.5,), range(5)])
def test_shards_that_do_not_exist_are_refused(shards: Any) -> None:
    with refuses("unknown slice", layer=3, error=PuzzleRefused):
        Weight(3, 4, 0, shards, 4)


def test_microbatches_count_from_zero() -> None:
    with refuses("unknown slice", layer=0, error=PuzzleRefused):
        Activation(0, 1, {-1}, 4)


def test_a_refusal_names_the_rank_whose_program_added() -> None:
    model = Model(rank=3)
    model.grad_weights[0] = model.fake_grad(0, [0])
    with pytest.raises(
        AssertionError, match=r"\.py:\d+: rank 3, op 0 add\(grad_weights\[0\]\): microbatch 0 would be counted twice"
    ):
        model.grad_weights[0] + model.grad_weights[0]


def test_refusals_are_the_programs_refusals_and_assertion_errors() -> None:
    assert issubclass(PuzzleRefused, AssertionError)
    assert issubclass(PuzzleRefused, Refused)


def test_values_are_printed_with_all_they_know() -> None:
    assert repr(Weight(1, 2, 0, {1}, 4)) == "Weight(layer=1, layers=2, step=0, shards=frozenset({1}), total=4)"


# Rules that are more lenient, so that published solutions keep running.


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
    row, square, batches = 2 * 512 * 256, 512 * 512, frozenset({0, 1})
    assert model.log == [
        Event("forward", 0, 0, 0, 2, 2 * square + row, batches),
        Event("loss", 1, 0, 2, 0, 2 * square + 2 * row),
        Event("backward", 0, 0, 2, 2, 2 * square + 3 * row, batches),
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


def test_errors_of_adding_objects_are_raised_on_every_rank() -> None:
    async def main() -> list[Any]:
        calls = [model.allreduce(Grumpy(), 0) for model in models_of(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [repr(outcome) for outcome in asyncio.run(main())] == ["KeyError('not with me')"] * 3


# Pictures of runs, values and stores.


VALUES = [
    Weight(2, 5, 0, {0}, 2),
    OptState(2, 5, 0),
    WeightGrad(2, 5, {0}, 2, {1}, 2),
    Activation(5, 5, {0}, 2),
    ActivationGrad(-1, 5, {1}, 2),
]


def is_svg(text: str) -> bool:
    return ET.fromstring(text).tag.endswith("svg")


def test_drawing_prints_time_and_peak_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    draw(run(solutions.gpipe, 4, 8, 4))
    expected = "Timesteps: 33.3 \nMaximum Memory: 4194304.0 at GPU: 1 time: 30.4\n"
    assert capsys.readouterr().out == expected


def test_a_run_is_drawn(tmp_path: Path) -> None:
    picture = draw(run(solutions.pipeline, 4, 4, 2))
    picture.save(tmp_path / "pipeline.svg")
    assert is_svg((tmp_path / "pipeline.svg").read_text())


def test_some_of_the_ranks_are_drawn_by_themselves() -> None:
    assert is_svg(draw(run(solutions.pipeline, 4, 4, 2)[1:3])._repr_svg_())


def test_a_model_that_has_done_nothing_is_drawn() -> None:
    assert is_svg(draw([Model(layers=2, batches=4)]).svg)


def test_nothing_is_not_drawn() -> None:
    with pytest.raises(UserError, match="no models were given"):
        draw([])


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_shows_itself(value: Weight) -> None:
    assert is_svg(value._repr_svg_())
    assert value.draw().svg == value._repr_svg_()


def test_a_store_is_drawn_as_one_network() -> None:
    assert is_svg(draw_group(dict(enumerate(VALUES))).svg)
    assert is_svg(draw_group({}).svg)


@pytest.mark.parametrize("name", ["ddp", "gpipe"])
def test_the_timeline_has_the_figures_of_the_logs(name: str) -> None:
    models = run(getattr(solutions, name), 4, 4, 4)
    timeline = timeline_of(models)
    assert (timeline.steps, timeline.end, timeline.peak_memory) == figures(models)


# The eight puzzles give the published figures, and other sizes what unit costs say.


TABLE = {  # ranks, layers, batches; steps, end, peak memory
    "standard": ((1, 2, 4), (16.5, 17.0, 2621440)),
    "grad_accum": ((1, 2, 4), (16.5, 17.0, 1966080)),
    "ddp": ((4, 2, 4), (5.1, 5.6, 1835008)),
    "wsdp": ((4, 6, 4), (19.9, 20.4, 2752512)),
    "fsdp": ((4, 6, 4), (19.9, 20.4, 2359296)),
    "pipeline": ((4, 8, 4), (66.9, 67.4, 3145728)),
    "gpipe": ((4, 8, 4), (33.3, 33.8, 4194304)),
    "pipeline_fsdp": ((16, 4, 4), (15.5, 16.0, 966656)),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_puzzle_gives_the_published_figures_to_the_digit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, expected = TABLE[name]
    models = run(getattr(solutions, name), *sizes)
    assert figures(models) == expected
    Model.check(models)
    assert capsys.readouterr().out == "Correct!\n"


@pytest.mark.parametrize("name", TABLE)
def test_the_statements_know_these_figures(name: str) -> None:
    puzzle: Puzzle = find(name)
    assert (puzzle.ranks, puzzle.layers, puzzle.batches) == TABLE[name][0]
    assert (puzzle.known_steps, puzzle.known_memory) == (TABLE[name][1][0], TABLE[name][1][2])


@given(layers=st.integers(1, 6), batches=st.integers(1, 8))
def test_on_one_rank_time_is_two_passes_over_every_microbatch_and_the_updates(layers: int, batches: int) -> None:
    for solution in (solutions.standard, solutions.grad_accum):
        assert figures(run(solution, 1, layers, batches))[1] == 2 * layers * batches + layers / 2


@given(ranks=st.integers(1, 9), layers=st.integers(1, 5))
def test_data_parallel_time_does_not_depend_on_the_ranks(ranks: int, layers: int) -> None:
    assert figures(run(solutions.ddp, ranks, layers, ranks))[1] == round(2 * layers + 0.8 * layers, 6)
    assert figures(run(solutions.fsdp, ranks, layers, ranks))[1] == round((2 + 0.9 + 0.5) * layers, 6)


@given(ranks=st.integers(1, 6), layers_per_rank=st.integers(1, 3), batches=st.integers(1, 6))
def test_a_pipeline_passes_the_batch_once_forward_and_once_back(ranks: int, layers_per_rank: int, batches: int) -> None:
    layers = ranks * layers_per_rank
    end = 2 * layers * batches + 2 * (ranks - 1) * 0.4 + layers_per_rank / 2
    assert figures(run(solutions.pipeline, ranks, layers, batches))[1] == round(end, 6)


@given(ranks=st.integers(1, 7))
def test_memory_of_shards_adds_up_to_the_whole(ranks: int) -> None:
    models = run(solutions.fsdp, ranks, 1, ranks)
    assert sum(model.weights[0].memory() for model in models) == pytest.approx(512 * 512)
