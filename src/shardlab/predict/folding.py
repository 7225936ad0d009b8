"""Folding: of ranks that a plan makes behave alike, only one is traced and priced.

Along every axis but `pp` all ranks of a plan do the same with other slices. So one rank of each pipeline stage is
traced, and whatever it meets there is made up of its own part: the other members of a group give what it gives, rotated
along the axis, and a message along the axis is the one that it sends itself, rotated back. Every op's rule applies, but
this is no check: that the others are alike is taken for granted.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial

from shardlab.predict.rotation import Rotation
from shardlab.program import Group, Mesh, Op, OpKind, Program, Rank, Refused, Sizes, Spec, Strategy, UserError, World
from shardlab.program.bounds import MAX_FOLDED
from shardlab.program.matching import Channel, Communication, channel_of, communications_of
from shardlab.program.rendezvous import Channels, CollectiveHandle, OpenCollectives, SendHandle, Wake
from shardlab.program.rooted import Call, collective, unite
from shardlab.program.values import TracedRank, Value
from shardlab.program.world import gc_paused
from shardlab.rules.dealing import share
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.layers import Rules
from shardlab.rules.spec import Space, form_of, of_layer
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned

SCALAR = Kind.SCALAR

FREED_SCALAR = Spec(form_of(SCALAR, 0, 0, Space(0)))
"""Stands for any scalar that was freed: all are of one size."""


@dataclass(frozen=True)
class Folded:
    """A folded trace of a plan: the tape of one rank of each pipeline stage, ready to be simulated.

    Attributes:
        program: as many tapes as there are pipeline ranks, on the whole mesh.
        specs, communications, communication_of: as of a checked program; members of other rows are left out.
    """

    program: Program
    specs: list[dict[int, Spec]]
    communications: list[Communication]
    communication_of: list[dict[int, int]]


def fold(plan: Plan, sizes: Sizes, microbatches: int, strategy: Strategy | None = None) -> Folded:
    """Trace one rank of each pipeline stage.

    Args:
        strategy: what follows the plan (None: `planned`).

    Raises:
        Refused: if an op breaks a rule.
        UserError: if the plan does not fit the model or the microbatches.
    """
    with gc_paused():
        world = FoldedWorld(plan, sizes, microbatches)
        program = world.run(strategy or planned(plan))
        specs = [rank.specs() for rank in world.ranks if isinstance(rank, FoldedRank)]
        world.release()
        return Folded(program, specs, *communications_of(program, partial(_channel, program.mesh, world.stride)))


class FoldedRank(Rank):
    """A rank that tells the specs of all its values once it has ended."""

    def _free(self, value: Value) -> None:
        super()._free(value)
        if value.spec[0].kind is SCALAR:  # what it summed has a bit for each layer of each rank, and is done with
            self._values[value.number] = FREED_SCALAR

    def specs(self) -> dict[int, Spec]:
        """Specs by the value's number. The values themselves are gone."""
        known = {n: value if isinstance(value, Spec) else value.spec for n, value in enumerate(self._values)}
        self._values.clear()  # each refers to this rank; in a circle they would stay until the collector comes
        return known


