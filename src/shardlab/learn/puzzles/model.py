"""Rank of the puzzles: `Model` under its published names, arguments and costs.

`Stores` has the memory, the clock and the log of a rank. `PuzzleCompute` adds methods that compute, and `PuzzleModel`
adds communication. Every op is checked before it is logged. `draw` and `timeline_of` convert the logs of all ranks to a
timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from shardlab.common.errors import About, Refused, about_layer
from shardlab.common.user_code import SourceLine, line_now
from shardlab.language import Holds, Mesh, Program, Sizes, Spec, UserError
from shardlab.language.rules import optimizer_step as steps
from shardlab.language.rules.kinds import in_equal_pieces, mask_of
from shardlab.language.rules.layer_rules import LayerRules, rules_of
from shardlab.language.rules.spec import Space
from shardlab.language.tape import Op
from shardlab.learn.puzzles import values as rules
from shardlab.learn.puzzles.calls import (
    Blocked,
    PuzzleCall,
    PuzzleEvent,
    PuzzleRefused,
    record_derived,
    refuse_unawaited,
    set_running_rank,
    translate_refusals,
    unawaited_refusal,
)
from shardlab.learn.puzzles.communication import Contribution, Dist, Message, Receiver
from shardlab.learn.puzzles.values import (
    Activation,
    ActivationGrad,
    OptState,
    Picture,
    PuzzleValue,
    Weight,
    WeightGrad,
    timeline_picture,
)
from shardlab.simulate.timeline import Event, Timeline

Storage = tuple[
    dict[Any, Weight], dict[Any, OptState], dict[Any, Activation], dict[Any, ActivationGrad], dict[Any, WeightGrad]
]


class Stores:
    """Memory, clock and log of one rank.

    A value that only a variable holds counts as memory from its creation to its last use. When an op reads such a
    value, it must have been alive at every event since its creation, so the memory of these events is increased
    afterwards.

    Attributes:
        rank: number of this rank.
        weights, opt_states, activations, grad_activations, grad_weights: the stores, with any keys. A value under two
            keys counts twice.
        time: the rank's clock, in units of `PUZZLE_COSTS`.
        log: all its events, in order.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time: float = 0
        self.log: list[PuzzleEvent] = []
        self.weights: dict[Any, Weight] = {}
        self.opt_states: dict[Any, OptState] = {}
        self.activations: dict[Any, Activation] = {}
        self.grad_activations: dict[Any, ActivationGrad] = {}
        self.grad_weights: dict[Any, WeightGrad] = {}
        self._alive: dict[int, tuple[PuzzleValue, int]] = {}
        """Map from the id of a value, since equal values use separate memory, to the value and a number of log entries.
        The entries before this number already count the value, or precede its creation.
        """

    def stores(self) -> Storage:
        """The five stores, in the published order."""
        return self.weights, self.opt_states, self.activations, self.grad_activations, self.grad_weights

    def memory(self) -> float:
        """Return the number of elements in the stores."""
        return sum(value.memory() for value in self._stored_values())

    def status(self) -> None:
        """Print the contents of the stores."""
        names = ("weights", "opt_states", "activations", "grad_activations", "grad_weights")
        for name, store in zip(names, self.stores(), strict=True):
            print(f"{name}: " + (", ".join(f"{key!r}: {value.spec}" for key, value in store.items()) or "empty"))

    def note(
        self,
        typ: str,
        *read: Any,
        layer: int | None = None,
        batches: Set[int] = frozenset(),
        to: int | None = None,
        source: int | None = None,
    ) -> None:
        """Log an event that starts now and reads some values, and advance the clock."""
        stored_values = self._stored_values()
        alive = {id(value): value for value in stored_values}
        hidden_values = {id(value): value for value in values_in(read) if id(value) not in alive}
        memory = sum(value.memory() for value in (*stored_values, *hidden_values.values()))
        event = PuzzleEvent(typ, layer, self.rank, self.time, 0, memory, batches, to, source)
        event.length = event.cost
        self.derive(*stored_values, *hidden_values.values())
        self.log.append(event)
        self._alive |= {key: (value, len(self.log)) for key, value in (alive | hidden_values).items()}
        self.time = event.end

    def derive(self, *values: Any) -> None:
        """Count, in this rank's memory, values that it created, received or read just now.

        If an earlier call counted a value, its elements are added to the memory of all events since that call.
        """
        for value in values_in(values):
            _, start = self._alive.get(id(value), (value, len(self.log)))
            for event in self.log[start:]:
                event.memory += value.memory()
            self._alive[id(value)] = value, len(self.log)

    def _stored_values(self) -> list[PuzzleValue]:
        """Return all values in the stores.

        Raises:
            PuzzleRefused: if an object in a store is not a value.
        """
        values: list[PuzzleValue] = []
        for store in self.stores():
            for key, value in cast("dict[Any, object]", store).items():
                if isinstance(value, PuzzleCall):
                    value.refuse()
                if not isinstance(value, PuzzleValue):
                    with translate_refusals(self):
                        problem = f"the store has {value!r} under {key!r}"
                        raise Refused("no value", "memory", problem, "keep values of the puzzles in it")
                values.append(value)
        return values


