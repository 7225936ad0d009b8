"""Files that commands write: what Shardlab wrote may be written again, what others wrote only by force."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from shardlab.cli import main
from shardlab.cli.options import check_new_file
from shardlab.language import UserError
from shardlab.measure.plot import save_figure

WRITES = [
    ("simulate ddp --svg", "new.svg"),
    ("simulate ddp --trace", "new.json"),
    ("simulate ddp --model gpt2 --cluster h100x4 --svg", "new.svg"),
    ("simulate ddp --model gpt2 --cluster h100x4 --trace", "new.json"),
    ("schedule 1f1b --csv", "new.csv"),
    ("plan --model gpt2 --cluster h100x2 --layers 2 --tp 1 --pp 1 --recompute none --out", "new.toml"),
]


@pytest.mark.parametrize(("command", "name"), WRITES)
def test_a_file_of_shardlab_is_written_again(command: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for _ in range(2):
        assert main([*command.split(), str(path)]) == 0


@pytest.mark.parametrize(("command", "name"), WRITES)
def test_a_file_of_the_user_is_replaced_by_force_alone(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text("years of work\n")
    assert main([*command.split(), str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: this file exists and is not" in said
    assert said.count("\n") == 1
    assert path.read_text() == "years of work\n"
    assert main([*command.split(), str(path), "--force"]) == 0
    assert path.read_text() != "years of work\n"


def test_an_empty_file_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "new.svg"
    path.touch()
    assert main(["simulate", "ddp", "--svg", str(path)]) == 0


def test_a_schedule_that_was_changed_by_hand_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    assert main(["schedule", "1f1b", "--csv", str(path)]) == 0
    assert main(["schedule", "gpipe", "--csv", str(path)]) == 2


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_plot_of_a_bench_is_known_as_shardlabs_and_another_one_is_not(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{suffix}"
    Figure().savefig(path)
    with pytest.raises(UserError, match="this file exists and is not one of Shardlab's"):
        check_new_file("--plot", path, "compute.svg")
    save_figure(Figure(), path)
    check_new_file("--plot", path, "compute.svg")


def test_force_without_anything_to_replace_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ddp", "--force"]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["new.svg", "new.json"])
def test_pictures_bear_shardlabs_mark_however_long_they_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    option = "--svg" if name.endswith("svg") else "--trace"
    for strategy, layers in itertools.product(["ddp", "gpipe"], ["4", "16"]):
        assert main(["simulate", strategy, "--layers", layers, option, str(path)]) == 0
