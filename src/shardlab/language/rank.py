"""A rank with all its verbs: the argument of every strategy."""

from __future__ import annotations

from typing import Any

from shardlab.common.errors import UserError
from shardlab.common.text import counted
from shardlab.common.user_code import at_line, line_now
from shardlab.language.misuse import why_no_attribute
from shardlab.language.rank_communication import CommunicationVerbs
from shardlab.language.rank_compute import ComputeVerbs
from shardlab.language.rank_values import ValueVerbs
from shardlab.language.rules.kinds import Kind
from shardlab.language.tracing import TracedWorld
from shardlab.language.values import Handle, Store, Value

MACHINERY = frozenset(
    {
        "cause_of", "emit_wait", "end", "forget_key", "handles", "make", "ops", "refuse",
        "refuse_attribute", "release", "require_storable", "require_stores", "sizes",
        "why_missing",
    }
)  # fmt: skip
"""Public members of a rank that are not part of the language."""


class Rank(ComputeVerbs, CommunicationVerbs, ValueVerbs):
    """One rank of a strategy's program: its number, its stores and its verbs.

    `index` is the rank's number, `world` the number of ranks and `mesh` their grid; `layers` and `microbatches` are the
    ranges of the step. The verbs are in three families, one base class each, which share the tape (`tracing.Tracer`):

    - `rank_compute.ComputeVerbs`: plain calls. A layer's passes (`forward`, `backward`, `backward_input`,
      `backward_weight`), attention between slices (`attend`, `attend_backward`), the loss (`loss`, `loss_stats`), and
      the step from gradients to new weights (`add`, `norm`, `direction`, `update`; `wants_norm` and `wants_direction`
      tell whether the optimizer needs these values). `update_shard` updates a layer in the stores.
    - `rank_communication.CommunicationVerbs`: each returns a handle to `await`. Messages (`send`, `recv`, `exchange`,
      `batch_p2p`) and collectives (`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `scatter`,
      `gather`, `reduce`, `barrier`).
    - `rank_values.ValueVerbs`: values at the start of a step (`load_weights`, `load_weight`, `load_opt_state`,
      `load_batch`, `zero_gradient`), changes of a value (`slice`, `concatenate`, `scale`, `tokens`, `cast`), and
      copies, which return a handle (`offload`, `reload`).

    Attributes:
        weighted_layers: layers with a weight of their own: all but a head that is tied to the embedding.
        signatures: inputs and outputs of each layer.
        weights: the store of weights. The key of a head that is tied to the embedding names the embedding's weight.
        opt_states, activations, grad_activations, grad_weights, directions, scalars, residuals,
            grad_residuals, routing, grad_routing, stats, queries, keys_values, grad_queries, grad_keys_values: the
            stores, a program's only memory.
    """

    def __init__(self, index: int, world: TracedWorld) -> None:
        super().__init__(index, world)
        self.weighted_layers = [layer for layer in self.layers if self.sizes.weight_of(layer) == layer]
        self.signatures = self.sizes.signatures
        weighted_layers = self.weighted_layers
        self.weights = Store(self, Kind.WEIGHT, {l: self.weight_of(l) for l in self.layers if l not in weighted_layers})
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

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.world}>"

    def refuse_attribute(self, error: AttributeError) -> None:
        """Refuse an attribute that this rank, or one of its values or handles, does not have.

        Raises:
            Refused: with the name that was probably meant. Errors about attributes of other objects are ignored.
        """
        thing: Any = error.obj
        if isinstance(thing, Handle):
            thing.refuse_use()
        if thing is self or isinstance(thing, Value):
            self.refuse("unknown verb", "", *why_no_attribute(error, self._families()))

    def require_stores(self) -> None:
        """Refuse a program that has put another object in place of a store, as in `rank.weights = {}`.

        Raises:
            Refused: with the name of the store.
        """
        for store in self._stores.values():
            if (other := getattr(self, store.name)) is not store:
                fault = f"the program replaced rank.{store.name} by an object of type {type(other).__name__}"
                self.refuse("wrong store", "", fault, f"a store stays, write rank.{store.name}[key] = value")

    def _families(self) -> dict[str, list[str]]:
        """Return the names of the rank's attributes by family, in the order of their definition."""
        classes = [base for base in reversed(type(self).__mro__) if base is not object]
        methods = dict.fromkeys(name for base in classes for name in vars(base) if callable(getattr(base, name)))
        families = {
            "verbs": list(methods),
            "stores": [store.name for store in self._stores.values()],
            "attributes": [name for name, value in vars(self).items() if not isinstance(value, Store)],
        }
        return {
            family: [name for name in names if not name.startswith("_") and name not in MACHINERY]
            for family, names in families.items()
        }

    def store(self, kind: Kind) -> Store:
        """Return the store that keeps values of a kind."""
        return self._stores[kind]

    def weight_of(self, layer: int) -> int:
        """Return the layer whose weight `layer` computes with: its own, or 0 for a head tied to the embedding."""
        return self.sizes.weight_of(layer)

    def coordinate(self, axis: str) -> int:
        """Return this rank's position along a mesh axis, from 0.

        Raises:
            Refused: for an axis that the mesh does not have.
        """
        return self.group(axis).ranks.index(self.index)

    def share(self, axis: str | None = None) -> range:
        """Return this rank's equal share of consecutive microbatches, among all ranks or the ranks of an axis.

        Raises:
            UserError: when they do not divide among these ranks.
        """
        return self._divide(self.microbatches, "microbatch", axis)

    def stage_layers(self, axis: str | None = None) -> range:
        """Return this rank's equal share of consecutive layers, among all ranks or the ranks of an axis.

        Raises:
            UserError: when they do not divide among these ranks.
        """
        return self._divide(self.layers, "layer", axis)

    def accumulate(self, gradient: Value) -> None:
        """Add a weight's gradient to `grad_weights[layer]`, or store it there if it is the first.

        Raises:
            Refused: as `add` does.
        """
        layer, sums = self._read(gradient, "accumulate").layer, self.grad_weights
        sums[layer] = self.add(sums[layer], gradient) if layer in sums else gradient

    async def update_shard(self, layer: int, norm: Value | None = None, *, axis: str | None = None) -> None:
        """Update `weights[layer]` and `opt_states[layer]` by `grad_weights[layer]`, and remove that gradient.

        The layer may be whole or a slice. If the optimizer updates whole matrices, as Muon does, and the optimizer
        state is a slice, the directions of all ranks' slices are gathered first.

        Args:
            norm: as for `update`.
            axis: axis of the mesh along which the layer is cut (None: the whole world).

        Raises:
            Refused: as `update` does.
        """
        gradient, state, direction = self.grad_weights[layer], self.opt_states[layer], None
        if self.wants_direction(layer) and not state.spec.holds.complete:
            direction = await self.all_gather(self.direction(layer, gradient, state, norm), axis=axis)
        gradient, weight = self.grad_weights.pop(layer), self.weights[layer]
        self.weights[layer], self.opt_states[layer] = self.update(layer, gradient, weight, state, norm, direction)

    def _divide(self, numbers: range, noun: str, axis: str | None) -> range:
        """Return this rank's part of some numbers, divided evenly among the ranks along an axis."""
        ranks = self.group(axis).ranks
        part_length, rest = divmod(len(numbers), len(ranks))
        if rest:
            do = "does" if len(numbers) == 1 else "do"
            axis_is_settled = axis is not None or len(self.mesh.used) < 2
            along = "" if axis_is_settled else f", or name one of the axes {', '.join(self.mesh.used)}"
            raise UserError(
                f"{counted(len(numbers), noun)} {do} not divide among {len(ranks)} ranks; give a multiple of "
                f"{counted(len(ranks), noun)}{along}{at_line(line_now())}"
            )
        place = ranks.index(self.index)
        return numbers[place * part_length : (place + 1) * part_length]
