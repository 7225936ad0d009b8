"""Activation recomputation: the tape shows what is computed again, and memory and time follow."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.models import GPT, Halves
from shardlab.program import Mesh, OpKind, Program, Sizes, UserError, trace
from shardlab.simulate import Timeline, simulate
from shardlab.strategies.plan import Plan, Recompute
from shardlab.strategies.planned import planned

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


def test_selective_recomputes_attention_alone() -> None:
    halves = Halves(GPT(layers=2, width=16, heads=2, block=8))
    sizes = halves.sizes(64, 8)  # so many rows that activations outweigh the weights
    program = traced("selective", sizes)
    assert recomputed(program) == list(reversed(sizes.selective))
    assert simulate(check(program)).peak_memory < simulate(check(traced("none", sizes))).peak_memory


def test_norms_keep_what_they_need_when_all_else_is_recomputed() -> None:
    program = traced("full", Sizes.half_blocks(1), Mesh(tp=2))
    assert {layer % 2 for layer in recomputed(program)} == {0}
    check(program)


def test_selective_recomputation_of_whole_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="selective recomputation was asked for, which works on half-blocks"):
        traced("selective")
