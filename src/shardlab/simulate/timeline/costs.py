"""Costs: prices in time units instead of seconds.

`TeachingCosts` are the default of a simulation: compute by FLOPs, communication by bytes. `Costs` has one time for each
kind of op, whatever its size; its defaults, `PUZZLE_COSTS`, are those of the LLM Training Puzzles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardlab.language import Group, Kind, Op, OpKind, Sizes, Spec
from shardlab.language.ops import COLLECTIVES, Price
from shardlab.language.rules import attention
from shardlab.language.rules.kinds import AUTOGRAD_KINDS
from shardlab.language.rules.spec import fraction_held
from shardlab.simulate.timeline.prices import Messages, Prices


@dataclass(frozen=True)
class TeachingCosts(Prices):
    """Time units by FLOPs and bytes: the forward pass of one microbatch through one layer of average size takes 1.

    A pass takes time in proportion to its FLOPs: a backward pass twice as long as the forward pass, and each of its
    halves, or a recomputation, as long as the forward pass. A slice of a layer or of a sequence takes its fraction, so
    a model that is cut into smaller layers takes as long as one of whole layers. An update takes time in proportion to
    its elements. The loss, norms, sums, casts and all other ops that only read and write memory take no time.

    Each rank has one link, over which it sends and receives at the same time. A message takes the latency, and its
    bytes divided by the bandwidth. It starts when it is issued and the sender's and the receiver's link are free; it
    does not wait for the receive. A collective of n ranks occupies the links of all its members. It consists of hops
    around a ring or along a chain, one after the other, and each hop takes as long as a message:

    - all_gather, reduce_scatter, all_to_all, gather, scatter: n - 1 hops of 1/n of the whole value;
    - all_reduce: a reduce_scatter and an all_gather, so 2 (n - 1) hops of 1/n;
    - broadcast, reduce: n - 1 hops of the whole value;
    - barrier: as an all_reduce of 0 bytes.

    A copy to the host or the disk takes as long as a message, on a separate link.

    The bandwidth is relative to compute. With the defaults, an activation of the puzzles' model (512 KiB) takes 0.2 to
    send, and one of its weights (1 MiB) takes 0.33 to gather and 0.66 to reduce over 4 ranks. So communication is
    visible, data parallelism can hide it, and tensor parallelism cannot. A GPU computes more FLOPs for each byte of its
    links, but a layer of a large model also has more FLOPs for each byte of its activations.

    Attributes:
        flops_per_byte: FLOPs that a device computes in the time in which a link carries one byte.
        latency: time units that a message, copy or hop takes in addition to those for its bytes.
        update: time units of updating a layer of average size.
        sizes: the model whose layers define the time unit (None: the puzzles' model).
    """

    flops_per_byte: float = 46.08
    latency: float = 0.02
    update: float = 0.2
    sizes: Sizes | None = field(default=None, repr=False)

    @property
    def one_stream(self) -> bool:
        """Always true: messages and collectives of a rank share its link."""
        return True

    @property
    def messages(self) -> Messages:
        return "full duplex"

    def for_model(self, sizes: Sizes) -> TeachingCosts:
        return replace(self, sizes=sizes)

    @cached_property
    def _unit(self) -> float:
        """FLOPs of a time unit."""
        return (self.sizes or Sizes.puzzle(1)).block_flops or 1.0

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        if op.kind is OpKind.UPDATE:
            return self.update * sizes.elements(specs[op.outputs[0]]) * sizes.block_count / max(1, sum(sizes.weights))
        times = _FORWARD_PASSES.get(op.kind)
        if times is None:
            return 0.0
        attends = op.kind is OpKind.ATTEND or op.kind is OpKind.ATTEND_BACKWARD
        flops = sizes.attend_flops if attends else sizes.forward_flops[op.layer]
        return times * flops * _microbatches(op, specs, sizes) / self._unit

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        members = len(group.ranks)
        hops = (members - 1) * (2 if kind in (OpKind.ALL_REDUCE, OpKind.BARRIER) else 1)
        return hops * self._hop(bytes if kind in (OpKind.BROADCAST, OpKind.REDUCE) else bytes / members)

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        time = self._hop(bytes)
        return time, time

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return self._hop(bytes)

    def _hop(self, bytes: float) -> float:
        return self.latency + bytes * self.flops_per_byte / self._unit


_FORWARD_PASSES = {
    OpKind.FORWARD: 1,
    OpKind.RECOMPUTE: 1,
    OpKind.BACKWARD: 2,
    OpKind.BACKWARD_INPUT: 1,
    OpKind.BACKWARD_WEIGHT: 1,
    OpKind.ATTEND: 1,
    OpKind.ATTEND_BACKWARD: 2,
}
"""FLOPs of each pass, relative to the forward pass of its layer (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""

TEACHING_COSTS = TeachingCosts()


@dataclass(frozen=True)
class Costs(Prices):
    """Time units of each op; the defaults are those of the LLM Training Puzzles (Rush 2023, `Model.event`).

    Attributes:
        forward, recompute, backward_input, backward_weight: time for each microbatch of the op.
        attend, attend_backward: time of causal attention of whole sequences, for each microbatch of the op. Attention
            to a part of the keys takes a fraction, by the number of its unmasked (query, key) pairs.
        loss_stats, loss, add, norm, update: time of each op.
        collective: time of each collective, from the arrival of its last member.
        send, recv: time that each message takes on its sender and on its receiver. A receive starts when its send has
            ended, or later.
        offload, reload: time of each value that is copied to another place, or back.
        link_latency: whether the time of a send is only latency of a link that carries any number of messages at once,
            as papers about schedules assume. Otherwise messages occupy the streams of both ranks, one at a time.
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
        """Always true: messages and collectives of a rank take turns."""
        return True

    @property
    def messages(self) -> Messages:
        return "link" if self.link_latency else "buffered"

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        """Return the time of a compute op, by its number of microbatches; a slice of a layer takes its fraction."""
        norm = op.layer < sizes.layers and sizes.signatures[op.layer].name == "norm"
        return self.duration(op.kind, 0.0 if norm or not op.inputs else _microbatches(op, specs, sizes))

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
        unit_cost: float = self.collective if kind in COLLECTIVES else getattr(self, kind.value)
        return unit_cost * microbatches if price is Price.MICROBATCH else unit_cost


def _microbatches(op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
    """Return the number of microbatches of an op, a fraction if the op computes a slice of a layer or of sequences.

    For attention, the fraction is that of the unmasked (query, key) pairs.
    """
    inputs = specs[op.inputs[0]]
    cells = inputs.cells.bit_count()
    if not any(layer.sliced for layer in sizes.signatures):
        return cells
    if op.kind is OpKind.ATTEND or op.kind is OpKind.ATTEND_BACKWARD:
        return float(fraction_held(inputs.form)) * attention.work(inputs, specs[op.inputs[1]])
    used = [specs[number] for number in (*op.inputs, *op.outputs)]
    shares = [share for spec in used if spec.kind in _TELL_SLICES and (share := fraction_held(spec.form)) < 1]
    return cells * float(max(shares, default=1)) / inputs.form.space.sequence


_TELL_SLICES = AUTOGRAD_KINDS | {Kind.ACTIVATION}
"""Kinds of values whose specs record with which slices of the layer's parameters an op computes."""

PUZZLE_COSTS = Costs()
