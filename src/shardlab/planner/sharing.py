"""Sharings: how the ranks that see different tokens share a model, and what a backward pass then holds of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardlab.planner.pass_memory import Gradients, PassHolds
from shardlab.planner.rank_orders import Moment
from shardlab.strategies.plan import CUT_AXES, Plan
from shardlab.strategies.schedules.steps import Steps


@dataclass(frozen=True)
class Sharing:
    """How the ranks that see different tokens share a model.

    Attributes:
        parameters, gradients, optimizer: among how many ranks each is cut.
        late: among how many the gradients are when the last backward pass has ended.
        reshard: when gathered weights are freed ("": none is gathered).
        ahead: the share of a weight that is gathered before it is used: all, or next to nothing.
        passing: the gradients of a pass itself that take room.
        reduces: whether a layer's gradients are reduced as soon as they have all microbatches.
    """

    parameters: int
    gradients: int
    optimizer: int
    late: int
    reshard: str = ""
    ahead: float = 1.0
    passing: Gradients = ""
    reduces: bool = False

    @cached_property
    def passes(self) -> Sharing:
        """This sharing as the memory of passes sees it, so that sharings with almost the same figures share them."""
        return replace(self, parameters=1, optimizer=1, gradients=_many(self.gradients), late=_many(self.late))

    def held(self, moment: Moment, weight: float, gradient: float) -> PassHolds:
        """How a stage's weights and gradients are held during the backward pass of a moment.

        Args:
            moment: when the pass begins.
            weight, gradient: bytes of an element.
        """
        whole = self.reshard == "step" or (self.reshard == "stage" and moment.resumed)
        gathers = "" if moment.part == "weight" or not self.reshard else "left" if whole else "layers"
        passing = "" if moment.part == "input" else self.passing
        if passing == "new" and moment.ends and self.reduces:
            passing = "ending" if moment.stage in moment.summed else "moving"
        elif passing == "new" and moment.stage in moment.summed:  # to which the pass adds
            passing = ""
        return PassHolds(moment.part, gathers, passing, weight, gradient, self.ahead)


def _many(shards: int) -> int:
    """Round a number of shards above 8 to so many that a shard takes next to nothing."""
    return shards if shards <= 8 else 1 << 40


def sharing_of(plan: Plan) -> Sharing:
    """How a plan shares a model; if its schedule itself says what is gathered and reduced when, that is left out."""
    parameters, gradients, optimizer = (
        shards(plan, axes) for axes in (plan.shard_parameters, plan.shard_gradients, plan.shard_optimizer)
    )
    late = gradients if plan.reduce_at == "step" else optimizer
    sizes = plan.mesh.sizes()
    gathered = [sizes[axis] for axis in plan.shard_parameters if sizes[axis] > 1]  # the last one is gathered first
    moving = any(sizes[axis] > 1 for axis in plan.axes_of_every_microbatch if axis != "ep")
    if isinstance(plan.order, Steps):
        return Sharing(parameters, gradients, optimizer, late)
    return Sharing(
        parameters,
        gradients,
        optimizer,
        late,
        plan.reshard_after if gathered else "",
        1.0 if len(gathered) < 2 else 0.0,
        "moving" if moving else "new",
        plan.reduce_at == "layer" and any(sizes[axis] > 1 for axis in CUT_AXES),
    )


def least_sharings(plan: Plan) -> list[Sharing]:
    """Sharings that hold least: however a candidate with a plan's pipeline shares the model, one of them holds no
    more."""
    every = shards(plan, CUT_AXES)
    if isinstance(plan.order, Steps):
        return [Sharing(every, every, every, every)]
    if every == 1:
        return [Sharing(1, 1, 1, 1, passing="new")]
    return [
        Sharing(parameters, gradients, every, every, reshard, 0.0, "moving" if gradients > 1 else "new", True)
        for parameters, reshard in ((1, ""), (every, "layer"))
        for gradients in (1, every)
    ]


def shards(plan: Plan, axes: tuple[str, ...]) -> int:
    """Into how many pieces something is cut over axes."""
    sizes = plan.mesh.sizes()
    return prod(sizes[axis] for axis in axes)