def values_in(objects: Iterable[Any]) -> Iterable[PuzzleValue]:
    """Yield the values among some objects, also in lists, tuples and dicts, since a message may be one."""
    for item in objects:
        if isinstance(item, dict):
            item = list(cast(dict[Any, Any], item).values())
        parts = cast(list[Any], item) if isinstance(item, (list, tuple)) else [item]
        yield from (part for part in parts if isinstance(part, PuzzleValue))


class PuzzleCompute(Stores):
    """Rank with the methods that compute. `PuzzleModel` adds communication.

    Attributes:
        LAYERS, BATCHES, RANKS: numbers of layers, microbatches and ranks.
        dist: the group of ranks.
        final_weights: weights that were passed to `set_final_weight`.
        forgotten: refusals for communications of the run that were called without an `await`.
        fakes: refusals for nonzero gradients from `fake_grad`.
    """

    def __init__(self, rank: int = 1, dist: Dist | None = None, layers: int = 2, batches: int = 1) -> None:
        for name, count in (("layers", layers), ("batches", batches)):
            if count < 1:
                raise UserError(f"{count} {name} were asked for; give 1 or more")
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
        """Return the layer's weight and optimizer state before the step, or shard `shard` of `total` of both."""
        self.begin()
        fields = layer, self.LAYERS, 0, frozenset({shard}), total
        return record_derived((Weight(*fields), OptState(*fields)))

    def get_activation(self, batches: Iterable[int]) -> Activation:
        """Return activation 0 of some microbatches: the input."""
        self.begin()
        return record_derived(Activation(0, self.LAYERS, frozenset(batches), self.BATCHES))

    def fake_grad(self, layer: int, batches: Iterable[int] = ()) -> WeightGrad:
        """Return a gradient that no rank has computed. Without microbatches it is zero."""
        self.begin()
        gradient = WeightGrad(layer, self.LAYERS, frozenset(batches), self.BATCHES)
        if gradient.batches:
            problem, remedy = f"{gradient.spec} was made up", "let a solution compute its gradients"
            fake = PuzzleRefused("made up", about_layer("fake_grad", layer), problem, remedy)
            self.fakes.append(fake.at(self.rank, len(self.log)).on(line_now()))
        return record_derived(gradient)

    def forward(self, layer: int, inp: Activation, weight: Weight) -> Activation:
        """Return activation l + 1, from activation l and the complete weight of layer l."""
        with self._op_context(about_layer("forward", layer), inp, weight) as op:
            self._layer(op, layer).forward([self._spec(op, "activation", inp)], self._weight(op, weight))
        self.note("forward", inp, weight, layer=layer, batches=inp.batches)
        return record_derived(Activation(layer + 1, self.LAYERS, inp.batches, self.BATCHES))

    def loss(self, inp: Activation) -> ActivationGrad:
        """Return the gradient of the last activation."""
        with self._op_context(About("loss"), inp) as op:
            steps.loss(self.LAYERS, self._spec(op, "activation", inp))
        self.note("loss", inp, layer=self.LAYERS)
        return record_derived(ActivationGrad(self.LAYERS - 1, self.LAYERS, inp.batches, self.BATCHES))

    def backward(
        self, layer: int, inp: Activation, grad: ActivationGrad, weight: Weight
    ) -> tuple[WeightGrad, ActivationGrad]:
        """Return the gradients of the weight and of activation l, from activation l, the gradient of activation l + 1
        and the weight.
        """
        with self._op_context(about_layer("backward", layer), inp, grad, weight) as op:
            specs = self._spec(op, "activation", inp), self._spec(op, "gradient", grad)
            self._layer(op, layer).backward(specs[0], specs[1:], self._weight(op, weight))
        self.note("backward", inp, grad, weight, layer=layer, batches=inp.batches)
        sizes = self.LAYERS, inp.batches, self.BATCHES
        return record_derived((WeightGrad(layer, *sizes), ActivationGrad(layer - 1, *sizes)))

    def update(
        self, layer: int, weight_grad: WeightGrad, weight: Weight, opt_state: OptState, shard: int = 0
    ) -> tuple[Weight, OptState]:
        """Update a weight with the gradient of the whole batch. Returns the new weight and optimizer state.

        A complete gradient may update a shard. The argument `shard` is not used.
        """
        del shard
        with self._op_context(about_layer("update", layer), weight_grad, weight, opt_state) as op:
            grad = self._spec(op, "gradient", weight_grad)
            state = self._spec(op, "optimizer state", opt_state)
            rules.update(layer, grad, self._weight(op, weight), state)
        updated_slices, weight_slices = in_equal_pieces(self._updated.get(layer, Holds(0, 1)), weight.spec.holds)
        self._updated[layer] = Holds(updated_slices.mask | weight_slices.mask, weight_slices.of)
        self.note("update", weight_grad, weight, opt_state)
        new_weight = Weight(layer, self.LAYERS, weight.step + 1, weight.shards, weight.total)
        new_state = OptState(layer, self.LAYERS, opt_state.step + 1, opt_state.shards, opt_state.total)
        return record_derived((new_weight, new_state))

    def set_final_weight(self, layer: int, weight: Weight) -> None:
        """Submit this rank's part of a layer's new weight."""
        self.begin(weight)
        self.final_weights[layer] = record_derived(weight)

    def begin(self, *values: Any) -> None:
        """Record that this rank runs in the current task, and refuse values that were not awaited."""
        set_running_rank(self)
        for value in values:
            if isinstance(value, PuzzleCall):
                value.refuse()
        try:
            refuse_unawaited(self.forgotten)
        finally:
            self.forgotten.clear()  # a rank that continues afterwards has received the message
        self._run.watch.enter(self.rank)

    @contextmanager
    def _op_context(self, op: About, *values: Any) -> Generator[About]:
        """Begin an op. In the context, refusals become `PuzzleRefused` and name this rank."""
        self.begin(*values)
        with translate_refusals(self):
            yield op

    def _spec(self, op: About, name: str, value: PuzzleValue) -> Spec:
        """Return the spec of a value, with this model's number of microbatches instead of the value's own."""
        spec = rules.spec_of(op, name, value)
        return spec._replace(form=spec.form.but(space=self._space))

    def _layer(self, op: About, layer: int) -> LayerRules:
        if layer not in range(self.LAYERS):
            remedy = f"the model has layers 0-{self.LAYERS - 1}, name one of these"
            raise Refused("unknown layer", op, f"layer {layer} does not exist", remedy)
        return self._rules.layers[layer]

    def _weight(self, op: About, weight: Weight) -> Spec:
        spec = rules.spec_of(op, "weight", weight)
        rules.refuse_stale(op, spec, self._updated)
        return spec


