"""Folding: of the ranks of a plan that do the same work, only one is traced and priced.

Along every axis but `pp`, all ranks of a plan run the same ops on different slices. So `fold` traces one rank of each
pipeline stage. The other members of its groups are absent. In a collective, their contributions are the traced rank's
value, *rotated* along the axis of the group. Where the traced rank receives a message from an absent rank, the message
is the one that it sends itself, rotated back. The traced ops obey all rules of the language, but folding is not a
check: it assumes that the absent ranks do the same.

A value is a set of slices, stored as bits. The bits count slices in mixed radix, with one digit for each axis of the
mesh that cuts the value. The next rank along an axis has the same slices with that digit one higher; after the last
rank comes the first. So a rotation (`Rotation`) is a cyclic shift of one digit of each number (`cycled`).

This file contains, in order: `fold` and its world, which derives collectives and messages of absent ranks; helpers
about groups and channels; `Rotation`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial

from shardlab.common.user_code import MAX_FOLDED_OPS
from shardlab.language import (
    Group,
    Holds,
    Mesh,
    Op,
    OpKind,
    Program,
    Rank,
    Refused,
    Sizes,
    Spec,
    Strategy,
    UserError,
    World,
)
from shardlab.language.collective_calls import Call, collective_results, unite_members
from shardlab.language.mesh import axes_between
from shardlab.language.rendezvous import Channels, CollectiveHandle, OpenCollectives, SendHandle, Wake
from shardlab.language.rules.collectives import scatter_part
from shardlab.language.rules.kinds import ROW_KINDS, Kind, repeat_pattern
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import KEY, Form, Joined, Space, form_of, with_layer
from shardlab.language.tape import Channel, Communication, channel_of, communications_of
from shardlab.language.values import TracedRank, Value
from shardlab.language.world import gc_paused
from shardlab.strategies.plan.context_parallel import slices_of_rank
from shardlab.strategies.plan.plan import BATCH_AXES, Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.plan.rank_plan import model_layers

SCALAR = Kind.SCALAR

FREED_SCALAR = Spec(form_of(SCALAR, 0, 0, Space(0)))
"""Spec that replaces the specs of all freed scalars, which have the same size."""


@dataclass(frozen=True)
class Folded:
    """Folded trace of a plan: the tapes of one rank of each pipeline stage, ready to be simulated.

    Attributes:
        program: the program, on the whole mesh, with one tape for each pipeline rank.
        specs, communications, communication_of: as in `Checked`, without the members that were not traced.
    """

    program: Program
    specs: list[dict[int, Spec]]
    communications: list[Communication]
    communication_of: list[dict[int, int]]


def fold(plan: Plan, sizes: Sizes, microbatches: int, strategy: Strategy | None = None) -> Folded:
    """Trace one rank of each pipeline stage.

    Args:
        plan: the plan.
        sizes: sizes of the values.
        microbatches: microbatches of the global batch.
        strategy: the program that follows the plan (None: `program_from_plan`).

    Raises:
        Refused: if an op breaks a rule.
        UserError: if the plan does not fit the model or the microbatches.
    """
    with gc_paused():
        world = FoldedWorld(plan, sizes, microbatches)
        program = world.run(strategy or program_from_plan(plan))
        specs = [rank.specs() for rank in world.ranks if isinstance(rank, FoldedRank)]
        world.release()
        return Folded(program, specs, *communications_of(program, partial(_channel, program.mesh, world.stride)))


class FoldedRank(Rank):
    """Traced rank that stores the specs of all its values until it has ended."""

    def _free(self, value: Value) -> None:
        super()._free(value)
        if value.spec[0].kind is SCALAR:  # its spec takes much memory: a bit for each layer of each rank
            self._values[value.number] = FREED_SCALAR

    def specs(self) -> dict[int, Spec]:
        """Return the specs by number of the value, and release the values."""
        specs = {n: value if isinstance(value, Spec) else value.spec for n, value in enumerate(self._values)}
        self._values.clear()  # each refers to this rank; in a cycle they would stay until the garbage collector runs
        return specs


class FoldedWorld(World):
    """World with only the first rank of each pipeline stage."""

    most_ops = MAX_FOLDED_OPS

    def __init__(self, plan: Plan, sizes: Sizes, microbatches: int) -> None:
        self.stride = plan.mesh.world // plan.mesh.pp
        super().__init__(plan.mesh, sizes, microbatches)
        rotation = Rotation(plan, sizes, microbatches)
        self.collectives = FoldedCollectives(self._wake, self.rules, rotation, self.stride)
        self.channels = FoldedChannels(self._wake, rotation, self.stride)

    def make_ranks(self) -> list[Rank]:
        return [FoldedRank(index, self) for index in range(0, self.mesh.world, self.stride)]

    def place(self, rank: int) -> int:
        return rank // self.stride


class FoldedCollectives(OpenCollectives):
    """Collectives of a folded world.

    All members of groups along the pipeline are traced. In any other group, the contributions of absent members are the
    traced member's, rotated.
    """

    def __init__(self, wake: Wake, rules: Rules, rotation: Rotation, stride: int) -> None:
        super().__init__(wake, rules)
        self._rotation = rotation
        self._stride = stride
        self._results: dict[Hashable, Spec] = {}
        sizes = rotation.sizes
        layers = [None, *((layer.nodes, layer.cut) for layer in sizes.signatures), None]
        neighbourhoods = ((*layers[l : l + 3], l == 0, l == sizes.layers) for l in range(sizes.layers + 1))
        classes: dict[Hashable, int] = {}
        self._layer_class = [classes.setdefault(neighbourhood, len(classes)) for neighbourhood in neighbourhoods]

    def issue(self, rank: TracedRank, call: Call, value: Value | None, group: Group) -> CollectiveHandle:
        if _all_there(group, self._stride):
            return super().issue(rank, call, value, group)
        return CollectiveHandle(rank, call, value, group, {})

    def complete(self, handle: CollectiveHandle) -> None:
        if _all_there(handle.group, self._stride):
            super().complete(handle)
            return
        call, spec, group = handle.call, handle.spec, handle.group
        if spec is None or handle.result is None or call.root >= 0:
            raise UserError(f"{call} on {group}: its members do not behave alike, so they cannot be folded")
        try:
            handle.result.spec = self._result(call.kind, spec, group)
        except Refused as refusal:
            raise refusal.at(handle.rank.index, handle.op) from None
        handle.ready = True  # before its rank can wait for it

    def _result(self, kind: OpKind, spec: Spec, group: Group) -> Spec:
        """Return the result of a collective for its first member, cached for identical layers."""
        form, cells, joined = spec
        layer = form.layer
        distances = _apart(self._rotation.mesh, group)
        key = (kind, group.axis, distances, self._layer_class[layer], with_layer(form, 0), cells, joined)
        result = self._results.get(key)
        if result is None:
            if spec.kind in ROW_KINDS:
                rotated = [self._rotation.rotated(spec, group.axis, by) for by in distances]
                result = collective_results(Call(kind), rotated, group.ranks, self._rules)[0]
                assert result is not None, "all members receive"
            else:
                result = self._united(kind, spec, group, len(group.ranks))
                if kind is OpKind.REDUCE_SCATTER:
                    result = scatter_part(spec.about(kind.value), result, len(group.ranks), 0)
            self._results[key] = result
        return Spec(with_layer(result[0], layer), result[1], result[2])

    def _united(self, kind: OpKind, spec: Spec, group: Group, members: int) -> Spec:
        """Return the union of the contributions of the first `members` members of a group.

        It is computed from halves: the second half contributes the union of the first half, rotated. Computed from all
        contributions at once, memory would grow with the square of the members, since each has a bit for every member.
        """
        if members == 1:
            return spec
        half = members // 2
        parts = [(0, first := self._united(kind, spec, group, half)), (half, first)]
        if members % 2:
            parts.append((members - 1, spec))
        rotated = [self._rotation.rotated(part, group.axis, by) for by, part in parts]
        ranks = [group.ranks[by] for by, _ in parts]
        return unite_members(Call(kind), rotated, ranks)


class FoldedChannels(Channels):
    """Messages of a folded world. A message along another axis than `pp` returns to its sender, rotated."""

    def __init__(self, wake: Wake, rotation: Rotation, stride: int) -> None:
        super().__init__(wake)
        self._rotation = rotation
        self._stride = stride

    def post_send(self, rank: TracedRank, value: Value, to: int) -> SendHandle:
        source, target = _twin(self._rotation.mesh, rank.index, to, self._stride)
        queue = self._matcher[source, target]
        handle = queue.join(source)[source] = SendHandle(rank, value, queue)
        if source != rank.index:
            axis, by = _along(self._rotation.mesh, rank.index, to)
            handle.spec = self._rotation.rotated(value.spec, axis, -by % self._rotation.mesh.sizes()[axis])
        return handle


@cache
def _apart(mesh: Mesh, group: Group) -> tuple[int, ...]:
    """Return the distances of a group's ranks from its first one, along its axis."""
    if group.axis not in mesh.sizes():
        raise UserError(f"ranks that meet on {group} do not behave alike, so they cannot be folded")
    first, *others = (mesh.coordinate(rank, group.axis) for rank in group.ranks)
    return 0, *(other - first for other in others)


