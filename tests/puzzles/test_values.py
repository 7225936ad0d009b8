"""The five values: what they hold, what they sum, and what may be done with them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.errors import Rule
from shardlab.program import Refused
from shardlab.puzzles import Activation, ActivationGrad, Model, OptState, PuzzleRefused, Weight, WeightGrad
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
