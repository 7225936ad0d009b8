"""Passes of a plan's layers, measured on a sample of the plan.

All blocks of a model are alike, all microbatches are, and so are the ranks of a pipeline but for their layers. So the
passes of three blocks, on one pipeline rank without data parallelism, tell those of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from shardlab.predict.folding import fold
from shardlab.predict.measured_passes import PassMeter
from shardlab.predict.passes import Cuts, PassKey, PassTable
from shardlab.predict.workload import Workload
from shardlab.program import Kind, Rank, Sizes, Spec, Value
from shardlab.rules.layer import GRADIENT_OF
from shardlab.strategies.computing import LayerRunner
from shardlab.strategies.model_layers import model_layers
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import TracedRunner
from shardlab.strategies.rank_plan import Keeps, RankPlan
from shardlab.strategies.resolve import resolve
from shardlab.strategies.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.timeline.prices import Bytes, Prices


def passes_of(workload: Workload, done: Collection[type], cuts: Cuts) -> PassTable:
    """Measure the passes of a workload's layers.

    Args:
        workload: a sample, with the plan of the whole model.
        done: the kinds of steps that the plan has.
        cuts: layers of a block that is computed again at which stages begin (None: measure others).
    """
    sample = _on_one_rank(workload, done, cuts)
    key = _Key(sample, workload.mesh.world > 1, workload.prices.host_seconds)
    known = _KNOWN.get(key)
    if known is None:
        if len(_KNOWN) == MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = _measured(sample, workload.prices, workload.kept_sizes)
    return known


MOST_KNOWN = 256
"""Samples whose passes are remembered: in a search many plans differ in their pipeline and their data parallelism."""


class _Key:
    """What a sample's passes depend on; a cluster and a recipe are told by identity.

    Args:
        several: whether other devices of the cluster are at work too.
        host_seconds: as of the whole plan's prices.
    """

    def __init__(self, sample: Workload, several: bool, host_seconds: float) -> None:
        self.sample = sample  # so that its cluster and recipe live as long
        numbers = sample.precision, sample.optimizer, sample.ema, sample.micro_batch_size, sample.microbatches
        cut = sample.plan, sample.model, sample.cut.layers
        self.parts = (cut, numbers, id(sample.cluster), id(sample.recipe), several, host_seconds)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.parts == other.parts


_KNOWN: dict[_Key, PassTable] = {}


def _measured(sample: Workload, prices: Prices, kept: Sizes) -> PassTable:
    """Trace and replay a sample, and measure its passes."""
    plan, sizes = sample.plan, sample.sizes
    assert isinstance(plan, Plan)
    marks: list[tuple[int, PassKey]] = []
    borders: dict[tuple[Kind, int], Spec] = {}

    async def strategy(rank: Rank) -> None:
        rank_plan = resolve(plan, rank.sizes, sample.microbatches, rank.index)
        await _MarkedRunner(rank, rank_plan, _MarkedLayers(rank, rank_plan, marks, borders)).run()

    traced = fold(plan, sizes, sample.microbatches, strategy)
    measuring = PassMeter(traced, prices, Bytes(kept))
    by_key = {key: measuring.between(start, stop, key) for (start, key), (stop, _) in pairwise(marks) if key}
    return PassTable(by_key, borders, resolve(plan, sizes, sample.microbatches, 0))


def _on_one_rank(workload: Workload, done: Collection[type], cuts: Cuts) -> Workload:
    """Put a sample of a workload on one pipeline rank, without data parallelism."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    split, both = BackwardInput in done, {Backward, BackwardInput} <= set(done)
    plain = "none" if plan.recompute == "full" or isinstance(plan.recompute, tuple) else plan.recompute
    sampled = replace(
        plan,
        mesh=replace(plan.mesh, pp=1, dp_replicate=1, dp_shard=1),
        schedule=Schedule("sample", _last_in_halves if split else _one_by_one, stages_per_rank=None),
        stages_per_rank=1,
        layers_per_stage=(),
        shard_parameters=(),
        shard_gradients=(),
        shard_optimizer=(),
        reduce_every_microbatch=(),
        reduce_at="step",
        recompute=plain if cuts is None else "full",
    )
    if cuts:
        layers = model_layers(workload.sizes)
        stages = {layers.pipeline_cuts.index(block[0] + cut) for block in layers.recomputable for cut in cuts}
        each = [stop - start for start, stop in pairwise((0, *sorted(stages), layers.pipeline_units))]
        sampled = replace(sampled, stages_per_rank=len(each), layers_per_stage=tuple(each))
    sample = replace(workload, plan=sampled, microbatches=(3 if both else 2) * plan.mesh.ep)
    sample.__dict__["cut"] = workload.cut  # a pipeline may want finer layers than a plan of one rank
    return sample


