"""Folded traces: of ranks that are alike one is traced, and its timeline is what it would be among all of them."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, Sizes, UserError, Value, trace
from shardlab.language.rules.spec import KEY
from shardlab.models.architectures import MoE
from shardlab.models.cutting import cut_for
from shardlab.simulate.predict.estimate import estimate
from shardlab.simulate.predict.folding import FREED_SCALAR, Folded, Rotation, cycled, fold
from shardlab.simulate.timeline.prices import rank_of
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan, Recompute
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.plan.sharding import GradientReducer
from shardlab.strategies.registry import entry_from_plan
from tests.simulate.timeline.fakes import FakePrices
from tests.support.refusing import refuses
from tests.support.thorough import examples, sampled

PRESETS = {name: entry for name, entry in STRATEGIES.items() if entry.plan is not None}

SHARD, BOTH = ("dp_shard",), ("dp_shard", "dp_replicate")


def puzzle_of(plan: Plan, blocks: int) -> Sizes:
    return entry_from_plan(plan, "plan").puzzle(plan.mesh.world, blocks)


def trace_both(plan: Plan, blocks: int, microbatches_per_rank: int, *, tied: bool = False) -> tuple[Folded, Checked]:
    """A plan traced folded and whole, on the puzzles' model with saved activations."""
    sizes = Sizes.half_blocks(blocks, tied=True) if tied else puzzle_of(plan, blocks)
    microbatches = plan.data_ranks * microbatches_per_rank
    return fold(plan, sizes, microbatches), check(trace(program_from_plan(plan), plan.mesh, sizes, microbatches))


def compare(folded: Folded, whole: Checked) -> None:
    """Every folded rank has the tape, the values, the times and the memory that it has among all."""
    one, all_of_them = (estimate(traced, FakePrices(by_layer=True)) for traced in (folded, whole))
    assert one.step == pytest.approx(all_of_them.step)
    for row in range(folded.program.ranks):
        rank = rank_of(folded.program, row)
        assert folded.program.tapes[row] == whole.program.tapes[rank]
        scalars = {number: FREED_SCALAR for number, spec in whole.specs[rank].items() if spec.kind is Kind.SCALAR}
        assert folded.specs[row] == {**whole.specs[rank], **scalars}  # that the norm is whole, updates have seen
        assert one.times.starts[row] == pytest.approx(all_of_them.times.starts[rank])
        assert one.times.ends[row] == pytest.approx(all_of_them.times.ends[rank])
        assert one.times.idle[row] == [pytest.approx(idle) for idle in all_of_them.times.idle[rank]]
        assert one.memory[row] == all_of_them.memory[rank]


LARGER = ("3d", "4d", "hsdp", "interleaved-1f1b", "pipeline-fsdp")
"""Presets whose axes need more than four ranks, or whose folded ranks differ more on them."""


@pytest.mark.parametrize(
    ("name", "ranks"),
    sampled([(name, ranks) for name in PRESETS for ranks in (4, 16)], lambda case: case[1] == 4 or case[0] in LARGER),
)
def test_a_preset_folded_is_what_it_is_unfolded(name: str, ranks: int) -> None:
    preset = PRESETS[name].plan
    assert preset is not None
    plan = preset(ranks)
    compare(*trace_both(plan, max(4, plan.natural_layers()), 2))


