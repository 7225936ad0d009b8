"""What must hold before steps are captured as CUDA graphs: a GPU, and a program in which the host has no part."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.models import Model
from shardlab.models.mixture import Routing
from shardlab.optimizers import OptimizerConfig
from shardlab.program import OpKind
from shardlab.program.precision import Precision

CAPTURING = {"cuda"}
"""Types of devices that capture what they are given (see `step_graph`)."""


def want_step_graph(
    checked: Checked,
    model: Model,
    precision: Precision,
    optimizer: OptimizerConfig,
    device: str,
    *,
    traced: bool = False,
) -> None:
    """Refuse to capture a step of which the host has a part.

    Args:
        device: the type of that on which layers are computed, cuda or cpu.
        traced: whether the ops of steps are to be timed.

    Raises:
        UserError: with that part, and what to do.
    """
    why = _part_of_the_host(checked, model, precision, optimizer, device)
    if not why and traced:
        why = "--trace has the host look at each op; leave out one of them"
    if why:
        raise UserError(f"--cuda-graph has the GPU do a step by itself, but {why}")


def _part_of_the_host(
    checked: Checked, model: Model, precision: Precision, optimizer: OptimizerConfig, device: str
) -> str:
    """What the host does within a step, and the way round it; nothing if it does nothing."""
    ops = [op for tape in checked.program.tapes for op in tape]
    if device not in CAPTURING:
        return "ranks compute on the CPU here; leave it out, or take a machine with a GPU for each rank"
    if model.dropout:
        return "masks of dropout are drawn on the host; take --dropout 0"
    if precision.scaled:
        return f"the scale of losses in {precision.name} is the host's; take --precision bf16"
    if optimizer.optimizer != "adamw" or optimizer.ema is not None:
        return "updates other than AdamW's have numbers of the host; take --optimizer adamw without --ema"
    if any(isinstance(step.primitive, Routing) for run in model.runs for step in run.steps):
        return "a mixture's tokens go to experts by lists that the host makes; take a model without experts"
    if any(op.factor is not None and op.factor.tokens for op in ops):
        return "the program scales gradients by tokens that the host counts; scale by microbatches"
    if any(op.kind in (OpKind.OFFLOAD, OpKind.RELOAD) for op in ops):
        return "values are copied to the host and back; take no --offload"
    return ""
