"""What a rank's verbs share: its number and groups, its stores, and its share of the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardlab.errors import Refused, UserError
from shardlab.program.mesh import AXES, WORLD, Group, Mesh, group_of
from shardlab.program.ops import OpKind
from shardlab.program.tape import Op
from shardlab.program.tracer import Tracer
from shardlab.program.values import Store, Value
from shardlab.rules.kind import Kind
from shardlab.rules.pieces import counted
from shardlab.rules.spec import Spec

if TYPE_CHECKING:
    from shardlab.program.world import World


class RankContext(Tracer):
    """Context of a rank's verbs: its number, its groups and its stores.

    Attributes:
        index: this rank's number, from 0.
        world: how many ranks there are.
        layers: `range` of the model's layers.
        weighted_layers: those with a weight of their own: all but a head that is tied to the embedding.
        microbatches: `range` of the step's microbatches.
        mesh: the ranks' grid.
        signatures: what each layer takes and makes.
        weights, opt_states, activations, grad_activations, grad_weights, directions, scalars, residuals,
            grad_residuals, routing, grad_routing, stats, queries, keys_values, grad_queries, grad_keys_values: the
            stores, a program's only memory.
    """

    def __init__(self, index: int, world: World) -> None:
        super().__init__(index, world.sizes, world.count)
        self.world = world.mesh.world
        self.layers = range(world.sizes.layers)
        self.weighted_layers = [layer for layer in self.layers if world.sizes.weight_of(layer) == layer]
        self.signatures = world.sizes.signatures
        self.microbatches = range(world.microbatches)
        self.mesh: Mesh = world.mesh
        self.weights = Store(self, Kind.WEIGHT)
        self.opt_states = Store(self, Kind.OPT_STATE)
        self.activations = Store(self, Kind.ACTIVATION)
        self.grad_activations = Store(self, Kind.GRAD_ACTIVATION)
        self.grad_weights = Store(self, Kind.GRAD_WEIGHT)
        self.directions = Store(self, Kind.DIRECTION)
        self.scalars = Store(self, Kind.SCALAR)
        self.residuals = Store(self, Kind.RESIDUAL)
        self.grad_residuals = Store(self, Kind.GRAD_RESIDUAL)
        self.routing = Store(self, Kind.ROUTING)
        self.grad_routing = Store(self, Kind.GRAD_ROUTING)
        self.stats = Store(self, Kind.STATS)
        self.queries = Store(self, Kind.QUERIES)
        self.keys_values = Store(self, Kind.KEYS_VALUES)
        self.grad_queries = Store(self, Kind.GRAD_QUERIES)
        self.grad_keys_values = Store(self, Kind.GRAD_KEYS_VALUES)
        self._stores = {store.kind: store for store in vars(self).values() if isinstance(store, Store)}
        self._world = world
        self._rules = world.rules
        self._groups: dict[str | None, Group] = {None: group_of(WORLD, tuple(range(self.world)))}
        self._batches = 0
        self._batch = -1  # the number of the batch of messages that is open

    def weight_of(self, layer: int) -> int:
        """Find the layer whose weight a layer computes with: its own, or the one that it is tied to."""
        return self.sizes.weight_of(layer)

    def store(self, kind: Kind) -> Store:
        """The store that keeps values of a kind."""
        return self._stores[kind]

    def coordinate(self, axis: str) -> int:
        """Find where this rank stands along a mesh axis, from 0.

        Raises:
            Refused: for an axis that the mesh does not have.
        """
        return self.group(axis).ranks.index(self.index)

    def group(self, axis: str | None = None) -> Group:
        """Find the ranks that this rank meets along an axis (None: all ranks).

        Raises:
            Refused: for an axis that the mesh does not have.
        """
        group = self._groups.get(axis)
        if group is None:
            assert axis is not None
            if axis not in AXES:
                remedy = f"the axes are {', '.join(AXES)}, name one of these"
                self.refuse("unknown axis", "", f"axis {axis!r} is not an axis of a mesh", remedy)
            group = self._groups[axis] = self.mesh.group(self.index, axis)
        return group

    def share(self, axis: str | None = None) -> range:
        """Deal the microbatches evenly, in order, to the ranks along an axis, and return this rank's.

        Raises:
            UserError: when they do not divide among these ranks.
        """
        return self._deal(self.microbatches, "microbatch", axis)

    def stage_layers(self, axis: str | None = None) -> range:
        """Deal the layers evenly, in order, to the ranks along an axis, and return this rank's: its pipeline stage.

        Raises:
            UserError: when they do not divide among these ranks.
        """
        return self._deal(self.layers, "layer", axis)

    def _deal(self, numbers: range, noun: str, axis: str | None) -> range:
        ranks = self.group(axis).ranks
        each, rest = divmod(len(numbers), len(ranks))
        if rest:
            do = "does" if len(numbers) == 1 else "do"
            raise UserError(
                f"{counted(len(numbers), noun)} {do} not divide among {len(ranks)} ranks; give a multiple of "
                f"{counted(len(ranks), noun)}"
            )
        place = ranks.index(self.index)
        return numbers[place * each : (place + 1) * each]

    def _made_of(self, values: Sequence[Value], kind: OpKind, rule: Callable[[], Spec], **fields: Any) -> Value:
        """Make a value, on this rank alone, of some that were read; the rule says what it is.

        Args:
            fields: of the op, beside its inputs and its output.
        """
        try:
            made = rule()
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        read = tuple([value.number for value in values])
        self.ops.append(Op(kind, made.layer, read, (output.number,), **fields))
        self._done_with(*values)
        return output

    def _check_layer(self, op: str, layer: int) -> None:
        if layer.__class__ is not int or layer not in self.layers:
            remedy = f"the model has layers 0-{len(self.layers) - 1}, name one of these"
            self.refuse("unknown layer", op, f"layer {layer} does not exist", remedy)
