"""`shardlab simulate`: what it prints, and the JSON that other programs read."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardlab.check import check
from shardlab.cli import main
from shardlab.cli.console import Report
from shardlab.cli.simulate.command import add_step
from shardlab.draw.canvas import layer_color
from shardlab.language import OpKind, trace
from shardlab.simulate.timeline import TEACHING_COSTS, simulate
from shardlab.strategies import STRATEGIES
from tests.check import right_programs
from tests.support.thorough import sampled
from tests.support.warm import WarmStarts

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_strategy.py"

TWO_STAGES = {"interleaved-1f1b", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v"}
"""Schedules with two stages on each rank."""

Captured = pytest.CaptureFixture[str]


def json_of(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json_has_the_figures_of_the_simulation(capsys: Captured) -> None:
    facts = json_of(capsys, "fsdp", "--ranks", "4", "--layers", "6", "--microbatches", "8")
    checked = check(trace(STRATEGIES["fsdp"].program, 4, 6, 8))
    timeline = simulate(checked)
    assert facts["strategy"] == "fsdp"
    assert (facts["ranks"], facts["layers"], facts["microbatches"]) == (4, 6, 8)
    assert (facts["steps"], facts["end"]) == (timeline.steps, timeline.end)
    assert facts["peak_memory"] == timeline.peak_memory
    assert facts["peak_memory_by_rank"] == timeline.peak_memory_by_rank
    assert facts["ops"] == sum(map(len, checked.program.tapes))
    assert facts["backends"] == ["gloo", "nccl"]
    assert facts["channel_models"] == dict.fromkeys(CHANNEL_MODELS, True)


CHANNEL_MODELS = ["buffered", "in-order", "rendezvous", "queued per pair", "queued"]


def test_ops_counts_every_entry_of_the_tapes(capsys: Captured) -> None:
    tapes = trace(STRATEGIES["ddp"].program, 4, 4, 4).tapes
    assert any(op.kind is OpKind.WAIT for op in tapes[0])
    assert any(op.kind is OpKind.FREE for op in tapes[0])
    assert json_of(capsys, "ddp")["ops"] == sum(map(len, tapes))


def test_muon_gathers_directions_where_matrices_are_cut(capsys: Captured) -> None:
    without, cut = json_of(capsys, "zero-1"), json_of(capsys, "zero-1", "--optimizer", "muon")
    assert cut["ops"] > without["ops"]
    assert cut["end"] > without["end"]
    assert json_of(capsys, "ddp", "--optimizer", "muon")["ops"] == json_of(capsys, "ddp")["ops"]
    assert json_of(capsys, "wsdp", "--optimizer", "muon")["ops"] > json_of(capsys, "wsdp")["ops"]
    assert main(["simulate", "ddp", "--optimizer", "lion"]) == 2
    assert "--optimizer needs a model and a cluster" in capsys.readouterr().err


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_simulates_without_options(name: str, capsys: Captured) -> None:
    facts = json_of(capsys, name)
    assert facts["ranks"] == STRATEGIES[name].ranks
    assert facts["microbatches"] == 4
    finer = {"tp": 4 * 4 + 3, "ep": 2 * 4 + 1, "cp": 3 * 4 + 3}  # layers of four blocks
    finer |= {"tp": 4} if STRATEGIES[name].columns else {}
    cut = [layers for axis, layers in finer.items() if axis in facts["mesh"]]
    assert facts["layers"] == (cut[0] if cut else 8 if name in TWO_STAGES else 4)


def test_a_users_file_is_simulated(capsys: Captured) -> None:
    facts = json_of(capsys, f"{EXAMPLE}:my_ddp")
    assert facts["strategy"] == f"{EXAMPLE}:my_ddp"
    assert facts["end"] == 15.44


def test_frozen_layers_are_named(capsys: Captured) -> None:
    program = f"{Path(right_programs.__file__)}:fine_tuned"
    assert json_of(capsys, program, "--ranks", "2", "--layers", "3")["frozen"] == [0, 1]
    assert main(["simulate", program, "--ranks", "2", "--layers", "3"]) == 0
    assert re.search(r"^frozen +2  layers 0-1$", capsys.readouterr().out, re.MULTILINE)
    assert "frozen" not in json_of(capsys, "ddp")


def test_options_may_stand_before_the_strategy(capsys: Captured) -> None:
    assert main(["simulate", "--json", "--ranks", "2", "ddp"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_what_a_users_file_prints_does_not_mix_with_the_json(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "chatty.py"
    path.write_text(EXAMPLE.read_text().replace("None:\n", 'None:\n    print("hello")\n') + '\nprint("loaded")\n')
    assert main(["simulate", f"{path}:my_ddp", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ranks"] == 4
    assert captured.err.split() == ["loaded"] + ["hello"] * 4


def test_a_program_that_only_some_backends_run_says_which(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "crossing.py"
    path.write_text(EXAMPLE.read_text().replace("    for l in rank.layers:\n", CROSSING, 1))
    assert main(["simulate", f"{path}:my_ddp", "--ranks", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["channel_models"]["buffered"] is True
    assert facts["channel_models"]["queued"] is False
    assert facts["backends"] == []
    assert "deadlock" in facts["deadlocks"]["queued"]
    assert main(["simulate", f"{path}:my_ddp", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "buffered, in-order: passed" in out
    assert "queued: refused" in out
    assert "no backend" in out


CROSSING = """    batch = rank.load_batch([rank.index])
    sent = rank.send(batch, to=1 - rank.index)
    await sent
    await rank.recv(source=1 - rank.index, expect=("activations", 0, [1 - rank.index]))
    for l in rank.layers:
