"""A run's passes get their numbers from what its communication costs."""

from __future__ import annotations

import pytest

from shardlab.cli import settling
from shardlab.cli.settling import settled_here
from shardlab.errors import UserError
from shardlab.hardware import Cluster, find_cluster
from shardlab.models import GPT
from shardlab.strategies.entry import StrategyEntry
from shardlab.strategies.load import load
from shardlab.train.config import StrategyConfig, TrainingConfig

MODEL = GPT(layers=4, hidden_size=256, heads=4, seq_len=64)


def settled_on(entry: StrategyEntry, cluster: Cluster | None) -> StrategyEntry:
    def here(ranks: int) -> Cluster | None:
        assert ranks == 2
        return cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "cluster_here", here)
        plan = StrategyConfig(entry.for_job(2), 2, entry.name, entry.passes)
        return settled_here(entry, TrainingConfig(plan=plan, model=MODEL))


def test_what_is_fastest_on_the_machine_gets_a_number() -> None:
    """Alike for a program of its own and for a plan; what has one keeps it."""
    cluster = find_cluster("h100x2")
    page = settled_on(load("fsdp", "all"), cluster)
    assert page.passes is not None
    assert page.passes.startswith("prefetch=")
    plan = settled_on(load("zero-1", "bucket"), cluster)
    assert plan.passes_on(2).startswith("bucket=")
    assert settled_on(page, None).passes == page.passes


def test_without_a_profile_or_a_price_the_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load("fsdp", "prefetch")
    assert settled_on(entry, None).passes == "prefetch"
    assert settled_on(entry, find_cluster("h100x1")).passes == "prefetch"

    def unpriced(*_: object) -> object:
        raise UserError("this device does not compute so")

    monkeypatch.setattr(settling, "workload_of", unpriced)
    assert settled_on(entry, find_cluster("h100x2")).passes == "prefetch"
