"""Table of strategies: the properties of each, and the two ways to declare one.

`StrategyEntry` is a row of the table. `built_in` declares a program, and `preset` declares a plan for any number of
ranks. The functions at the top give the default mesh of each kind of program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from shardlab.common.errors import error_text
from shardlab.common.text import counted
from shardlab.common.user_code import require_ops
from shardlab.language import Mesh, Rank, Sizes, Strategy, UserError
from shardlab.language.pass_names import named_passes, require_half_blocks, tiles_of
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan

Preset = Callable[[int], Plan]
"""Function from a number of ranks to the plan for them."""


def data_parallel_mesh(ranks: int) -> Mesh:
    """Return a mesh with all ranks on the axis `dp_shard`."""
    return Mesh(dp_shard=ranks)


def pipeline_mesh(ranks: int) -> Mesh:
    """Return a mesh with all ranks on the axis `pp`."""
    return Mesh(pp=ranks)


def tensor_parallel_mesh(ranks: int) -> Mesh:
    """Return a mesh with all ranks on the axis `tp`.

    Raises:
        UserError: if there is only one rank.
    """
    if ranks < 2:
        raise UserError(f"tensor parallelism cuts layers over 2 or more ranks, but {ranks} was asked for")
    return Mesh(tp=ranks)


def expert_parallel_mesh(ranks: int) -> Mesh:
    """Return a mesh with all ranks on the axis `ep`.

    Raises:
        UserError: if there is only one rank.
    """
    if ranks == 1:
        raise UserError("experts are exchanged between ranks, but 1 rank was asked for; give 2 or more")
    return Mesh(ep=ranks)


def one_device_mesh(ranks: int) -> Mesh:
    """Return a mesh of one rank.

    Raises:
        UserError: if there are several ranks.
    """
    if ranks != 1:
        raise UserError(f"this strategy runs on one device, but {ranks} ranks were asked for; give 1")
    return Mesh()


@dataclass(frozen=True)
class StrategyEntry:
    """Row of the table of strategies.

    Attributes:
        name: name on the command line.
        program: the program of one rank.
        splits: the values that the ranks split, as text.
        source: the paper or course that describes it.
        mesh: function from a number of ranks to the mesh.
        ranks: default number of ranks.
        columns: whether the program needs a model whose layers are all split by columns.
        plan: function from a number of ranks to the plan (None: the strategy is a program without a plan).
        memory: formula of the model state that one rank stores. It leaves out activations and one or two gathered
            layers.
        sends: formula of the elements sent by the rank that sends most, as a Python expression.
        order: position in listings: 1 to 9 for the nine short programs, 50 for other programs that `built_in` declares,
            and 100 for plans.
        passes: names of the tape passes (None: the plan's passes, if there is a plan); see `Plan.passes`.

    Symbols of `memory` and `sends`:
        W, G, O: all weights, gradients and optimizer state. D and E: their parts in dense layers and in experts.
        A: elements of a microbatch's activation.
        L: layers (blocks, if layers are cut at half-blocks).
        m: microbatches in all. k = m / d: microbatches of each of d data-parallel ranks.
        n: ranks. p: ranks of a pipeline, with v stages each. r, s, c, t, e: ranks along dp_replicate, dp_shard, cp, tp,
            ep.
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
    sends: str = ""

    def __post_init__(self) -> None:
        named_passes("none" if self.passes is None else self.passes)

    def passes_on(self, ranks: int, default: str = "none") -> str:
        """Return the names of the passes: this entry's, or else its plan's, or else `default`."""
        passes = self.plan(ranks).passes if self.plan and self.passes is None else self.passes
        return default if passes is None else passes

    def tiles_on(self, ranks: int) -> int:
        """Return the number of tiles into which the passes split a layer (1: they do not split layers)."""
        return tiles_of(self.passes_on(ranks))

    def rewritten(self, ranks: int, passes: str) -> StrategyEntry:
        """Return this strategy with these passes in place of its own."""
        if self.plan is None:
            return replace(self, passes=passes)
        return entry_from_plan(replace(self.plan(ranks), passes=passes), self.name)

    def on_mesh(self, mesh: Mesh) -> StrategyEntry:
        """Return this strategy with one mesh, and so for one number of ranks."""
        return replace(self, mesh={mesh.world: mesh}.__getitem__)

    def for_job(self, ranks: int) -> str | Plan:
        """Return the name or the plan from which another process can load this strategy."""
        return self.name if self.plan is None else self.plan(ranks)

    def title(self, ranks: int) -> str:
        """Return the title of a picture: the name, followed by the schedule if the name does not contain it."""
        plan = self.plan and self.plan(ranks)
        schedule = str(plan.as_dict()["schedule"]) if plan is not None and plan.mesh.pp > 1 else ""
        return self.name if schedule in self.name else f"{self.name} ({schedule})"

    def default_layers(self, ranks: int, at_least: int = 4) -> int:
        """Return the default number of layers: 4, or for a pipeline one per stage but not less than `at_least`."""
        plan = self.plan and self.plan(ranks)
        if plan is None or not (plan.mesh.pp > 1 or plan.layers_per_stage):
            return 4
        return plan.natural_layers() if plan.layers_per_stage else max(plan.natural_layers(), at_least)

    def puzzle(self, ranks: int, layers: int | None = None) -> Sizes:
        """Return the sizes of the puzzles' model, with its layers split as this strategy needs them.

        Args:
            layers: number of layers (None: `default_layers`).
        """
        layers = self.default_layers(ranks) if layers is None else layers
        plan, mesh, tiles = self.plan and self.plan(ranks), self.grid(ranks), self.tiles_on(ranks)
        require_half_blocks(tiles, planned=plan is not None or mesh.tp > 1)
        if self.columns:
            return Sizes.columns(layers)
        if plan is not None and plan.attention_apart:
            return plan.counted(Sizes.expert_blocks(layers) if plan.mesh.ep > 1 else Sizes.context_blocks(layers))
        if tiles > 1 and mesh.ep == 1:
            return replace(Sizes.half_blocks(layers), tiles=tiles)
        return Sizes.of_puzzle(layers, mesh)

    def require_ops(self, ranks: int, layers: int, microbatches: int) -> None:
        """Check that a step does not exceed the number of ops that can be traced.

        Raises:
            UserError: if it does, with a lower bound of the number of ops.
        """
        if self.plan is not None:
            self.plan(ranks).require_ops(layers, microbatches, tiles=self.tiles_on(ranks))
            return
        require_ops(ranks, f"the ops of {counted(ranks, 'rank')}")
        require_ops(4 * layers, f"loading, two passes and an update of {counted(layers, 'layer')}")
        require_ops(microbatches, f"loading and passes of {counted(microbatches, 'microbatch')}")

    def grid(self, ranks: int) -> Mesh:
        """Return the mesh for a number of ranks.

        Raises:
            UserError: if the strategy cannot use that number, or a user's mesh function does not return such a mesh.
        """
        try:
            mesh = cast(object, self.mesh(ranks))  # a user's function may return anything
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the mesh function of {self.name} raised {error_text(error)}") from error
        if not isinstance(mesh, Mesh) or mesh.world != ranks:
            value = f"a mesh of {mesh.world} ranks" if isinstance(mesh, Mesh) else repr(mesh)
            raise UserError(f"the mesh function of {self.name} gave {value} for {ranks} ranks; give a Mesh of {ranks}")
        return mesh


DECLARED: list[StrategyEntry] = []
"""Built-in strategies in the order of their declaration. `STRATEGIES` has them by name."""


def built_in(
    splits: str,
    *,
    sends: str,
    keeps: str,
    source: str,
    mesh: Callable[[int], Mesh] = data_parallel_mesh,
    ranks: int = 4,
    columns: bool = False,
    order: int = 50,
) -> Callable[[Strategy], Strategy]:
    """Declare a program as a built-in strategy. It has the function's name, with `-` in place of `_`.

    Args:
        keeps: the field `memory` of `StrategyEntry`. All other arguments are its fields of the same name.
    """

    def declare(program: Strategy) -> Strategy:
        name = program.__name__.replace("_", "-")
        entry = StrategyEntry(name, program, splits, source, mesh, ranks, None, keeps, columns, order, sends=sends)
        DECLARED.append(entry)
        return program

    return declare


def preset(
    splits: str, keeps: str, source: str, *, sends: str, ranks: int = 4, name: str = ""
) -> Callable[[Preset], Preset]:
    """Declare a function from a number of ranks to a plan as a built-in strategy.

    Args:
        splits, keeps, source, sends, ranks: as for `built_in`.
        name: name of the strategy (empty: the function's name).
    """

    def declare(plan: Preset) -> Preset:
        async def strategy(rank: Rank) -> None:
            await program_from_plan(plan(rank.world))(rank)

        def mesh(ranks: int) -> Mesh:
            return plan(ranks).mesh

        title = name or plan.__name__.replace("_", "-")
        entry = StrategyEntry(title, strategy, splits, source, mesh, ranks, plan, keeps, order=100, sends=sends)
        DECLARED.append(entry)
        return plan

    return declare


def entry_from_plan(plan: Plan, name: str) -> StrategyEntry:
    """Return the entry of a strategy that follows one plan, on the plan's own mesh."""
    program, mesh = program_from_plan(plan), plan.mesh
    return StrategyEntry(name, program, "as the plan says", "a plan", lambda _: mesh, mesh.world, lambda _: plan)