@cache
def _all_there(group: Group, stride: int) -> bool:
    """Return whether all ranks of a group are traced, or the group has only one rank."""
    return len(group.ranks) == 1 or group.ranks[1] % stride == 0 == group.ranks[0] % stride


def _along(mesh: Mesh, source: int, to: int) -> tuple[str, int]:
    """Return the axis along which two ranks differ, and their distance on it."""
    axes = axes_between(mesh, source, to)
    if len(axes) != 1:
        raise UserError(f"a message goes from rank {source} to rank {to}, along no one axis; it cannot be folded")
    axis = axes[0]
    return axis, (mesh.coordinate(to, axis) - mesh.coordinate(source, axis)) % mesh.sizes()[axis]


@lru_cache(maxsize=4096)
def _twin(mesh: Mesh, source: int, to: int, stride: int) -> tuple[int, int]:
    """Return (source, target) of the traced channel for messages from `source` to `to`.

    If `to` is absent, it is the channel on which `source` receives the same message from an absent rank.
    """
    if to % stride == 0:
        return source, to
    axis, by = _along(mesh, source, to)
    ranks = mesh.group(source, axis).ranks
    return ranks[(ranks.index(source) - by) % len(ranks)], source


def _channel(mesh: Mesh, stride: int, rank: int, op: Op) -> Channel:
    """Return the channel of a traced rank's op. If the group's other members are absent, the rank has it alone."""
    channel = channel_of(rank, op)
    assert channel is not None, "a traced op names its group or its peer"
    if isinstance(channel, Group):
        return channel if _all_there(channel, stride) else (rank,)
    source, to = channel
    return _twin(mesh, source, to, stride)