T = TypeVar("T")


class PuzzleModel(PuzzleCompute):
    """Rank of a network that several ranks train together for one optimizer step.

    Args:
        rank: number of this rank, from 0. It is checked at the first communication.
        dist: the group of ranks (None: one rank).
        layers, batches: numbers of layers and of microbatches, equal on every rank.
    """

    def allreduce(self, v: T, layer: int) -> PuzzleCall[T]:
        """Return the sum over all ranks, on every rank."""
        return self._call("allreduce", f"layer {layer}", partial(self._meet, "allreduce", v, layer, line_now()))

    def allgather(self, v: T, layer: int) -> PuzzleCall[T]:
        """Return the concatenated pieces of all ranks, on every rank."""
        return self._call("allgather", f"layer {layer}", partial(self._meet, "allgather", v, layer, line_now()))

    def scatterreduce(self, v: T, layer: int) -> PuzzleCall[T]:
        """Return shard r of the sum over all ranks, on rank r."""
        return self._call("scatterreduce", f"layer {layer}", partial(self._meet, "scatterreduce", v, layer, line_now()))

    def pass_to(self, rank: int, v: Any) -> PuzzleCall[None]:
        """Put any object into a rank's mailbox as soon as the mailbox is empty."""
        return self._call("pass_to", f"rank {rank}", partial(self._pass, rank, v, line_now()))

    def receive(self) -> PuzzleCall[Any]:
        """Return the earliest message to this rank, from any sender."""
        return self._call("receive", "", partial(self._receive, line_now()))

    @staticmethod
    def check(models: Sequence[PuzzleModel]) -> None:
        """Print "Correct!" if the ranks together have updated every layer exactly once.

        Raises:
            PuzzleRefused: if not. The message says what is wrong with the final weights of which layer.
        """
        verify(models)
        print("Correct!")

    def _call(self, verb: str, argument: str, work: Callable[[], Coroutine[Any, Any, T]]) -> PuzzleCall[T]:
        name = f"{verb}({argument})"
        refusal = unawaited_refusal(name, f"model.{verb}({'...' * bool(argument)})").at(self.rank, len(self.log))
        return PuzzleCall(name, refusal.on(line_now()), work, self.forgotten)

    async def _meet(self, name: str, v: T, layer: int, line: SourceLine | None) -> T:
        self._enter(name, line, [self.rank], v)
        with translate_refusals(self, line):
            if isinstance(v, Weight):
                rules.refuse_stale(about_layer(name, layer), v.spec, self._updated)
            collective = self._run.collectives.next_of(self.rank)
            collective[self.rank] = contribution = Contribution(self.rank, line, name, layer, v, self.time, collective)
            result, time = await self._wait(contribution)
        self.time = max(self.time, time)
        self.note(name, v, layer=layer)
        return record_derived(result)

    async def _pass(self, rank: int, v: Any, line: SourceLine | None) -> None:
        self._enter(f"pass_to(rank {rank})", line, [self.rank, rank], v)
        self.note("pass", v, to=rank)
        about = str(v.spec) if isinstance(v, PuzzleValue) else repr(v)[:40]
        message = Message(self.rank, line, rank, v, self.time, about)
        self._run.mail.messages.append(message)
        await self._wait(message)

    async def _receive(self, line: SourceLine | None) -> Any:
        self._enter("receive", line, [self.rank])
        reader = Receiver(self.rank, line, self.time, self._run.watch)
        self._run.mail.readers.append(reader)
        message: Message = await self._wait(reader)
        self.time = max(self.time, message.send_time)
        self.note("pass", source=message.rank)
        return record_derived(message.value)

    async def _wait(self, blocked: Blocked) -> Any:
        result = await self._run.watch.block(blocked)
        set_running_rank(self)
        return result

    def _enter(self, op: str, line: SourceLine | None, ranks: list[int], *values: Any) -> None:
        """Begin a communication, and refuse ranks that do not exist."""
        self.begin(*values)
        for rank in ranks:
            if not 0 <= rank < self.RANKS:
                with translate_refusals(self, line):
                    remedy = f"the Dist has {self.RANKS}, counted from 0, name one of these"
                    raise Refused("unknown rank", op, f"rank {rank} does not exist", remedy)


