"""shardlab train --resume: what goes on, and what cannot."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from shardlab.cli import main
from shardlab.common.errors import UserError
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import GPT
from shardlab.train import history
from shardlab.train.checkpoint import read as reading
from shardlab.train.checkpoint.write import checksum_of
from shardlab.train.checkpoints import ResumedRun, find_checkpoint
from shardlab.train.history import lock_metrics, note_end, require_free
from shardlab.train.job import Job
from shardlab.train.launch.commands import RankExchange
from shardlab.train.launch.environment import LaunchEnvironment
from tests.support.processes import free_port, until
from tests.support.ranks import Ranks
from tests.support.warm import WarmStarts
from tests.train.checkpoint.runs import saving_run, trained

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)


@pytest.fixture(scope="module")
def finished(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with checkpoints after 4 and 5."""
    out = tmp_path_factory.mktemp("finished") / "run"
    ranks(2).call(trained, saving_run(Job("fsdp", 2, 4, MODEL, 2), out))
    note_end(out, "finished", None)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["rank-0001.safetensors", "state.json", "config.toml"])
@pytest.mark.parametrize(
    ("harm", "sentence"), [(flip, "has changed"), (cut_off, "bytes, and was"), (Path.unlink, "is missing")]
)
def test_a_harmed_checkpoint_is_named_and_the_one_before_offered(
    name: str, harm: Callable[[Path], None], sentence: str, run: Path, capsys: Captured
) -> None:
    path = run / "checkpoints" / "step-000005" / name
    harm(path)
    assert main(["train", "--resume", str(run), "--steps", "9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: {path}"), said
    assert sentence in said
    assert said.rstrip().endswith(f"the checkpoint before is whole: shardlab train --resume {run} --from-step 4")
    assert len(said.splitlines()) == 1


def test_a_harmed_manifest_is_named(run: Path, capsys: Captured) -> None:
    path = run / "checkpoints" / "step-000005" / "manifest.json"
    cut_off(path)
    assert main(["train", "--resume", str(run), "--steps", "9"]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: {path} is not JSON")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--resume {run}", "{run} has taken all of its 5 steps; give more --steps"),
        ("--resume {run} --steps 2", "{run} has taken 5 steps already; give more --steps"),
        ("--resume {run} --from-step 4 --steps 2", "{run} has taken 4 steps already; give more --steps"),
        ("--resume {run} --from-step 3", "{run} has no checkpoint after step 3; it has those after steps 4-5"),
        ("--resume {run}/checkpoint", "{run}/checkpoint does not exist; did you mean {run}/checkpoints?"),
        ("--resume {run}/..", "{run}/.. has no complete checkpoint; name the folder of a run, such as {run}/../run"),
        (
            "--resume {run}/checkpoints/step-000004",
            "{run}/checkpoints/step-000004 is a checkpoint; name its run, {run}, and --from-step 4",
        ),
        ("--resume {run}/nowhere", "{run}/nowhere does not exist; name the folder of a run"),
        ("--resume {run}/checkpoints", "{run}/checkpoints has no complete checkpoint; name the folder of a run"),
        ("--resume {run} --out x", "--resume and --out exclude each other"),
        ("--resume {run} --init x", "--resume and --init exclude each other"),
        ("--resume auto", "--resume auto resumes the run in --out, or starts it; give --out FOLDER"),
        ("--from-step 3", "--from-step chooses a checkpoint of the run to resume; give --resume FOLDER, too"),
        ("--resume {run} --steps 9 --hidden-size 32", "{run}/checkpoints/step-000005 has the weights of another model"),
        ("--resume {run} --steps 9 --seed 1", "--seed: 0 before, 1 now; a resumed run keeps this setting"),
        ("--resume {run} --steps 9 --optimizer lion", "--optimizer: adamw before, lion now"),
        ("--resume {run} --steps 9 --microbatches 8", "sequences of the first 5 steps: 40 before, 80 now"),
        ("--resume {run} --steps 9 --data {run}/run.json --seq-len 4", "--seq-len: 8 before, 4 now"),
        ("--resume {run} --steps 9 --momentum 0.9", "--momentum has no effect with --optimizer adamw; leave it out"),
        (
            "--resume {run} --steps 9 --profile-steps 3:5",
            "--profile-steps 3:5 has no effect, because the run continues",
        ),
        ("--resume {run} --steps 20 --trace", "--trace records the first steps of a run, which are already done"),
        ("--out {run}", "--out {run} exists; name a new folder"),
    ],
)
def test_what_cannot_be_resumed_is_one_sentence_and_nothing_is_written(
    words: str, sentence: str, run: Path, capsys: Captured
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", *words.format(run=run).split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardlab: " + sentence.format(run=run)), said
    assert len(said.splitlines()) == 1
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_command_with_resume_auto_may_profile_steps_that_are_done_when_it_is_repeated(run: Path) -> None:
    words = ["train", "--resume", "auto", "--out", str(run), "--steps", "9", "--profile-steps", "3:5", "--print-config"]
    assert main(words) == 0


