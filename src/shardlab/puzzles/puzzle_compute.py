"""What one rank computes: plain calls that cost time and are judged before they are logged."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from shardlab.errors import About, Refused, of_layer
from shardlab.program import Holds, Sizes, Spec, UserError
from shardlab.program.lines import here
from shardlab.puzzles import rules
from shardlab.puzzles.calls import PuzzleCall, refuse_forgotten
from shardlab.puzzles.dist import Dist
from shardlab.puzzles.refusal import PuzzleRefused, derived, judged, stand
from shardlab.puzzles.stores import Storage, Stores
from shardlab.puzzles.values import Activation, ActivationGrad, OptState, PuzzleValue, Weight, WeightGrad
from shardlab.rules import update as steps
from shardlab.rules.layer import LayerRules
from shardlab.rules.layers import rules_of
from shardlab.rules.pieces import common
from shardlab.rules.spec import Space


class PuzzleCompute(Stores):
    """A rank that computes; `PuzzleModel` adds communication.

    Attributes:
        LAYERS, BATCHES, RANKS: how many layers, microbatches and ranks there are.
        dist: the ranks.
        final_weights: what `set_final_weight` was given.
        forgotten: communications of the run that were called without an `await`, a refusal for each.
        fakes: gradients made up by `fake_grad`, but for zeros, a refusal for each.
    """

    def __init__(self, rank: int = 1, dist: Dist | None = None, layers: int = 2, batches: int = 1) -> None:
        for what, count in (("layers", layers), ("batches", batches)):
            if count < 1:
                raise UserError(f"{count} {what} were asked for; give 1 or more")
        super().__init__(rank)
        self.dist = Dist(1) if dist is None else dist
        self.RANKS = self.dist.ranks
        self.LAYERS = layers
        self.BATCHES = batches
        self.final_weights: dict[int, Weight] = {}
        self.fakes: list[PuzzleRefused] = []
        self._run = self.dist.join(rank)
        self.forgotten = self._run.watch.forgotten
        self._updated: dict[int, Holds] = {}
        self._space = Space(batches)
        self._rules = rules_of(Sizes.puzzle(layers).signatures, self._space)

    def storage(self) -> Storage:
        """The five stores: weights, opt_states, activations, grad_activations, grad_weights."""
        self.begin()
        return self.stores()

    def load_weights(self, layer: int, shard: int = 0, total: int = 1) -> tuple[Weight, OptState]:
        """The layer's weight and optimizer state before the step, or shard `shard` of `total` of both."""
        self.begin()
        loaded = layer, self.LAYERS, 0, frozenset({shard}), total
        return derived((Weight(*loaded), OptState(*loaded)))

    def get_activation(self, batches: Iterable[int]) -> Activation:
        """Activation 0 of some microbatches: the input."""
        self.begin()
        return derived(Activation(0, self.LAYERS, frozenset(batches), self.BATCHES))

    def fake_grad(self, layer: int, batches: Iterable[int] = ()) -> WeightGrad:
        """A gradient that nobody has computed; of no microbatches it is zero."""
        self.begin()
        gradient = WeightGrad(layer, self.LAYERS, frozenset(batches), self.BATCHES)
        if gradient.batches:
            given, remedy = f"{gradient.spec} was made up", "let a solution compute its gradients"
            fake = PuzzleRefused("made up", of_layer("fake_grad", layer), given, remedy)
            self.fakes.append(fake.at(self.rank, len(self.log)).on(here()))
        return derived(gradient)

    def forward(self, layer: int, inp: Activation, weight: Weight) -> Activation:
        """Activation l and the complete weight of layer l: activation l + 1."""
        with self._judging(of_layer("forward", layer), inp, weight) as op:
            self._layer(op, layer).forward([self._spec(op, "activation", inp)], self._weight(op, weight))
        self.note("forward", inp, weight, layer=layer, batches=inp.batches)
        return derived(Activation(layer + 1, self.LAYERS, inp.batches, self.BATCHES))

    def loss(self, inp: Activation) -> ActivationGrad:
        """The last activation's gradient."""
        with self._judging(About("loss"), inp) as op:
            steps.loss(self.LAYERS, self._spec(op, "activation", inp))
        self.note("loss", inp, layer=self.LAYERS)
        return derived(ActivationGrad(self.LAYERS - 1, self.LAYERS, inp.batches, self.BATCHES))

    def backward(
        self, layer: int, inp: Activation, grad: ActivationGrad, weight: Weight
    ) -> tuple[WeightGrad, ActivationGrad]:
        """Activation l, the gradient of activation l + 1 and the weight: (weight's gradient, activation l's)."""
        with self._judging(of_layer("backward", layer), inp, grad, weight) as op:
            specs = self._spec(op, "activation", inp), self._spec(op, "gradient", grad)
            self._layer(op, layer).backward(specs[0], specs[1:], self._weight(op, weight))
        self.note("backward", inp, grad, weight, layer=layer, batches=inp.batches)
        of = self.LAYERS, inp.batches, self.BATCHES
        return derived((WeightGrad(layer, *of), ActivationGrad(layer - 1, *of)))

    def update(
        self, layer: int, weight_grad: WeightGrad, weight: Weight, opt_state: OptState, shard: int = 0
    ) -> tuple[Weight, OptState]:
        """The optimizer's step, from the gradient of the whole batch: the new (weight, optimizer state).

        A complete gradient may update a shard. `shard` is not used.
        """
        del shard
        with self._judging(of_layer("update", layer), weight_grad, weight, opt_state) as op:
            grad = self._spec(op, "gradient", weight_grad)
            state = self._spec(op, "optimizer state", opt_state)
            rules.update(layer, grad, self._weight(op, weight), state)
        done, mine = common(self._updated.get(layer, Holds(0, 1)), weight.spec.holds)
        self._updated[layer] = Holds(done.mask | mine.mask, mine.of)
        self.note("update", weight_grad, weight, opt_state)
        new = Weight(layer, self.LAYERS, weight.step + 1, weight.shards, weight.total)
        return derived((new, OptState(layer, self.LAYERS, opt_state.step + 1, opt_state.shards, opt_state.total)))

    def set_final_weight(self, layer: int, weight: Weight) -> None:
        """Hand in this rank's part of a layer's new weight."""
        self.begin(weight)
        self.final_weights[layer] = derived(weight)

    def begin(self, *values: Any) -> None:
        """Note who runs where; refuse values that have not been awaited."""
        stand(self)
        for value in values:
            if isinstance(value, PuzzleCall):
                value.refuse()
        try:
            refuse_forgotten(self.forgotten)
        finally:
            self.forgotten.clear()  # whoever goes on after this message has read it
        self._run.watch.enter(self.rank)

    @contextmanager
    def _judging(self, op: About, *values: Any) -> Generator[About]:
        """Begin an op, and name it in what is refused of it."""
        self.begin(*values)
        with judged(self):
            yield op

    def _spec(self, op: About, what: str, value: PuzzleValue) -> Spec:
        """A value's spec; microbatches are compared as numbers, whatever total they were made with."""
        spec = rules.spec_of(op, what, value)
        return spec._replace(form=spec.form.but(space=self._space))

    def _layer(self, op: About, layer: int) -> LayerRules:
        if layer not in range(self.LAYERS):
            remedy = f"the model has layers 0-{self.LAYERS - 1}, name one of these"
            raise Refused("unknown layer", op, f"layer {layer} does not exist", remedy)
        return self._rules.layers[layer]

    def _weight(self, op: About, weight: Weight) -> Spec:
        spec = rules.spec_of(op, "weight", weight)
        rules.fresh(op, spec, self._updated)
        return spec
