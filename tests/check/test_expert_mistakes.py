"""Mistakes that expert parallelism invites are refused, whether a program makes them or a tape has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardlab.check import check
from shardlab.language import Holds, Mesh, Op, OpKind, Program, Rank, Value, trace
from shardlab.strategies.expert_parallel import expert_parallel
from tests.check.expert_programs import combined_apart, combined_apart_mesh
from tests.support.passing import is_right_everywhere
from tests.support.random_plans import routed
from tests.support.refusing import Told, refuses, told


def program_of(strategy: Callable[[Rank], Awaitable[Any]] = expert_parallel) -> Program:
    async def named(rank: Rank) -> None:
        await strategy(rank)

    return trace(named, Mesh(ep=2), 2, 4)


async def without_reduction(rank: Rank) -> None:
    """Every rank keeps the gradient of its own microbatches, as if dense layers were experts."""

    async def as_it_is(value: Value) -> Value:
        return value

    rank.all_reduce = as_it_is  # pyright: ignore[reportAttributeAccessIssue]
    await expert_parallel(rank)


async def reducing_experts_too(rank: Rank) -> None:
    """Experts' gradients are reduced over all ranks, as if they were replicas."""
    backward = rank.backward

    def then_reduce(layer: int, *given: Any) -> tuple[Value, ...]:
        grad_weight, *gradients = backward(layer, *given)
        if "expert" in rank.sizes.signatures[layer].cut:
            rank.grad_weights[layer, "sum"] = grad_weight
            rank.all_reduce(grad_weight)
        return grad_weight, *gradients

    rank.backward = then_reduce  # pyright: ignore[reportAttributeAccessIssue]
    await expert_parallel(rank)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (without_reduction, told("missing microbatches", layer=0, missing=(2, 3))),
        (reducing_experts_too, told("other slices", layer=3)),
    ],
)
def test_a_program_that_reduces_the_wrong_gradients_is_refused(
    strategy: Callable[[Rank], Awaitable[Any]], said: Told
) -> None:
    with refuses(said):
        program_of(strategy)


def changed(change: Callable[[Program, int, Op], Op]) -> Program:
    """The program with every op replaced."""
    program = program_of()
    for rank, tape in enumerate(program.tapes):
        tape[:] = [change(program, rank, op) for op in tape]
    return program


def summed(program: Program, rank: int, op: Op) -> Op:
    return op._replace(kind=OpKind.ALL_REDUCE) if op.kind is OpKind.ALL_TO_ALL else op


def swapped(program: Program, rank: int, op: Op) -> Op:
    """Every rank loads the other one's experts."""
    loads = op.kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE)
    if loads and program.sizes.signatures[op.layer].cut:
        return op._replace(holds=Holds(1 << 1 - rank, 2))
    return op


def all_on_one(program: Program, rank: int, op: Op) -> Op:
    """Two ranks read the same microbatches."""
    return op._replace(holds=Holds(0b0011, 4)) if op.kind is OpKind.LOAD_BATCH else op


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (summed, told("no term", layer=1)),
        (swapped, told("other pieces", layer=1)),
        (all_on_one, told("pieces overlap", layer=1, doubled=(0, 1))),
    ],
)
def test_a_tape_that_exchanges_the_wrong_buffers_is_refused(
    change: Callable[[Program, int, Op], Op], said: Told
) -> None:
    check(program_of())
    with refuses(said):
        check(changed(change))


def test_parts_of_the_experts_that_lie_apart_may_be_combined() -> None:
    is_right_everywhere(trace(combined_apart, combined_apart_mesh(4), routed(2), 4))
