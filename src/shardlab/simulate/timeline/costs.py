"""Costs: prices in units of time instead of seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.language import Group, Kind, Op, OpKind, Sizes, Spec
from shardlab.language.ops import COLLECTIVES, Price
from shardlab.language.rules import attention
from shardlab.language.rules.kinds import AUTOGRAD_KINDS
from shardlab.language.rules.spec import fraction_held
from shardlab.simulate.timeline.prices import Messages, Prices


@dataclass(frozen=True)
class Costs(Prices):
    """Time units of each op; the defaults are those of the LLM Training Puzzles (Rush 2023, `Model.event`).

    Attributes:
        forward, recompute, backward_input, backward_weight: for each microbatch of the op.
        attend, attend_backward: causal attention of whole sequences, for each microbatch of the op; a block of keys
            takes its share of that.
        loss_stats, loss, add, norm, update: for each op.
        collective: for each collective, from the arrival of its last member.
        send, recv: for each message. A receive starts when its send has ended, or later.
        offload, reload: for each value that is copied to another place, or back.
        link_latency: whether a send's time is spent on the link alone, which carries any number of messages at once, as
            papers about schedules assume. Otherwise messages take the streams of both ranks, one at a time.
    """

    forward: float = 1.0
    recompute: float = 1.0
    backward_input: float = 0.5
    backward_weight: float = 0.5
    attend: float = 1.0
    attend_backward: float = 1.0
    loss_stats: float = 0.0
    loss: float = 0.0
    add: float = 0.0
    norm: float = 0.0
    update: float = 0.5
    collective: float = 0.3
    send: float = 0.2
    recv: float = 0.2
    offload: float = 0.2
    reload: float = 0.2
    link_latency: bool = False

    @property
    def backward(self) -> float:
        """Time units of an unsplit backward pass: both halves."""
        return self.backward_input + self.backward_weight

    @property
    def one_stream(self) -> bool:
        """True: messages and collectives of a rank take turns."""
        return True

    @property
    def messages(self) -> Messages:
        return "link" if self.link_latency else "buffered"

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        """Return the time units of a compute op: its microbatches count, and of half-blocks the part it computes."""
        acted_on: float = specs[op.inputs[0]].cells.bit_count() if op.inputs else 0
        if any(layer.sliced for layer in sizes.signatures) and op.inputs:
            acted_on *= _share(op, specs, sizes)
        return self.duration(op.kind, acted_on)

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        return self.collective

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        return self.send, self.recv

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return self.duration(kind, 1)

    def duration(self, kind: OpKind, microbatches: float) -> float:
        """Return the time units of an op on `microbatches` microbatches."""
        price = kind.row.price
        if price is Price.NOTHING or price is Price.BYTES:
            return 0.0
        each: float = self.collective if kind in COLLECTIVES else getattr(self, kind.value)
        return each * microbatches if price is Price.MICROBATCH else each


def _share(op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
    """Return the share of a microbatch's work that an op on half-blocks does.

    A norm counts as nothing, a body by its slices, and attention by the pairs of query and key slices.
    """
    if op.layer < sizes.layers and sizes.signatures[op.layer].name == "norm":
        return 0.0
    if op.kind is OpKind.ATTEND or op.kind is OpKind.ATTEND_BACKWARD:
        queries, keys_values = specs[op.inputs[0]], specs[op.inputs[1]]
        return float(fraction_held(queries.form)) * attention.work(queries, keys_values) / queries.cells.bit_count()
    used = [specs[number] for number in (*op.inputs, *op.outputs)]
    shares = [share for spec in used if spec.kind in _TELL_SLICES and (share := fraction_held(spec.form)) < 1]
    return float(max(shares, default=1)) / used[0].form.space.sequence


_TELL_SLICES = AUTOGRAD_KINDS | {Kind.ACTIVATION}
"""Kinds of value that tell which slices of its parameters a layer was computed with."""

PUZZLE_COSTS = Costs()
