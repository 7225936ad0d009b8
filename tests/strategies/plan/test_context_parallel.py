"""Plans with context parallelism: their messages, each rank's computation, and their refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from shardlab.check import ChannelModel, Checked, check
from shardlab.language import Deadlock, Kind, Mesh, Op, OpKind, Program, Refused, Sizes, UserError, trace
from shardlab.language.rules.kinds import bits
from shardlab.simulate.timeline import PUZZLE_COSTS, simulate
from shardlab.strategies.plan.plan import Context, Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.support.thorough import sampled

BLOCKS = 2


def checked(plan: Plan, microbatches: int = 1) -> Checked:
    sizes = plan.counted(Sizes.context_blocks(BLOCKS * plan.mesh.pp))
    return check(trace(program_from_plan(plan), plan.mesh, sizes, microbatches * plan.data_ranks))


CUT = ("dp_shard", "cp")
PLANS = [
    Plan(Mesh(cp=2)),
    Plan(Mesh(cp=3), context="all_gather"),
    Plan(Mesh(cp=4)),
    Plan(Mesh(cp=2, dp_shard=2), shard_parameters=CUT, shard_gradients=CUT, shard_optimizer=CUT),
    Plan(Mesh(cp=2, dp_replicate=2), context="all_gather", shard_optimizer=("cp",)),
    Plan(Mesh(pp=2, cp=2), "zb-h1"),
    Plan(Mesh(pp=2, cp=2), "interleaved-1f1b", context="all_gather"),
    Plan(Mesh(cp=2), recompute="full"),
    Plan(Mesh(cp=2, tp=2)),
    Plan(Mesh(cp=2, tp=2), context="all_gather", sequence_parallel=True, recompute="selective"),
    Plan(Mesh(pp=2, cp=3, tp=2), "zb-h1", sequence_parallel=True, recompute="full"),
    Plan(Mesh(cp=2, tp=2, dp_shard=2), shard_parameters=CUT, shard_gradients=CUT, shard_optimizer=CUT),
    Plan(Mesh(cp=4), context="ulysses", ulysses_degree=2),
    Plan(Mesh(cp=2, tp=2), "zb-h1", sequence_parallel=True, stripes=3),
    Plan(Mesh(cp=3), context="all_gather", stripes=2, recompute="full"),
    Plan(Mesh(pp=2, cp=4), stripes=4, ulysses_degree=2),
    Plan(Mesh(cp=4, tp=2), "zb-h1", sequence_parallel=True, recompute="full", ulysses_degree=2),
    Plan(Mesh(pp=2, cp=4), "interleaved-1f1b", context="all_gather", ulysses_degree=2),
]


@pytest.mark.parametrize("plan", sampled(PLANS, lambda plan: plan.mesh.world <= 8), ids=map(str, PLANS))
def test_plans_pass_on_every_kind_of_channel(plan: Plan) -> None:
    assert not any(checked(plan, 2).models[model] for model in ChannelModel)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_block_goes_round_once_and_its_gradient_comes_home(ranks: int) -> None:
    result = checked(Plan(Mesh(cp=ranks)))
    for tape, specs in zip(result.program.tapes, result.specs, strict=True):
        sent_kinds = Counter(specs[op.inputs[0]].kind for op in tape if op.kind is OpKind.SEND)
        assert sent_kinds[Kind.KEYS_VALUES] == 2 * (ranks - 1) * BLOCKS
        assert sent_kinds[Kind.GRAD_KEYS_VALUES] == ranks * BLOCKS


def test_gathered_blocks_take_one_collective_in_each_direction_and_one_back() -> None:
    result = checked(Plan(Mesh(cp=4), context="all_gather"))
    tape, specs = result.program.tapes[0], result.specs[0]
    collectives = Counter((op.kind, specs[op.inputs[0]].kind) for op in tape if op.group is not None)
    assert collectives[OpKind.ALL_GATHER, Kind.KEYS_VALUES] == 2 * BLOCKS
    assert collectives[OpKind.REDUCE_SCATTER, Kind.GRAD_KEYS_VALUES] == BLOCKS


def test_neighbours_exchange_heads_and_the_others_keys_go_round() -> None:
    result = checked(Plan(Mesh(cp=6), context="ulysses", ulysses_degree=2))
    tape, specs = result.program.tapes[3], result.specs[3]
    groups = {op.group.ranks for op in tape if op.kind is OpKind.ALL_TO_ALL and op.group is not None}
    peers = {op.peer for op in tape if op.kind is OpKind.SEND and specs[op.inputs[0]].kind is Kind.KEYS_VALUES}
    assert (groups, peers) == ({(2, 3)}, {5})
    assert {specs[op.inputs[0]].cells.bit_count() for op in tape if op.kind is OpKind.ATTEND} == {4}


def test_stripes_are_every_cp_th_slice_and_nearly_as_much_work_at_every_hop() -> None:
    result = checked(Plan(Mesh(cp=4), stripes=8))
    batches = [next(op.holds for op in tape if op.kind is OpKind.LOAD_BATCH) for tape in result.program.tapes]
    assert [holds and list(bits(holds.mask)) for holds in batches] == [list(range(rank, 32, 4)) for rank in range(4)]
    events = simulate(result, PUZZLE_COSTS).events
    hops = [[e.end - e.start for e in mine if e.kind is OpKind.ATTEND] for mine in events]
    assert max(max(hop) for hop in hops) == pytest.approx((1 + 1 / 8) / 4**2)


@pytest.mark.parametrize(("mesh", "stripes"), [(Mesh(cp=2), 1), (Mesh(dp_shard=2), 4)])
def test_stripes_that_deal_nothing_are_refused(mesh: Mesh, stripes: int) -> None:
    with pytest.raises(UserError, match="sequences are dealt in 2 stripes or more, over 2 ranks of cp or more"):
        Plan(mesh, stripes=stripes)


def test_sizes_that_count_other_slices_than_the_plan_deals_are_refused() -> None:
    plan = Plan(Mesh(cp=2), stripes=4)
    with pytest.raises(UserError, match=r"deals 4 slices .* these sizes count 2; give plan.counted\(sizes\)"):
        trace(program_from_plan(plan), plan.mesh, Sizes.context_blocks(2), 1)


@pytest.mark.parametrize("degree", [3, 8])
def test_a_degree_that_does_not_divide_cp_is_refused(degree: int) -> None:
    with pytest.raises(UserError, match=f"ulysses_degree is {degree}, but the mesh has cp 4; give a number that"):
        Plan(Mesh(cp=4), ulysses_degree=degree)


@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(cp=2, tp=2), Mesh(tp=4)])
@pytest.mark.parametrize("context", ["ring", "all_gather"])
@pytest.mark.parametrize("degree", [1, 2])
def test_every_rank_computes_as_much_attention(context: Context, mesh: Mesh, degree: int) -> None:
    degree = min(degree, mesh.cp)
    plan = Plan(mesh, context=context, recompute="selective", ulysses_degree=degree)
    timeline = simulate(checked(plan), PUZZLE_COSTS)
    for kind in (OpKind.ATTEND, OpKind.ATTEND_BACKWARD):
        spent = [sum(e.end - e.start for e in events if e.kind is kind) for events in timeline.events]
        assert spent == pytest.approx([BLOCKS / 4] * 4)


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=2, tp=2)])
def test_heads_share_the_room_of_queries_keys_and_values(mesh: Mesh) -> None:
    result = checked(Plan(mesh))
    sizes = result.program.sizes
    for kind, whole in ((Kind.QUERIES, sizes.queries), (Kind.GRAD_KEYS_VALUES, sizes.keys_values)):
        element_counts = {sizes.elements(spec) for spec in result.specs[0].values() if spec.kind is kind}
        assert element_counts == {whole // mesh.world}


@pytest.mark.parametrize("context", ["ring", "all_gather"])
def test_keys_values_and_their_gradients_are_gone_after_the_step_of_a_layer(context: Context) -> None:
    """Nothing of one microbatch is left when the next one is computed."""
    one, four = (simulate(checked(Plan(Mesh(cp=2), context=context), count)).peak_memory for count in (1, 4))
    sizes = Sizes.context_blocks(BLOCKS)
    assert four - one <= sizes.activations[0] + sum(sizes.weights)


def attend_the_same_again(program: Program) -> Program:
    """The second block that rank 0's queries meet is the first once more."""
    tape = program.tapes[0]
    first, second = [at for at, op in enumerate(tape) if op.kind is OpKind.ATTEND][:2]
    repeated = tape[second]._replace(inputs=tape[first].inputs)
    return changed(program, 0, second, repeated)


