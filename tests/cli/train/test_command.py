"""`shardlab train` and `shardlab verify`: what they print, and what they refuse before any rank is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import shardlab.train.verification.cases as verifying
import shardlab.train.verification.verify as comparing
from shardlab.cli import main
from shardlab.execute.requirements import has_driver
from shardlab.train.job import Job
from shardlab.train.verification.cases import SMALL_NORM, Case, Verdict
from shardlab.train.verification.verify import CaseResult
from tests.support.processes import PATIENCE, free_port
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]

PRINTS = """
print("the file speaks")

async def talks(rank):
    print("rank", rank.index, "speaks")
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def blocks(rank):
    await talks(rank)
    peer = 1 - rank.index
    await rank.send(rank.load_batch([0]), to=peer)
    await rank.recv(source=peer)
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user.py").write_text(PRINTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command", ["verify user.py:talks", "train --strategy user.py:talks --steps 2 --hidden-size 16"]
)
@pytest.mark.usefixtures("user")
def test_json_stands_alone_on_stdout_whatever_the_program_prints(command: str, warm: WarmStarts) -> None:
    done = warm.run(["-m", "shardlab", *command.split(), "--ranks", "2", "--json"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.get("ok", True) is True
    assert "speaks" in done.stderr


def test_verify_says_how_far_off_it_is_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(verifying, "verify", Mock(return_value=Verdict(0.0, 3e-7, 2, 0.0, 0)))
    assert main(["verify", "ddp", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert {"loss_error", "gradient_error", "weight_error", "ok"} <= set(result)
    assert (result["ok"], result["gradient_error"], result["gradient_layer"]) == (False, 3e-7, 2)
    assert main(["verify", "ddp"]) == 1
    assert "3.00e-07  worst in layer 2" in capsys.readouterr().out


def test_verify_all_shows_the_cases_before_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(cases: list[Case], steps: int, results: list[CaseResult]) -> None:
        results += [CaseResult(cases[1], 2e-12), CaseResult(cases[0], 1e-15)]
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "verify_all", interrupted)
    with pytest.raises(SystemExit) as exited:
        main(["verify", "--all"])
    assert exited.value.code == 130
    said = capsys.readouterr()
    assert "grad-accum, alone, 4 microbatches: 2.0e-12, more than 1e-12" in said.out
    assert f"2 of {len(verifying.CASES)} cases in" in said.out
    assert said.out.endswith("1 case wrong\n")
    assert "shardlab: interrupted" in said.err
    with pytest.raises(SystemExit):
        main(["verify", "--all", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [case["row"] for case in result["cases"]] == ["single", "grad-accum"]
    assert (result["ok"], result["total"]) == (False, len(verifying.CASES))


def test_verify_warns_of_replicas_that_may_drift(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """In float64 and for a few steps they are as good as equal."""
    monkeypatch.setattr(verifying, "verify", Mock(return_value=Verdict(0.0, 0.0, 0, 0.0, 0)))
    words = ["verify", f"{ROOT}/tests/check/drifting.py:drifting", "--ranks", "3", "--microbatches", "3"]
    assert main(words) == 0
    assert "on ranks 0-2 may drift: their gradients" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert [drift["kind"] for drift in json.loads(capsys.readouterr().out)["drifts"]] == ["weights"]
    assert main(["verify", "ddp"]) == 0
    assert "drift" not in capsys.readouterr().out


def test_a_program_with_casts_is_verified_in_float32_as_well(warm: WarmStarts) -> None:
    """Float64 turns the casts off. With them, gradients have the 8 bits of bfloat16."""
    program = f"{ROOT}/examples/gradients_in_half.py:gradients_in_half"
    words = ["-m", "shardlab", "verify", program, "--ranks", "2", "--steps", "1", "--layers", "2"]
    done = warm.run([*words, "--json"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["gradient_error"] < 1e-12
    assert result["with_casts"]["precision"] == "fp32"
    assert 2**-13 < result["with_casts"]["gradient_error"] < 2**-5
    shown = warm.run(words).stdout
    assert "casts           disabled in float64; the same in float32, with casts:" in shown
    assert shown.count("gradient_error") == 2
    done = warm.run(["-m", "shardlab", "verify", "ddp", "--ranks", "2", "--steps", "1", "--json"])
    assert "with_casts" not in json.loads(done.stdout)


def test_verify_clips_to_the_norm_that_is_given_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    clips: list[float | None] = []

    def verify(job: Job, steps: int, clip: float | None, compile: bool) -> Verdict:
        clips.append(clip)
        return Verdict(0.0, 0.0, 0, 0.0, 0)

    monkeypatch.setattr(verifying, "verify", verify)
    for words in (["zero-3"], ["fsdp"], ["zero-3", "--clip", "0.5"], ["ddp"]):
        assert main(["verify", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["clip"] == clips[-1]
    assert clips == [SMALL_NORM, SMALL_NORM, 0.5, None]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("verify ddp --clip 1", "--clip 1.0 limits the gradient norm, which ddp does not compute"),
        ("train --strategy ddp --clip 1", "--clip 1.0 limits the gradient norm, which ddp does not compute"),
        (
            "train --passes update-early --clip 1",
            "which fsdp does not compute; leave out the pass update-early, or --clip",
        ),
        ("verify zero-3 --clip 0", "clip is 0.0; give a positive norm, or none at all"),
        ("train --strategy fsqp", "did you mean fsdp?"),
        ("train --strategy fsdp --microbatches 3", "3 microbatches do not divide among 4 ranks"),
        ("train --strategy gpipe --layers 3", "3 layers do not reach 4 pipeline stages"),
        ("train --hidden-size 30 --heads 4", "hidden_size 30 does not divide by 4 heads"),
        ("train --strategy pipeline --tied", "run it by a plan"),
        ("train --dropout 1.5", "dropout is 1.5"),
        ("train --learning-rate -1", "learning_rate is -1.0; give 0 or more"),
        ("train --data nowhere.txt", "nowhere.txt does not exist"),
        ("train --data /dev/zero", "/dev/zero is a device, but text is read from random places"),
        ("train --prompt ''", "--prompt is empty; give a value, or leave it out"),
        ("train --data short.txt", "short.txt has 20 bytes but 130 are needed"),
        ("train --out .", "exists"),
        (
            "train --strategy 1f1b --ranks 2 --audit-every 5",
            "but 1f1b has no such results; leave it out, or add an axis",
        ),
        ("train --steps 0", "0 is too few; give 1 or more"),
        ("verify single --ranks 2", "runs on one device, but 2 ranks were asked for"),
        ("verify user.py:gone", "has no function 'gone'"),
        ("verify ddp --dropout -0.1", "dropout is -0.1"),
        ("verify ddp --vocab-size 1", "the loss of a vocabulary of one token is always 0; give --vocab-size 2 or more"),
        ("verify zero-1 --offload optimizer=host optimizer=disk", "optimizer is offloaded to two places; give one of"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_before_any_rank_starts(
    command: str, sentence: str, user: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "short.txt").write_text("only twenty letters.")
    before = sorted(user.iterdir())
    monkeypatch.setattr(
        "shardlab.train.launch.ranks._start_local", Mock(side_effect=AssertionError("ranks were started"))
    )
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr()
    assert sentence in " ".join(printed.err.replace("│", " ").split())
    assert printed.out == ""
    assert sorted(user.iterdir()) == before


@pytest.mark.parametrize("command", ["train --strategy user.py:blocks", "verify user.py:blocks"])
def test_a_program_that_can_hang_on_this_backend_is_refused_before_any_rank_starts(
    command: str, user: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardlab.train.launch.ranks._start_local", Mock(side_effect=AssertionError("ranks were started"))
    )
    assert main([*command.split(), "--ranks", "2"]) == 1
    assert "on gloo this program can hang: deadlock: rank 0 waits in send" in capsys.readouterr().err
    assert not (user / "runs").exists()


def test_a_run_that_diverges_is_one_sentence_at_once(warm: WarmStarts, tmp_path: Path) -> None:
    words = ["--strategy", "ddp", "--ranks", "2", "--hidden-size", "16", "--steps", "1000", "--learning-rate", "1e6"]
    done = warm.run(["-m", "shardlab", "train", *words, "--out", str(tmp_path / "run")])
    assert done.returncode == 2
    *steps, sentence = done.stderr.splitlines()
    assert re.match(r"shardlab: the loss of step \d on ranks 0-1 is not finite, so training has stopped;", sentence)
    assert sentence.endswith("try a --learning-rate of less than 1e+06, or --clip 1 with a plan")
    world = next(at for at, line in enumerate(steps) if line.startswith("gloo, started by shardlab"))
    assert all(
        line.startswith(("ddp on 2 ranks", "step ")) or "  under way for " in line for line in steps[world + 1 :]
    )


OPTIONS = "train --ranks 2 --hidden-size 32 --steps 3 --prompt import --out"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that may write no file of more than 60,000 bytes: the weights have more, and all else has less."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
    code += "from shardlab.cli import main; status = main(); print('torch' in sys.modules); sys.exit(status)"
    out = tmp_path_factory.mktemp("limited") / "run"
    command = [sys.executable, "-c", code, *OPTIONS.split(), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return out, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_run_that_cannot_write_its_weights_says_so_and_gives_the_rest(
    limited: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = limited
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"shardlab: {out}/weights.safetensors cannot be written (File too large)" in done.stderr
    assert {file.name for file in out.iterdir()} == {
        "config.toml",
        "run.json",
        "metrics.jsonl",
        "strategy.svg",
    }
    assert "The model continues --prompt, 6 characters:\nimport" in done.stdout
    assert "weights" not in done.stdout
    record = json.loads((out / "run.json").read_text())
    assert record["command"] == shlex.join(["shardlab", *OPTIONS.split(), str(out)])


@pytest.mark.parametrize(("words", "reported"), [([], True), (["--model", "gpt"], False)])
def test_a_plan_in_a_file_does_not_say_which_model_is_trained_so_train_does(
    words: list[str], reported: bool, warm: WarmStarts, tmp_path: Path
) -> None:
    plan = tmp_path / "p.toml"
    plan.write_text("mesh = { dp_shard = 1 }\n")
    small = ["--steps", "1", "--hidden-size", "16", "--layers", "2", "--out", str(tmp_path / "run")]
    done = warm.run(["-m", "shardlab", "train", "--plan", str(plan), *words, *small])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{plan} does not name a model")]
    assert bool(lines) is reported
    if lines:
        assert re.search(r"so gpt is trained, with [\d,]+ parameters in 2 layers; --model chooses another$", lines[0])


def test_what_starts_ranks_imports_torch_only_to_ask_for_gpus(
    limited: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    assert limited[1].stdout.splitlines()[-1] == str(has_driver())


def test_what_is_no_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = "import sys; from shardlab.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", program, "train", "--data", str(tmp_path / "fifo")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ended.stdout.split() == ["2", "False"]
    assert "fifo is a pipe, but text is read from random places" in ended.stderr


@pytest.mark.parametrize("words", ["--timeout 0.3s", "--timeout 0.3s --resume auto", "--config given.toml"])
def test_a_rank_whose_others_do_not_come_waits_no_longer_than_asked(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "given.toml").write_text("[train]\ntimeout = 0.3\n")
    monkeypatch.chdir(tmp_path)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--strategy", "ddp", "--hidden-size", "16", "--out", "run", *words.split()]) == 2
    assert "shardlab: rank 0 of 2 waited 0.3 s for rank 1 at 127.0.0.1:" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("out", "reason"),
    [("file/run", "Not a directory"), ("/proc/run", "No such file"), ("o" * 300, "File name too long")],
)
@pytest.mark.parametrize("words", ["", "--print-config"])
def test_a_folder_that_cannot_be_made_is_refused_before_ranks_start(
    out: str, reason: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr("shardlab.train.launch.ranks.run_ranks", Mock(side_effect=AssertionError("ranks were started")))
    assert main(["train", "--strategy", "ddp", "--hidden-size", "16", "--out", out, *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: --out {out}: nothing can be written there ({reason}")
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp 3 --layers 4", "4 heads do not divide into 3 tensor-parallel slices"),
        ("--strategy ddp --ranks 2 --clip 1", "--clip 1.0 limits the gradient norm, which ddp does not compute"),
        ("--strategy single --audit-every 2", "--audit-every compares results that several ranks keep"),
        ("--strategy ddp --out there", "--out there exists"),
        ("--strategy ddp --data there", "there"),
        ("--strategy ddp --passes offload=host", "offload"),
    ],
)
def test_print_config_refuses_what_train_would_refuse(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    refused: list[str] = []
    for more in ([], ["--print-config"]):
        assert main(["train", "--hidden-size", "16", *words.split(), *more]) != 0
        refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1]
    assert said in refused[0]