@pytest.mark.parametrize("name", ["zero-3", "hsdp", "partially-sharded", "pipeline-fsdp", "4d"])
def test_a_preset_of_64_ranks_folded_is_what_it_is_unfolded(name: str) -> None:
    preset = PRESETS[name].plan
    assert preset is not None
    plan = preset(64)
    compare(*trace_both(plan, max(2, plan.natural_layers()), 1))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Meshes with any sharding and recomputation."""
    size = st.sampled_from([1, 2, 3])
    cut = draw(st.sampled_from([("tp",), ("cp",), ("tp", "cp"), ("ep",), ()]))
    axes = {"pp": draw(st.sampled_from([1, 2])), "dp_replicate": draw(size), "dp_shard": draw(size)}
    axes |= {axis: draw(st.sampled_from([2, 4] if len(cut) == 1 else [2, 3])) for axis in cut}
    recompute_choices: list[Recompute | tuple[int, ...]] = ["none", "full", (0,)]
    if "ep" not in cut:
        recompute_choices.append("selective")
    optimizer = draw(st.sampled_from([(), SHARD, BOTH, ("dp_replicate",)]))
    count = draw(st.integers(0, len(optimizer)))
    gradients = optimizer[: draw(st.integers(0, count))]
    return Plan(
        Mesh(**axes),
        draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        shard_optimizer=optimizer,
        shard_gradients=gradients,
        shard_parameters=optimizer[: draw(st.integers(0, len(optimizer)))],
        reshard_after=draw(st.sampled_from(["layer", "stage", "step"])),
        sequence_parallel="tp" in cut and draw(st.booleans()),
        recompute=draw(st.sampled_from(recompute_choices)),
        context=draw(st.sampled_from(["ring", "all_gather"])),
        stripes=draw(st.sampled_from([None, 2, 3])) if "cp" in cut else None,
    )


@settings(max_examples=examples(40), deadline=None)
@given(plans(), st.integers(1, 3))
def test_any_plan_folded_is_what_it_is_unfolded(plan: Plan, microbatches: int) -> None:
    compare(*trace_both(plan, 2, microbatches))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD, shard_parameters=SHARD, recompute="selective"),
        Plan(Mesh(dp_shard=2, ep=2, tp=2), shard_optimizer=SHARD),
        Plan(Mesh(pp=2, dp_replicate=2, ep=2, tp=2), "zb-h1", shard_optimizer=("dp_replicate",), recompute="selective"),
        Plan(Mesh(cp=2, ep=2), shard_optimizer=SHARD),
        Plan(Mesh(dp_shard=2, cp=2, ep=2), context="ulysses", shard_optimizer=SHARD, recompute="full"),
        Plan(Mesh(cp=4), ulysses_degree=2, shard_optimizer=SHARD),
        Plan(Mesh(cp=2, tp=2, ep=2), sequence_parallel=True),
        Plan(Mesh(ep=2, tp=2), sequence_parallel=True, recompute="full"),
    ],
)
def test_a_mixture_folded_is_what_it_is_unfolded(plan: Plan) -> None:
    """As it is cut for a plan: its experts and its other layers along different axes."""
    model = MoE(vocab_size=16, hidden_size=8, heads=4, seq_len=8, layers=2, experts=4)
    cut = cut_for(model, plan.mesh, planned=True, attention_apart=plan.attention_apart, ulysses=plan.ulysses)
    sizes, microbatches = cut.sizes(1, 4), 2 * plan.data_ranks
    compare(fold(plan, sizes, microbatches), check(trace(program_from_plan(plan), plan.mesh, sizes, microbatches)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tied_model_folds(sequence_parallel: bool) -> None:
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    compare(*trace_both(Plan(mesh, sequence_parallel=sequence_parallel, shard_optimizer=SHARD), 2, 2, tied=True))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mesh(dp_replicate=2, dp_shard=3), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=BOTH),
        Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD, sequence_parallel=True),
        Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD),
        Plan(Mesh(cp=4)),
        Plan(Mesh(cp=3), context="all_gather"),
        Plan(Mesh(dp_shard=2, cp=2, tp=3), shard_optimizer=SHARD, sequence_parallel=True, recompute="full"),
        Plan(Mesh(cp=3, tp=2), context="all_gather"),
        Plan(Mesh(cp=6, tp=2), ulysses_degree=3, sequence_parallel=True),
        Plan(Mesh(cp=4, tp=2), ulysses_degree=2, sequence_parallel=True, stripes=3),
        Plan(Mesh(cp=6), context="all_gather", ulysses_degree=2, shard_optimizer=("cp",)),
    ],
)
def test_what_a_rank_has_rotated_is_what_its_neighbour_has(plan: Plan) -> None:
    """Of everything but partial attention, whose masked blocks nobody notes."""
    _, whole = trace_both(plan, 2, 2)
    rotation = Rotation(plan, whole.program.sizes, whole.program.microbatches)
    for axis, size in plan.mesh.sizes().items():
        for by in range(size):
            neighbour = plan.mesh.group(0, axis).ranks[by]
            for number, spec in whole.specs[0].items():
                theirs = whole.specs[neighbour][number]
                rotated = rotation.rotated(spec, axis, by)
                term = spec.form.term
                if term is not None and term.indices == KEY and spec.kind.value in ("activations", "grad_queries"):
                    rotated, theirs = (s._replace(form=s.form.but(term=None)) for s in (rotated, theirs))
                assert rotated == theirs, f"{spec} along {axis} by {by}"


def test_only_the_first_rank_of_each_stage_is_traced() -> None:
    plan = Plan(Mesh(pp=4, dp_shard=128, tp=8), shard_optimizer=SHARD)
    folded = fold(plan, Sizes.half_blocks(4), 128)
    assert folded.program.ranks == 4
    assert folded.program.mesh.world == 4096
    assert [rank_of(folded.program, row) for row in range(4)] == [0, 1024, 2048, 3072]


def test_what_a_group_makes_takes_memory_for_its_members_not_for_their_square() -> None:
    def peak(ranks: int) -> int:
        plan = Plan(Mesh(dp_shard=ranks), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
        fold(plan, Sizes.puzzle(16), ranks)  # what is made once and kept
        tracemalloc.start()
        fold(plan, Sizes.puzzle(16), ranks)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    assert peak(4096) < 6 * peak(1024)


def test_a_rule_that_is_broken_is_refused_in_a_folded_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_reduces(self: GradientReducer[Value], layer: int) -> None:
        """In the place of `finish`."""

    monkeypatch.setattr(GradientReducer, "finish", never_reduces)
    with refuses("missing microbatches", layer=0, missing=(1, 2, 3)):
        fold(Plan(Mesh(dp_shard=4)), Sizes.puzzle(2), 4)


def test_a_plan_that_does_not_fit_its_batch_is_refused() -> None:
    with pytest.raises(UserError, match="5 microbatches do not divide"):
        fold(Plan(Mesh(dp_shard=4)), Sizes.puzzle(2), 5)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.data())
def test_a_cycled_set_has_the_same_numbers_with_one_digit_further(
    outer: int, size: int, stride: int, by: int, data: st.DataObject
) -> None:
    total = outer * size * stride
    mask = data.draw(st.integers(0, (1 << total) - 1))
    expected = 0
    for number in range(total):
        if mask >> number & 1:
            rest, low = divmod(number, stride)
            high, digit = divmod(rest, size)
            expected |= 1 << (high * size + (digit + by) % size) * stride + low
    assert cycled(mask, total, stride, size, by) == expected
