"""A run's passes get their settings from what its communication costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from shardlab.cli.train import choose_passes
from shardlab.cli.train.before_ranks import checked_to_run
from shardlab.cli.train.choose_passes import settle_passes, settle_run
from shardlab.common.errors import UserError
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import Mesh, Refused
from shardlab.models import GPT
from shardlab.simulate.hardware import Cluster, find_cluster
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.config import StrategyConfig, TrainingConfig
from shardlab.train.config_sources import ConfigSource
from shardlab.train.job import Job
from shardlab.train.run import TrainingRun

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = GPT(layers=4, hidden_size=256, heads=4, seq_len=64)
NARROW = GPT(layers=24, hidden_size=32, heads=4, vocab_size=256, seq_len=16)


def settled_on(
    entry: StrategyEntry,
    cluster: Cluster | None,
    model: GPT = MODEL,
    ranks: int = 2,
    *,
    counts: Sequence[int] = (),
    lenient: bool = False,
) -> str:
    """The passes that an entry gets on a machine (None: one that nobody has measured)."""
    job = Job(entry.for_job(ranks), ranks, 4, model, 2, passes=entry.passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_passes, "cluster_here", dict.fromkeys((1, 2), cluster).get)
        return settle_passes(entry, job, counts=counts, lenient=lenient).passes_on(ranks, "unsaid")


def test_what_is_fastest_on_the_machine_gets_a_setting() -> None:
    """Alike for a program of its own and for a plan; what has one keeps it."""
    cluster = find_cluster("h100x2")
    assert settled_on(load("fsdp", "all"), cluster).startswith("prefetch=")
    assert settled_on(load("zero-1", "bucket"), cluster).startswith("bucket=")
    assert settled_on(load("fsdp", "prefetch=3,update-early"), cluster) == "prefetch=3,update-early"


def test_where_nobody_says_which_all_passes_run_that_help() -> None:
    """Also where none is named for a plan, and none are where nobody wants any."""
    for entry in (load("fsdp"), load("zero-3"), entry_from_plan(Plan(Mesh(dp_shard=2)), "plan")):
        named = entry.rewritten(2, "all")
        assert settled_on(entry, find_cluster("h100x2")) == settled_on(named, find_cluster("h100x2"))
    assert settled_on(load("fsdp", "none"), find_cluster("h100x2")) == "none"
    assert settled_on(entry_from_plan(Plan(Mesh(dp_shard=2), passes="none"), "plan"), None) == "none"


@pytest.mark.parametrize("strategy", ["ddp", "zero-1"])
def test_on_a_machine_that_was_not_measured_many_small_sums_become_one(strategy: str) -> None:
    """Each has a latency, which unit costs do not tell."""
    assert "bucket=1" in settled_on(load(strategy), None, NARROW).split(",")


def test_on_gpus_without_a_price_no_pass_runs_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What helps cores, on which a collective starts in a millisecond, need not help them."""
    monkeypatch.setattr("shardlab.train.launch.ranks.device_type", {2: "cuda"}.get)
    unpriced = replace(h100 := find_cluster("h100x2"), device=replace(h100.device, flops={}))
    for cluster in (None, unpriced):
        assert settled_on(load("ddp"), cluster, NARROW) == settled_on(load("ddp", "all"), cluster, NARROW) == "none"
        assert settled_on(load("ddp", "bucket"), cluster, NARROW) == "bucket=1"
        assert settled_on(load("ddp", "defer=2,all"), cluster, NARROW) == "defer=2"
    assert settled_on(load("fsdp"), h100).startswith("prefetch=")


def test_ranks_that_share_places_and_numbers_without_a_price_are_settled_all_the_same() -> None:
    """More ranks than devices; and a device that does not compute in float32."""
    assert settled_on(load("fsdp"), find_cluster("h100x1")).startswith("prefetch=")
    cluster = find_cluster("h100x2")
    unpriced = replace(cluster, device=replace(cluster.device, flops={}))
    assert settled_on(load("ddp"), unpriced, NARROW) == "bucket=1"


def test_a_wrong_program_and_a_pass_at_fault_are_left_to_the_check_of_every_rank() -> None:
    """A launcher's first rank chooses for all: were it to end here, the others would wait for it."""
    entry = load(f"{EXAMPLES}/mistake.py:my_ddp")
    assert settled_on(entry, None) == "all"
    with pytest.raises(Refused, match=r"examples/mistake\.py:15"):
        checked_to_run(entry, Job(entry.for_job(2), 2, 4, MODEL, 2), OptimizerConfig())
    assert settled_on(load("ddp", "prefetch"), None) == "prefetch"


