"""Entries of the table of strategies, the grids that they use, and the declarations of those that are built in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from shardlab.common.user_code import require_ops
from shardlab.language import Mesh, Rank, Sizes, Strategy, UserError
from shardlab.language.pass_names import named_passes, tiles_of, want_half_blocks
from shardlab.language.rules.kinds import counted
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned

Preset = Callable[[int], Plan]
"""A number of ranks to a plan for that many."""


def data_parallel_mesh(ranks: int) -> Mesh:
    """Put all ranks on the axis that shards data."""
    return Mesh(dp_shard=ranks)


def pipeline_mesh(ranks: int) -> Mesh:
    """Put all ranks on the pipeline axis."""
    return Mesh(pp=ranks)


def tensor_parallel_mesh(ranks: int) -> Mesh:
    """Put all ranks on the axis that cuts layers.

    Raises:
        UserError: for one rank, which has nothing to cut.
    """
    if ranks < 2:
        raise UserError(f"tensor parallelism cuts layers over 2 or more ranks, but {ranks} was asked for")
    return Mesh(tp=ranks)


def expert_parallel_mesh(ranks: int) -> Mesh:
    """Put all ranks on the axis that shards experts.

    Raises:
        UserError: for one rank, where there is nothing to exchange.
    """
    if ranks == 1:
        raise UserError("experts are exchanged between ranks, but 1 rank was asked for; give 2 or more")
    return Mesh(ep=ranks)


def one_device_mesh(ranks: int) -> Mesh:
    """Make a mesh of one rank.

    Raises:
        UserError: for any other number.
    """
    if ranks != 1:
        raise UserError(f"this strategy runs on one device, but {ranks} ranks were asked for; give 1")
    return Mesh()


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy and what is known of it.

    Attributes:
        name: what the command line calls it.
        program: the strategy.
        splits: what is split over the ranks.
        source: where it was described.
        mesh: the grid that it uses for a number of ranks.
        ranks: how many ranks it gets if nobody says.
        columns: whether it is for models whose every layer is cut by columns.
        plan: the plan that it is for a number of ranks (None: a program of its own).
        memory: what a rank keeps of the weights W, the gradients G and the optimizer's state O, where there are n
            ranks, p of them along the pipeline with v stages each, s along dp_shard and t along tp; of a mixture, what
            it keeps of the dense layers D and of the experts E. Activations come on top, and for a while a layer or two
            that are whole.
        order: where listings have it: programs to read from 1 on, then others, at 50, and from 100 on plans.
        passes: what rewrites the program, by name (None: what the plan says, or else nothing); see `Plan.passes`.
    """

    name: str
    program: Strategy
    splits: str
    source: str
    mesh: Callable[[int], Mesh] = data_parallel_mesh
    ranks: int = 4
    plan: Preset | None = None
    memory: str = ""
    columns: bool = False
    order: int = 0
    passes: str | None = None

    def __post_init__(self) -> None:
        named_passes("none" if self.passes is None else self.passes)

    def passes_on(self, ranks: int, unsaid: str = "none") -> str:
        """Passes that rewrite its program: its own, or those of its plan for so many ranks; or `unsaid`."""
        passes = self.plan(ranks).passes if self.plan and self.passes is None else self.passes
        return unsaid if passes is None else passes

    def tiles_on(self, ranks: int) -> int:
        """In how many tiles its passes compute layers that can be cut (1: they leave layers as they are)."""
        return tiles_of(self.passes_on(ranks))

    def rewritten(self, ranks: int, passes: str) -> StrategyEntry:
        """Name the passes that rewrite the program, in place of all others."""
        if self.plan is None:
            return replace(self, passes=passes)
        return planned_entry(replace(self.plan(ranks), passes=passes), self.name)

    def for_job(self, ranks: int) -> str | Plan:
        """A description from which every process can make this strategy."""
        return self.name if self.plan is None else self.plan(ranks)

    def title(self, ranks: int) -> str:
        """Title of a picture of it: its name, and of a plan by flags in brackets the pipeline's schedule."""
        plan = self.plan and self.plan(ranks)
        schedule = str(plan.as_dict()["schedule"]) if plan is not None and plan.mesh.pp > 1 else ""
        return self.name if schedule in self.name else f"{self.name} ({schedule})"

    def default_layers(self, ranks: int, at_least: int = 4) -> int:
        """Layers of a model if nobody says: 4, or for a pipeline one for each stage and `at_least` so many."""
        plan = self.plan and self.plan(ranks)
        if plan is None or not (plan.mesh.pp > 1 or plan.layers_per_stage):
            return 4
        return plan.natural_layers() if plan.layers_per_stage else max(plan.natural_layers(), at_least)

    def puzzle(self, ranks: int, layers: int | None = None) -> Sizes:
        """The puzzles' model with so many layers (None: `default_layers`), cut as this strategy needs it."""
        layers = self.default_layers(ranks) if layers is None else layers
        plan, mesh, tiles = self.plan and self.plan(ranks), self.grid(ranks), self.tiles_on(ranks)
        want_half_blocks(tiles, planned=plan is not None or mesh.tp > 1)
        if self.columns:
            return Sizes.columns(layers)
        if plan is not None and plan.attention_apart:
            return plan.counted(Sizes.expert_blocks(layers) if plan.mesh.ep > 1 else Sizes.context_blocks(layers))
        if tiles > 1 and mesh.ep == 1:
            return replace(Sizes.half_blocks(layers), tiles=tiles)
        return Sizes.of_puzzle(layers, mesh)

    def require_ops(self, ranks: int, layers: int, microbatches: int) -> None:
        """Refuse sizes with which a step is sure to have more ops than are traced.

        Raises:
            UserError: with how many there would be at least.
        """
        if self.plan is not None:
            self.plan(ranks).require_ops(layers, microbatches, tiles=self.tiles_on(ranks))
            return
        require_ops(ranks, f"the ops of {counted(ranks, 'rank')}")
        require_ops(4 * layers, f"loading, two passes and an update of {counted(layers, 'layer')}")
        require_ops(microbatches, f"loading and passes of {counted(microbatches, 'microbatch')}")

    def grid(self, ranks: int) -> Mesh:
        """The grid for a number of ranks.

        Raises:
            UserError: when the strategy cannot use that number, or its own mesh function gives something else.
        """
        try:
            mesh = cast(object, self.mesh(ranks))  # a user's own function may give anything
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the mesh function of {self.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(mesh, Mesh) or mesh.world != ranks:
            got = f"a mesh of {mesh.world} ranks" if isinstance(mesh, Mesh) else repr(mesh)
            raise UserError(f"the mesh function of {self.name} gave {got} for {ranks} ranks; give a Mesh of {ranks}")
        return mesh


DECLARED: list[StrategyEntry] = []
"""Every built-in strategy, as its module declares it."""


def built_in(
    splits: str,
    *,
    keeps: str,
    source: str,
    mesh: Callable[[int], Mesh] = data_parallel_mesh,
    ranks: int = 4,
    columns: bool = False,
    order: int = 50,
) -> Callable[[Strategy], Strategy]:
    """Declare a program as a built-in strategy, by the name of its function with `-` in place of `_`.

    Args:
        keeps: the `memory` of its `StrategyEntry`; the others are as there.
    """

    def declare(program: Strategy) -> Strategy:
        name = program.__name__.replace("_", "-")
        DECLARED.append(StrategyEntry(name, program, splits, source, mesh, ranks, None, keeps, columns, order))
        return program

    return declare


def preset(splits: str, keeps: str, source: str, *, ranks: int = 4, name: str = "") -> Callable[[Preset], Preset]:
    """Declare a plan for any number of ranks as a built-in strategy, by `name` or that of its function."""

    def declare(plan: Preset) -> Preset:
        async def strategy(rank: Rank) -> None:
            await planned(plan(rank.world))(rank)

        called = name or plan.__name__.replace("_", "-")
        entry = StrategyEntry(called, strategy, splits, source, lambda n: plan(n).mesh, ranks, plan, keeps, order=100)
        DECLARED.append(entry)
        return plan

    return declare


def planned_entry(plan: Plan, name: str) -> StrategyEntry:
    """Make the entry of one plan."""
    mesh = plan.mesh
    return StrategyEntry(name, planned(plan), "as the plan says", "a plan", lambda _: mesh, mesh.world, lambda _: plan)
