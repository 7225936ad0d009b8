"""Groups in any order, statistics of the loss, losses of slices and unequal parts: the numbers are one device's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.check import check
from shardlab.check.runnable import why_not_runnable
from shardlab.language import Mesh, OpKind, Program, Sizes, Strategy, trace
from shardlab.language.ops import COLLECTIVES
from shardlab.models import GPT, MLP, Blocks, MoE
from shardlab.strategies import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.check import group_programs as right
from tests.support.interpreter import judge
from tests.support.passing import is_right_everywhere
from tests.support.ranks import Ranks
from tests.support.refusing import require_refusal

World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SMALL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=40)
DEEP = GPT(layers=2, hidden_size=16, heads=2, seq_len=16, vocab_size=40, dropout=0.1)
MIXTURE = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, capacity_factor=0.7)
TOKENWISE = MLP(layers=2, hidden_size=16, seq_len=8)

PROGRAMS: dict[str, tuple[Strategy, Mesh | int, Sizes | int, Blocks]] = {
    "zero_1_descending": (right.zero_1_descending, 2, 3, SMALL),
    "shards_descending": (right.shards_descending, 2, 3, SMALL),
    "microbatches_descending": (right.microbatches_descending, Mesh(tp=2), 1, SMALL),
    "experts_descending": (right.experts_descending, Mesh(ep=2), 2, MIXTURE),
    "context_descending": (right.context_descending, Mesh(cp=2), 1, DEEP),
    "statistics_concatenated": (right.statistics_concatenated, Mesh(tp=2), 1, SMALL),
    "statistics_concatenated_in_slices": (right.statistics_concatenated_in_slices, Mesh(tp=2), 1, SMALL),
    "statistics_sliced": (right.statistics_sliced, Mesh(tp=2), 1, SMALL),
    "statistics_gathered_twice": (right.statistics_gathered_twice, Mesh(dp_shard=2, tp=2), 1, SMALL),
    "losses_of_slices_first": (right.losses_of_slices_first, Mesh(cp=2), Sizes.columns(2), TOKENWISE),
}
"""Each with its mesh, the sizes with which it is judged, and the model that it is verified on."""


def traced(name: str) -> Program:
    strategy, mesh, sizes, _ = PROGRAMS[name]
    return trace(strategy, mesh, sizes, 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass_and_give_one_devices_numbers(name: str) -> None:
    program = traced(name)
    is_right_everywhere(program)
    if name.endswith("descending"):
        groups = {op.group.ranks for tape in program.tapes for op in tape if op.kind in COLLECTIVES and op.group}
        assert (1, 0) in groups


@pytest.mark.starts_ranks
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_processes_its_numbers_are_those_of_one_device(ranks: World, name: str) -> None:
    _, mesh, _, model = PROGRAMS[name]
    world = mesh.world if isinstance(mesh, Mesh) else mesh
    job = Job(f"{Path(right.__file__)}:{name}", world, 4, model, 2, "fp64")
    verdict = ranks(world).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


def test_unequal_parts_are_not_dealt_to_ranks() -> None:
    program = trace(right.unequal_parts_scattered, Mesh(tp=2), 1, 4)
    assert judge(program).right
    refusal = check(program).not_runnable
    require_refusal(
        refusal, "not runnable", rank=0, remedy="put the value together from equal pieces, since it is dealt in these"
    )
    assert "the members receive 1/4, 3/4 of the whole" in str(refusal)


@pytest.mark.parametrize(
    ("end", "cells", "remedy"),
    [
        ("inputs", 0b0001, "give equal pieces"),
        ("outputs", 0b1001_0110, "deal the same slices of all microbatches"),  # no tensor has these
    ],
)
def test_an_exchange_of_unequal_pieces_runs_nowhere(end: str, cells: int, remedy: str) -> None:
    checked = check(trace(program_from_plan(Plan(Mesh(cp=2), context="ulysses")), Mesh(cp=2), 1, 2))
    tapes = checked.program.tapes
    exchange = next(op for op in tapes[0] if op.kind is OpKind.ALL_TO_ALL)
    (number,), specs = getattr(exchange, end), checked.specs[0]
    specs[number] = specs[number]._replace(cells=cells)
    reason = why_not_runnable(
        checked.program, checked.specs, checked.communications, [range(len(tape)) for tape in tapes]
    )
    require_refusal(reason, "not runnable", rank=0, remedy=remedy)
