"""`shardlab simulate --passes` and `shardlab passes`: what each pass does to a step, in words, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.language.pass_names import ONLY_NAMED
from shardlab.simulate.passes import PASSES

Captured = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[2] / "examples"
GPT2 = ("--model", "gpt2", "--cluster", "h100x4", "--layers", "4")
COSTS = "forward=1,backward_input=1,backward_weight=1"


def json_of(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys: Captured, *words: str) -> str:
    """What is printed, in one line."""
    assert main(["simulate", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: Captured, *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fsdp",), "the pass tile cuts blocks into half-blocks, for which this program is not written; take a plan"),
        (("zero-1",), "the pass tile has nothing to do: no layer that can be cut is gathered for its use"),
        (("zero-3", "--recompute", "selective"), "no tiles are made of experts, of layers around attention between"),
        (("zero-3", "--model", "gpt2-xl", "--cluster", "h100x4"), "25 heads do not divide into 2 slices, tiles of a"),
        (("zero-3", "--model", "mixtral-8x7b", "--cluster", "h100x64"), "in 2 tiles, but none are made of experts"),
        (("fsdp", "--model", "gpt2", "--cluster", "h100x4"), "the pass tile cuts blocks into half-blocks"),
    ],
)
def test_a_layer_that_cannot_be_computed_in_tiles_is_one_sentence(
    capsys: Captured, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(capsys, "simulate", *words, "--passes", "tile=2")


def test_a_step_in_tiles_takes_less_memory_and_more_time(capsys: Captured) -> None:
    """With prices too, where gathers ahead win some of the time back."""
    (unit,) = json_of(capsys, "zero-3", "--passes", "tile=4")["passes"]
    tiled, ahead = json_of(capsys, "zero-3", *GPT2, "--passes", "tile=4,prefetch")["passes"]
    for row in (unit, tiled):
        assert (row["pass"], row["number"]) == ("tile", 4)
        assert row["peak_bytes"] < row["peak_bytes_before"]
        assert row["end"] > row["end_before"]
    assert ahead["end"] < tiled["end"]


def test_a_row_for_each_pass_and_then_the_step_that_they_make(capsys: Captured, tmp_path: Path) -> None:
    shown = said(capsys, "fsdp", "--passes", "all", "--svg", str(tmp_path / "fsdp.svg"))
    assert "as written 16.16 7.00 MiB prefetch=1 14.84 7.00 MiB gathers weights ahead of their use" in shown
    assert "bucket 14.84 7.00 MiB nothing: no change is faster" in shown
    assert "update-early 14.69" in shown
    assert "end 14.69 when the last op ends" in shown
    assert (tmp_path / "fsdp.svg").exists()


def test_the_steps_before_and_after_each_pass_stand_below_each_other_on_one_axis(
    capsys: Captured, tmp_path: Path
) -> None:
    """In the terminal where that is asked for, and in the picture; a strip is as long as its step."""
    svg, trace = tmp_path / "f.svg", tmp_path / "f.json"
    words = ["simulate", "fsdp", "--passes", "all", "--each-pass", "--svg", str(svg), "--trace", str(trace)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    heads = ["as written  ends at 16.16", "prefetch=1  ends at 14.84", "update-early  ends at 14.69"]
    first = [lines[1 + next(at for at, line in enumerate(lines) if head in line)] for head in heads]
    lengths = [len(line.split()[1]) for line in first]
    assert lengths == [round(lengths[0] * end / 16.16) for end in (16.16, 14.84, 14.69)]
    drawn = svg.read_text()
    assert all(name in drawn for name in ("as written", "prefetch=1 14.84", "update-early 14.69"))
    assert "update-early" in trace.read_text()
    assert "as written  ends at" in shown_of(capsys, "fsdp", *GPT2, "--passes", "prefetch", "--each-pass")
    assert "ends at" not in shown_of(capsys, "fsdp", "--passes", "prefetch")


def shown_of(capsys: Captured, *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_what_passes_do_is_shown_where_some_are_asked_for(capsys: Captured) -> None:
    for words in (("fsdp",), ("fsdp", "--passes", "none"), ("zero-3", *GPT2)):
        line = refused(capsys, "simulate", *words, "--each-pass")
        assert (
            line
            == "shardlab: --each-pass shows the effect of passes, but none is given; give some, such as --passes all"
        )


def test_json_has_each_pass_with_what_was_before_and_after(capsys: Captured) -> None:
    facts = json_of(capsys, "fsdp", "--passes", "all")
    assert [row["pass"] for row in facts["passes"]] == [name for name in PASSES if name not in ONLY_NAMED]
    first, *_, last = facts["passes"]
    assert (first["number"], first["end_before"], first["end"]) == (1, 16.16, 14.84)
    assert (last["end"], last["peak_bytes"]) == (facts["end"], 7 * 2**20)
    assert all(bool(row["why_not"]) == (row["number"] == 0) for row in facts["passes"])
    again = json_of(capsys, "fsdp", "--passes", facts["settled"])
    assert (again["settled"], again["end"]) == (facts["settled"], facts["end"])


def test_without_passes_nothing_is_said_of_them(capsys: Captured) -> None:
    for words in (("fsdp",), ("fsdp", "--passes", "none"), ("zero-3", "--passes", "none"), ("zero-3", *GPT2)):
        assert not {"passes", "settled"} & set(json_of(capsys, *words))
    assert "prefetch" not in said(capsys, "fsdp")


def test_a_program_in_a_file_and_a_plan_by_flags_are_rewritten_equally(capsys: Captured) -> None:
    by_hand = f"{EXAMPLES / 'my_strategy.py'}:my_ddp"
    assert [json_of(capsys, by_hand, "--passes", names)["end"] for names in ("none", "defer")] == [15.44, 12.86]
    facts = json_of(
        capsys, "--dp-shard", "4", "--shard-optimizer", "dp_shard", "--passes", "bucket", "--costs", "puzzle"
    )
    assert facts["plan"]["passes"] == "bucket"
    assert facts["passes"][0]["end"] < facts["passes"][0]["end_before"]


def test_a_plans_file_names_its_passes(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        'mesh = { dp_shard = 4 }\nshard_optimizer = ["dp_shard"]\npasses = "bucket=2"\n'
    )
    assert json_of(capsys, "--plan", str(tmp_path / "plan.toml"))["settled"] == "bucket=2"


def test_unit_costs_of_ones_own_guide_them(capsys: Captured) -> None:
    """Where a collective takes no time, there is nothing to hide."""
    assert json_of(capsys, "fsdp", "--passes", "all", "--costs", COSTS)["settled"] == "none"


@pytest.mark.parametrize("strategy", ["fsdp", "zero-3"])
def test_on_a_cluster_the_whole_program_is_priced_in_its_seconds_and_its_memory(
    capsys: Captured, strategy: str
) -> None:
    """A plan's alike ranks are not folded then."""
    without = json_of(capsys, strategy, *GPT2)
    facts = json_of(capsys, strategy, *GPT2, "--passes", "all")
    first, *_, last = facts["passes"]
    assert first["end_before"] == pytest.approx(without["step_seconds"])
    assert first["peak_bytes_before"] == without["peak_memory"]
    assert last["end"] == pytest.approx(facts["step_seconds"])
    assert last["end"] < first["end_before"]
    assert facts["ranks_simulated"] == 4
    assert "prefetch" in said(capsys, strategy, *GPT2, "--passes", "all")


