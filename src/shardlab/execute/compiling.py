"""What must hold before layers are compiled: a compiler, and a program that needs none of what compiling hides."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.program import OpKind


def want_compilable(checked: Checked, device: str, *, traced: bool = False) -> None:
    """Refuse to compile layers where that cannot be.

    Args:
        checked: the program.
        device: the type of that on which layers are computed, cuda or cpu.
        traced: whether the memory of steps is to be measured.

    Raises:
        UserError: when the program has backward passes in halves; when memory is measured on a CPU; when torch.compile
            finds no compiler for the device, or no headers of Python.
    """
    if any(op.kind is OpKind.BACKWARD_INPUT for tape in checked.program.tapes for op in tape):
        raise UserError(
            "--compile hides what the second half of a backward pass needs, and this program has backward passes in "
            "halves; take a schedule without, such as 1f1b or interleaved-1f1b, or leave out --compile"
        )
    if traced and device == "cpu":
        raise UserError(
            "--trace measures memory by torch's tracker, which on a CPU cannot follow what --compile compiles; leave "
            "out one of them"
        )
    if lacking := _lacking(device):
        raise UserError(f"--compile needs {lacking}, or leave out --compile")


def _lacking(device: str) -> str:
    """What torch.compile lacks here and where it looks for it; nothing if it has all."""
    if device == "cuda":
        if find_spec("triton") is None:
            return "the package triton, which is not installed here; install it"
        name, language = os.environ.get("CC"), "C"
        found = which(name) if name else which("gcc") or which("clang") or which("cc")
    else:
        usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        name, language = os.environ.get("CXX", usual), "C++"
        found = which(name)
    if found is None:
        variable = {"C": "CC", "C++": "CXX"}[language]
        return f"a {language} compiler, and {name or 'gcc'} is not here; install one, name another in {variable}"
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        return f"Python's headers, which are not in {include}; install them (python3-dev)"
    return ""