def verify(models: Sequence[PuzzleModel]) -> None:
    """Refuse final weights that are missing, of another layer, or not updated exactly once.

    Replicas are accepted, and the shards of a layer may be on any ranks.

    Raises:
        PuzzleRefused: for such weights, and for a communication that was not awaited.
    """
    if not models:
        raise PuzzleRefused("wrong number", "Model.check", "no models were given", "give those of all ranks")
    for model in models:
        refuse_unawaited(model.forgotten)
        model.memory()  # refuses an object that is not a value, such as a call that was not awaited
    for layer in range(models[0].LAYERS):
        final_weights = {model.rank: model.final_weights[layer] for model in models if layer in model.final_weights}
        try:
            rules.require_one_update(layer, final_weights)
        except Refused as refusal:
            raise PuzzleRefused.of(refusal) from None


def draw(models: Sequence[PuzzleModel]) -> Picture:
    """Print the latest start of an op and the largest memory of any rank, and return a picture of all ranks."""
    events = [(number, event) for number, model in enumerate(models) for event in model.log]
    if events:
        steps = max(model.log[-1].time for model in models if model.log)
        number, peak = max(events, key=lambda pair: pair[1].memory)  # the first of equals
        print(f"Timesteps: {steps} \nMaximum Memory: {peak.memory} at GPU: {number} time: {peak.time}")
    else:
        print("Timesteps: 0 \nMaximum Memory: 0: nothing has been computed")
    return timeline_picture(timeline_of(models))


def timeline_of(models: Sequence[PuzzleModel]) -> Timeline:
    """Return a timeline whose rank i is the i-th model.

    Raises:
        UserError: if there are no models.
    """
    if not models:
        raise UserError("no models were given; give those of all ranks")
    rows = {model.rank: row for row, model in enumerate(models)}
    tapes: list[list[Op]] = []
    events: list[list[Event]] = []
    for row, model in enumerate(models):
        # A model without events still has memory.
        log = model.log or [PuzzleEvent("load_batch", None, model.rank, 0, 0, model.memory())]
        tapes.append([_op(event, rows) for event in log])
        events.append(
            [
                Event(row, index, op.kind, op.layer, mask_of(event.batches), event.time, event.end, round(event.memory))
                for index, (op, event) in enumerate(zip(tapes[row], log, strict=True))
            ]
        )
    sizes = Sizes.puzzle(max(model.LAYERS for model in models))
    microbatches = max(model.BATCHES for model in models)
    return Timeline(Program(Mesh(dp_shard=len(models)), microbatches, sizes, tapes), events)


def _op(event: PuzzleEvent, rows: dict[int, int]) -> Op:
    peer = event.source if event.to is None else event.to
    layer = -1 if event.layer is None else event.layer
    return Op(event.kind, layer, peer=-1 if peer is None else rows.get(peer, -1))