def test_a_run_that_goes_on_leaves_out_what_its_ranks_have_no_use_for() -> None:
    entry = load("zero-3").rewritten(2, "prefetch=2,defer=1")
    assert settled_on(entry, None, lenient=True) == "prefetch=2,defer=1"
    alone = load("zero-3").rewritten(1, "prefetch=2,defer=1")
    assert settled_on(alone, None, ranks=1, lenient=True) == "none"


def test_a_launchers_ranks_take_what_the_first_of_them_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts need not have been measured alike."""

    class Meeting:
        rank = 1

        def __init__(self, world: object, timeout: timedelta) -> None: ...

        def all(self, act: Callable[[], str]) -> str:
            return act()

        def exchange(self, word: str) -> list[str]:
            assert word == "", "only the first chooses"
            return ["bucket=3", word]

    monkeypatch.setattr("shardlab.train.launch.commands.RankExchange", Meeting)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert settled_on(load("ddp"), None, NARROW) == "bucket=3"


def test_what_was_chosen_stands_in_the_configuration_of_a_run() -> None:
    entry = load("ddp")
    sources = [ConfigSource("flags", {"plan": {"strategy": "ddp", "ranks": 2}})]
    config = TrainingConfig(plan=StrategyConfig("ddp", 2, "ddp"), model=NARROW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_passes, "cluster_here", dict[int, Cluster]().get)
        entry, run = settle_run(entry, TrainingRun(config, out=None), sources)  # pyright: ignore[reportArgumentType]
    assert run.config.plan.as_dict()["passes"] == entry.passes == run.job.passes == "bucket=1"
    assert sources[-1] == ConfigSource("chosen", {"plan": {"passes": "bucket=1"}})
    with pytest.raises(UserError):
        replace(run, config=replace(config, plan=StrategyConfig("ddp", 2, "ddp", "bucke"))).job.checked()


@pytest.mark.parametrize(
    ("name", "plan", "left"),
    [
        ("runs/zero-3-1/config.toml", {"mesh": {}, "passes": "prefetch=2,defer=1"}, "none"),
        ("flags", {"mesh": {}, "passes": "prefetch=2,defer=1"}, "prefetch=2,defer=1"),
        ("flags", {"plan": "page.toml"}, "prefetch=2,defer=1"),
    ],
)
def test_passes_of_a_runs_own_file_may_have_nothing_to_do_on_other_ranks(
    name: str, plan: dict[str, object], left: str
) -> None:
    """Nobody has named them now; those that a flag or a page names stay, so that the ranks say what is wrong."""
    entry = load("zero-3").rewritten(1, "prefetch=2,defer=1")
    sources = [ConfigSource("default", {"plan": {"strategy": "ddp"}}), ConfigSource(name, {"plan": plan})]
    config = TrainingConfig(plan=StrategyConfig(entry.for_job(1), 1, "zero-3"), model=MODEL)
    _, run = settle_run(entry, TrainingRun(config, out=None), sources)  # pyright: ignore[reportArgumentType]
    assert run.config.plan.as_dict()["passes"] == left


def test_a_pass_that_nobody_has_named_must_surely_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled_on(load("zero-3"), None) == "prefetch=1"
    assert "fuse-steps" in settled_on(load("zero-3", "prefetch,fuse-steps"), None)
    monkeypatch.setattr(choose_passes, "SURE_GAIN", 0.0)
    assert "fuse-steps" in settled_on(load("zero-3"), None)


def test_steps_of_other_numbers_of_microbatches_take_the_passes_that_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is carried from step to step may differ between numbers, and the next step would not find it."""
    monkeypatch.setattr(choose_passes, "SURE_GAIN", 0.0)
    entry = load("zero-3")
    assert "fuse-steps" in settled_on(entry, None)
    assert "fuse-steps" not in settled_on(entry, None, counts=(2, 4))
    named = entry.rewritten(2, "fuse-steps")
    assert settled_on(named, None, counts=(2, 4)).startswith("fuse-steps=")


def test_a_pass_without_work_at_one_of_the_numbers_is_left_out(tmp_path: Path) -> None:
    """Nobody has named it, so nobody is to be told to leave it out."""
    (tmp_path / "either.py").write_text(
        "from shardlab.strategies.ddp import ddp\n"
        "from shardlab.strategies.wsdp import wsdp\n\n\n"
        "async def either(rank):\n"
        "    await (ddp if len(rank.microbatches) == 2 else wsdp)(rank)\n"
    )
    entry, cluster = load(f"{tmp_path}/either.py:either"), find_cluster("h100x2")
    assert settled_on(entry, cluster) == "prefetch=1,defer=2"
    assert settled_on(entry, cluster, counts=(2, 4)) == "defer=2"