def send_home_too_early(program: Program) -> Program:
    """Rank 0 sends on a gradient to which it has not added its part."""
    tape = program.tapes[0]
    adds = [at for at, op in enumerate(tape) if op.kind is OpKind.ADD]
    received = next(n for at in adds for n in tape[at].inputs if made_by(tape, n).kind is OpKind.RECV)
    add = next(op for at in adds if received in (op := tape[at]).inputs)
    at = next(at for at, op in enumerate(tape) if op.kind is OpKind.SEND and op.inputs == add.outputs)
    return changed(program, 0, at, tape[at]._replace(inputs=(received,)))


def made_by(tape: list[Op], number: int) -> Op:
    return next(op for op in tape if number in op.outputs)


def changed(program: Program, rank: int, at: int, op: Op) -> Program:
    tapes = [*program.tapes]
    tapes[rank] = [*tapes[rank][:at], op, *tapes[rank][at + 1 :]]
    return Program(program.mesh, program.microbatches, program.sizes, tapes)


@pytest.mark.parametrize("mistake", [attend_the_same_again, send_home_too_early])
def test_a_tape_with_a_mistake_is_refused(mistake: Callable[[Program], Program]) -> None:
    program = checked(Plan(Mesh(cp=3))).program
    with pytest.raises((Refused, Deadlock)):
        check(mistake(program))


def test_a_model_whose_attention_is_no_step_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match=r"give Sizes.context_blocks or those of models.cut with attention_apart=True"):
        trace(program_from_plan(Plan(Mesh(cp=2))), Mesh(cp=2), Sizes.half_blocks(2), 2)


def test_another_way_to_meet_is_refused() -> None:
    with pytest.raises(UserError, match="context is 'rings'; give one of ring, all_gather"):
        Plan(Mesh(cp=2), context="rings")  # pyright: ignore[reportArgumentType]
