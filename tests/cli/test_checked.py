"""Every command that takes a strategy checks the tapes of all its ranks, none folded, before anything else is done."""

from __future__ import annotations

import pytest

from shardlab.check import Checked, report
from shardlab.cli import main, plan_options
from shardlab.language import Program, Refused

PLAN = ("--pp", "2", "--dp-shard", "2", "--tp", "2", "--shard-optimizer", "dp_shard")
OWN = ("examples/my_strategy.py:my_ddp", "--ranks", "8")
PRICED = ("--model", "gpt2", "--cluster", "h100x8", "--layers", "4")


@pytest.mark.parametrize("given", [PLAN, OWN, ("zero-3", "--ranks", "8")], ids=" ".join)
@pytest.mark.parametrize(
    "command", [("simulate",), ("simulate", *PRICED), ("verify",), ("train", "--steps", "1")], ids=" ".join
)
def test_all_ranks_are_checked(
    command: tuple[str, ...],
    given: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(program: Program) -> Checked:
        raise Refused("not loaded", "", f"the tapes of {program.ranks} ranks were checked", "load them")

    monkeypatch.setattr(plan_options, "check", refuse)
    monkeypatch.setattr(report, "check", refuse)
    name = [] if given is PLAN else ["--strategy", given[0]] if command[0] == "train" else [given[0]]
    words = given if given is PLAN else given[1:]
    assert main([command[0], *name, *command[1:], *words, "--microbatches", "8"]) == 1
    assert "the tapes of 8 ranks were checked" in capsys.readouterr().err