def _one_by_one(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield from (Forward(stage, i) for stage in range(stages_per_rank))
        yield from (Backward(stage, i) for stage in reversed(range(stages_per_rank)))


def _last_in_halves(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    yield from _one_by_one(rank, ranks, microbatches - 1, stages_per_rank)
    yield from (Forward(stage, microbatches - 1) for stage in range(stages_per_rank))
    for stage in reversed(range(stages_per_rank)):
        yield BackwardInput(stage, microbatches - 1)
        yield BackwardWeight(stage, microbatches - 1)


class _MarkedRunner(TracedRunner):
    """A rank that marks where passes begin and end."""

    layers: _MarkedLayers

    async def forward(self, stage: int, m: int) -> None:
        self.layers.mark(m, "load")
        await super().forward(stage, m)
        self.layers.mark(-1)

    async def backward(self, stage: int, m: int) -> None:
        await super().backward(stage, m)
        self.layers.mark(-1)

    async def backward_input(self, stage: int, m: int) -> None:
        await super().backward_input(stage, m)
        self.layers.mark(-1)

    async def backward_weight(self, stage: int, m: int) -> None:
        await super().backward_weight(stage, m)
        self.layers.mark(-1)


class _MarkedLayers(LayerRunner):
    """Passes that are marked, and the values between them."""

    def __init__(
        self, rank: Rank, plan: RankPlan, marks: list[tuple[int, PassKey]], borders: dict[tuple[Kind, int], Spec]
    ) -> None:
        super().__init__(rank, plan)
        self.marks = marks
        self.borders = borders
        self.inputs = [[port.kind for port in layer.inputs] for layer in plan.model.layers]

    def mark(self, m: int, *key: object) -> None:
        """Mark a pass's beginning; those of the first microbatch do not count, whose gradients are added to none."""
        self.marks.append((len(self._rank.ops), key if m > 0 else ()))

    def meet(self, layer: int, m: int, kinds: Mapping[Kind, Kind] | None = None) -> None:
        """Note the values with which a layer's pass begins, or the gradients with which it ends."""
        for kind in self.inputs[layer]:
            made = kinds[kind] if kinds else kind
            self.borders[made, layer] = self._rank.store(made)[layer, m].spec

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, hands_on: bool = True) -> None:
        self.mark(m, "forward", layer, keeps, hands_on)
        self.meet(layer, m)
        await super().forward(layer, m, weight, keeps, hands_on=hands_on)

    async def loss(self, m: int) -> None:
        self.mark(m, "loss", len(self._rank.layers))
        await super().loss(m)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        self.mark(m, "backward", layer)
        gradient = await super().backward(layer, m, weight)
        self.meet(layer, m, GRADIENT_OF)
        self.mark(-1)  # the sum of gradients comes next
        return gradient

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        self.mark(m, "backward_input", layer)
        await super().backward_input(layer, m, weight)
        self.meet(layer, m, GRADIENT_OF)
        self.mark(-1)

    def backward_weight(self, layer: int, m: int) -> Value:
        self.mark(m, "backward_weight", layer)
        gradient = super().backward_weight(layer, m)
        self.mark(-1)
        return gradient