def test_on_a_full_device_passes_do_not_make_a_step_too_large(capsys: Captured) -> None:
    """What is held beyond tensors counts: the step is as large as the device lets it be."""
    free = json_of(capsys, "wsdp", *GPT2, "--passes", "prefetch")
    assert free["peak_memory"] > free["passes"][0]["peak_bytes_before"]
    room = free["memory_held"] - 2**20
    full = json_of(capsys, "wsdp", *GPT2, "--passes", "prefetch", "--memory", f"{room / 2**30}GiB")
    assert full["memory_held"] <= room < free["memory_held"]


def test_more_ranks_than_are_traced_are_refused_since_passes_want_them_all(capsys: Captured) -> None:
    line = refused(capsys, "simulate", "zero-3", "--model", "llama3-8b", "--cluster", "h100x4096", "--passes", "all")
    assert line.startswith("shardlab: passes need the program of every rank: ")
    assert "raise --max-ops" in line


def test_mistakes_are_one_sentence(capsys: Captured) -> None:
    assert refused(capsys, "simulate", "fsdp", "--passes", "prefech") == (
        "shardlab: there is no pass 'prefech'; did you mean prefetch?"
    )
    assert "the pass prefetch has nothing to do: no weights are gathered" in refused(
        capsys, "simulate", "ddp", "--passes", "prefetch"
    )
    assert "--passes rewrites the program of a plan, but this command compares plans" in refused(
        capsys, "plan", "--model", "gpt2", "--cluster", "h100x4", "--passes", "all"
    )


def test_what_is_offloaded_may_be_rewritten_by_all_passes(capsys: Captured) -> None:
    """Those that find nothing to do are left out in silence."""
    facts = json_of(capsys, "ddp", "--offload", "optimizer=host", "--passes", "all")
    assert facts["settled"].startswith("offload=optimizer:host,copy-early=")


def test_offloading_that_lowers_no_peak_says_so(capsys: Captured) -> None:
    useless = "offloading activations:host does not lower the peak: the fullest rank holds 13.50 MiB"
    assert useless in said(capsys, "ddp", "--offload", "activations=host")
    assert "does not lower the peak" not in said(capsys, "ddp", "--offload", "optimizer=host")


def test_passes_are_listed(capsys: Captured) -> None:
    assert main(["passes", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(PASSES)
    assert main(["passes"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "prefetch uses ahead 1, 2, 4, 8 gathers weights ahead of their use" in shown
    assert "update-early updates a layer" in shown
    assert "offload keeps what is needed" in shown
    assert "--offload optimizer=host activations=disk" in shown, "how its words are written"
