"""PricedSample that the outlines of one workload's ranks share: sizes, prices and passes, each found out once."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import cached_property
from typing import NamedTuple

from shardlab.predict.passes import Cuts, Pass, PassTable
from shardlab.predict.residuals import layers_given_kept
from shardlab.predict.sampled_passes import passes_of
from shardlab.predict.workload import Workload
from shardlab.program import Group, Holds, Kind, OpKind, Spec
from shardlab.program.tape import compute_op
from shardlab.rules.spec import Space, form_of
from shardlab.strategies.rank_plan import RankPlan
from shardlab.timeline.memory import CATEGORY_OF_KIND
from shardlab.timeline.prices import Bytes

NO_SPACE = Space(0)
"""Of parameters, which have no tokens."""


class SizedPart(NamedTuple):
    """A part of a weight, of its gradient or of its optimizer's state, of a layer of the sample.

    Attributes:
        wire, room: its bytes where it is communicated, and where it is held.
        slot: the category that these count in, by its place.
    """

    spec: Spec
    wire: int
    room: int
    slot: int


class PricedSample:
    """Sizes, prices and passes of a workload, from its sample.

    Args:
        done: the kinds of steps that its plan has.

    Attributes:
        alike: for each layer the sample's layer that it is like.
        apart: how far one rank of a pipeline is from the next.
        chains: passes of whole stages, by the passes in them.
    """

    def __init__(self, workload: Workload, done: Collection[type]) -> None:
        self._sample, self._done = workload.sample, done
        self.alike = workload.repeated.alike
        self.place = workload.repeated.place
        self.apart = workload.mesh.world // workload.mesh.pp
        self.sizes, self.prices = self._sample.sizes, self._sample.prices
        self.chains: dict[Hashable, Pass] = {}
        self._wire, self._room = Bytes(self.sizes), Bytes(self._sample.kept_sizes)
        self._saves = self._sample.kept_sizes.saves_residual
        self._passes: dict[Cuts, PassTable] = {}
        self._given_kept: dict[Cuts, frozenset[int]] = {}
        self._parts: dict[Hashable, SizedPart] = {}
        self._seconds: dict[Hashable, float] = {}

    @cached_property
    def merges(self) -> bool:
        """Whether communication that is awaited at once takes as long as compute does."""
        return not self.prices.slows

    def passes(self, cuts: Cuts = None) -> PassTable:
        """Passes of blocks that are computed again and are cut so by stages (None: of others)."""
        known = self._passes.get(cuts)
        if known is None:
            known = self._passes[cuts] = passes_of(self._sample, self._done, cuts)
        return known

    def given_kept(self, plan: RankPlan) -> frozenset[int]:
        """The layers of a rank that are given a residual stream in what is kept of the layer before (`residuals`)."""
        return layers_given_kept(plan, self.alike, self._saves)

    def measured_given_kept(self, cuts: Cuts) -> frozenset[int]:
        """The layers of the sample that were given one so when its passes were measured."""
        known = self._given_kept.get(cuts)
        if known is None:
            plan = self.passes(cuts).plan
            known = self._given_kept[cuts] = layers_given_kept(plan, range(len(plan.model.layers)), self._saves)
        return known

    def part(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> SizedPart:
        """So many of so many pieces of a layer's parameters, or of something as large."""
        like = self.alike[layer]
        key = (kind, like, pieces, of)
        known = self._parts.get(key)
        if known is None:
            spec = Spec(form_of(kind, like, 0, NO_SPACE, Holds((1 << pieces) - 1, of)))
            known = self._parts[key] = self.measured(spec)
        return known

    def border(self, kind: Kind, layer: int) -> SizedPart:
        """The value of a kind that enters a layer, or its gradient."""
        key = (kind, self.alike[layer])
        known = self._parts.get(key)
        if known is None:
            known = self._parts[key] = self.measured(self.passes().borders[key])
        return known

    def measured(self, spec: Spec) -> SizedPart:
        return SizedPart(spec, self._wire(spec), self._room(spec), CATEGORY_OF_KIND[spec.kind])

    def compute(self, kind: OpKind, part: SizedPart) -> float:
        """Seconds of an op on parameters, their gradient or a scalar."""
        form = part.spec.form
        key = (kind, form)
        known = self._seconds.get(key)
        if known is None:
            op = compute_op(kind, form.layer, (0,), (0,))
            known = self._seconds[key] = self.prices.compute_time(op, {0: part.spec}, self.sizes)
        return known

    def collective(self, kind: OpKind, bytes: int, group: Group) -> float:
        """Seconds of a collective, from its last member's arrival."""
        key = (kind, bytes, group)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.collective_time(kind, bytes, group)
        return known

    def message(self, part: SizedPart, source: int, target: int) -> float:
        """Seconds of a message."""
        key = (part.spec.form, part.wire, source, target)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.message_times(part.spec.kind, part.wire, source, target)[0]
        return known
