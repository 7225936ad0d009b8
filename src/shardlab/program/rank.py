"""What a strategy is written in: the verbs of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from shardlab.program import sliced, transfer
from shardlab.program.errors import Refused, UserError
from shardlab.program.handle import Handle
from shardlab.program.mesh import WORLD, Group, Mesh, group_of
from shardlab.program.recorder import Recorder
from shardlab.program.sizes import LayerKind
from shardlab.program.tape import Message, Op, OpKind
from shardlab.program.value import Store, Value
from shardlab.program.values import AUTOGRAD_KINDS, Holds, Kind, Spec, mask_of

if TYPE_CHECKING:
    from shardlab.program.world import World

STORES = {kind.value: kind for kind in Kind if kind not in AUTOGRAD_KINDS}
"""The kinds of value that a program can hold, by the name of the store."""

Expected = tuple[str, int, "int | Iterable[int] | None"]
"""(store's name, layer, microbatch or microbatches): the message that a receive means."""


class Rank(Recorder):
    """One rank of a strategy program.

    Attributes:
        index: this rank's number, from 0.
        world: how many ranks there are.
        layers: `range` of the model's layers.
        microbatches: `range` of the step's microbatches.
        mesh: the ranks' grid.
        kinds: each layer's kind.
        weights, opt_states, activations, grad_activations, grad_weights, scalars, residuals, grad_residuals, stats:
            the stores, a program's only memory.
    """

    def __init__(self, index: int, world: World) -> None:
        super().__init__(index, world.sizes, world.watch)
        self.world = world.mesh.world
        self.layers = range(world.sizes.layers)
        self.kinds = [world.sizes.kind(layer) for layer in self.layers]
        self.microbatches = range(world.microbatches)
        self.mesh: Mesh = world.mesh
        self.weights = Store(self, Kind.WEIGHT)
        self.opt_states = Store(self, Kind.OPT_STATE)
        self.activations = Store(self, Kind.ACTIVATION)
        self.grad_activations = Store(self, Kind.GRAD_ACTIVATION)
        self.grad_weights = Store(self, Kind.GRAD_WEIGHT)
        self.scalars = Store(self, Kind.SCALAR)
        self.residuals = Store(self, Kind.RESIDUAL)
        self.grad_residuals = Store(self, Kind.GRAD_RESIDUAL)
        self.stats = Store(self, Kind.STATS)
        self._world = world
        self._grid = world.grid
        self._cells = (1 << world.microbatches * world.grid.sequence) - 1
        self._groups: dict[str | None, Group] = {None: group_of(WORLD, tuple(range(self.world)))}
        self._batches = 0

    def coordinate(self, axis: str) -> int:
        """Where this rank stands along a mesh axis."""
        return self.group(axis).ranks.index(self.index)

    def group(self, axis: str | None = None) -> Group:
        """The ranks along an axis that this rank meets; without one, all ranks."""
        group = self._groups.get(axis)
        if group is None:
            assert axis is not None
            try:
                group = self._groups[axis] = self.mesh.group(self.index, axis)
            except UserError as error:
                self.refuse(f"{error}.")
        return group

    def share(self, axis: str | None = None) -> range:
        """This rank's microbatches when they are dealt evenly, in order, to the ranks along an axis."""
        return self._deal(self.microbatches, "microbatches", axis)

    def stage_layers(self, axis: str | None = None) -> range:
        """This rank's layers when they are dealt evenly, in order, to the ranks along an axis: a pipeline's stage."""
        return self._deal(self.layers, "layers", axis)

    def _deal(self, numbers: range, what: str, axis: str | None) -> range:
        ranks = self.group(axis).ranks
        each, rest = divmod(len(numbers), len(ranks))
        if rest:
            raise UserError(
                f"{len(numbers)} {what} do not divide among {len(ranks)} ranks; give a multiple of {len(ranks)} {what}"
            )
        place = ranks.index(self.index)
        return numbers[place * each : (place + 1) * each]

    # Compute: plain calls.

    def load_weights(self, layer: int, shard: int = 0, of: int = 1) -> tuple[Value, Value]:
        """This step's weight and optimizer state of a layer: slice `shard` of `of` equal ones."""
        return self.load_weight(layer, shard, of), self.load_opt_state(layer, shard, of)

    def load_weight(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's weight alone."""
        return self._load(OpKind.LOAD_WEIGHT, Kind.WEIGHT, layer, shard, of)

    def load_opt_state(self, layer: int, shard: int = 0, of: int = 1) -> Value:
        """This step's optimizer state alone; its slice may be smaller than the weight's."""
        return self._load(OpKind.LOAD_OPT_STATE, Kind.OPT_STATE, layer, shard, of)

    def _load(self, kind: OpKind, what: Kind, layer: int, shard: int, of: int) -> Value:
        name = kind.value
        self._check_layer(name, layer)
        if not isinstance(shard, int) or not isinstance(of, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse(f"{name}(layer {layer}): shard {shard!r} of {of!r} was asked for; give whole numbers.")
        if not 0 <= shard < of:
            self.refuse(f"{name}(layer {layer}): shard {shard} of {of} does not exist; shards count from 0.")
        holds = Holds(1 << shard, of)
        key = (what, layer, holds)
        if key in self._loaded:
            self.refuse(f"{name}(layer {layer}): the same slice was loaded by op {self._loaded[key]} already.")
        self._loaded[key] = len(self.ops)
        value = self.make(Spec(what, layer, holds))
        self.ops.append(Op(kind, layer, (), (value.number,), holds=holds))
        return value

    def load_batch(self, microbatches: Iterable[int]) -> Value:
        """Activation 0 of some microbatches: the input rows."""
        numbers = list(microbatches)
        total = len(self.microbatches)
        if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= n < total for n in numbers):
            self.refuse(f"load_batch({numbers}): give one or more of the microbatches 0-{total - 1}, each once.")
        holds = Holds(mask_of(numbers), total)
        spec = Spec(Kind.ACTIVATION, 0, holds.refined(total * self._grid.sequence), 0, 0, self._grid)
        value = self.make(spec)
        self.ops.append(Op(OpKind.LOAD_BATCH, 0, (), (value.number,), holds=holds))
        return value

    def forward(self, layer: int, activation: Value, weight: Value, *, save: bool = True) -> Value:
        """Activation l through layer l: activation l + 1.

        What autograd needs for the backward pass is kept with the input activation; with `save=False` it is not,
        and `backward` computes it again.
        """
        self._check_layer("forward", layer)
        spec = self._read(activation)
        rule = self._rule("forward", layer, forward=True)
        try:
            made = rule(layer, spec, self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        number = output.number
        if save:
            outputs = (number, number + 1)
            self._values.append(None)
            activation.saved, activation.saved_slices = number + 1, made.sums
        else:
            outputs = (number,)
        self.ops.append(Op(OpKind.FORWARD, layer, (activation.number, weight.number), outputs))
        if not weight.keys:
            self._used(weight)
        if not activation.keys:
            self._used(activation)
        return output

    def loss(self, activation: Value, stats: Value | None = None) -> Value:
        """The gradient of the loss with respect to the last activation.

        Slices of it take the gathered `loss_stats` of all slices as well, and give these slices of the gradient.
        """
        read = (activation,) if stats is None else (activation, stats)
        specs = [self._read(value) for value in read]
        try:
            if self._grid.width > 1:
                made = sliced.loss(len(self.layers), specs[0], specs[1] if stats is not None else None)
            else:
                made = transfer.loss(len(self.layers), *specs)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.LOSS, made.layer, tuple([value.number for value in read]), (output.number,)))
        for value in read:
            if not value.keys:
                self._used(value)
        return output

    def loss_stats(self, logits: Value) -> Value:
        """What the loss needs of some slices of the logits: all_gather it over the ranks that have the others."""
        try:
            made = sliced.loss_stats(len(self.layers), self._read(logits))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.LOSS_STATS, made.layer, (logits.number,), (output.number,)))
        if not logits.keys:
            self._used(logits)
        return output

    def forward_norm(
        self, layer: int, residual: Value | None, branch: Value, weight: Value
    ) -> tuple[Value | None, Value]:
        """A norm of a model in half-blocks: (the residual for the next norm, the normalised activation l + 1).

        The branch, activation l, is added to the residual that the norm before has handed on. The first norm is given
        no residual, the last one hands none on.
        """
        self._check_layer("forward_norm", layer)
        self._rule("forward_norm", layer, forward=True)
        read = (branch, weight) if residual is None else (branch, weight, residual)
        specs = [self._read(value) for value in read]
        try:
            made, handed_on = sliced.norm_forward(layer, len(self.layers), *specs)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        outputs = [self.make(spec) for spec in (made, handed_on) if spec is not None]
        branch.saved, branch.saved_slices = len(self._values), 0
        self._values.append(None)
        numbers = (*(value.number for value in outputs), branch.saved)
        self.ops.append(Op(OpKind.FORWARD, layer, tuple([value.number for value in read]), numbers))
        for value in read:
            if not value.keys:
                self._used(value)
        return outputs[1] if handed_on is not None else None, outputs[0]

    def backward_norm(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value, Value | None]:
        """A norm's backward pass: the gradients of (its weight, its branch, the residual that it was given).

        `gradient` is that of activation l + 1, `grad_residual` that of the residual that it has handed on.
        """
        specs, inputs, read = self._norm_backward("backward_norm", layer, branch, gradient, grad_residual, weight)
        made = [self.make(spec) for spec in specs]
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, tuple([value.number for value in made])))
        for value in read:
            if not value.keys:
                self._used(value)
        return made[0], made[1], made[2] if len(made) > 2 else None

    def backward_norm_input(
        self, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[Value, Value | None]:
        """The half of `backward_norm` that others wait for; `backward_weight` is the other half."""
        specs, inputs, read = self._norm_backward("backward_norm_input", layer, branch, gradient, grad_residual, weight)
        made = [self.make(spec) for spec in specs[1:]]
        branch.saved_for_weight, branch.half_slices = len(self._values), 0
        self._values.append(None)
        outputs = (*(value.number for value in made), branch.saved_for_weight)
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, outputs))
        for value in read:
            if not value.keys:
                self._used(value)
        return made[0], made[1] if len(made) > 1 else None

    def _norm_backward(
        self, op: str, layer: int, branch: Value, gradient: Value, grad_residual: Value | None, weight: Value
    ) -> tuple[tuple[Spec, ...], tuple[int, ...], list[Value]]:
        self._check_layer(op, layer)
        self._rule(op, layer, forward=False)
        extra = [] if grad_residual is None else [grad_residual]
        read = [branch, gradient, weight, *extra]
        b, g, w, *r = (self._read(value) for value in read)
        try:
            specs = sliced.norm_backward(layer, len(self.layers), b, g, w, *r)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if branch.saved < 0:
            self.refuse(f"{op}(layer {layer}): no forward_norm has come before it for {b}; a norm is not recomputed.")
        saved, branch.saved = branch.saved, -1
        inputs = (branch.number, gradient.number, weight.number, saved, *(value.number for value in extra))
        return specs, inputs, read

    def backward(self, layer: int, activation: Value, gradient: Value, weight: Value) -> tuple[Value, Value]:
        """Activation l, the gradient of activation l + 1 and the weight: (weight's gradient, activation l's)."""
        self._check_layer("backward", layer)
        rule = self._rule("backward", layer, forward=False)
        try:
            specs = rule(layer, self._read(activation), self._read(gradient), self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        saved = self._saved(layer, activation, weight, specs[1].sums)
        grad_weight, grad_activation = self.make(specs[0]), self.make(specs[1])
        inputs = (activation.number, gradient.number, weight.number, saved)
        self.ops.append(Op(OpKind.BACKWARD, layer, inputs, (grad_weight.number, grad_activation.number)))
        for value in (activation, gradient, weight):
            if not value.keys:
                self._used(value)
        return grad_weight, grad_activation

    def backward_input(self, layer: int, activation: Value, gradient: Value, weight: Value) -> Value:
        """The half of `backward` that the layer below waits for: the gradient of activation l.

        The other half, `backward_weight`, reads the same activation and gradient: keep both in their stores until then.
        """
        self._check_layer("backward_input", layer)
        rule = self._rule("backward_input", layer, forward=False)
        try:
            specs = rule(layer, self._read(activation), self._read(gradient), self._read(weight))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        saved = self._saved(layer, activation, weight, specs[1].sums)
        grad_activation = self.make(specs[1])
        activation.saved_for_weight, activation.half_slices = grad_activation.number + 1, specs[1].sums
        self._values.append(None)
        inputs = (activation.number, gradient.number, weight.number, saved)
        outputs = (grad_activation.number, activation.saved_for_weight)
        self.ops.append(Op(OpKind.BACKWARD_INPUT, layer, inputs, outputs))
        for value in (activation, gradient, weight):
            if not value.keys:
                self._used(value)
        return grad_activation

    def backward_weight(self, layer: int, activation: Value, gradient: Value) -> Value:
        """The other half of `backward`, at any time after `backward_input`: the weight's gradient."""
        self._check_layer("backward_weight", layer)
        specs = self._read(activation), self._read(gradient)
        try:
            if self.kinds[layer] is LayerKind.WHOLE:
                made = transfer.backward_weight(layer, *specs)
            else:
                made = sliced.backward_weight(layer, len(self.layers), *specs, activation.half_slices)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        if activation.saved_for_weight < 0:
            self.refuse(
                f"backward_weight(layer {layer}): no backward_input has come before it for {activation.spec}; "
                "that leaves what this half needs."
            )
        grad_weight = self.make(made)
        inputs = (activation.number, gradient.number, activation.saved_for_weight)
        activation.saved_for_weight = -1
        self.ops.append(Op(OpKind.BACKWARD_WEIGHT, layer, inputs, (grad_weight.number,)))
        for value in (activation, gradient):
            if not value.keys:
                self._used(value)
        return grad_weight

    def _rule(self, op: str, layer: int, *, forward: bool) -> Callable[..., Any]:
        """What a layer's kind makes of its inputs; refuses the verbs that are not for it."""
        kind = self.kinds[layer]
        if (kind is LayerKind.NORM) != ("norm" in op):
            which = "a norm: use forward_norm and backward_norm" if kind is LayerKind.NORM else "no norm"
            self.refuse(f"{op}(layer {layer}): this layer is {which}.")
        if kind is LayerKind.SLICED:
            return sliced.forward if forward else partial(sliced.backward, layers=len(self.layers))
        return transfer.forward if forward else transfer.backward

    def _saved(self, layer: int, activation: Value, weight: Value, slices: int) -> int:
        """What autograd saved from an activation's forward, for its backward; computed again if nothing was."""
        saved = activation.saved
        if saved >= 0 and activation.saved_slices != slices:
            self.refuse(
                f"backward(layer {layer}): the forward pass was by other slices of the layer than {weight.spec}."
            )
        if saved < 0:
            saved = len(self._values)
            self._values.append(None)
            self.ops.append(Op(OpKind.RECOMPUTE, layer, (activation.number, weight.number), (saved,)))
        activation.saved = -1
        return saved

    def add(self, a: Value, b: Value) -> Value:
        """The sum of two weight gradients, or of two scalars; also written `a + b`."""
        try:
            made = transfer.add(self._read(a), self._read(b))
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.ADD, made.layer, (a.number, b.number), (output.number,)))
        for value in (a, b):
            if not value.keys:
                self._used(value)
        return output

    def norm(self, layer: int, gradient: Value) -> Value:
        """The sum of the squares of a finished gradient, a scalar: this layer's, or slice's, part of the model's.

        Add the parts up over layers, and over the ranks that have others; `update` takes the whole.
        """
        self._check_layer("norm", layer)
        try:
            made = transfer.norm(layer, len(self.layers), self._read(gradient), self._cells)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        output = self.make(made)
        self.ops.append(Op(OpKind.NORM, layer, (gradient.number,), (output.number,)))
        if not gradient.keys:
            self._used(gradient)
        return output

    def update(
        self, layer: int, gradient: Value, weight: Value, opt_state: Value, norm: Value | None = None
    ) -> tuple[Value, Value]:
        """The optimizer's step on a slice: the new (weight, optimizer state). The old ones end here, in place.

        Weight and gradient may hold more than the state's slice; the new weight is that slice alone. With the squared
        `norm` of the whole model's gradient, the gradient is clipped to the optimizer's limit, and the update is left
        out if the norm is not finite.
        """
        self._check_layer("update", layer)
        read = (gradient, weight, opt_state) if norm is None else (gradient, weight, opt_state, norm)
        specs = [self._read(value) for value in read]
        try:
            made = transfer.update(layer, specs[0], specs[1], specs[2], self._cells, *specs[3:])
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
        self._end_in_place(weight)
        self._end_in_place(opt_state)
        new_weight, new_state = self.make(made[0]), self.make(made[1])
        inputs = tuple([value.number for value in read])
        self.ops.append(Op(OpKind.UPDATE, layer, inputs, (new_weight.number, new_state.number)))
        if not gradient.keys:
            self._used(gradient)
        if norm is not None and not norm.keys:
            self._used(norm)
        return new_weight, new_state

    # Communication: starts at once and returns a handle; await it for the result.

    def all_reduce(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """The sum of the members' gradients, on every member."""
        return self._collective(OpKind.ALL_REDUCE, value, axis)

    def all_gather(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """The members' pieces side by side, on every member."""
        return self._collective(OpKind.ALL_GATHER, value, axis)

    def reduce_scatter(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """The sum of the members' gradients, slice i of it on the group's i-th member."""
        return self._collective(OpKind.REDUCE_SCATTER, value, axis)

    def _collective(self, kind: OpKind, value: Value, axis: str | None) -> Handle[Value]:
        spec = self._read(value)
        group = self.group(axis)
        handle = self._world.collectives.issue(self, kind, value, group)
        result = handle.result
        op = Op(kind, spec.layer, (value.number,), (result.number,), handle.number, group)
        self._issue(op, handle, value)
        self._world.collectives.meet(handle)
        return handle

    def send(self, value: Value, *, to: int) -> Handle[None]:
        """Send a value to another rank.

        On gloo and NCCL awaiting the handle waits for the peer's receive; in unit costs a send ends by itself.
        """
        handle = self._send(value, to, -1)
        self._world.channels.deliver(self.index, to)
        return handle

    def recv(self, *, source: int, expect: Expected | None = None) -> Handle[Value]:
        """Receive the next value that `source` sends here.

        Args:
            source: the sender's number.
            expect: the message that is meant, as (store's name, layer, microbatch or microbatches); another one is
                refused by name.
        """
        handle = self._recv(source, expect, -1)
        self._world.channels.deliver(source, self.index)
        return handle

    def exchange(self, value: Value, *, to: int, source: int, expect: Expected | None = None) -> Handle[Value]:
        """A send and a receive that cross, issued as one group so that neither must come first.

        Awaiting the handle waits for both and gives the value received.
        """
        self._batches += 1
        sent = self._send(value, to, self._batches - 1)
        received = self._recv(source, expect, self._batches - 1)
        received.partner = sent
        self._world.channels.deliver(self.index, to)
        self._world.channels.deliver(source, self.index)
        return received

    def _send(self, value: Value, to: int, batch: int) -> Handle[None]:
        spec = self._read(value)
        self._check_peer("send to", to)
        handle = self._world.channels.post_send(self, value, to)
        op = Op(OpKind.SEND, spec.layer, (value.number,), (), handle.number, peer=to, batch=batch)
        self._issue(op, handle, value)
        return handle

    def _recv(self, source: int, expect: Expected | None, batch: int) -> Handle[Value]:
        self._check_peer("recv from", source)
        message = None if expect is None else self._message(expect)
        handle = self._world.channels.post_recv(self, source, message)
        number = handle.result.number
        layer = -1 if message is None else message.layer
        op = Op(OpKind.RECV, layer, (), (number,), handle.number, peer=source, expect=message, batch=batch)
        self._issue(op, handle, None)
        return handle

    def _message(self, expect: Expected) -> Message:
        if not isinstance(expect, tuple) or len(expect) != 3:  # pyright: ignore[reportUnnecessaryIsInstance]
            self.refuse(f"recv: {expect!r} was expected; write (store's name, layer, microbatch or microbatches).")
        name, layer, microbatches = expect
        kind = STORES.get(name)
        if kind is None:
            self.refuse(f"recv: {name!r} is not a store; expect one of {', '.join(STORES)}.")
        numbers = [microbatches] if isinstance(microbatches, int) else list(microbatches or ())
        try:
            mask = mask_of(numbers)
        except ValueError:  # a negative number
            mask = -1
        if not 0 <= mask <= self._cells:
            self.refuse(f"recv: microbatches {numbers} were expected; the step has 0-{len(self.microbatches) - 1}.")
        return Message(kind, layer, mask)

    def _check_layer(self, op: str, layer: int) -> None:
        if layer.__class__ is not int or layer not in self.layers:
            self.refuse(f"{op}: layer {layer} does not exist; the model has layers 0-{len(self.layers) - 1}.")

    def _check_peer(self, op: str, peer: int) -> None:
        if not isinstance(peer, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' programs are not checked
            self.refuse(f"{op} {peer!r}: a rank is named by its number.")
        if peer == self.index or not 0 <= peer < self.world:
            why = "that is this rank itself" if peer == self.index else f"the world has ranks 0-{self.world - 1}"
            self.refuse(f"{op} rank {peer}: {why}.")
