"""Plans with expert parallelism: right over every mesh, with the communication that the method has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.draw import timeline_svg
from shardlab.language import Kind, Mesh, OpKind, Sizes, UserError, trace
from shardlab.simulate.timeline import simulate
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from tests.support.thorough import examples

SHARDS = [(), ("dp_shard",), ("dp_shard", "dp_replicate")]


def checked_plan(plan: Plan, blocks: int, microbatches: int) -> Checked:
    return check(trace(planned(plan), plan.mesh, blocks, microbatches))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mesh = Mesh(
        **{axis: draw(st.integers(1, 2)) for axis in ("pp", "dp_replicate", "dp_shard")}, ep=draw(st.integers(2, 3))
    )
    cuts = sorted(draw(st.tuples(*[st.sampled_from(SHARDS)] * 3)), key=len)
    return Plan(
        mesh,
        draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])),
        shard_parameters=cuts[0],
        shard_gradients=cuts[1],
        shard_optimizer=cuts[2],
        reduce_every_microbatch=(*cuts[1], *draw(st.sampled_from([(), ("ep",)]))),
        reshard_after=draw(st.sampled_from(["layer", "stage", "step"])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@settings(deadline=None, max_examples=examples(60))
@given(plans(), st.integers(1, 2), st.integers(3, 4))
def test_every_expert_plan_passes_all_four_channel_models(plan: Plan, each: int, blocks: int) -> None:
    checked = checked_plan(plan, blocks, each * plan.data_ranks)
    assert set(checked.models.values()) == {None}
    assert checked.backends() == ["gloo", "nccl"]
    assert simulate(checked).end > 0


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_block_exchanges_its_buffers_twice_forward_and_twice_backward(microbatches: int) -> None:
    plan = Plan(Mesh(ep=2))
    checked = checked_plan(plan, 3, 2 * microbatches)
    for tape in checked.program.tapes:
        assert sum(op.kind is OpKind.ALL_TO_ALL for op in tape) == 4 * 3 * microbatches


def test_experts_gradients_are_reduced_over_the_other_data_axes_only() -> None:
    plan = Plan(Mesh(dp_replicate=2, ep=2))
    checked = checked_plan(plan, 2, 8)
    for tape, specs in zip(checked.program.tapes, checked.specs, strict=True):
        reduced = [op for op in tape if op.kind is OpKind.ALL_REDUCE and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]
        axes = Counter((checked.program.sizes.signatures[op.layer].cut, str(op.group)) for op in reduced)
        assert axes == {
            ((), "ep"): 3,
            ((), "dp_replicate"): 3,
            (("expert",), "dp_replicate"): 2,
        }


def test_a_rank_keeps_its_experts_alone() -> None:
    def weights(ranks: int) -> int:
        checked = checked_plan(Plan(Mesh(ep=ranks)), 2, ranks)
        tape, specs = checked.program.tapes[0], checked.specs[0]
        sizes = checked.program.sizes
        return sum(sizes.elements(specs[op.outputs[0]]) for op in tape if op.kind is OpKind.LOAD_WEIGHT)

    matrix = Sizes.mixture(2).weights[0]
    assert [weights(ranks) for ranks in (2, 4)] == [(3 + 2 / 2) * matrix, (3 + 2 / 4) * matrix]


def test_mixtures_run_as_they_are_where_nothing_is_parallel() -> None:
    program = trace(planned(Plan()), Mesh(), Sizes.mixture(2), 2)
    assert not any(op.kind is OpKind.ALL_TO_ALL for op in program.tapes[0])
    check(program)


def test_what_expert_parallelism_cannot_cut_is_refused() -> None:
    shared = Plan(Mesh(cp=2, ep=2), shard_optimizer=("cp",))
    with pytest.raises(UserError, match="the plan shards over cp, but the 2 ranks of cp share a mixture's experts"):
        trace(planned(shared), shared.mesh, Sizes.expert_blocks(2), 2)
    with pytest.raises(UserError, match="ep 2, which cuts mixtures of experts, but this model has none"):
        trace(planned(Plan(Mesh(ep=2))), Mesh(ep=2), Sizes.puzzle(4), 2)
    with pytest.raises(UserError, match="3 microbatches do not divide among 2 data-parallel ranks"):
        checked_plan(Plan(Mesh(ep=2)), 2, 3)
    with pytest.raises(UserError, match="shard_parameters is ep"):
        Plan(Mesh(ep=2), shard_parameters=("ep",))


def test_the_drawing_and_its_legend_show_the_exchange() -> None:
    svg = timeline_svg(simulate(checked_plan(Plan(Mesh(ep=2)), 2, 2)))
    assert "all-to-all" in svg
