"""Requirements of GPUs, CUDA graphs and torch.compile: on this machine, and on a program.

`gpu_count` finds the GPUs of this machine. `want_step_graph` refuses to capture steps as CUDA graphs if the host
computes a part of them. `want_compilable` refuses to compile layers if there is no compiler, or if the program needs
tensors that compiled layers hide.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from shardlab.check import Checked
from shardlab.common.errors import UserError
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import OpKind
from shardlab.language.precision import Precision
from shardlab.models import Model
from shardlab.models.mixture import Routing


def gpu_count() -> int:
    """Return the number of GPUs that torch finds. Without a driver, torch is not imported, since that takes seconds."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_driver() -> bool:
    """Return whether NVIDIA's or AMD's driver is installed."""
    with suppress(OSError):
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()


CAPTURING = {"cuda"}
"""Types of devices that can capture a step (see `StepGraph`)."""


def want_step_graph(
    checked: Checked,
    model: Model,
    precision: Precision,
    optimizer: OptimizerConfig,
    device: str,
    *,
    traced: bool = False,
) -> None:
    """Refuse to capture steps as CUDA graphs if the host computes a part of them.

    Args:
        device: type of the device that computes layers, cuda or cpu.
        traced: whether the ops of steps are timed.

    Raises:
        UserError: if the host computes a part of a step. The message names this part and the remedy.
    """
    reason = _part_of_the_host(checked, model, precision, optimizer, device)
    if not reason and traced:
        reason = "--trace records every op on the host; leave out one of the two"
    if reason:
        raise UserError(f"--cuda-graph repeats steps on the GPU without the host, but {reason}")


def want_compilable(checked: Checked, device: str, *, traced: bool = False) -> None:
    """Refuse to compile layers if that is impossible.

    Args:
        checked: the program.
        device: type of the device that computes layers, cuda or cpu.
        traced: whether the memory of steps is measured.

    Raises:
        UserError: if the program has split backward passes, if memory is measured on a CPU, or if torch.compile finds
            no compiler for the device or no headers of Python.
    """
    if any(op.kind is OpKind.BACKWARD_INPUT for tape in checked.program.tapes for op in tape):
        raise UserError(
            "--compile hides the tensors that the second half of a backward pass needs, and this program splits "
            "backward passes; choose a schedule that does not, such as 1f1b or interleaved-1f1b, or leave out --compile"
        )
    if traced and device == "cpu":
        raise UserError(
            "--trace measures memory by torch's tracker, which cannot follow compiled layers on a CPU; leave out one "
            "of the two, --trace or --compile"
        )
    if requirement := _missing_requirement(device):
        raise UserError(f"--compile needs {requirement}, or leave out --compile")


def _part_of_the_host(
    checked: Checked, model: Model, precision: Precision, optimizer: OptimizerConfig, device: str
) -> str:
    """Return the host's part in a step, and how to avoid it; empty if there is none."""
    ops = [op for tape in checked.program.tapes for op in tape]
    if device not in CAPTURING:
        return "ranks compute on the CPU here; leave it out, or use a machine with a GPU for each rank"
    if model.dropout:
        return "the host draws the dropout masks; give --dropout 0"
    if precision.scaled:
        return f"the host computes the loss scale of {precision.name}; give --precision bf16"
    if optimizer.optimizer != "adamw" or optimizer.ema is not None:
        return "the host computes numbers for updates other than AdamW's; give --optimizer adamw without --ema"
    if any(isinstance(step.primitive, Routing) for run in model.runs for step in run.steps):
        return "the host lists the tokens of each expert; choose a model without experts"
    if any(op.factor is not None and op.factor.tokens for op in ops):
        return "the program scales gradients by numbers of tokens, which the host counts; scale by microbatches"
    if any(op.kind in (OpKind.OFFLOAD, OpKind.RELOAD) for op in ops):
        return "values are copied to the host and back; leave out --offload"
    return ""


def _missing_requirement(device: str) -> str:
    """Return the requirement of torch.compile that this machine lacks, and the remedy; empty if it lacks none."""
    if device == "cuda":
        if find_spec("triton") is None:
            return "the package triton, which is not installed here; install it"
        name, language = os.environ.get("CC"), "C"
        compiler = which(name) if name else which("gcc") or which("clang") or which("cc")
    else:
        usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        name, language = os.environ.get("CXX", usual), "C++"
        compiler = which(name)
    if compiler is None:
        variable = {"C": "CC", "C++": "CXX"}[language]
        return f"a {language} compiler, and {name or 'gcc'} is not here; install one, name another in {variable}"
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        return f"Python's headers, which are not in {include}; install them (python3-dev)"
    return ""
