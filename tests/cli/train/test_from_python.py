"""Training from a script, with callbacks of its own."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardlab
from shardlab.cli.options import option_values
from shardlab.cli.train.from_python import command_from
from shardlab.common.errors import UserError
from shardlab.strategies.ddp import ddp
from shardlab.train.steps import Callback, StepResult, Training
from tests.support.warm import WarmStarts

ROOT = Path(__file__).parents[3]

SCRIPT = """
import torch.distributed as dist
import shardlab
from shardlab.train import Callback

class Spread(Callback):
    "The sum of the ranks' numbers, and the norm of rank 0's weights after each step; ends the training at step 3."

    def needs_weights(self, step):
        return True

    def on_metrics(self, training, step):
        numbers = [None] * dist.get_world_size()
        dist.all_gather_object(numbers, training.rank)
        if step.metrics["step"] == 2:
            training.stop()
        return {"numbers": float(sum(numbers)), "norm": sum(float(w.norm()) for w in training.state.kept.values())}

small = dict(ranks=2, hidden_size=16, layers=2, seq_len=32, betas=(0.9, 0.99), bias=False)
summary = shardlab.train("fsdp", steps=9, callbacks=[Spread()], out="run", **small)
print(summary.steps, summary.interrupted, summary.saved)
summary = shardlab.train(resume="run", steps=5)
print(summary.steps, summary.interrupted, summary.saved)
"""


def test_a_script_without_a_guard_trains_with_a_callback_of_its_own_and_goes_on(
    warm: WarmStarts, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = warm.run(["mine.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 False 4", "5 False 5"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("numbers") for line in lines] == [1.0] * 4 + [None]
    assert len({line["norm"] for line in lines[:4]}) == 4, "each step's own weights are seen"
    assert "norm" in done.stderr
    assert "numbers 1 " in done.stderr, "own figures are shown, too"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["command"].startswith("shardlab.train(resume='run', steps=5")


def in_a_notebook() -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec("async def mine(rank): pass", namespace)
    return namespace["mine"]


class Narrow(Callback):
    """Callback with a method that takes too few arguments."""

    def on_metrics(self, training: Training) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


class Misspelt(Callback):
    """Callback with a method that is never called."""

    def on_metric(self, training: Training) -> None:
        pass


@pytest.mark.parametrize(
    ("strategy", "settings", "sentence"),
    [
        ("fsdp", {"hidden_siz": 8}, "there is no option hidden_siz=8; did you mean hidden_size?"),
        ("fsdp", {"steps": 0}, "steps"),
        (
            "fsdp",
            {"callbacks": [Callback]},
            "Callback'>, which is not a callback; give instances of classes derived from",
        ),
        (
            "fsdp",
            {"callbacks": [len]},
            "callbacks has <built-in function len>, which is not a callback; give instances",
        ),
        ("fsdp", {"callbacks": Callback()}, "; give a list of callbacks, such as callbacks=[WeightNorm()]"),
        (
            "fsdp",
            {"callbacks": [Narrow()]},
            "the callback Narrow has on_metrics(self, training); write it as on_metrics(self, training, step)",
        ),
        ("fsdp", {"callbacks": [Misspelt()]}, "has on_metric, which is never called; did you mean on_metrics?"),
        (3, {}, "strategy is 3; give a name, path/to/file.py:function, or a function in a file"),
        ("fsdp", {"json": True}, "json is an option of the command shardlab train only; leave it out"),
        ("fsdq", {}, "there is no strategy 'fsdq'"),
        (in_a_notebook(), {}, "mine is not in a file, from which each rank could load it"),
    ],
)
def test_a_wrong_call_raises_the_sentence_of_the_command(strategy: Any, settings: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        shardlab.train(strategy, **settings)


def test_a_function_is_a_strategy_by_its_file_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text((ROOT / "examples" / "my_strategy.py").read_text())
    my_ddp = runpy.run_path(str(tmp_path / "page.py"))["my_ddp"]
    for strategy, name in ((my_ddp, "page.py:my_ddp"), (ddp, 'strategy = "ddp"')):
        out = Path(f"run-{strategy.__name__}")
        summary = shardlab.train(strategy, ranks=1, steps=1, hidden_size=16, layers=1, seq_len=8, out=out)
        assert summary is not None
        assert summary.steps == 1
        assert name in (out / "config.toml").read_text()


class Wrong(Callback):
    """Callback with a mistake."""

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        return {"x": step.metrics["los"]}


def test_a_mistake_in_a_callback_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Wrong failed in on_metrics \(.*:\d+\): KeyError: 'los'; did you mean loss\?"):
        shardlab.train(
            "ddp", ranks=1, steps=2, hidden_size=16, layers=1, callbacks=[Wrong()], out=str(tmp_path / "run")
        )


IN_A_CELL = """
import shardlab
summary = shardlab.train("ddp", ranks=2, steps=2, hidden_size=16, layers=1, seq_len=8, out="run")
print(summary)
"""


def test_a_notebook_shows_all_output_on_stdout(warm: WarmStarts, tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(IN_A_CELL)
    done = warm.run(["cell.py"], cwd=tmp_path, env={**os.environ, "JPY_PARENT_PID": "1"})
    assert done.stderr == ""
    *lines, summary = done.stdout.splitlines()
    assert any(line.startswith("step     2/2") for line in lines)
    assert summary.startswith("<Summary of 2 steps, validation loss ")


def test_false_is_the_opposite_of_a_flag_or_leaves_it_out() -> None:
    command = command_from("plan", [], {"model": "gpt2", "cluster": "a100x4", "tied": False, "explain": False})
    assert option_values(command)["untied"]
    assert not option_values(command)["explain"]