"""


DRIFTING = "tests/check/drifting.py:drifting"


def test_replicas_that_may_drift_are_a_warning(capsys: Captured) -> None:
    assert main(["simulate", DRIFTING, "--ranks", "3", "--microbatches", "3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warning equal only up to rounding replicas of weights[0-3] on ranks 0-2 may drift: their gradients" in out
    (drift,) = json_of(capsys, DRIFTING, "--ranks", "3", "--microbatches", "3")["drifts"]
    assert drift["layers"] == [0, 1, 2, 3]
    assert drift["groups"] == [[0], [1], [2]]
    assert drift["text"].startswith("replicas of weights[0-3] on ranks 0-2 may drift: " + drift["cause"])
    assert json_of(capsys, "ddp")["drifts"] == []


def test_a_priced_step_warns_of_replicas_that_may_drift(capsys: Captured) -> None:
    priced = ("--model", "gpt2", "--cluster", "h100x8", "--ranks", "3", "--microbatches", "3", "--layers", "2")
    notes = json_of(capsys, DRIFTING, *priced)["notes"]
    assert any("replicas of weights[0-1] on ranks 0-2 may drift" in note for note in notes)


def test_svg_draws_the_timeline_into_a_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "fsdp.svg"
    assert main(["simulate", "fsdp", "--svg", str(path)]) == 0
    assert path.read_text().startswith("<?xml")
    assert f"drawn in        {path}" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["fsdp.svg"]


@pytest.mark.parametrize("by", ["pass", "layer"])
def test_a_drawing_is_coloured_by_pass_or_by_layer_and_has_a_title(by: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert main(["simulate", "--pp", "2", "--schedule", "zb-h1", "--svg", str(path), "--color-by", by]) == 0
    assert "plan (zb-h1): one optimizer step" in path.read_text()
    assert (layer_color(0, 4) in path.read_text()) == (by == "layer")


def report(width: int, name: str = "fsdp", ranks: int = 4) -> list[str]:
    """The lines that a terminal of some width shows."""
    entry = STRATEGIES[name]
    program = trace(entry.program, entry.mesh(ranks), 16 if ranks > 4 else 4, 64 if ranks > 4 else 4)
    checked = check(program)
    text = io.StringIO()
    shown = Report()
    add_step(shown, name, checked, simulate(checked), TEACHING_COSTS)
    shown.print(Console(file=text, width=width, highlight=False))
    return text.getvalue().splitlines()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--no-bias", "--no-bias needs a model and a cluster; give --model and --cluster, or leave it out"),
        ("--untied", "--untied needs a model and a cluster; give --model and --cluster, or leave it out"),
        ("--capacity-factor 0", "--capacity-factor needs a model and a cluster; give --model and --cluster, or leave"),
        ("--as-if", "--as-if needs a model and a cluster; give --model and --cluster, or leave it out"),
        ("--as-if --model gpt2 --cluster a100x4", "--as-if is for the recipe of a framework; give --recipe NAME, or"),
        ("--color-by layer", "--color-by is for a drawing; give --svg FILE, or leave it out"),
    ],
)
def test_an_option_without_effect_is_refused(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ddp", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: {sentence}")


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize(("name", "ranks", "count"), [("fsdp", 4, 1), ("pipeline-fsdp", 64, 8), ("gpipe", 4, 4)])
def test_the_report_fits_the_terminal(width: int, name: str, ranks: int, count: int) -> None:
    lines = report(width, name, ranks)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 32
    rows = [line for line in lines if line.lstrip()[:1].isdigit()]
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == count


def test_the_report_is_plain_ascii() -> None:
    assert all(line.isascii() for line in report(80))


def test_the_timeline_shows_what_each_rank_does() -> None:
    (row,) = [line.split()[1] for line in report(80, "fsdp") if line.lstrip().startswith("0-3 ")]
    assert row.startswith("+F")
    assert row.endswith("U")
    assert row.count("B") > row.count("U")


def test_a_pipe_gets_no_colours(warm: WarmStarts) -> None:
    done = warm.run(["-m", "shardlab", "simulate", "ddp"], env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "peak memory" in done.stdout


@pytest.mark.parametrize("option", sampled(["", "--json"], bool))
def test_a_reader_that_stops_early_sees_no_traceback(option: str) -> None:
    command = f"{sys.executable} -m shardlab simulate gpipe --ranks 16 --layers 16 {option} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("recompute", [["selective"], ["full"], ["0", "2"]])
@pytest.mark.parametrize("mesh", [["--dp-shard", "2"], ["--tp", "2"], ["--ep", "2"]])
def test_recomputation_is_compared_with_none_on_the_same_layers(
    mesh: list[str], recompute: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers are cut otherwise for some of it, and each takes a unit, however fine it is."""
    words = ["simulate", *mesh, "--recompute", *recompute]
    if mesh[0] == "--ep" and recompute == ["selective"]:
        return
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    without = facts["without_recompute"]
    assert (facts["end"] > without["end"]) == (recompute != ["selective"]), "of which unit costs know nothing"
    assert facts["peak_memory"] <= without["peak_memory"]
    assert main(words) == 0
    said = "changes nothing: no attention scores" if recompute == ["selective"] else "peak memory, against none"
    assert said in capsys.readouterr().out
    assert main([*words[:3], "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "without_recompute" not in plain
    if plain["layers"] == facts["layers"]:
        assert {name: plain[name] for name in without} == without


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "2"], "attention, embedding, feed-forward, head, norm"),
        (["--cp", "2"], "embedding, head, norm, output, projection"),
        (["--ep", "2"], "experts, non-expert"),
        (["column-parallel"], "column"),
        (["ddp"], ""),
    ],
)
def test_the_layers_of_a_model_that_is_cut_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 0
    fact = re.search(r"^layers +\d+ +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert (fact[1] if fact else "") == said
