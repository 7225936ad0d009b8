"""Activation recomputation: the tape shows what is computed again, and memory and time follow."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import Kind, Mesh, OpKind, Program, Sizes, UserError, trace
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.models import GPT, cut
from shardlab.simulate.timeline import Timeline, simulate
from shardlab.strategies.plan.plan import Plan, Recompute
from shardlab.strategies.plan.program import planned

SAVED = Sizes(weights=(1,) * 4, opt_states=(1,) * 4, activations=(10,) * 5, saved=(100,) * 4)


def traced(recompute: Recompute | tuple[int, ...], sizes: Sizes = SAVED, mesh: Mesh | None = None) -> Program:
    plan = Plan(mesh or Mesh(), recompute=recompute)
    return trace(planned(plan), plan.mesh, sizes, 1)


def run(recompute: Recompute | tuple[int, ...], sizes: Sizes = SAVED) -> Timeline:
    return simulate(check(traced(recompute, sizes)))


def recomputed(program: Program) -> list[int]:
    return [op.layer for op in program.tapes[0] if op.kind is OpKind.RECOMPUTE]


@pytest.mark.parametrize(("recompute", "layers"), [("none", []), ("full", [3, 2, 1, 0]), ((1, 2), [2, 1])])
def test_the_tape_shows_what_is_computed_again(recompute: Recompute | tuple[int, ...], layers: list[int]) -> None:
    assert recomputed(traced(recompute)) == layers


def test_each_layer_that_is_recomputed_takes_one_more_forward_pass_and_keeps_only_its_input() -> None:
    nothing, two, everything = run("none"), run((1, 2)), run("full")
    assert (two.end - nothing.end, everything.end - nothing.end) == (2, 4)
    assert nothing.peak_memory > two.peak_memory > everything.peak_memory
    assert nothing.peak_memory - two.peak_memory == pytest.approx(2 * 100, abs=20)


def test_selective_keeps_queries_keys_and_values_and_computes_the_scores_again() -> None:
    model = GPT(layers=2, hidden_size=16, heads=2, seq_len=64)
    apart = cut(model, attention_apart=True).sizes(64, 8)  # so many rows that activations outweigh the weights
    selective = simulate(check(traced("selective", apart)))
    everything = simulate(check(traced("none", cut(model).sizes(64, 8))))
    assert recomputed(traced("selective", apart)) == []
    kinds = [op.kind for op in traced("selective", apart).tapes[0]]
    assert kinds.count(OpKind.ATTEND) == kinds.count(OpKind.ATTEND_BACKWARD) == 2
    kinds = [op.kind for op in traced("selective", apart, Mesh(tp=2)).tapes[0]]
    assert kinds.count(OpKind.ATTEND_BACKWARD) == 2
    assert selective.end > everything.end


HALVES = Sizes.half_blocks(2)
"""Layers 0 to 10; blocks 1-4 and 5-8, each norm, attention, norm, MLP."""

TP = Mesh(tp=2)


def done(program: Program) -> list[tuple[str, int]]:
    """Passes and collectives of activations of rank 0, in order, after the loss."""
    tape = program.tapes[0]
    start = next(at for at, op in enumerate(tape) if op.kind is OpKind.LOSS)
    wanted = {OpKind.FORWARD: "F", OpKind.RECOMPUTE: "R", OpKind.BACKWARD: "B", OpKind.ALL_REDUCE: "all_reduce"}
    ops = [(wanted[op.kind], op.layer) for op in tape[start:] if op.kind in wanted]
    return ops[: ops.index(("B", 0))]


def test_a_block_of_half_blocks_is_computed_again_with_its_communication() -> None:
    again = [("F", 5), ("F", 6), ("all_reduce", 7), ("F", 7), ("R", 8), ("B", 8), ("all_reduce", 8), ("B", 7), ("B", 6)]
    ops = done(traced((1,), HALVES, TP))
    assert ops[ops.index(("F", 5)) :][: len(again)] == again
    assert [op for op in ops if op[0] == "F"] == [("F", 5), ("F", 6), ("F", 7)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_of_a_block_that_is_computed_again_only_its_input_is_kept(sequence_parallel: bool) -> None:
    plan = Plan(TP, recompute="full", sequence_parallel=sequence_parallel)
    program = trace(planned(plan), TP, HALVES, 1)
    tape, specs = program.tapes[0], check(program).specs[0]
    live: set[int] = set()
    for op in tape:
        if op.kind is OpKind.LOSS:
            break
        live |= set(op.outputs)
        live -= set(op.inputs) if op.kind is OpKind.FREE else set()
    kept = sorted((specs[n].kind.value, specs[n].layer) for n in live if specs[n].kind in ROW_KINDS - {Kind.STATS})
    head = [("activations", 9), ("activations", 10), ("activations", 11), ("saved", 9), ("saved", 10)]
    inputs = [("activations", 1), ("activations", 5), ("residuals", 5)]
    assert kept == sorted([*head, *inputs, ("activations", 0), ("saved", 0)])
    cut = [n for n in live if (specs[n].kind.value, specs[n].layer) in inputs]
    assert all(specs[n].whole_sequences is not sequence_parallel for n in cut)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_blocks_are_computed_again_on_any_pipeline(schedule: str) -> None:
    mesh = Mesh(pp=2, tp=2)
    for recompute in ("full", (1,)):
        plan = Plan(mesh, schedule, recompute=recompute, shard_optimizer=("dp_shard",))
        check(trace(planned(plan), mesh, Sizes.half_blocks(3), 4))


def test_full_recomputation_takes_one_more_forward_pass_of_every_block() -> None:
    halves = cut(GPT(layers=2, hidden_size=16, heads=2, seq_len=8)).sizes(64, 8)
    nothing, everything = run("none", halves), run("full", halves)
    assert everything.end - nothing.end == 4
    assert everything.peak_memory < nothing.peak_memory


def test_selective_recomputation_of_whole_blocks_is_refused() -> None:
    with pytest.raises(
        UserError, match="selective recomputation was asked for, but attention is not a step of its own"
    ):
        traced("selective")
