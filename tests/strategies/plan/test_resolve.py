"""Plans resolved for one rank: stages, microbatches, slices, and axes of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardlab.language import Mesh, Sizes, UserError
from shardlab.models import find_model
from shardlab.models.cutting import cut_for
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import Completion, Completions, model_layers
from shardlab.strategies.plan.resolve import resolve, with_named_blocks

SHARD = ("dp_shard",)
FSDP = Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)


def test_each_rank_has_its_stages_and_its_microbatches() -> None:
    mesh = Mesh(pp=2, dp_shard=2)
    plans = [resolve(Plan(mesh), Sizes.puzzle(5), 6, rank) for rank in range(4)]
    assert [plan.pipeline for plan in plans] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [plan.microbatches for plan in plans] == [range(3), range(3, 6)] * 2
    assert [tuple(plan.layers) for plan in plans] == [(0, 1)] * 2 + [(2, 3, 4)] * 2


def test_half_blocks_are_cut_before_a_norm() -> None:
    sizes = Sizes.half_blocks(2)  # 11 layers: a body, then five pairs of a norm and a body
    plan = Plan(Mesh(pp=2, tp=2))
    stages = resolve(plan, sizes, 2, 0).stages
    assert stages == (range(5), range(5, 11))
    assert not sizes.signatures[5].sliced
    assert resolve(replace(plan, layers_per_stage=(1, 4)), sizes, 2, 0).stages == (range(3), range(3, 11))


def test_too_many_stages_for_half_blocks_are_counted_in_half_blocks() -> None:
    with pytest.raises(UserError, match="4 half-blocks of 2 blocks, and the head, do not reach 8 pipeline stages"):
        resolve(Plan(Mesh(pp=8, tp=2)), Sizes.half_blocks(2), 8, 0)


def test_fsdp_keeps_slices_and_scatters_gradients() -> None:
    rank = resolve(FSDP, Sizes.puzzle(2), 2, 1)
    assert [weight.parameters for weight in rank.weights.values()] == [(1, 2), (1, 2)]
    assert rank.gather_axes == rank.scatter_axes == SHARD
    assert rank.update_axes == ()
    assert rank.weights[0].reduce_every_microbatch == SHARD
    assert rank.weights[0].reduce_once == ()


def test_zero_1_reduces_once_a_step_and_gathers_what_it_has_updated() -> None:
    rank = resolve(Plan(Mesh(dp_shard=2), shard_optimizer=SHARD), Sizes.puzzle(2), 2, 1)
    weight = rank.weights[0]
    assert (weight.parameters, weight.optimizer) == ((0, 1), (1, 2))
    assert (weight.reduce_every_microbatch, weight.reduce_once) == ((), SHARD)
    assert (rank.gather_axes, rank.update_axes) == ((), SHARD)


def test_a_weight_is_cut_over_tp_before_it_is_sharded() -> None:
    plan = replace(FSDP, mesh=Mesh(dp_shard=2, tp=2))
    rank = resolve(plan, Sizes.half_blocks(1), 2, 3)  # the last of both axes
    body, norm = rank.weights[0], rank.weights[1]
    assert (body.cut_axes, body.parameters) == (("tp",), (3, 4))
    assert (norm.cut_axes, norm.parameters) == ((), (1, 2))


def test_bodies_reduce_their_terms_and_norms_gather_with_sequence_parallelism() -> None:
    reduce, scatter, gather = ((Completion(verb, "tp"),) for verb in ("all_reduce", "reduce_scatter", "all_gather"))
    layers = resolve(Plan(Mesh(tp=2)), Sizes.half_blocks(1), 1, 0).layers
    assert layers[1].completions == Completions()
    assert layers[2].completions == Completions(output=reduce, grad_input=reduce)
    layers = resolve(Plan(Mesh(tp=2), sequence_parallel=True), Sizes.half_blocks(1), 1, 0).layers
    assert layers[0].completions == Completions(output=scatter, grad_output=gather), "nobody needs the tokens' gradient"
    assert layers[1].completions == Completions(output=gather)
    assert layers[2].completions == Completions(output=scatter, grad_output=gather, grad_input=scatter)
    assert layers[6].completions == Completions(grad_input=scatter), "the loss takes slices of the logits"


def test_experts_exchange_buffers_before_and_after_in_both_directions() -> None:
    rank = resolve(Plan(Mesh(ep=2)), Sizes.mixture(1), 2, 1)
    assert rank.layers[0].completions == Completions()
    assert set(rank.layers[1].completions) == {(Completion("all_to_all", "ep"),)}
    assert rank.weights[0].reduce_once == ("ep",)
    assert rank.weights[1].reduce_once == (), "their gradients have every microbatch of the group already"


def test_a_tied_weight_is_shared_by_the_ends_of_its_pipeline_and_counted_by_the_first() -> None:
    plan, sizes = Plan(Mesh(pp=3, dp_shard=2)), Sizes.half_blocks(2, tied=True)
    first, middle, last = (resolve(plan, sizes, 2, rank) for rank in (1, 3, 5))
    assert first.weights[0].shared_by == last.weights[0].shared_by == (1, 5)
    assert 0 not in middle.weights
    assert (first.weights[0].counted, last.weights[0].counted) == (True, False)
    alone = resolve(Plan(), sizes, 1, 0).weights[0]
    assert (alone.users, alone.shared_by, alone.counted) == (2, (), True)


def test_a_block_on_two_stages_is_recomputed_in_two_runs() -> None:
    plan, sizes = Plan(Mesh(pp=2, tp=2), layers_per_stage=(2, 3), recompute="full"), Sizes.half_blocks(2)
    layers = {**resolve(plan, sizes, 2, 0).layers, **resolve(plan, sizes, 2, 2).layers}
    assert {l: layer.recompute for l, layer in layers.items() if layer.recompute} == {
        4: range(1, 4),
        8: range(5, 8),
    }
    plan = replace(plan, layers_per_stage=(1, 4))
    layers = {**resolve(plan, sizes, 2, 0).layers, **resolve(plan, sizes, 2, 2).layers}
    assert [l for l, layer in layers.items() if layer.keeps == "input"] == [1, 3, 5]


@pytest.mark.parametrize(
    ("recompute", "blocks"),
    [("every-2", (1, 3, 5)), ("every-4", (3,)), ("first-1", (0, 4)), ("first-2", (0, 1, 4, 5)), ("first-9", range(6))],
)
def test_counted_recomputation_names_the_blocks_of_each_stage(recompute: str, blocks: Sequence[int]) -> None:
    plan, model = Plan(Mesh(pp=2), layers_per_stage=(4, 2), recompute=recompute), model_layers(Sizes.puzzle(6))
    assert with_named_blocks(plan, model).recompute == tuple(blocks)
    assert with_named_blocks(replace(plan, recompute="full"), model).recompute == "full"


def test_uniform_recomputation_keeps_one_input_of_several_blocks_of_a_stage() -> None:
    plan, sizes = Plan(Mesh(pp=2), layers_per_stage=(3, 2), recompute="uniform-2"), Sizes.puzzle(5)
    kept_inputs = [
        [l for l, layer in resolve(plan, sizes, 2, rank).layers.items() if layer.keeps == "input"] for rank in (0, 1)
    ]
    assert kept_inputs == [[0, 2], [3]]
    assert resolve(plan, sizes, 2, 0).layers[1].recompute == range(1)


def test_backward_passes_come_after_what_they_recompute() -> None:
    rank = resolve(Plan(recompute=(1,)), Sizes.half_blocks(2), 1, 0)
    assert list(rank.backward_order(0)) == [10, 9, 5, 6, 7, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_slices_of_the_sequence_are_an_early_and_a_late_one() -> None:
    sizes = Sizes.context_blocks(1)
    assert [resolve(Plan(Mesh(cp=2)), sizes, 1, rank).sequence_slices for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert resolve(Plan(), sizes, 1, 0).sequence_slices is None


def test_layers_of_one_shape_are_described_once() -> None:
    assert model_layers(Sizes.half_blocks(2)) is model_layers(Sizes.half_blocks(2))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(Mesh(tp=2)), "the mesh has tp 2, which works on half-blocks, but this model's layers are whole"),
        (Plan(Mesh(ep=2)), "the mesh has ep 2, which cuts mixtures of experts, but this model has none"),
        (Plan(Mesh(cp=2)), "the mesh has cp 2, which cuts sequences, but attention is not a step of its own"),
        (Plan(recompute="selective"), "selective recomputation was asked for, but attention is not a step of its own"),
        (Plan(recompute=(4,)), "recompute names block 4, but the model has blocks 0-3"),
    ],
)
def test_a_model_that_does_not_fit_the_plan_is_one_sentence(plan: Plan, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(plan, Sizes.puzzle(4), 2, 0)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("model", "mesh", "puzzle"),
    [("llama", Mesh(tp=2), Sizes.half_blocks(3)), ("mixtral", Mesh(ep=2, tp=2), Sizes.expert_blocks(3))],
)
def test_the_puzzles_layers_belong_to_the_same_blocks_as_those_of_a_model(
    model: str, mesh: Mesh, puzzle: Sizes
) -> None:
    sizes = cut_for(replace(find_model(model), layers=3), mesh, attention_apart=mesh.ep > 1).sizes(1, 4)
    assert puzzle.weight_blocks == sizes.weight_blocks


def test_freeze_counts_blocks_in_half_blocks() -> None:
    plan, sizes = Plan(Mesh(tp=2), freeze=(0,)), Sizes.half_blocks(3)
    assert resolve(plan, sizes, 4, 0).frozen == {0, 1, 2, 3, 4}
    for number in (-1, 3):
        with pytest.raises(
            UserError, match=rf"freeze names block {number}, but the model has blocks 0-2; give numbers"
        ):
            resolve(replace(plan, freeze=(number,)), sizes, 4, 0)
