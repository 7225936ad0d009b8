"""Models that are computed to time layers: small ones of each width, whole and in halves, for one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from shardlab.check import Checked, check
from shardlab.hardware.measured import families
from shardlab.measure.points import KernelWork
from shardlab.models import GPT, CutModel, Llama, Model, cut
from shardlab.models.kernels import Kernel
from shardlab.program import Mesh, Op, OpKind, UserError, trace
from shardlab.rules.dtype import bytes_of
from shardlab.strategies.load import load
from shardlab.strategies.plan import Plan

MICROBATCHES = 2
"""The first gradient of a step is made, the next one is added to it."""

MEASURED = (
    OpKind.FORWARD,
    OpKind.LOSS,
    OpKind.BACKWARD,
    OpKind.BACKWARD_INPUT,
    OpKind.BACKWARD_WEIGHT,
    OpKind.LOAD_BATCH,
    OpKind.NORM,
    OpKind.UPDATE,
)


DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Data types that layers are computed in."""


class Shape(NamedTuple):
    """A model's width, and a microbatch of so many sequences of so many tokens."""

    width: int
    rows: int
    tokens: int


def parse_batch(text: str) -> tuple[int, int]:
    """Sequences and tokens of each.

    >>> parse_batch("8x128")
    (8, 128)

    Raises:
        UserError: when it is no such pair.
    """
    rows, _, tokens = text.lower().partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise UserError(f"{text!r} is no microbatch; write sequences x tokens, such as 8x128")
    return int(rows), int(tokens)


@dataclass(frozen=True)
class Subject:
    """A model and the way in which it is trained on one rank.

    Attributes:
        model: in whole blocks or in halves.
        rows: sequences of a microbatch.
        split: whether the backward pass has two halves.
        dtype: torch's name of it.
    """

    model: Model
    rows: int
    split: bool
    dtype: str

    def checked(self) -> Checked:
        """A step of two microbatches, one after the other."""
        plan = Plan(schedule="zb-h1" if self.split else "1f1b")
        sizes = self.model.sizes(self.rows, int(bytes_of(self.dtype)))
        return check(trace(load(plan).program, Mesh(), sizes, MICROBATCHES))

    def layer_name(self, op: Op) -> str:
        """Name the layer that an op computes on, as "norm", "attention", "first block" or "loss"; of an update "model",
        for all layers are updated at once."""
        if op.kind is OpKind.LOSS:
            return "loss"
        if op.kind is OpKind.UPDATE:
            return "model"
        if op.kind is OpKind.LOAD_BATCH:
            return "batch"
        model, last = self.model, self.model.layers - 1
        if isinstance(model, CutModel):
            if not model.run(op.layer).cut:
                return "norm"
            return model.place(op.layer).split(", ")[-1].replace("feed-forward", "mlp")
        return {0: "first block", last: "last block"}.get(op.layer, "block")

    def work(self, op: Op, elements: int) -> tuple[KernelWork, ...]:
        """The kernels of an op; `elements` are those of its layer's weights."""
        bytes = bytes_of(self.dtype)
        if op.kind is OpKind.UPDATE:
            return (("update", 0.0, float(elements * bytes * UPDATE_MOVES)),)
        if op.kind is OpKind.LOAD_BATCH:
            return ()
        if op.kind is OpKind.NORM:
            return (("pointwise:norm", 0.0, float(elements * bytes)),)
        tokens = self.model.seq_len
        forward = (
            self.model.loss_kernels(self.rows, tokens)
            if op.kind is OpKind.LOSS
            else self.model.kernels(op.layer, self.rows, tokens)
        )
        kernels: list[Kernel] = []
        if op.kind in (OpKind.FORWARD, OpKind.LOSS):
            kernels += forward
        if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.LOSS):
            kernels += [made for kernel in forward for made in kernel.backward_input()]
        if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
            kernels += [made for kernel in forward for made in kernel.backward_weight()]
        return tuple((families(kernel)[0], kernel.flops, kernel.elements * bytes) for kernel in kernels)


UPDATE_MOVES = 7
"""Elements that AdamW moves for each of a weight: it reads gradient, weight and two moments, and writes all but one."""


def subjects(shape: Shape, dtype: str, vocab_size: int) -> list[Subject]:
    """Models that are measured for a shape: GPT's whole blocks (first, middle, last) and halves of blocks, both also
    with a split backward; of Llama, whose kernels are others but whose ops are the same, halves."""
    heads = heads_of(shape.width)
    gpt = GPT(layers=1, hidden_size=shape.width, heads=heads, seq_len=shape.tokens, vocab_size=vocab_size)
    llama = Llama(layers=1, hidden_size=shape.width, heads=heads, seq_len=shape.tokens, vocab_size=vocab_size)
    blocks = replace(gpt, layers=3)
    return [
        *(Subject(model, shape.rows, split, dtype) for split in (False, True) for model in (blocks, cut(gpt))),
        Subject(cut(llama), shape.rows, False, dtype),
    ]


def heads_of(width: int) -> int:
    """Heads of about 64 features, as the models that are trained have; two at least.

    >>> heads_of(64), heads_of(768)
    (2, 12)
    """
    return next((heads for heads in range(max(2, width // 64), width) if width % heads == 0), 1)
