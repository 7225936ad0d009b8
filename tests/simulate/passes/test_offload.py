"""What is kept elsewhere, whatever the program: its numbers stay, and its device needs less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.cli.plan_options import checked as traced
from shardlab.common.errors import UserError
from shardlab.language import OpKind
from shardlab.language.pass_names import OffloadTargets, with_offload
from shardlab.simulate.passes import Goal, run_named
from shardlab.simulate.passes.offload import offload
from shardlab.simulate.timeline.memory import peak_elsewhere
from shardlab.strategies.fsdp import fsdp
from shardlab.strategies.load import load
from tests.simulate.passes.late_programs import checked
from tests.support.passing import is_right
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.thorough import examples

EXAMPLES = Path(__file__).parents[3] / "examples"
EVERYTHING = OffloadTargets("host", "host", "host", "host")


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6))
def test_every_program_with_anything_elsewhere_is_right(seed: int) -> None:
    random = Random(seed)
    program = check(random_program(random_shape(seed)) if seed % 2 else random_plan(seed, ranks=4).program)
    places = ("", "host", "disk")
    homes = OffloadTargets(
        random.choice(places), random.choice(places), random.choice(("", "host")), random.choice(places)
    )  # pyright: ignore[reportArgumentType]
    is_right(replace(program.program, tapes=offload(program, homes)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero-1", "zero-3", "1f1b", "tensor-parallel", "expert-parallel"])
def test_a_device_keeps_less_the_more_lies_elsewhere(strategy: str) -> None:
    entry = load(strategy)
    program = traced(entry, entry.ranks, entry.default_layers(entry.ranks), 4)
    peaks = [Goal().of(program)[1]]
    for words in (["optimizer=host"], ["optimizer=host", "parameters=host"]):
        away = run_named(program, with_offload(None, words))[1].checked
        is_right(away.program)
        peaks.append(Goal().of(away)[1])
        assert peak_elsewhere(away)["host"] > 0
    assert peaks[0] > peaks[1] >= peaks[2]


@pytest.mark.parametrize("words", ["parameters=disk", "optimizer=host", "gradients=host", "activations=disk"])
def test_what_a_program_keeps_elsewhere_by_itself_stays_there(words: str) -> None:
    """The rest goes where it is to go: here activations are all that is on the device."""
    entry = load(f"{EXAMPLES}/offload.py:offload")
    program = traced(entry, 4, 4, 4)
    offloaded = is_right(replace(program.program, tapes=offload(program, OffloadTargets.parse([words]))))
    disk_kinds = {kind for tape in offloaded.program.tapes for kind in [op.kind for op in tape if op.place == "disk"]}
    assert disk_kinds == ({OpKind.OFFLOAD} if words == "activations=disk" else set())
    assert (offloaded.program == program.program) == (words != "activations=disk")


def test_weights_and_states_on_the_host_are_updated_there() -> None:
    """As in ZeRO-Offload: nothing of them comes to the device but weights for their passes."""
    program = checked(fsdp, 2)
    away = check(replace(program.program, tapes=offload(program, EVERYTHING)))
    for rank, tape in enumerate(away.program.tapes):
        updates = [op for op in tape if op.kind is OpKind.UPDATE]
        assert {away.specs[rank][number].form.place for op in updates for number in op.inputs[:3]} == {"host"}
        assert not any(
            op.kind is OpKind.RELOAD and away.specs[rank][op.outputs[0]].kind.value == "opt_states" for op in tape
        )


def test_copies_start_ahead_and_are_awaited_late() -> None:
    results = run_named(checked(fsdp, 4), with_offload(None, ["optimizer=host", "activations=disk"]))
    assert [result.name for result in results] == ["", "offload", "copy-early"]
    original, offloaded, copied_early = (result.end for result in results)
    assert original < copied_early < offloaded


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optimizer"], "cannot offload 'optimizer'; say what goes where, such as optimizer=host"),
        (["optimiser=host"], "did you mean optimizer?"),
        (["optimizer=hots"], "did you mean host?"),
        (["gradients=disk"], "nothing is added up on the disk; give gradients=host"),
    ],
)
def test_words_that_say_nothing_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        with_offload("none", words)
    assert says in str(refused.value)
