"""Plans by flags: what they make of a strategy's name, of a file, and of nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.cli.plan_options import plan_flags
from shardlab.common.fields import field_helps, field_types
from shardlab.language import AXES, Mesh, UserError
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config_sources import ConfigSource

Captured = pytest.CaptureFixture[str]
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_schedule.py"


def facts_of(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plan_of(entry: tuple[StrategyEntry, int]) -> Plan:
    assert entry[0].plan is not None
    return entry[0].plan(entry[1])


def test_flags_alone_are_a_plan() -> None:
    options = plan_flags(pp=2, dp_shard=3, schedule="gpipe", shard_optimizer=("dp_shard",), recompute=("full",))
    plan = Plan(Mesh(pp=2, dp_shard=3), "gpipe", shard_optimizer=("dp_shard",), recompute="full")
    assert plan_of(options.entry(None, None)) == plan_of(options.entry(None, 6)) == plan


def test_every_field_of_a_plan_has_its_flag_and_its_help(capsys: Captured) -> None:
    assert main(["simulate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for axis in AXES:
        assert f"--{axis.replace('_', '-')} N {field_helps(Mesh)[axis]}" in shown
    for name, written in field_types(Plan).items():
        words = f"--{name.replace('_', '-')} {written.metavar}".strip()
        assert f"{words} {field_helps(Plan)[name]}" in shown
    assert plan_of(plan_flags(dp_shard=2, reduce_at="step").entry(None, None)).reduce_at == "step"


def test_flags_change_a_plan_that_has_a_name() -> None:
    assert plan_of(plan_flags(recompute=("full",)).entry("zero-3", 8)).mesh == Mesh(dp_shard=8)
    changed = plan_of(plan_flags(pp=2, dp_shard=2).entry("zero-3", None))
    assert changed.mesh == Mesh(pp=2, dp_shard=2)
    assert changed.shard_parameters == ("dp_shard",)
    assert plan_of(plan_flags(dp_replicate=3, dp_shard=1).entry("hsdp", None)).mesh == Mesh(dp_replicate=3)
    assert plan_of(plan_flags(shard_optimizer=()).entry("zero-1", None)).shard_optimizer == ()


def test_without_flags_a_name_is_itself() -> None:
    assert plan_flags().entry("fsdp", None) == (STRATEGIES["fsdp"], 4)
    assert plan_flags().entry("single", None) == (STRATEGIES["single"], 1)


def test_flags_change_a_plan_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('mesh = { pp = 2 }\nschedule = "gpipe"\n')
    assert plan_of(plan_flags(plan=file, schedule="zb-h1").entry(None, None)) == Plan(Mesh(pp=2), "zb-h1")


def test_a_flag_without_effect_is_noted_and_a_field_of_a_file_is_not(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.toml").write_text("context = 'ulysses'\n[mesh]\ndp_shard = 2\n")
    plan = ["simulate", "--plan", str(tmp_path / "mine.toml")]
    assert main(plan) == 0
    assert capsys.readouterr().err == ""
    assert main([*plan, "--context", "all_gather", "--shard-optimizer", "dp_shard", "cp"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "shardlab: --shard-optimizer cp has no effect: the mesh has cp 1",
        "shardlab: --context has no effect: the mesh has cp 1",
    ]


def test_json_names_the_plan_that_was_simulated(capsys: Captured) -> None:
    facts = facts_of(capsys, "--pp", "2", "--dp-shard", "2", "--shard-optimizer", "dp_shard")
    assert facts["strategy"] == "plan"
    assert facts["mesh"] == facts["plan"]["mesh"] == {"pp": 2, "dp_shard": 2}
    assert facts["plan"]["shard_optimizer"] == ["dp_shard"]
    assert "plan" not in facts_of(capsys, "fsdp")


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["zb-h1", "--pp", "2"], 4),
        (["zb-h1", "--pp", "6"], 6),
        (["zb-v", "--pp", "3"], 6),
        (["interleaved-1f1b", "--pp", "2", "--stages-per-rank", "5"], 10),
        (["gpipe", "--pp", "2", "--layers-per-stage", "1", "1"], 2),
        (["zero-3"], 4),
        (["zero-3", "--costs", "forward=1"], 4),
        (["zb-h1", "--pp", "2", "--costs", "forward=1"], 2),
    ],
)
def test_layers_are_one_for_each_stage_unless_somebody_says(words: list[str], layers: int, capsys: Captured) -> None:
    assert facts_of(capsys, *words)["layers"] == layers


def test_a_generator_in_a_file_is_a_schedule(capsys: Captured) -> None:
    own = facts_of(capsys, "--pp", "4", "--schedule", f"{EXAMPLE}:one_at_a_time")
    assert own["backends"] == ["gloo", "nccl"]
    assert own["bubble"] >= 0.75  # one of four ranks works at a time
    assert own["end"] > facts_of(capsys, "1f1b")["end"]


def test_the_report_shows_both_halves_of_a_backward_pass(capsys: Captured) -> None:
    assert main(["simulate", "zb-h1", "--pp", "2"]) == 0
    out = capsys.readouterr().out
    assert "I backward-input" in out
    assert "W backward-weight" in out


def test_a_plan_that_is_resumed_follows_the_ranks_and_any_other_is_refused() -> None:
    options, base = plan_flags(), [ConfigSource("run", {"plan": {"mesh": {"pp": 2, "dp_shard": 2}}})]
    assert plan_of(options.entry(None, 2, base, follows=True)).mesh == Mesh(pp=2)
    assert plan_of(plan_flags(pp=2, dp_shard=2).entry(None, 2, follows=True)).mesh == Mesh(pp=2)
    with pytest.raises(UserError, match=r"the plan's mesh pp 2 x dp_shard 2 does not fit on 2 ranks"):
        options.entry(None, 2, base)
