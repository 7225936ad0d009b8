"""Every combination of axes: traced and checked on a mixture; the table in the documentation says what has been run."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from shardlab.check import check
from shardlab.language import Mesh, trace
from shardlab.models import MoE
from shardlab.models.cutting import cut_for
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from tests.train.verify_cases import TABLE, Verified

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
    checked = check(trace(planned(plan), plan.mesh, cut.sizes(1, 4), plan.data_ranks))
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
    told = {line for line in re.findall(r"^\| `([a-z ]+)` \|", PAGE.read_text("utf-8"), re.M) if " " in line}
    assert told == {axes for axes in run if " " in axes}