class FoldedWorld(World):
    """A world in which only the first rank of each pipeline stage is there."""

    most_ops = MAX_FOLDED

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
    """Groups along the pipeline meet; any other member gives what the one that is there gives, rotated."""

    def __init__(self, wake: Wake, rules: Rules, rotation: Rotation, stride: int) -> None:
        super().__init__(wake, rules)
        self._rotation = rotation
        self._stride = stride
        self._results: dict[Hashable, Spec] = {}
        sizes = rotation.sizes
        layers = [None, *((layer.nodes, layer.cut) for layer in sizes.signatures), None]
        around = ((*layers[l : l + 3], l == 0, l == sizes.layers) for l in range(sizes.layers + 1))
        classes: dict[Hashable, int] = {}
        self._alike = [classes.setdefault(each, len(classes)) for each in around]

    def issue(self, rank: TracedRank, call: Call, value: Value | None, group: Group) -> CollectiveHandle:
        if _all_there(group, self._stride):
            return super().issue(rank, call, value, group)
        return CollectiveHandle(rank, call, value, group, {})

    def meet(self, handle: CollectiveHandle) -> None:
        if _all_there(handle.group, self._stride):
            super().meet(handle)
            return
        call, spec, group = handle.call, handle.spec, handle.group
        if spec is None or handle.result is None or call.root >= 0:
            raise UserError(f"{call} on {group}: its members do not behave alike, so they cannot be folded")
        try:
            handle.result.spec = self._result(call.kind, spec, group)
        except Refused as refusal:
            raise refusal.at(handle.rank.index, handle.op) from None
        handle.ready = True  # before its rank can have come to wait for it

    def _result(self, kind: OpKind, spec: Spec, group: Group) -> Spec:
        """What the first member receives; layers of a kind are alike, so each is worked out once."""
        form, cells, joined = spec
        layer = form.layer
        apart = _apart(self._rotation.mesh, group)
        key = (kind, group.axis, apart, self._alike[layer], of_layer(form, 0), cells, joined)
        made = self._results.get(key)
        if made is None:
            if spec.kind in ROW_KINDS:
                rotated = [self._rotation.rotated(spec, group.axis, by) for by in apart]
                made = collective(Call(kind), rotated, group.ranks, self._rules)[0]
                assert made is not None, "all members receive"
            else:
                made = self._united(kind, spec, group, len(group.ranks))
                if kind is OpKind.REDUCE_SCATTER:
                    made = share(spec.about(kind.value), made, len(group.ranks), 0)
            self._results[key] = made
        return Spec(of_layer(made[0], layer), made[1], made[2])

    def _united(self, kind: OpKind, spec: Spec, group: Group, members: int) -> Spec:
        """What the first members of a group make together.

        The second half of them makes what the first half makes, rotated. All members' parts at once would take memory
        for the square of their number, since what one holds of the model has a bit for each of them.
        """
        if members == 1:
            return spec
        half = members // 2
        parts = [(0, first := self._united(kind, spec, group, half)), (half, first)]
        if members % 2:
            parts.append((members - 1, spec))
        rotated = [self._rotation.rotated(part, group.axis, by) for by, part in parts]
        ranks = [group.ranks[by] for by, _ in parts]
        return unite(Call(kind), rotated, ranks)


class FoldedChannels(Channels):
    """Messages along the pipeline travel; those along another axis come back as the neighbour's, rotated."""

    def __init__(self, wake: Wake, rotation: Rotation, stride: int) -> None:
        super().__init__(wake)
        self._rotation = rotation
        self._stride = stride

    def post_send(self, rank: TracedRank, value: Value, to: int) -> SendHandle:
        source, there = _twin(self._rotation.mesh, rank.index, to, self._stride)
        queue = self._matcher[source, there]
        handle = queue.next(source)[source] = SendHandle(rank, value, queue)
        if source != rank.index:
            axis, by = _along(self._rotation.mesh, rank.index, to)
            handle.spec = self._rotation.rotated(value.spec, axis, -by % self._rotation.mesh.sizes()[axis])
        return handle


@cache
def _apart(mesh: Mesh, group: Group) -> tuple[int, ...]:
    """How far each of a group's ranks is from the first one, along its axis."""
    if group.axis not in mesh.sizes():
        raise UserError(f"ranks that meet on {group} do not behave alike, so they cannot be folded")
    first, *others = (mesh.coordinate(rank, group.axis) for rank in group.ranks)
    return 0, *(other - first for other in others)


@cache
def _all_there(group: Group, stride: int) -> bool:
    """Whether all of a group's ranks are traced, or it has but one."""
    return len(group.ranks) == 1 or group.ranks[1] % stride == 0 == group.ranks[0] % stride


def _along(mesh: Mesh, source: int, to: int) -> tuple[str, int]:
    """The axis along which two ranks lie, and how far it is."""
    apart = [axis for axis in mesh.sizes() if mesh.coordinate(source, axis) != mesh.coordinate(to, axis)]
    if len(apart) != 1:
        raise UserError(f"a message goes from rank {source} to rank {to}, along no one axis; it cannot be folded")
    return apart[0], (mesh.coordinate(to, apart[0]) - mesh.coordinate(source, apart[0])) % mesh.sizes()[apart[0]]


def _twin(mesh: Mesh, source: int, to: int, stride: int) -> tuple[int, int]:
    """The channel that stands for this one: the same, if it ends at a traced rank; else the alike one that does."""
    if to % stride == 0:
        return source, to
    axis, by = _along(mesh, source, to)
    ranks = mesh.group(source, axis).ranks
    return ranks[(ranks.index(source) - by) % len(ranks)], source


def _channel(mesh: Mesh, stride: int, rank: int, op: Op) -> Channel:
    """The channel of a traced rank's op; it is alone on that of a group whose other members were not traced."""
    channel = channel_of(rank, op)
    assert channel is not None, "a traced op names its group or its peer"
    if isinstance(channel, Group):
        return channel if _all_there(channel, stride) else (rank,)
    source, to = channel
    return _twin(mesh, source, to, stride)
