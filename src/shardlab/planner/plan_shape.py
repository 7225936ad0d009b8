"""Shape of a plan: what the time of a microbatch's own passes depends on."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.errors import UserError
from shardlab.planner.alike import AlikeBlocks, alike_blocks
from shardlab.planner.problem import Candidate, Problem
from shardlab.program import Mesh
from shardlab.program.precision import Precision
from shardlab.strategies.plan import Context, Plan, Recompute

SHARES = {"none": 0.0, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75, "7/8": 0.875, "full": 1.0}
"""Shares of a stage's blocks that are computed again."""

WORDS: dict[str | tuple[int, ...], Recompute] = {"selective": "selective", "full": "full"}
"""Recomputation that is the same for every number of stages."""


@dataclass(frozen=True)
class PlanShape:
    """What the time of a microbatch's own passes depends on.

    Attributes:
        mesh: the ranks; those of the data-parallel axes are all on `dp_shard`.
        micro_batch_size: sequences of a microbatch.
        precision: in which numbers.
        sequence_parallel, context, ulysses_degree, stripes: as in a plan.
        recompute: which share of blocks is computed again, of `SHARES`; or "selective", or blocks by number.
    """

    mesh: Mesh
    micro_batch_size: int
    precision: Precision
    sequence_parallel: bool = False
    context: Context = "ring"
    ulysses_degree: int | None = None
    recompute: str | tuple[int, ...] = "none"
    stripes: int | None = None

    @property
    def share(self) -> float:
        """The share of blocks that are computed again, at least."""
        return 0.0 if isinstance(self.recompute, tuple) else SHARES.get(self.recompute, 0.0)

    @property
    def candidate(self) -> Candidate:
        """The candidate that shards nothing, of one pipeline stage if blocks by number are computed again.

        Raises:
            UserError: the mesh does not go together with the rest.
        """
        plan = Plan(
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            context=self.context,
            ulysses_degree=self.ulysses_degree,
            recompute=WORDS.get(self.recompute, "none"),
            stripes=self.stripes,
        )
        return Candidate(plan, self.micro_batch_size, self.precision)


def divides(problem: Problem, shape: PlanShape) -> bool:
    """Whether `Plan` and the code that cuts models accept a shape."""
    try:
        return bool(shape.candidate) and _blocks(problem, shape) is not None
    except UserError:
        return False


def blocks_of(problem: Problem, shape: PlanShape) -> AlikeBlocks:
    """The model in the layers of a shape's plans."""
    found = _blocks(problem, shape)
    assert found is not None, "shapes are of models that divide"
    return found


def _blocks(problem: Problem, shape: PlanShape) -> AlikeBlocks | None:
    ulysses = shape.ulysses_degree or (shape.mesh.cp if shape.context == "ulysses" else 1)
    return alike_blocks(problem.model, shape.mesh, apart=shape.recompute == "selective", ulysses=ulysses)
