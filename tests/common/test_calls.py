"""Calls of the Python API: wrong arguments, options in messages, and interrupts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from shardlab.common.calls import Interrupted, options_as_arguments, public, refuse_argument
from shardlab.common.errors import UserError


@public
def measure(what: str, *, steps: int = 1, color_by: str = "pass") -> str:
    """Return the arguments as text."""
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "long":
        Path("x" * 300).stat()
    if what == "option":
        raise UserError("--micro-batch-size 3 does not divide 8; give --micro-batch-size 2 or 4")
    print(what, file=sys.stderr)
    return f"{what} {steps} {color_by}"


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        ((), {}, "measure: missing a required argument: 'what'; it takes what, steps, color_by"),
        (("a", "b"), {}, "measure: too many positional arguments; it takes what, steps, color_by"),
        (("a",), {"what": "b"}, "measure: multiple values for argument 'what'; it takes what, steps, color_by"),
        (("a",), {"color": "layer"}, "there is no argument 'color'; did you mean color_by?"),
        (("a",), {"xyzzy": 1}, "there is no argument 'xyzzy'; there are what, steps, color_by"),
        (("long",), {}, f"'{'x' * 40}'... is too long for the name of a file; give the path of a file"),
        (("option",), {}, "micro_batch_size=3 does not divide 8; give micro_batch_size=2 or 4"),
    ],
)
def test_a_wrong_call_raises_one_sentence(arguments: Any, settings: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        measure(*arguments, **settings)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        (
            "there is no option --max-tpp=4; did you mean --max-tp?",
            "there is no option max_tpp=4; did you mean max_tp?",
        ),
        ("give --out FOLDER and --resume 'a'", "give out=FOLDER and resume='a'"),
        ("--plan and --offload exclude each other", "plan and offload exclude each other"),
        ("leave --no-compile out", "leave compile=False out"),
        ("see shardlab train --print-config", "see shardlab train --print-config"),
        ("--help lists them", "shardlab plan --help lists them"),
        ("a -- b, x--y", "a -- b, x--y"),
    ],
)
def test_options_are_named_as_arguments(text: str, converted: str) -> None:
    assert options_as_arguments(text, "plan") == converted


def test_an_interrupt_is_shown_as_one_line() -> None:
    with pytest.raises(Interrupted) as interrupt:
        measure("interrupt")
    assert interrupt.value._render_traceback_() == ["Interrupted: measure was interrupted"]
    assert interrupt.value.__suppress_context__


def test_messages_are_on_stdout_in_a_notebook_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure("text")
    assert capsys.readouterr() == ("", "text\n")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    measure("text")
    assert capsys.readouterr() == ("text\n", "")


def test_a_refused_class_is_named() -> None:
    with pytest.raises(UserError, match="model is the class int; give a model"):
        refuse_argument("model", int, "a model")
    with pytest.raises(UserError, match="model is 3; give a model"):
        refuse_argument("model", cast(Any, 3), "a model")


def test_a_scalar_of_numpy_or_torch_is_a_number() -> None:
    assert measure("a", steps=cast(Any, np.int64(2))) == measure("a", steps=cast(Any, torch.tensor(2))) == "a 2 pass"


def test_a_path_is_text() -> None:
    assert measure(cast(Any, Path("a/b"))) == measure("a/b")
