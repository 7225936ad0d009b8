"""Every built-in strategy: right for all sizes that fit, refused in a sentence for others, and as its paper says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.draw import timeline_svg
from shardlab.language import Kind, Mesh, OpKind, Program, Sizes, UserError, trace
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.models import GPT, MoE, cut
from shardlab.models.cutting import cut_for
from shardlab.simulate.timeline import PUZZLE_COSTS, Timeline, simulate
from shardlab.strategies import STRATEGIES, find
from shardlab.strategies.plan.plan import Plan, Recompute
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.schedules import SCHEDULES
from tests.support.thorough import examples
from tests.train.verify_cases import TABLE, Verified

WEIGHT_HALF = OpKind.BACKWARD_WEIGHT


def traced(name: str, ranks: int, layers: int, microbatches: int) -> Program:
    entry = STRATEGIES[name]
    return trace(entry.program, entry.mesh(ranks), entry.puzzle(ranks, layers), microbatches)


def test_every_declaration_has_a_name_of_its_own() -> None:
    """In a process of its own: a test that runs a file of shardlab as a user's declares its strategies again."""
    code = "from shardlab.strategies import DECLARED, STRATEGIES; print(len(DECLARED) - len(STRATEGIES))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "0\n"


def count(program: Program, kind: OpKind) -> int:
    return sum(op.kind is kind for tape in program.tapes for op in tape)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A strategy with ranks, layers and microbatches that fit it."""
    name = draw(st.sampled_from(list(STRATEGIES)))
    entry = STRATEGIES[name]
    largest = 5 if name == "context-parallel" else 9  # each rank's queries meet every other's keys: the square of ops
    ranks = 1 if entry.ranks == 1 else draw(st.integers(1 + (name == "expert-parallel"), largest))
    multiple = {"hsdp": 2, "partially-sharded": 2, "tensor-parallel": 2, "column-parallel": 2, "3d": 4, "4d": 4}.get(
        name, 1
    )
    ranks = -(-ranks // multiple) * multiple
    sizes = entry.mesh(ranks).sizes()
    if name == "pipeline":
        layers = ranks * draw(st.integers(1, 4))
    else:
        layers = entry.default_layers(ranks, at_least=1) + draw(st.integers(0, 3))
    data_ranks = sizes["dp_shard"] * sizes["dp_replicate"] * sizes["ep"] if entry.ranks > 1 else 1
    return name, ranks, layers, data_ranks * draw(st.integers(1, 4))


@settings(deadline=None, max_examples=examples(150))
@given(fitting())
def test_every_strategy_passes_all_four_channel_models(case: tuple[str, int, int, int]) -> None:
    name, ranks, layers, microbatches = case
    checked = check(traced(name, ranks, layers, microbatches))
    assert set(checked.models.values()) == {None}
    assert checked.backends() == ["gloo", "nccl"]
    assert simulate(checked).end > 0


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "microbatches", "divides"),
    [
        ("ddp", 4, 4, 6, "6 microbatches do not divide among 4 ranks"),
        ("wsdp", 4, 4, 2, "2 microbatches do not divide among 4 ranks"),
        ("fsdp", 3, 4, 4, "4 microbatches do not divide among 3 ranks"),
        ("pipeline", 4, 6, 4, "6 layers do not divide among 4 ranks"),
        ("gpipe", 4, 3, 4, "3 layers do not reach 4 pipeline stages; give at most 3 stages, or more layers"),
        ("zb-v", 4, 7, 4, "7 layers do not reach 8 pipeline stages"),
        ("pipeline-fsdp", 16, 4, 6, "6 microbatches do not divide among 4 data-parallel ranks; give a multiple of 4"),
        ("hsdp", 3, 4, 6, "3 ranks do not make two replicas; give an even number, or a mesh by --dp-replicate"),
        ("single", 2, 4, 4, "2 ranks were asked for; give 1"),
        ("grad-accum", 4, 4, 4, "4 ranks were asked for; give 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, ranks: int, layers: int, microbatches: int, divides: str) -> None:
    with pytest.raises(UserError, match=divides):
        traced(name, ranks, layers, microbatches)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [0, -1])
def test_no_strategy_runs_on_less_than_one_rank(name: str, ranks: int) -> None:
    with pytest.raises(UserError):
        traced(name, ranks, 4, 4)


def test_fsdp_gathers_each_layer_twice() -> None:
    program = traced("fsdp", 4, 6, 4)
    gathered = Counter(op.layer for op in program.tapes[0] if op.kind is OpKind.ALL_GATHER)
    assert gathered == dict.fromkeys(range(6), 2)


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "microbatches", "expected"),
    [
        ("single", 1, 5, 4, {}),
        ("grad-accum", 1, 5, 4, {}),
        ("ddp", 4, 5, 8, {OpKind.ALL_REDUCE: 4 * 5}),
        ("wsdp", 4, 5, 8, {OpKind.ALL_GATHER: 4 * 5 * 2, OpKind.ALL_REDUCE: 4 * 5}),
        ("fsdp", 4, 5, 8, {OpKind.ALL_GATHER: 4 * 5 * 2, OpKind.REDUCE_SCATTER: 4 * 5}),
        ("pipeline", 4, 8, 3, {OpKind.SEND: 3 * 2, OpKind.RECV: 3 * 2}),
        # a plan also reduces the gradient's norm over the pipeline, and over what shards the optimizer's state
        ("gpipe", 4, 8, 3, {OpKind.SEND: 3 * 2 * 3, OpKind.RECV: 3 * 2 * 3, OpKind.ALL_REDUCE: 4}),
        ("zero-1", 4, 5, 8, {OpKind.REDUCE_SCATTER: 4 * 5, OpKind.ALL_GATHER: 4 * 5, OpKind.ALL_REDUCE: 4}),
        ("zero-2", 4, 5, 8, {OpKind.REDUCE_SCATTER: 4 * 5 * 2, OpKind.ALL_GATHER: 4 * 5, OpKind.ALL_REDUCE: 4}),
        # 2 x 2 ranks, 3 microbatches each: the replicas meet once for each layer, not for each microbatch, and a weight
        # that is used twice in a row (at the top three times, at the bottom twice) is gathered once
        (
            "hsdp",
            4,
            5,
            12,
            {OpKind.ALL_GATHER: 4 * (2 * 5 * 3 - 5), OpKind.REDUCE_SCATTER: 4 * 5 * 3, OpKind.ALL_REDUCE: 4 * (5 + 1)},
        ),
        # 2 x 2 ranks, 2 layers a stage, 3 microbatches a column; a rank stays on its stage and gathers it once
        (
            "pipeline-fsdp",
            4,
            4,
            6,
            {
                OpKind.ALL_GATHER: 4 * 2,
                OpKind.REDUCE_SCATTER: 4 * 2 * 3,
                OpKind.ALL_REDUCE: 4 * 2,
                OpKind.SEND: 2 * 3 * 2,
                OpKind.RECV: 2 * 3 * 2,
            },
        ),
    ],
)
def test_each_strategy_communicates_as_often_as_it_should(
    name: str, ranks: int, layers: int, microbatches: int, expected: dict[OpKind, int]
) -> None:
    program = traced(name, ranks, layers, microbatches)
    kinds = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.SEND, OpKind.RECV)
    assert {kind: count(program, kind) for kind in kinds if count(program, kind)} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layer_computes_every_microbatch_once_in_each_direction(name: str) -> None:
    """Experts on each of 4 ranks compute their part of it."""
    program = traced(name, STRATEGIES[name].ranks, 8, 4)
    checked = check(program)
    for kinds in ((OpKind.FORWARD,), (OpKind.BACKWARD, OpKind.BACKWARD_INPUT), (OpKind.BACKWARD, WEIGHT_HALF)):
        passes: Counter[tuple[int, int]] = Counter()
        for rank, (tape, specs) in enumerate(zip(program.tapes, checked.specs, strict=True)):
            for op in tape:
                if op.kind in kinds and all(program.mesh.coordinate(rank, axis) == 0 for axis in ("cp", "tp")):
                    mask = specs[op.inputs[0]].microbatches
                    passes.update((op.layer, m) for m in range(4) if mask >> m & 1)
        experts = ["expert" in layer.cut for layer in program.sizes.signatures]
        assert passes == {(layer, m): 4 if expert else 1 for layer, expert in enumerate(experts) for m in range(4)}


def test_a_ddp_rank_holds_every_weight_whole_and_an_fsdp_rank_its_slice() -> None:
    for name, share in (("ddp", 1), ("fsdp", 4)):
        program = traced(name, 4, 2, 4)
        loads = [op for op in program.tapes[1] if op.kind is OpKind.LOAD_WEIGHT]
        assert [op.holds.of for op in loads if op.holds] == [share, share]


def test_pipelines_send_activations_up_and_gradients_down() -> None:
    program = traced("gpipe", 3, 3, 2)
    expected = [op.expect for op in program.tapes[1] if op.kind is OpKind.RECV]
    kinds = [message.kind for message in expected if message]
    assert kinds == [Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRAD_ACTIVATION, Kind.GRAD_ACTIVATION]


@pytest.mark.parametrize(("typed", "suggestion"), [("fdsp", "fsdp"), ("gpip", "gpipe"), ("pipelin", "pipeline")])
def test_an_unknown_name_suggests_the_nearest(typed: str, suggestion: str) -> None:
    with pytest.raises(UserError, match=f"no strategy '{typed}'; did you mean {suggestion}"):
        find(typed)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_has_hyphens_as_options_have_and_may_be_typed_with_underscores(name: str) -> None:
    assert "_" not in name
    assert find(name) is find(name.replace("-", "_")) is STRATEGIES[name]


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(UserError, match="there are single, grad-accum, ddp"):
        find("zzz")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_traced_to_the_same_tapes_every_time(name: str) -> None:
    ranks = STRATEGIES[name].ranks
    assert traced(name, ranks, 8, 4).fingerprint() == traced(name, ranks, 8, 4).fingerprint()


# Schedules are those of the figures of their papers: the microbatches that each rank takes, in order.


FIGURES = {
    # Qi et al. 2023, arXiv 2401.10241: 4 ranks, 8 microbatches, counted from 1
    "zb-h1": [  # fig. 3, top
        "1 2 3 4 1 1 5 2 2 6 3 3 7 4 4 8 5 5 6 6 7 7 8 8",
        "1 2 3 1 4 2 1 5 3 2 6 4 3 7 5 4 8 6 5 7 6 8 7 8",
        "1 2 1 3 2 4 3 1 5 4 2 6 5 3 7 6 4 8 7 5 8 6 7 8",
        "1 1 2 2 3 3 4 4 1 5 5 2 6 6 3 7 7 4 8 8 5 6 7 8",
    ],
    "zb-h2": [  # fig. 3, bottom
        "1 2 3 4 5 6 7 1 1 8 2 2 3 3 4 4 5 5 6 6 7 7 8 8",
        "1 2 3 4 5 1 6 2 7 3 1 8 4 2 5 3 6 4 7 5 8 6 7 8",
        "1 2 3 1 4 2 5 3 6 4 7 5 1 8 6 2 7 3 8 4 5 6 7 8",
        "1 1 2 2 3 3 4 4 5 5 6 6 7 7 1 8 8 2 3 4 5 6 7 8",
    ],
    "zb-v": [  # fig. 8
        "1 2 3 4 5 6 7 1 1 1 2 2 2 3 3 3 4 4 4 8 1 1 5 5 5 2 2 6 6 6 3 3 7 7 7 4 4 8 8 8 5 5 6 6 7 7 8 8",
        "1 2 3 4 5 1 6 2 1 1 3 2 2 4 3 3 7 1 1 5 4 4 8 2 2 6 5 5 3 3 7 6 6 4 4 8 7 7 5 8 6 5 7 8 8 6 7 8",
        "1 2 3 1 4 2 5 3 1 1 4 2 2 6 1 1 5 3 3 7 2 2 6 4 4 8 3 3 7 5 5 4 4 8 6 6 5 7 6 8 7 5 8 7 6 8 7 8",
        "1 1 2 2 3 3 4 4 1 1 5 1 1 5 2 2 6 2 2 6 3 3 7 3 3 7 4 4 8 4 4 8 5 5 5 6 6 7 7 8 8 5 6 6 7 7 8 8",
    ],
}


@pytest.mark.parametrize("name", FIGURES)
def test_each_rank_takes_the_microbatches_of_the_figure_in_its_order(name: str) -> None:
    schedule = SCHEDULES[name]
    for rank, row in enumerate(FIGURES[name]):
        actions = schedule.actions(rank, 4, 8, schedule.stages_per_rank or 1)
        assert [action.microbatch + 1 for action in actions] == [int(word) for word in row.split()]


# Plans with expert parallelism: right over every mesh, with the communication that the method has.


SHARDS = [(), ("dp_shard",), ("dp_shard", "dp_replicate")]


def checked_plan(plan: Plan, blocks: int, microbatches: int) -> Checked:
    return check(trace(program_from_plan(plan), plan.mesh, blocks, microbatches))


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
def test_every_expert_plan_passes_all_four_channel_models(plan: Plan, microbatches: int, blocks: int) -> None:
    checked = checked_plan(plan, blocks, microbatches * plan.data_ranks)
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
    program = trace(program_from_plan(Plan()), Mesh(), Sizes.mixture(2), 2)
    assert not any(op.kind is OpKind.ALL_TO_ALL for op in program.tapes[0])
    check(program)


def test_models_that_expert_parallelism_cannot_cut_are_refused() -> None:
    shared = Plan(Mesh(cp=2, ep=2), shard_optimizer=("cp",))
    with pytest.raises(UserError, match="the plan shards over cp, but the 2 ranks of cp share a mixture's experts"):
        trace(program_from_plan(shared), shared.mesh, Sizes.expert_blocks(2), 2)
    with pytest.raises(UserError, match="ep 2, which cuts mixtures of experts, but this model has none"):
        trace(program_from_plan(Plan(Mesh(ep=2))), Mesh(ep=2), Sizes.puzzle(4), 2)
    with pytest.raises(UserError, match="3 microbatches do not divide among 2 data-parallel ranks"):
        checked_plan(Plan(Mesh(ep=2)), 2, 3)
    with pytest.raises(UserError, match="shard_parameters is ep"):
        Plan(Mesh(ep=2), shard_parameters=("ep",))


def test_the_drawing_and_its_legend_show_the_exchange() -> None:
    svg = timeline_svg(simulate(checked_plan(Plan(Mesh(ep=2)), 2, 2)))
    assert "all-to-all" in svg


# Activation recomputation: the tape shows what is computed again, and memory and time follow.


SAVED = Sizes(weights=(1,) * 4, opt_states=(1,) * 4, activations=(10,) * 5, saved=(100,) * 4)


def traced_with(recompute: Recompute | tuple[int, ...], sizes: Sizes = SAVED, mesh: Mesh | None = None) -> Program:
    plan = Plan(mesh or Mesh(), recompute=recompute)
    return trace(program_from_plan(plan), plan.mesh, sizes, 1)


def run(recompute: Recompute | tuple[int, ...], sizes: Sizes = SAVED) -> Timeline:
    return simulate(check(traced_with(recompute, sizes)), PUZZLE_COSTS)


def recomputed(program: Program) -> list[int]:
    return [op.layer for op in program.tapes[0] if op.kind is OpKind.RECOMPUTE]


@pytest.mark.parametrize(("recompute", "layers"), [("none", []), ("full", [3, 2, 1, 0]), ((1, 2), [2, 1])])
def test_the_tape_shows_what_is_computed_again(recompute: Recompute | tuple[int, ...], layers: list[int]) -> None:
    assert recomputed(traced_with(recompute)) == layers


def test_each_layer_that_is_recomputed_takes_one_more_forward_pass_and_keeps_only_its_input() -> None:
    plain, two_layers, all_layers = run("none"), run((1, 2)), run("full")
    assert (two_layers.end - plain.end, all_layers.end - plain.end) == (2, 4)
    assert plain.peak_memory > two_layers.peak_memory > all_layers.peak_memory
    assert plain.peak_memory - two_layers.peak_memory == pytest.approx(2 * 100, abs=20)


def test_selective_keeps_queries_keys_and_values_and_computes_the_scores_again() -> None:
    model = GPT(layers=2, hidden_size=16, heads=2, seq_len=64)
    apart = cut(model, attention_apart=True).sizes(64, 8)  # so many rows that activations outweigh the weights
    selective = simulate(check(traced_with("selective", apart)), PUZZLE_COSTS)
    everything = simulate(check(traced_with("none", cut(model).sizes(64, 8))), PUZZLE_COSTS)
    assert recomputed(traced_with("selective", apart)) == []
    kinds = [op.kind for op in traced_with("selective", apart).tapes[0]]
    assert kinds.count(OpKind.ATTEND) == kinds.count(OpKind.ATTEND_BACKWARD) == 2
    kinds = [op.kind for op in traced_with("selective", apart, Mesh(tp=2)).tapes[0]]
    assert kinds.count(OpKind.ATTEND_BACKWARD) == 2
    assert selective.end > everything.end


HALVES = Sizes.half_blocks(2)
"""Layers 0 to 10; blocks 1-4 and 5-8, each norm, attention, norm, MLP."""

TP = Mesh(tp=2)


def ops_after_loss(program: Program) -> list[tuple[str, int]]:
    """Passes and collectives of activations of rank 0, in order, after the loss."""
    tape = program.tapes[0]
    start = next(at for at, op in enumerate(tape) if op.kind is OpKind.LOSS)
    names = {OpKind.FORWARD: "F", OpKind.RECOMPUTE: "R", OpKind.BACKWARD: "B", OpKind.ALL_REDUCE: "all_reduce"}
    ops = [(names[op.kind], op.layer) for op in tape[start:] if op.kind in names]
    return ops[: ops.index(("B", 0))]


def test_a_block_of_half_blocks_is_computed_again_with_its_communication() -> None:
    order = [("F", 5), ("F", 6), ("all_reduce", 7), ("F", 7), ("R", 8), ("B", 8), ("all_reduce", 8), ("B", 7), ("B", 6)]
    ops = ops_after_loss(traced_with((1,), HALVES, TP))
    assert ops[ops.index(("F", 5)) :][: len(order)] == order
    assert [op for op in ops if op[0] == "F"] == [("F", 5), ("F", 6), ("F", 7)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_of_a_block_that_is_computed_again_only_its_input_is_kept(sequence_parallel: bool) -> None:
    plan = Plan(TP, recompute="full", sequence_parallel=sequence_parallel)
    program = trace(program_from_plan(plan), TP, HALVES, 1)
    tape, specs = program.tapes[0], check(program).specs[0]
    live: set[int] = set()
    for op in tape:
        if op.kind is OpKind.LOSS:
            break
        live |= set(op.outputs)
        live -= set(op.inputs) if op.kind is OpKind.FREE else set()
    values = sorted((specs[n].kind.value, specs[n].layer) for n in live if specs[n].kind in ROW_KINDS - {Kind.STATS})
    head = [("activations", 9), ("activations", 10), ("activations", 11), ("saved", 9), ("saved", 10)]
    inputs = [("activations", 1), ("activations", 5), ("residuals", 5)]
    assert values == sorted([*head, *inputs, ("activations", 0), ("saved", 0)])
    cut = [n for n in live if (specs[n].kind.value, specs[n].layer) in inputs]
    assert all(specs[n].whole_sequences is not sequence_parallel for n in cut)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_blocks_are_computed_again_on_any_pipeline(schedule: str) -> None:
    mesh = Mesh(pp=2, tp=2)
    for recompute in ("full", (1,)):
        plan = Plan(mesh, schedule, recompute=recompute, shard_optimizer=("dp_shard",))
        check(trace(program_from_plan(plan), mesh, Sizes.half_blocks(3), 4))


def test_full_recomputation_takes_one_more_forward_pass_of_every_block() -> None:
    halves = cut(GPT(layers=2, hidden_size=16, heads=2, seq_len=8)).sizes(64, 8)
    plain, recomputing = run("none", halves), run("full", halves)
    assert recomputing.end - plain.end == 4
    assert recomputing.peak_memory < plain.peak_memory


def test_selective_recomputation_of_whole_blocks_is_refused() -> None:
    with pytest.raises(
        UserError, match="selective recomputation was asked for, but attention is not a step of its own"
    ):
        traced_with("selective")


# Every combination of axes: traced and checked on a mixture; the table in the documentation says what has been run.


MODEL = MoE(layers=2, hidden_size=8, heads=4, seq_len=16, vocab_size=16, experts=4)

PAGE = Path(__file__).parents[2] / "docs" / "plans.md"

COMBINED = [sizes for sizes in product((1, 2), repeat=5) if sum(size > 1 for size in sizes) >= 3]
"""Sizes of pp, dp, tp, cp and ep; pairs are run on processes."""


@pytest.mark.parametrize("sizes", COMBINED, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_combination_of_axes_passes_the_check(sizes: tuple[int, int, int, int, int]) -> None:
    pp, dp, tp, cp, ep = sizes
    plan = Plan(
        Mesh(pp=pp, dp_shard=dp, tp=tp, cp=cp, ep=ep),
        "zb-h1" if pp > 1 else "1f1b",
        shard_optimizer=("dp_shard",),
        sequence_parallel=tp > 1,
        context="ulysses" if ep > 1 else "ring",
    )
    cut = cut_for(MODEL, plan.mesh, planned=True, ulysses=plan.ulysses)
    checked = check(trace(program_from_plan(plan), plan.mesh, cut.sizes(1, 4), plan.data_ranks))
    assert checked.frozen == ()


def axes_of(case: Verified) -> str:
    """The axes along which a case's plan cuts, as the table has them: `pp ep tp sp`."""
    plan = case.strategy
    if not isinstance(plan, Plan):
        return ""
    cut = {axis.split("_")[0]: None for axis, size in plan.mesh.sizes().items() if size > 1}
    return " ".join([axis for axis in ("pp", "dp", "tp", "cp", "ep") if axis in cut] + ["sp"] * plan.sequence_parallel)


def test_the_table_names_the_combinations_that_are_run_on_processes() -> None:
    run = {axes_of(case) for case in TABLE}
    documented = {line for line in re.findall(r"^\| `([a-z ]+)` \|", PAGE.read_text("utf-8"), re.M) if " " in line}
    assert documented == {axes for axes in run if " " in axes}
