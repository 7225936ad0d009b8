"""Resolution of a plan for one rank and one model.

`resolve` is called once, before the rank runs. It computes everything that a rank reads while it follows the plan: its
steps, stages, slices of weights, and the axes of each collective (see `RankPlan`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from shardlab.language import Sizes, UserError
from shardlab.strategies.plan.context_parallel import slices_of_rank
from shardlab.strategies.plan.plan import BATCH_AXES, CUT_AXES, Plan
from shardlab.strategies.plan.rank_plan import (
    Completion,
    Completions,
    Keeps,
    LayerPlan,
    ModelLayers,
    RankPlan,
    Verb,
    WeightPlan,
    model_layers,
)


def resolve(plan: Plan, sizes: Sizes, microbatches: int, rank: int) -> RankPlan:
    """Return a plan with all details of one rank.

    Args:
        sizes: sizes of the model's values.
        microbatches: number of microbatches of the global batch.
        rank: number of the rank on the plan's mesh.

    Raises:
        UserError: if the model's layers or the microbatches do not fit the plan.
    """
    return _Resolver(with_named_blocks(plan, model_layers(sizes)), sizes, rank).rank_plan(microbatches)


def with_named_blocks(plan: Plan, model: ModelLayers) -> Plan:
    """Return the plan with every-N or first-N replaced by the numbers of the recomputed blocks.

    Every-N recomputes the last of every N blocks, as torchtitan's selective_ac_option with a number did
    (torchtitan/distributed/activation_checkpoint.py before version 0.3). First-N recomputes the first N blocks of each
    stage, as Megatron's recompute_method block does (megatron/core/transformer/transformer_config.py).
    """
    word, number = plan.counted_recompute or ("", 0)
    blocks = model.recomputable
    if word == "every":
        return replace(plan, recompute=tuple(range(number - 1, len(blocks), number)))
    if word == "first":
        bounds = [model.pipeline_cuts[unit] for unit in plan.bounds(model.pipeline_units, model.units_text)]
        firsts = [bisect_left(blocks, start, key=lambda block: block.start) for start in bounds]
        runs = [range(start, min(start + number, stop)) for start, stop in pairwise(firsts)]
        return replace(plan, recompute=tuple(block for blocks in runs for block in blocks))
    return plan


def named_blocks(numbers: Iterable[int], model: ModelLayers) -> list[range]:
    """Return the layers of the blocks with these numbers, counted over the blocks that can be recomputed.

    Raises:
        UserError: if the model has no such block.
    """
    blocks = model.recomputable
    unknown = [number for number in numbers if not 0 <= number < len(blocks)]
    if unknown:
        raise UserError(
            f"recompute names block {unknown[0]}, but the model has blocks 0-{len(blocks) - 1}; give numbers of these"
        )
    return [blocks[number] for number in numbers]


def recomputed_runs(plan: Plan, model: ModelLayers, stages: Sequence[range]) -> dict[int, range]:
    """Return the runs of layers that are recomputed, each under its last layer. A block on two stages is two runs.

    With uniform-N, N blocks of a stage are one run (Megatron's recompute_method uniform).

    The forward pass keeps only the input of each run. For half-blocks, that is the residual and the branch at the run's
    first norm; with sequence parallelism, the rank's slice of both. Before the backward pass of a run, its forward pass
    runs again, with all communication except for its last layer's output, which nothing reads (Chen et al. 2016, arXiv
    1604.06174, section 4; Korthikanti et al. 2022, arXiv 2205.05198, section 5, "full recomputation").

    Raises:
        UserError: if the plan names a block that the model does not have.
    """
    numbers = plan.recompute if isinstance(plan.recompute, tuple) else ()
    word, number = plan.counted_recompute or ("", 1)
    blocks = model.recomputable if plan.recompute == "full" or word == "uniform" else named_blocks(numbers, model)
    run_by_end: dict[int, range] = {}
    for stage in stages:
        cut = [range(max(block.start, stage.start), min(block.stop, stage.stop)) for block in blocks]
        runs = [run for run in cut if run]
        if number > 1 and any(run.stop != next_run.start for run, next_run in pairwise(runs)):
            raise UserError(
                f"recompute {plan.recompute} keeps one input of {number} blocks, but of a mixture of experts only the "
                "experts are computed again; give full, or the numbers of blocks"
            )
        for group in (runs[index : index + number] for index in range(0, len(runs), number)):
            run_by_end[group[-1][-1]] = range(group[0].start, group[-1].stop)
    return run_by_end


class _Resolver:
    """Computation of the fields of a `RankPlan`.

    Attributes:
        size: number of ranks of each axis.
        place: coordinate of this rank along each axis.
        token_axes: axes that have several ranks, each of which sees different tokens. The axes that shard the optimizer
            state come first.
    """

    def __init__(self, plan: Plan, sizes: Sizes, rank: int) -> None:
        self.plan = plan
        self.sizes = sizes
        self.rank = rank
        self.model = model_layers(sizes)
        self.model.require(plan)
        self.size = plan.mesh.sizes()
        self.place = {axis: plan.mesh.coordinate(rank, axis) for axis in self.size}
        self.token_axes = self.among_several((*plan.shard_optimizer, *CUT_AXES))

    def rank_plan(self, microbatches: int) -> RankPlan:
        plan, model = self.plan, self.model
        steps = plan.steps(model.pipeline_units, microbatches)
        first = steps.microbatches * self.slice(BATCH_AXES)[0]
        units = plan.bounds(model.pipeline_units, model.units_text)
        stages = tuple(range(*cuts) for cuts in pairwise(model.pipeline_cuts[unit] for unit in units))
        own_stages = tuple(
            stage for stage, pipeline_rank in enumerate(steps.ranks_of_stages) if pipeline_rank == self.place["pp"]
        )
        layers = [layer for stage in own_stages for layer in stages[stage]]
        pipeline = plan.mesh.group(self.rank, "pp").ranks
        ranks = [
            pipeline[pipeline_rank]
            for pipeline_rank, stage in zip(steps.ranks_of_stages, stages, strict=True)
            for _ in stage
        ]
        weightless = tuple(layer for layer in layers if not self.sizes.weights[model.layers[layer].weight])
        weights = self.weights([layer for layer in layers if layer not in weightless], ranks)
        frozen = self.frozen()
        trained = [l for l, entry in enumerate(model.layers) if self.sizes.weights[entry.weight] and l not in frozen]
        blocks = Counter[int]()
        for layer in layers:
            if layer not in weightless and layer not in frozen:
                blocks[model.reduced_with(layer)] += weights[model.layers[layer].weight].elements
        return RankPlan(
            plan=plan,
            model=model,
            steps=steps.of_ranks[self.place["pp"]],
            microbatches=range(first, first + steps.microbatches),
            sequence_slices=self.sequence_slices(),
            pipeline=pipeline,
            stages=stages,
            own_stages=own_stages,
            layers=self.layers(layers, [stages[stage] for stage in own_stages]),
            weights=weights,
            weightless=weightless,
            frozen=frozen,
            training=tuple(sorted({ranks[layer] for layer in trained})),
            gather_axes=self.among_several(plan.shard_parameters[::-1]),
            scatter_axes=self.scatter_axes(),
            update_axes=self.among_several(
                axis for axis in reversed(plan.shard_optimizer) if axis not in plan.shard_parameters
            ),
            reduction_buffer=max(blocks.values(), default=0),
        )

    def frozen(self) -> frozenset[int]:
        """Return the layers whose weights the plan freezes, including layers that share a frozen weight.

        Raises:
            UserError: if a block does not exist, no block is left to train, or a layer has parameters of a frozen block
                and of another block.
        """
        if not self.plan.freeze:
            return frozenset()
        freeze, weight_blocks = set(self.plan.freeze), self.sizes.weight_blocks
        blocks = weight_blocks or tuple((layer,) for layer in range(len(self.model.layers)))
        last = max(max(block, default=0) for block in blocks)
        if unknown := [number for number in sorted(freeze) if not 0 <= number <= last]:
            raise UserError(
                f"freeze names block {unknown[0]}, but the model has blocks 0-{last}; give numbers of these"
            )
        if len(freeze) > last:
            raise UserError(f"freeze names all {last + 1} blocks of the model, so nothing is trained; leave some out")
        for block in blocks:
            if freeze & set(block) and not freeze >= set(block):
                (one, *_), (other, *_) = sorted(freeze & set(block)), sorted(set(block) - freeze)
                raise UserError(
                    f"freeze names block {one} and not block {other}, but this plan cuts blocks so that the last "
                    "biases of a block lie in one layer with the next block's norm; freeze both, leave out --tp and "
                    "--cp, or take a model without biases"
                )
        return frozenset(
            l
            for l, layer in enumerate(self.model.layers)
            if blocks[layer.weight] and freeze >= set(blocks[layer.weight])
        )

    def sequence_slices(self) -> tuple[int, ...] | None:
        """Return this rank's slices of every sequence (None: sequences are not split)."""
        plan, cp = self.plan, self.size["cp"]
        slices_per_rank = plan.counted(self.sizes).slices_per_rank
        if self.sizes.slices_per_rank != slices_per_rank:
            raise UserError(
                f"the plan deals {slices_per_rank} slices of every sequence to a rank of cp, but these sizes count "
                f"{self.sizes.slices_per_rank}; give plan.counted(sizes)"
            )
        return slices_of_rank(self.place["cp"], cp, plan.mesh.tp, plan.stripes) if cp > 1 else None

    def among_several(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes that have several ranks, without duplicates."""
        return tuple(axis for axis in dict.fromkeys(axes) if self.size[axis] > 1)

    def if_several(self, verb: Verb, axis: str) -> tuple[Completion, ...]:
        """Return a collective over an axis, or nothing if the axis has one rank."""
        return (Completion(verb, axis),) if self.size[axis] > 1 else ()

    def slice(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return (index, count) of this rank's slice of a tensor that is split along several axes, outermost first."""
        index, count = 0, 1
        for axis in axes:
            index, count = index * self.size[axis] + self.place[axis], count * self.size[axis]
        return index, count

    def layers(self, own_layers: Sequence[int], stages: Sequence[range]) -> dict[int, LayerPlan]:
        """Return the plans of the rank's layers."""
        runs = recomputed_runs(self.plan, self.model, stages)
        keeps: dict[int, Keeps] = {l: "input" if l == run[0] else "nothing" for run in runs.values() for l in run}
        recompute = {l: run[:-1] if self.model.layers[l].recomputed else run for l, run in runs.items()}
        part = (self.place["cp"], self.size["cp"]) if self.size["cp"] > 1 else None
        return {
            l: LayerPlan(
                self.completions(l),
                part if self.model.layers[l].deals else None,
                keeps.get(l, "all"),
                recompute.get(l, range(0)),
            )
            for l in own_layers
        }

    def completions(self, layer: int) -> Completions:
        """Return the collectives around a layer of a tensor-, context- or expert-parallel rank.

        With tensor parallelism, each rank computes one term of the layer's output in the forward pass, and one term of
        the gradient of its input in the backward pass. The terms are all-reduced. With sequence parallelism they are
        reduce-scattered along the sequence, and the input of the next sliced layer is all-gathered (Korthikanti et al.
        2022, arXiv 2205.05198, fig. 5).

        With expert parallelism, the buffers of tokens are exchanged by all-to-all before and after the experts, in both
        passes (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2). In between, a rank has the tokens of its `ep`
        group for its own experts.

        The router reads whole sequences, so ranks that split sequences gather them first. Each rank of `cp` then sends
        tokens to its own experts only, so its sums over experts are terms.
        """
        sequence, sliced = self.plan.sequence_parallel, self.model.cut_axes(layer)
        cut, signature = self.among_several(sliced), self.model.layers[layer]
        gather = (Completion("all_gather", "tp"),) if sequence else ()
        if signature.routes and not signature.carries:
            scatter = (
                *self.if_several("reduce_scatter", "cp"),
                *(self.if_several("slice", "tp") if sequence else ()),
            )
            if signature.deals:
                return Completions(grad_input=scatter)
            return Completions(output=scatter, grad_output=(*gather, *self.if_several("all_gather", "cp")))
        if not sliced:
            feeds_router = any(signature.deals for signature in self.model.layers[layer + 1 : layer + 2])
            return Completions(output=(*gather, *(self.if_several("all_gather", "cp") if feeds_router else ())))
        if "ep" in sliced:
            exchange = self.if_several("all_to_all", "ep")
            sum_and_exchange = (*(self.if_several("all_reduce", "tp") if "tp" in cut else ()), *exchange)
            return Completions(exchange, sum_and_exchange, exchange, sum_and_exchange)
        reduction = (Completion("reduce_scatter" if sequence else "all_reduce", "tp"),) if "tp" in cut else ()
        if not cut:
            return Completions()
        # Attention and the loss read slices, and nothing reads the gradient of the tokens.
        makes_slices = layer in self.model.feeding_attention or layer == len(self.model.layers) - 1
        reads_slices = layer - 1 in self.model.feeding_attention or layer == 0
        return Completions(
            output=() if makes_slices else reduction,
            grad_output=() if makes_slices else gather,
            grad_input=() if reads_slices else reduction,
        )

    def weights(self, own_layers: Sequence[int], ranks: Sequence[int]) -> dict[int, WeightPlan]:
        """Return the plans of the weights that the rank's layers use.

        Args:
            own_layers: the rank's layers with parameters.
            ranks: for every layer of the model, the rank of this pipeline that runs it.
        """
        plan, model = self.plan, self.model
        weights: dict[int, WeightPlan] = {}
        for layer, users in Counter(model.layers[layer].weight for layer in own_layers).items():
            sliced = model.cut_axes(layer)
            # The gradient of an expert already includes the tokens of all ranks of `cp` and `ep`.
            axes = [axis for axis in (*self.token_axes, *self.among_several(("ep",))) if axis not in sliced]
            axes_once = [axis for axis in axes if axis not in plan.axes_of_every_microbatch]
            if plan.sequence_parallel and not sliced and not model.layers[layer].mixes_tokens:
                axes_once.append("tp")  # each tensor-parallel rank has seen different tokens
            keepers = tuple(dict.fromkeys(ranks[user] for user in model.users[layer]))
            weights[layer] = WeightPlan(
                users=users,
                cut_axes=sliced,
                parameters=self.slice((*sliced, *plan.shard_parameters)),
                optimizer=self.slice((*sliced, *plan.shard_optimizer)),
                elements=-(-self.sizes.weights[layer] // self.slice(sliced)[1]),
                reduce_every_microbatch=tuple(axis for axis in axes if axis in plan.axes_of_every_microbatch),
                reduce_once=tuple(axes_once),
                direction_axes=self.direction_axes(layer, sliced),
                shared_by=keepers if len(keepers) > 1 else (),
                counted=layer in own_layers,
            )
        return weights

    def direction_axes(self, layer: int, sliced: Sequence[str]) -> tuple[str, ...]:
        """Return the axes that split a layer's matrices, if the optimizer updates whole matrices (Muon)."""
        if layer not in self.sizes.directed:
            return ()
        return self.among_several((*reversed(self.plan.shard_optimizer), *(axis for axis in sliced if axis == "tp")))

    def scatter_axes(self) -> tuple[str, ...]:
        """Return the axes over which gradients are reduce-scattered.

        A gradient that stays whole along one axis is not sharded along later axes.
        """
        plan, axes = self.plan, self.token_axes
        early_axes = plan.axes_of_every_microbatch
        whole = (place for place, axis in enumerate(axes) if axis in early_axes and axis not in plan.shard_gradients)
        return tuple(axis for axis in axes[: next(whole, len(axes))] if axis in plan.shard_optimizer)