AXES_OF = {"head": ("tp", "cp"), "expert": ("cp", "ep")}
"""Mesh axes that cut an index, outermost first. `tp` cuts all other indices."""


@dataclass(frozen=True)
class Rotation:
    """Rotations of specs along the axes of a plan's mesh."""

    plan: Plan
    sizes: Sizes
    microbatches: int
    _layer_bits: dict[tuple[tuple[str, ...], int], int] = field(default_factory=dict[tuple[tuple[str, ...], int], int])
    _distances_of: dict[Hashable, Sequence[tuple[int, int]]] = field(
        default_factory=dict[Hashable, Sequence[tuple[int, int]]]
    )

    @cached_property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return self.mesh.sizes()

    @cached_property
    def space(self) -> Space:
        return self.sizes.space(self.mesh, self.microbatches)

    def rotated(self, spec: Spec, axis: str, by: int) -> Spec:
        """Return the spec that corresponds to `spec` on the rank at distance `by` along an axis."""
        form, cells, joined = spec
        if by == 0:
            return spec
        neighbours = self.plan.ulysses
        if axis == "cp" and form.kind in ROW_KINDS and 0 < by % neighbours < by:
            return self.rotated(self.rotated(spec, axis, by % neighbours), axis, by - by % neighbours)
        if form.kind in ROW_KINDS:
            return Spec(self._row_form(spec, axis, by), self._rows(cells, axis, by), self._joined(joined, axis, by))
        if form.kind is Kind.SCALAR:
            return Spec(form.but(holds=self._scalar(form.holds, axis, by)))
        holds = self._slices(form.layer, form.holds, axis, by)
        summed = self._summed(form, cells, axis, by) if cells else 0
        return Spec(form if holds == form.holds else form.but(holds=holds), summed)

    def _joined(self, joined: tuple[Joined, ...], axis: str, by: int) -> tuple[Joined, ...]:
        """Rotate the pieces from which a value was joined, unless all ranks have equal pieces."""
        rotated = tuple([(self._rows(cells, axis, by), self._joined(inner, axis, by)) for cells, inner in joined])
        return joined if {cells for cells, _ in rotated} == {cells for cells, _ in joined} else rotated

    def _row_form(self, spec: Spec, axis: str, by: int) -> Form:
        """Rotate the form of an activation: its pieces of each index, and its term."""
        form, term = spec.form, spec.form.term
        slices = tuple([(index, self._cycled((index,), mask, axis, by)) for index, mask in form.slices])
        if term is not None and term.indices == KEY:
            term = term._replace(bits=self._rotated_kv_done(spec, term.bits, by)) if axis == "cp" else term
        elif term is not None:
            term = term._replace(bits=self._cycled(term.indices, term.bits, axis, by))
        return form if (slices, term) == (form.slices, form.term) else form.but(slices=slices, term=term)

    def _cycled(self, indices: Sequence[str], mask: int, axis: str, by: int) -> int:
        """Rotate a bit set over the pieces of some indices along an axis that cuts them."""
        cuts = tuple([name for index in indices for name in AXES_OF.get(index, ("tp",))])
        if axis not in cuts:
            return mask
        outer, size = self._digit(cuts, axis)
        if axis == "cp" and "head" in indices:  # ranks that exchange heads have several pieces each
            by = by % self.plan.ulysses * (size // self.plan.ulysses)
        count = math.prod(self.space.count(index) for index in indices)
        return cycled(mask, count, count // outer, size, by)

    def _rotated_kv_done(self, spec: Spec, kv_done: int, by: int) -> int:
        """Rotate the set of the sequence's slices whose keys a value's queries have attended to.

        The set leaves out slices that the causal mask excludes. So the ranks whose keys have been attended to are found
        first, by each rank's last slices, which are never masked. Then these ranks are rotated.
        """
        sequence = self.space.sequence
        last = sequence - self.mesh.cp * self.mesh.tp
        ranks = {self._places[slice][0] for slice in range(last, sequence) if kv_done >> slice & 1}
        rotated_ranks = {self._neighbour(rank, by, self.plan.ulysses) for rank in ranks}
        first = self._rows(spec.cells, "cp", by)
        lowest = ((first & -first).bit_length() - 1) % sequence
        return sum(
            1 << slice for slice in range(sequence) if self._places[slice][0] in rotated_ranks and slice >= lowest
        )

    def _rows(self, mask: int, axis: str, by: int, neighbours: int | None = None) -> int:
        """Rotate a bit set over the cells of the batch, which count the slices of each microbatch in order.

        Args:
            neighbours: number of adjacent ranks along `cp` that have joined their slices (None: `Plan.ulysses`).
        """
        sequence, total = self.space.sequence, self.space.cells
        sizes = self.axes
        if axis in BATCH_AXES:
            outer = math.prod(sizes[name] for name in BATCH_AXES[: BATCH_AXES.index(axis) + 1])
            return cycled(mask, total, total // outer, sizes[axis], by)
        if self.mesh.cp == 1:
            return cycled(mask, total, 1, sequence, by) if axis == "tp" and sequence > 1 else mask
        if axis not in ("cp", "tp") or not mask:
            return mask
        rotated = 0
        for distance, cells_at_distance in self._distances(axis, by, neighbours or self.plan.ulysses):
            cells = mask & cells_at_distance
            rotated |= cells << distance if distance > 0 else cells >> -distance
        return rotated

    def _distances(self, axis: str, by: int, neighbours: int) -> Sequence[tuple[int, int]]:
        """Return how a rotation by `by` ranks along an axis shifts the bits of the batch's cells.

        Returns:
            Pairs of a number of bits (negative: to the right) and the mask of the cells that shift by it.
        """
        key = axis, by, neighbours
        distances = self._distances_of.get(key)
        if distances is None:
            slices = defaultdict[int, int](int)
            for slice in range(self.space.sequence):
                slices[self._slice(slice, axis, by, neighbours) - slice] |= 1 << slice
            distances = [
                (distance, repeat_pattern(slice_mask, self.space.sequence, self.space.cells))
                for distance, slice_mask in slices.items()
            ]
            self._distances_of[key] = distances
        return distances

    def _slice(self, slice: int, axis: str, by: int, neighbours: int) -> int:
        """Return the slice of the sequence that corresponds to `slice` on the rank at distance `by`.

        The tensor-parallel ranks of a context-parallel rank share its slices in order.
        """
        rank, position = self._places[slice]
        slices_per_rank = len(self._dealt[rank])
        if axis == "cp":
            rank = self._neighbour(rank, by, neighbours)
        else:
            position = (position + by * slices_per_rank // self.mesh.tp) % slices_per_rank
        return self._dealt[rank][position]

    def _neighbour(self, rank: int, by: int, neighbours: int) -> int:
        """Return the context-parallel rank at distance `by` from a rank.

        `by` has two digits: the distance between groups of `neighbours` adjacent ranks, and the distance inside a
        group.
        """
        outer, inner = divmod(rank, neighbours)
        return (outer + by // neighbours) * neighbours % self.mesh.cp + (inner + by) % neighbours

    @cached_property
    def _dealt(self) -> list[tuple[int, ...]]:
        """Slices of every sequence, by context-parallel rank."""
        cp, tp = self.mesh.cp, self.mesh.tp
        return [slices_of_rank(place, cp, tp, self.plan.stripes) for place in range(cp)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """(context-parallel rank, position among the rank's slices) of each slice."""
        return {slice: (rank, index) for rank, mine in enumerate(self._dealt) for index, slice in enumerate(mine)}

    def _summed(self, form: Form, sums: int, axis: str, by: int) -> int:
        """Rotate the contributions to a gradient: one set for each use of a tied weight, or for each expert."""
        total, rotated = self.space.cells, 0
        for place in range(-(-sums.bit_length() // total)):
            cells = sums >> place * total & (1 << total) - 1
            if cells and form.sums:
                place = self._cycled([index for index, _ in form.sums], 1 << place, axis, by).bit_length() - 1
            rotated |= self._rows(cells, axis, by, neighbours=1) << place * total
        return rotated

    def _slices(self, layer: int, holds: Holds, axis: str, by: int) -> Holds:
        """Rotate the slices of a layer's parameters."""
        order = self._orders[layer]
        if axis not in order or holds.complete:
            return holds
        outer, size = self._digit(order, axis)
        of = math.lcm(holds.of, outer)
        fine = holds.refined(of)
        mask = cycled(fine.mask, of, of // outer, size, by)
        return holds if mask == fine.mask else Holds(mask, of)

    def _scalar(self, holds: Holds, axis: str, by: int) -> Holds:
        """Rotate the parts of a scalar: for each layer, the slices whose squares are in the sum."""
        layers = self.sizes.layers
        slices_per_layer = holds.of // layers
        rotated = Holds(0, holds.of)
        for order in set(self._orders):
            part = Holds(holds.mask & self._bits_of_layers(order, slices_per_layer), holds.of)
            if axis in order and part.mask:
                outer, size = self._digit(order, axis)
                of = layers * math.lcm(slices_per_layer, outer)
                part = Holds(cycled(part.refined(of).mask, of, of // layers // outer, size, by), of)
            of = math.lcm(rotated.of, part.of)
            rotated = Holds(rotated.refined(of).mask | part.refined(of).mask, of)
        return rotated

    def _bits_of_layers(self, order: tuple[str, ...], slices_per_layer: int) -> int:
        """Return the bits of the layers whose parameters these axes cut, with `slices_per_layer` bits each."""
        bits = self._layer_bits.get((order, slices_per_layer))
        if bits is None:
            ones = (1 << slices_per_layer) - 1
            bits = sum(ones << layer * slices_per_layer for layer, cuts in enumerate(self._orders) if cuts == order)
            self._layer_bits[order, slices_per_layer] = bits
        return bits

    @cached_property
    def _orders(self) -> list[tuple[str, ...]]:
        """Axes that cut the parameters of each layer, outermost first."""
        model = model_layers(self.sizes)
        return [(*model.cut_axes(layer), *self.plan.shard_optimizer) for layer in range(self.sizes.layers)]

    def _digit(self, order: tuple[str, ...], axis: str) -> tuple[int, int]:
        """Return the number of pieces into which the axes up to `axis` cut, and the size of `axis`."""
        sizes = self.axes
        return math.prod(sizes[name] for name in order[: order.index(axis) + 1]), sizes[axis]


def cycled(mask: int, total: int, stride: int, size: int, by: int) -> int:
    """Return the bit set in which one digit of each number below `total` is `by` higher, cyclically.

    >>> bin(cycled(0b000011, 6, stride=2, size=3, by=1))
    '0b1100'

    Args:
        mask: the bit set.
        total: bound of the numbers in `mask`.
        stride, size: place value and radix of the digit.
        by: amount that is added to the digit.
    """
    by %= size
    if not by or not mask:
        return mask
    stays = repeat_pattern((1 << (size - by) * stride) - 1, size * stride, total)
    low = mask & stays
    return low << by * stride | (mask ^ low) >> (size - by) * stride