def test_a_finished_run_goes_back_only_where_that_is_asked_for(run: Path, capsys: Captured) -> None:
    """Its newest checkpoint is lost: going on from the one before would overwrite the weights of later steps."""
    shutil.rmtree(run / "checkpoints" / "step-000005")
    weights = (run / "weights.safetensors").read_bytes()
    for words in (["--resume", str(run)], ["--resume", "auto", "--out", str(run)]):
        assert main(["train", *words, "--steps", "9"]) == 2
        assert capsys.readouterr().err == (
            f"shardlab: {run} has the weights after 5 steps, but its newest checkpoint that can be read is the one "
            "after step 4, so training on would begin there and overwrite them; give --from-step 4 if that is meant, "
            f"or begin a new run with --init {run}\n"
        )
    assert main(["train", "--resume", str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: {run} has taken all of its 5 steps; give more --steps")
    assert (run / "weights.safetensors").read_bytes() == weights
    assert main(["train", "--resume", str(run), "--from-step", "4", "--steps", "6"]) == 0
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000006"]


def test_flags_that_name_the_mesh_take_nothing_of_the_plan_before(run: Path, capsys: Captured) -> None:
    for words, mesh in (("--pp 2 --schedule 1f1b", {"pp": 2}), ("--tp 2 --dp-shard 2", {"dp_shard": 2, "tp": 2})):
        assert main(["train", "--resume", str(run), "--steps", "9", *words.split(), "--print-config", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert (plan["mesh"], plan["shard_parameters"]) == (mesh, [])


def test_paths_are_those_of_the_folder_where_the_run_began(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "text:2.txt").write_text("to be or not to be, that is the question " * 20)
    (here / "mine.py").write_text("from shardlab.models import GPT\n\n\nclass Mine(GPT):\n    pass\n")
    (here / "page.py").write_text("from shardlab.strategies.ddp import ddp\n")
    small = "--ranks 1 --hidden-size 16 --layers 2 --seq-len 8 --steps 1 --out run"
    monkeypatch.chdir(here)
    words = "--strategy page.py:ddp --model mine.py:Mine --data text:2.txt:0.5"
    assert main(["train", *words.split(), *small.split()]) == 0
    monkeypatch.chdir(there)
    (there / "text:2.txt").write_text("another text, which was never trained on")
    assert main(["train", "--resume", "../here/run", "--steps", "2"]) == 0
    assert main(["train", "--resume", "../here/run", "--steps", "3"]) == 0, "its paths are absolute by now"
    assert main(["sample", "../here/run", "--tokens", "2", "--prompt", "to"]) == 0
    config = (here / "run" / "config.toml").read_text()
    assert all(str(here / name) in config for name in ("page.py:ddp", "mine.py:Mine", "text:2.txt:0.5"))
    capsys.readouterr()


def test_a_schedule_s_file_is_found_from_another_folder(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--csv", "mine.csv"]) == 0
    small = "--hidden-size 16 --layers 2 --seq-len 8 --steps 1 --microbatches 2 --pp 2 --schedule mine.csv"
    assert main(["train", *small.split(), "--out", "run"]) == 0
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert main(["train", "--resume", "../run", "--steps", "2"]) == 0
    assert str(tmp_path / "mine.csv") in (tmp_path / "run" / "config.toml").read_text()
    capsys.readouterr()


def rates(run: Path) -> list[float]:
    return [json.loads(line)["learning_rate"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "wanted", "sentence"),
    [
        ("", "cosine over 5 steps (warm-up 1, decay 4)", "; after 5 steps it stays at 0.0001"),
        ("--schedule-steps 7", "cosine over 7 steps (warm-up 1, decay 6)", " now ("),
        ("--learning-rate-schedule constant", "constant after a warm-up of 1", " now ("),
        ("--learning-rate-schedule wsd", "wsd over 5 steps (warm-up 1, decay 1)", " now ("),
        ("--warmup-steps 2", "cosine over 5 steps (warm-up 2, decay 3)", " now ("),
        ("--decay-steps 2", "cosine over 5 steps (warm-up 1, decay 2)", " now ("),
    ],
)
def test_more_steps_leave_the_learning_rate_s_schedule_as_it_was(
    words: str, wanted: str, sentence: str, run: Path, capsys: Captured
) -> None:
    assert main(["train", "--resume", str(run), "--steps", "7", *words.split(), "--print-config", "--json"]) == 0
    written: dict[str, Any] = json.loads(capsys.readouterr().out)["optimizer"]
    written["betas"] = tuple(written["betas"])
    optimizer = OptimizerConfig(**written)
    assert optimizer.schedule == wanted
    resumed = ResumedRun.find(run)
    assert resumed is not None
    config = saving_run(Job("fsdp", 2, 4, MODEL, 2), run).config
    said = resumed.schedule_change(replace(config, optimizer=optimizer, train=replace(config.train, steps=7)))
    assert wanted in said
    assert sentence in said


def test_a_run_that_is_extended_twice_keeps_one_schedule(run: Path, capsys: Captured) -> None:
    for steps in ("7", "8"):
        assert main(["train", "--resume", str(run), "--steps", steps]) == 0
        assert "learning rate: cosine over 5 steps (warm-up 1, decay 4) as before" in capsys.readouterr().err
    assert rates(run)[5:] == [pytest.approx(1e-4)] * 3


def test_a_folder_in_use_is_one_sentence(run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ENDING_SECONDS", 0.1)
    with lock_metrics(run):
        assert main(["train", "--resume", str(run), "--steps", "9"]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: {run} is in use by another process")


def test_a_folder_is_awaited_whose_process_is_ending(run: Path) -> None:
    lock = lock_metrics(run)
    threading.Timer(0.2, lock.close).start()
    require_free(run)
    assert lock.closed


def write_changed(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state in a checkpoint, with all checksums."""
    state, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    written, entry = json.loads(state.read_text()), json.loads(manifest.read_text())
    change(written)
    state.write_text(json.dumps(written))
    entry["files"]["state.json"] = {
        "size": state.stat().st_size,
        "sha256": hashlib.sha256(state.read_bytes()).hexdigest(),
    }
    entry.pop("sha256")
    manifest.write_text(json.dumps({**entry, "sha256": checksum_of(entry)}))


def test_other_data_are_refused_unless_they_are_named(run: Path, tmp_path: Path, capsys: Captured) -> None:
    write_changed(run / "checkpoints" / "step-000005", lambda state: state["data"].update(identity="of other data"))
    assert main(["train", "--resume", str(run), "--steps", "9"]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: the data are no longer those that {run} was trained on")


def test_a_checkpoint_of_another_model_is_named_and_passed_over(run: Path, capsys: Captured) -> None:
    path, record = run / "checkpoints" / "step-000005", run / "run.json"
    write_changed(path, lambda state: state["model"].update(hidden_size=48))
    assert main(["train", "--resume", str(run), "--steps", "9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: {path} has the weights of another model: hidden_size is 48, not "), said
    assert said.rstrip().endswith(f"the checkpoint before is whole: shardlab train --resume {run} --from-step 4")
    resumed = ResumedRun.find(run, auto=True)
    assert resumed is not None
    assert resumed.checkpoint.step == 4
    record.write_text("torn")  # then the checkpoint is all there is
    whole = find_checkpoint(run)
    assert whole is not None
    assert whole.step == 5


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (["gpt"], "{run}/run.json does not name the model of the weights; its field model has no kind"),
        ({"layers": 2}, "{run}/run.json does not name the model of the weights; its field model has no kind"),
        ({"kind": "gone.py:Mine"}, "gone.py is not a file"),
        ({"kind": "gpt", "depth": 2}, "{run}/run.json: a model of this kind (GPT) has no depth; "),
    ],
)
def test_a_record_of_no_model_is_one_sentence_and_harms_no_checkpoint(
    model: object, why: str, auto: bool, run: Path, capsys: Captured
) -> None:
    (run / "run.json").write_text(json.dumps({"model": model}))
    with pytest.raises(UserError) as said:
        find_checkpoint(run, auto=auto)
    assert str(said.value).startswith(f"the model of {run} cannot be restored: {why.format(run=run)}")
    assert not capsys.readouterr().err, "no checkpoint is passed over"


def test_a_skipped_checkpoint_is_reported(run: Path, capsys: Captured) -> None:
    cut_off(run / "checkpoints" / "step-000005" / "state.json")
    resumed = ResumedRun.find(run, auto=True)
    assert resumed is not None
    assert resumed.checkpoint.step == 4
    assert capsys.readouterr().err.count("trying the checkpoint before") == 1


def looked(rank: int, run: Path, port: int, auto: bool) -> tuple[str, list[str]]:
    """What a launcher's rank finds to go on from, or says is wrong, and the files that it has read to the end."""
    read: list[str] = []

    def compare(path: Path, entry: Mapping[str, Any]) -> None:
        read.append(f"{path.parent.name}/{path.name}")
        compared(path, entry)

    compared = reading._compare  # pyright: ignore[reportPrivateUsage]
    with patch("shardlab.train.checkpoint.read._compare", compare):
        together = RankExchange(LaunchEnvironment(rank, 2, rank, "127.0.0.1", port))
        try:
            checkpoint = find_checkpoint(run, auto=auto, together=together)
        except UserError as error:
            return str(error), read
    return f"step {checkpoint.step if checkpoint else 0}", read


def test_ranks_of_a_launcher_read_each_file_of_a_checkpoint_once_in_all(ranks: World, run: Path) -> None:
    (mine, ours), (its, others) = ranks(2).call(partial(looked, run=run, port=free_port(), auto=False))
    assert mine == its == "step 5"
    tensors = sorted(name for name in ours + others if name.endswith(".safetensors"))
    assert tensors == [f"step-000005/rank-000{rank}.safetensors" for rank in range(2)]


@pytest.mark.parametrize("harmed", [0, 1])
def test_what_one_rank_reads_and_finds_harmed_no_rank_goes_on_from(harmed: int, ranks: World, run: Path) -> None:
    path = run / "checkpoints" / "step-000005" / f"rank-000{harmed}.safetensors"
    flip(path)
    assert [said for said, _ in ranks(2).call(partial(looked, run=run, port=free_port(), auto=True))] == ["step 4"] * 2
    output = [said for said, _ in ranks(2).call(partial(looked, run=run, port=free_port(), auto=False))]
    assert output[0] == output[1]
    assert output[0].startswith(f"{path} has changed")


def test_auto_says_that_a_run_has_ended(run: Path, capsys: Captured) -> None:
    assert main(["train", "--resume", "auto", "--out", str(run)]) == 0
    assert capsys.readouterr().err == f"shardlab: {run} has taken all of its 5 steps\n"


@pytest.mark.parametrize("name", ["weights.safetensors", "run.json"])
def test_a_run_that_was_killed_after_its_last_step_writes_its_weights(name: str, run: Path, capsys: Captured) -> None:
    weights, figures = load_file(run / "weights.safetensors"), (run / "metrics.jsonl").read_text()
    (run / name).unlink()  # before the weights, or after them and before the end was on record
    assert main(["train", "--resume", "auto", "--out", str(run)]) == 0
    again = load_file(run / "weights.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (run / "metrics.jsonl").read_text() == figures
    assert (run / "report.md").exists()
    capsys.readouterr()
    assert main(["train", "--resume", "auto", "--out", str(run)]) == 0
    assert capsys.readouterr().err == f"shardlab: {run} has taken all of its 5 steps\n"


@pytest.mark.parametrize("words", ["", "--resume auto"])
def test_what_is_started_again_and_does_not_save_is_refused(
    words: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    small = "--ranks 1 --steps 1 --hidden-size 16"
    assert main(["train", *small.split(), *words.split(), "--out", str(tmp_path / "run")]) == 2
    assert "(restart 1), and a restarted run does not begin again at step 0" in capsys.readouterr().err


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


WORDS = ["train", "--ranks", "2", "--hidden-size", "16", "--steps", "20", "--save-every", "5"]


def test_a_killed_run_goes_on_by_itself_and_ends_bitwise_as_if_it_had_not_been(
    warm: WarmStarts, tmp_path: Path
) -> None:
    """With --resume auto it passes over a checkpoint that a flipped bit has harmed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert warm.run(["-m", "shardlab", *WORDS, "--out", str(whole)]).returncode == 0
    words = [*WORDS, "--resume", "auto", "--out", str(killed)]
    variables = {**os.environ, "HELD_AT": "step-000010", "HELD_UNTIL": str(tmp_path / "never")}
    newest = killed / "checkpoints" / "step-000010"
    with warm.start(["-m", "tests.train.jobs", *words], env=variables, start_new_session=True) as process:
        until(newest.exists)
        os.killpg(process.pid, signal.SIGKILL)
    flip(newest / "rank-0000.safetensors")
    said = warm.run(["-m", "shardlab", *words]).stderr
    assert f"{newest}/rank-0000.safetensors has changed" in said
    assert "resumed after step" in said
    weights, expected = (load_file(out / "weights.safetensors") for out in (killed, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    lines = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (killed, whole)
    ]
    assert lines[0] == lines[1]
    shutil.rmtree(killed)
