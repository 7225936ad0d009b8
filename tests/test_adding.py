"""docs/adding.md: its examples are built as it says, from outside the package or into a copy of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.language import Mesh
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job, job_as_dict, job_from_dict
from tests.models.tensors import alone, test_compute
from tests.support.processes import PATIENCE
from tests.support.warm import WarmStarts
from tests.test_readme import BLOCKS, ROOT, TEXTS, Block

PAGE = "docs/adding.md"
GOALS = {
    "schedule": 1,
    "strategy": 1,
    "model": 1,
    "primitive": 1,
    "collective": 5,
    "op": 8,
    "device": 2,
    "dtype": 2,
}
"""The most files that each takes."""

SECTIONS = dict(re.findall(r"^## An? (\w+)\n(.*?)(?=^## |\Z)", TEXTS[PAGE], re.MULTILINE | re.DOTALL))
ON_PAGE = [block for block in BLOCKS if block.page == PAGE]
SAVED = {block.comment.removeprefix("save as: "): block for block in ON_PAGE if block.comment.startswith("save as: ")}
INTO = [block for block in ON_PAGE if block.comment.startswith("into: ")]


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the package with the page's files."""
    for name, block in SAVED.items():
        (tmp_path / name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def run(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends well."""
    status = main(line.split())
    captured = capfd.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_the_page_has_every_kind_of_thing_with_no_more_files_than_it_should() -> None:
    assert set(SECTIONS) == set(GOALS)
    for kind, text in SECTIONS.items():
        assert 1 <= len(re.findall(r"^- (?:\[|`my_)", text, re.MULTILINE)) <= GOALS[kind], kind


@pytest.mark.parametrize("kind", ["collective", "op", "device", "dtype"])
def test_the_files_that_are_named_have_what_is_named_there(kind: str) -> None:
    items = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)(.*(?:\n  .*)*)", SECTIONS[kind], re.MULTILINE)
    assert items
    for name, target, text in items:
        path = (ROOT / PAGE).parent / target
        assert path == ROOT / "docs" / ".." / "src" / "shardlab" / name
        for word in re.findall(r"`(\w+)`", text):
            assert re.search(rf"\b{word}\b", path.read_text()), f"{word} in {path}"


@pytest.mark.usefixtures("page_folder")
def test_a_schedule_goes_wherever_one_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    schedule = "my_schedule.py:newest_first"
    line = f"schedule {schedule} --pp 2 --microbatches 2 --form compute_only"
    assert run(line, capfd) == "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
    assert "bubble" in run(f"simulate --pp 4 --schedule {schedule}", capfd)
    assert json.loads(run(f"verify --pp 2 --schedule {schedule} --json", capfd))["ok"]


@pytest.mark.usefixtures("page_folder")
def test_a_strategy_is_checked_and_runs(capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run("simulate my_strategy.py:in_two_steps --json", capfd))
    assert facts["backends"] == ["gloo", "nccl"]
    assert not facts["drifts"]
    assert json.loads(run("verify my_strategy.py:in_two_steps --ranks 2 --json", capfd))["ok"]


@pytest.mark.usefixtures("page_folder")
def test_a_primitive_in_slices_is_the_whole() -> None:
    """By itself, as each of the package's is tried: in slices, by what its passes keep, by shapes and FLOPs."""
    model = find_model("my_primitive.py:Rescaled")
    (kind,) = {type(step.primitive) for step in model.steps if type(step.primitive).__name__ == "Rescale"}
    arguments: dict[str, Any] = {"tokens": alone.T, "hidden": alone.C}
    primitive = kind(**arguments)
    for of in (2, 4):
        test_compute.test_in_slices_it_makes_what_its_rule_says(primitive, "ffn", of)
    test_compute.test_its_passes_keep_what_it_declares(primitive)
    test_compute.test_shapes_and_flops_are_those_it_declares(primitive)


@pytest.mark.usefixtures("page_folder")
def test_a_primitives_model_is_checked_whole_and_in_slices(capfd: pytest.CaptureFixture[str]) -> None:
    model = find_model("my_primitive.py:Rescaled")
    for plan in (Plan(Mesh(tp=2)), Plan(Mesh(pp=2), "zb-v"), Plan(Mesh(cp=2, tp=2), sequence_parallel=True)):
        ranks = plan.mesh.world
        assert Job(plan, ranks, 4, model, 2).checked().program.ranks == ranks
    assert json.loads(run("verify --tp 2 --model my_primitive.py:Rescaled --json", capfd))["ok"]
    line = "simulate --tp 2 --model my_primitive.py:Rescaled --cluster h100x2 --json"
    flops = json.loads(run(line, capfd))["model_flops"]
    assert flops == json.loads(run("simulate --tp 2 --model gpt --cluster h100x2 --json", capfd))["model_flops"]


def test_a_model_is_simulated_verified_and_trained(page_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run("simulate --model my_model.py:two_layers --cluster h100x8 --tp 2 --json", capfd))
    assert facts["layers"] > 2  # cut, from blocks
    assert json.loads(run("verify --tp 2 --model my_model.py:AttentionOnly --json", capfd))["ok"]
    line = "train --strategy ddp --ranks 2 --steps 15 --hidden-size 16 --trace --out traced --json"
    run(f"{line} --model my_model.py:AttentionOnly", capfd)
    assert json.loads((page_folder / "traced" / "run.json").read_text())["model"]["kind"] == "my_model.py:AttentionOnly"
    assert "forward" in run("compare traced", capfd)


def test_the_job_of_a_models_file_is_the_same_again(page_folder: Path) -> None:
    job = Job("ddp", 2, 4, find_model("my_model.py:AttentionOnly"), 2)
    words = json.loads(json.dumps(job_as_dict(job)))
    second_job = job_from_dict(words)
    assert vars(second_job.model) == vars(job.model)
    assert second_job.sizes == job.sizes
    (page_folder / "my_model.py").unlink()
    with pytest.raises(ValueError, match=r"in my_model\.py, which is not here; give the command in the run's folder"):
        job_from_dict(words)


def test_a_toml_file_changes_a_model_of_a_file(page_folder: Path) -> None:
    (page_folder / "four.toml").write_text('model = "my_model.py:two_layers"\nlayers = 4\n')
    model = find_model("four.toml")
    assert (model.layers, model.hidden_size) == (4, 768)


def test_torchrun_trains_a_model_of_a_file(page_folder: Path, warm: WarmStarts) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "shardlab"]
    command += ["verify", "--tp", "2", "--model", "my_primitive.py:Rescaled", "--steps", "1", "--json"]
    process = warm.run(command, cwd=page_folder)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["ok"]  # from one of the ranks alone


def test_a_cluster_file_puts_its_own_figures_in_the_place_of_a_devices(tmp_path: Path) -> None:
    (block,) = [block for block in ON_PAGE if block.language == "toml"]
    file = tmp_path / "mine.toml"
    file.write_text(block.text)
    cluster = find_cluster(str(file))
    assert (cluster.size, cluster.device.memory, cluster.device.bandwidth) == (16, 48 * 2**30, 1200e9)


def put(package: Path, block: Block) -> None:
    """Make a change of the page in a copy of the package: its first line that is there already says where."""
    path = package / block.comment.removeprefix("into: ")
    lines, change = path.read_text().splitlines(), block.text.splitlines()
    old_lines = [line[1:] for line in change if line[:1] != "+"]
    at = next(at for at in range(len(lines)) if lines[at : at + len(old_lines)] == old_lines)
    lines[at : at + len(old_lines)] = [line[1:] for line in change if line[:1] != "-"]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, into which all the page's additions are put, and the page's programs."""
    folder = tmp_path_factory.mktemp("changed")
    unfinished = shutil.ignore_patterns("*.pyc.*")  # which another process compiles right now
    shutil.copytree(ROOT / "src" / "shardlab", folder / "shardlab", ignore=unfinished)  # with what Python has compiled
    (folder / "shardlab" / "strategies" / "my_strategy.py").write_text(SAVED["my_strategy.py"].text)
    for block in INTO:
        put(folder / "shardlab", block)
    (ring,) = [block.text for block in ON_PAGE if block.comment == "built with it: ring.py:ring_ddp"]
    (folder / "ring.py").write_text(ring)
    came = 'await rank.shift(rank.grad_weights.pop("passing"))'
    (folder / "copies.py").write_text(ring.replace(came, f"rank.clone({came})"))
    return folder


COMMANDS = """
import sys
from shardlab.cli import main

for line in sys.argv[1:]:
    status = main([*line.split(), "--json"])
    print(end="\\0", flush=True)
    if status:
        sys.exit(status)
"""


def built(changed: Path, *lines: str) -> list[Any]:
    """What commands of the changed package say, as JSON. One process runs them all."""
    env = {**os.environ, "PYTHONPATH": str(changed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMANDS, *lines]
    process = subprocess.run(
        command, cwd=changed, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(text) for text in process.stdout.split("\0")[:-1]]


def test_a_strategy_is_built_in_by_its_own_file(changed: Path) -> None:
    facts, rows = built(changed, "simulate in-two-steps", "strategies")
    assert facts["backends"] == ["gloo", "nccl"]
    listed = [row["name"] for row in rows]
    assert listed == [*listed[: listed.index("zero-1") - 1], "in-two-steps", *listed[listed.index("zero-1") :]]


def test_a_collective_and_an_op_are_checked_and_run(changed: Path) -> None:
    (facts,) = built(changed, "verify copies.py:ring_ddp --ranks 3 --microbatches 3")
    assert facts["ok"]


def test_a_device_computes_and_a_collective_takes_time_on_it(changed: Path) -> None:
    (facts,) = built(changed, "simulate ring.py:ring_ddp --model gpt2 --cluster minex4 --precision fp16")
    assert facts["checked"]
    assert [entry["kind"] for entry in facts["exposed"]] == ["shift"]


def test_products_alone_are_quicker_in_a_narrower_dtype(changed: Path) -> None:
    line = "simulate ddp --ranks 8 --model gpt2 --cluster b200x8 --precision"
    narrow, wide = (facts["step_seconds"] for facts in built(changed, f"{line} fp4", f"{line} bf16"))
    assert wide / 4 < narrow < wide
