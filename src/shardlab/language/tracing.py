"""State of one rank while its program is traced: its tape, and which values are alive.

`Tracer` is the base of all verbs. It frees values, so programs need not. A value is freed when its last store key is
deleted or overwritten. A value without a key, in a variable or a list of the program, lives until its last use, or
until the end of the step if no op uses it. The slices that a step leaves, updated, must be in stores. Tracing does not
know in advance which use is the last, so it writes a FREE after each use, and a later use moves it. If a communication
still reads the value, the tape waits for it before the FREE. A gradient of an activation that no op uses, such as that
of the tokens, is freed after the op that computes it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol, cast

from shardlab.common.errors import About, Refused, Rule, about_layer
from shardlab.common.user_code import VALUES_PER_COUNT, OpCount
from shardlab.language.mesh import AXES, WORLD, Group, Mesh, group_of
from shardlab.language.ops import COLLECTIVES, OpKind
from shardlab.language.rendezvous import Channels, OpenCollectives
from shardlab.language.rules.kinds import ROW_KINDS, WHOLE, Holds, Kind, bits, mask_of
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import Spec
from shardlab.language.sizes import Sizes
from shardlab.language.tape import Op
from shardlab.language.values import Handle, Store, Value, argument_text, new_value

FREE, WAIT = OpKind.FREE, OpKind.WAIT

_RESULTS = {
    "missing microbatches": frozenset({Kind.GRAD_WEIGHT}),
    "missing slices": frozenset({Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.OPT_STATE}),
    "partial weight": frozenset({Kind.WEIGHT}),
    "a term": frozenset(ROW_KINDS),
    "missing terms": frozenset(ROW_KINDS),
}
"""Rules that are broken when the result of a collective is not used, each with the kinds of that result."""


@lru_cache(maxsize=1 << 16)
def free_op(number: int) -> Op:
    """Return the FREE of a value. Cached, since most ops are FREE or WAIT: equal ops of all ranks are one object."""
    return Op(FREE, -1, (number,))


@lru_cache(maxsize=1 << 16)
def wait_op(handle: int) -> Op:
    """Return the WAIT of a communication."""
    return Op(WAIT, -1, handle=handle)


class TracedWorld(Protocol):
    """The part of `world.World` that a rank uses while it is traced.

    Attributes:
        mesh: the grid of ranks.
        sizes: the elements and bytes of every value.
        microbatches: microbatches of the global batch.
        rules: rules that derive the outputs of every op.
        count: counter of the ops on all tapes, whose number is limited.
        collectives, channels: open communications, through which the ranks meet.
        trained: bit set of the layers of which some rank has loaded an optimizer state so far.
    """

    mesh: Mesh
    sizes: Sizes
    microbatches: int
    rules: Rules
    count: OpCount
    trained: int

    @property
    def collectives(self) -> OpenCollectives: ...
    @property
    def channels(self) -> Channels: ...


class Tracer(ABC):
    """Tape of one rank while its program is traced, and the lifetimes of its values; the base of all verbs.

    Attributes:
        index: this rank's number, from 0.
        world: the number of ranks.
        mesh: the grid of ranks.
        layers: `range` of the model's layers.
        microbatches: `range` of the step's microbatches.
        sizes: the elements and bytes of every value.
        ops: the tape so far.
        handles: the number of communications that the rank has issued.
    """

    def __init__(self, index: int, world: TracedWorld) -> None:
        self.index = index
        self.world = world.mesh.world
        self.mesh = world.mesh
        self.layers = range(world.sizes.layers)
        self.microbatches = range(world.microbatches)
        self.sizes = world.sizes
        self.ops: list[Op] = []
        self.handles = 0
        self._world = world
        self._rules = world.rules
        self._groups: dict[str | None, Group] = {None: group_of(WORLD, tuple(range(self.world)))}
        self._values: list[Value | Spec] = []  # by number; a spec stands for a freed value and for what layers keep
        self._load_ops: dict[tuple[Kind, int, Holds], int] = {}  # -> index of the op
        self._outstanding: dict[int, Handle[Any]] = {}
        self._batches = 0
        self._batch = -1  # number of the open batch of messages
        self._batch_start = 0  # index of that batch's first op
        self._counted = 0
        # The next count is due at this number of values or handles. It costs one comparison an op.
        self._next_count = VALUES_PER_COUNT

    def refuse(self, rule: Rule, about: About | str, fault: str, remedy: str) -> NoReturn:
        """Raise `Refused` about the verb that the program calls."""
        raise Refused(rule, about, fault, remedy).at(self.index, len(self.ops))

    def group(self, axis: str | None = None) -> Group:
        """Return the ranks that this rank meets along an axis (None: all ranks).

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

    @abstractmethod
    def add(self, a: Value, b: Value) -> Value:
        """Add two values, as `a + b` does."""

    def make(self, spec: Spec) -> Value:
        """Make a new value of this rank."""
        values = self._values
        number = len(values)
        if number > self._next_count:
            self._count_ops()
        value = new_value(self, number, spec)
        values.append(value)
        return value

    def why_missing(self, kind: Kind, key: Hashable) -> str:
        """Return why a store lacks a value for a key: a collective in flight brings it, or it was freed ("": neither).

        Args:
            key: a layer, or a tuple of the layer and a microbatch.
        """
        layer, *rest = cast(tuple[Any, ...], key if isinstance(key, tuple) and key else (key,))
        for handle in self._outstanding.values():
            op = self.ops[handle.op]
            if op.kind in COLLECTIVES and op.layer == layer and self._kind(op.inputs) is kind:
                return f"{op} (op {handle.op}) brings such a value, await its handle and store the result"
        for entry in reversed(self._values):
            spec = entry if isinstance(entry, Spec) else entry.spec
            if (spec.kind, spec.layer) != (kind, layer):
                continue
            if rest and spec is not entry and spec.holds is not WHOLE:
                return ""  # the second part of the key may be a slice instead of a microbatch
            if spec is entry and (not rest or (spec.holds is WHOLE and rest[0] in bits(spec.microbatches))):
                return f"{spec} was freed on this rank, keep it under this key until its last use"
        return ""

    def require_storable(self, kind: Kind, key: Hashable, value: object) -> None:
        """Refuse to store an object that is not a live value of the store's kind."""
        if isinstance(value, Value) and value.rank is self and value.spec.kind is not kind:
            remedy = f"it belongs in rank.{value.spec.kind.value}, keep it there"
            self.refuse("wrong store", "", f"{kind.value}[{key!r}] was given {value.spec}", remedy)
        self._require_usable(value, f"{kind.value}[{key!r}]")

    def forget_key(self, value: Value) -> None:
        """Remove one of a value's keys, and free the value if that was the last key."""
        value.keys -= 1
        if not value.keys and value.alive:
            value.dropped = True
            self._free(value)

    def emit_wait(self, handle: Handle[Any]) -> None:
        """Append a handle's WAIT to the tape. The value that the communication read may then be freed."""
        handle.waited = True
        number, read = handle.number, handle.read
        del self._outstanding[number]
        self.ops.append(wait_op(number))
        if read is not None:
            reading = read.reading
            read.reading = () if len(reading) == 1 else tuple([other for other in reading if other is not handle])
            if not read.keys and handle.result is not read:
                self._done_with(read)

    def cause_of(self, refusal: Refused) -> Refused:
        """Return the error to report when an op is refused.

        If the op lacks a part of a value because the result of a collective was not used, this is a refusal of that
        collective; otherwise it is `refusal` itself.
        """
        kinds = _RESULTS.get(refusal.rule, ())
        earlier_ops = self.ops[: refusal.op] if refusal.rank == self.index else ()
        for index, op in reversed(list(enumerate(earlier_ops))):
            if op.kind not in COLLECTIVES or op.layer != refusal.layer or self._kind(op.inputs) not in kinds:
                continue
            result = self._values[op.outputs[0]] if op.outputs else None
            if not isinstance(result, Value) or not result.alive or result.keys or result.reading:
                continue
            if op.handle in self._outstanding or _has_missing_part(result.spec, refusal):
                return self._unused_refusal(index, refusal).with_traceback(refusal.__traceback__)
        return refusal

    def release(self) -> None:
        """Drop the tape and all values."""
        self.ops, self._values = [], []

    def end(self, frozen: int) -> None:
        """End the step: wait for communication in flight, and free all values but the final one of each loaded slice.

        A final value that no store keeps is freed too, and the check then refuses the program.

        Args:
            frozen: bit set of the layers whose weights are not updated.
        """
        for handle in list(self._outstanding.values()):
            if not handle.waited:
                self.emit_wait(handle)
        alive = [value for value in self._values if isinstance(value, Value) and value.alive]
        final_values: dict[Spec, Value] = {}
        for value in alive:
            spec = value.spec
            load_op = self._load_ops.get((spec.kind, spec.layer, spec.holds))
            in_loaded_place = load_op is not None and self.ops[load_op].place == spec.form.place
            final = spec.step or (spec.kind is Kind.WEIGHT and frozen >> spec.layer & 1)
            if value.keys and final and in_loaded_place:
                final_values.setdefault(spec, value)
        for value in alive:
            if final_values.get(value.spec) is not value:
                if value.spec.kind is Kind.GRAD_ACTIVATION and not value.keys and not value.reading:
                    self._free_unused(value)
                else:
                    self._free(value)
        self._count_ops()

    def _free_unused(self, value: Value) -> None:
        """Free an unused gradient: right after the op that computes it, or now if it came by communication."""
        index, op = next((index, op) for index, op in enumerate(self.ops) if value.number in op.outputs)
        self._free(value)
        if op.handle < 0:
            del self.ops[-1]
            self.ops.insert(index + 1, free_op(value.number))

    def _kind(self, numbers: Sequence[int]) -> Kind | None:
        """Return the kind of the first of some values, even if that value has ended; None if there are no values."""
        value = self._values[numbers[0]] if numbers else None
        spec = value.spec if isinstance(value, Value) else value
        return None if spec is None else spec.kind

    def _unused_refusal(self, index: int, refusal: Refused) -> Refused:
        """Return the refusal of a collective with an unused result, given the refusal of a later op that needed it."""
        op = self.ops[index]
        about, needed = op.about, f"and {refusal.about} needs the result: {refusal.given}"
        remedy = f"use its result: `x = await rank.{op.kind.value}(x)`"
        if op.handle in self._outstanding:
            cause = Refused("not awaited", about, f"an `await` is missing here, {needed}", f"wait for it, and {remedy}")
        else:
            cause = Refused("unused result", about, f"its result is dropped here, {needed}", remedy)
        cause.missing = refusal.missing
        return cause.at(self.index, index)

    def _make_all(self, specs: Sequence[Spec]) -> list[Value]:
        """Make new values, as `make` does, without a call for each."""
        values = self._values
        new_values: list[Value] = []
        for spec in specs:
            value = new_value(self, len(values), spec)
            values.append(value)
            new_values.append(value)
        if len(values) > self._next_count:
            self._count_ops()
        return new_values

    def _count_ops(self) -> None:
        ops = len(self.ops)
        try:
            self._world.count.add(ops - self._counted)
        except Refused as refusal:
            raise refusal.at(self.index, ops) from None
        self._counted, self._next_count = ops, max(len(self._values), self.handles) + VALUES_PER_COUNT

    def _read(self, value: Value, verb: str, layer: int = -1) -> Spec:
        """Return the spec of a value that an op may read now.

        Args:
            value: the argument that the program passed.
            verb, layer: the reading op, for the message. A verb without a layer, such as the loss, gives its name only.
        """
        if value.__class__ is not Value or not value.alive or value.rank is not self:
            self._require_usable(value, about_layer(verb, layer) if 0 <= layer < self.sizes.layers else verb)
        return value.spec

    def _read_all(self, values: Sequence[Value], verb: str, layer: int) -> list[Spec]:
        """Return the specs of several values, as `_read` does, without a call for each."""
        specs: list[Spec] = []
        for value in values:
            if value.__class__ is not Value or not value.alive or value.rank is not self:
                self._read(value, verb, layer)
            specs.append(value.spec)
        return specs

    def _check_layer(self, op: str, layer: int) -> None:
        if layer.__class__ is not int or layer not in self.layers:
            remedy = f"the model has layers 0-{len(self.layers) - 1}, name one of these"
            self.refuse("unknown layer", op, f"layer {argument_text(layer)} does not exist", remedy)

    def _require_usable(self, value: object, about: About | str) -> None:
        """Refuse an object that is not a usable value of this rank. A FREE after the value's last use is undone."""
        if not isinstance(value, Value) or value.rank is not self or value.dropped or value.replaced:
            self._refuse_value(value, about)
        if not value.alive:
            self._unfree(value)

    def _unfree(self, value: Value) -> None:
        """Take back the FREE that followed the last use of a value without a key."""
        free, ops = free_op(value.number), self.ops
        index = len(ops) - 1
        while ops[index] is not free and ops[index] != free:
            index -= 1
        del ops[index]
        value.alive = True
        self._values[value.number] = value
        self._batch_start -= index < self._batch_start
        for handle in self._outstanding.values():
            handle.op -= index < handle.op
        for key, op in self._load_ops.items():
            self._load_ops[key] = op - (index < op)

    def _refuse_value(self, value: object, about: About | str) -> NoReturn:
        if isinstance(value, Handle):
            issued = f"{self.ops[value.op]} (op {value.op})" if value.rank is self else "another rank's communication"
            fault = f"the handle of {issued} was given where a value is wanted"
            self.refuse("not awaited", about, fault, "await it first")
        if inspect.iscoroutine(value):
            value.close()  # or Python would warn about it
            call = f"{value.__name__}(...)"
            self.refuse("not awaited", about, f"{call} was called without `await`, so it has not run", f"await {call}")
        if not isinstance(value, Value):
            text, hint = argument_text(value), "compute on values from the stores"
            if isinstance(value, tuple):
                text, hint = "a tuple", "unpack it, as in `a, b = ...`"
            elif isinstance(value, Store):
                hint = f"name the key of one value, {text}[key]"
            elif inspect.ismethod(value):
                hint = f"write {text}(...), with parentheses"
            elif value is None:
                hint = (
                    "look for the line that made it: accumulate, send and barrier return None, gather and reduce do so "
                    "on all ranks but the root, and a function without `return` does so too"
                )
            self.refuse("no value", about, f"{text} was given where a value is wanted", hint)
        if value.rank is not self:
            fault = f"{value.spec} belongs to rank {value.rank.index}"
            self.refuse("another rank's value", about, fault, "ranks share values only by communication, send it")
        fault = f"{value.spec} is used after it was freed"
        if value.replaced:
            self.refuse(
                "replaced", about, f"{fault} (an update replaced it in place)", "use the value that it returned"
            )
        reason = "its last key in a store was deleted or overwritten"
        remedy = (
            "keep a key until the last use, or take the value out with `pop`: a variable or a list does not keep it"
        )
        self.refuse("freed", about, f"{fault} ({reason})", remedy)

    def _done_with(self, *values: Value) -> None:
        """Free those inputs of an op that no store key names and no communication reads."""
        for value in values:
            if not value.keys and value.alive and not value.reading:
                self._free(value)

    def _free(self, value: Value) -> None:
        value.alive = False
        for handle in value.reading:
            self.emit_wait(handle)
        self.ops.append(free_op(value.number))
        self._values[value.number] = value.spec

    def _end_in_place(self, value: Value) -> None:
        """End a value that an update replaces, after waiting for the communications that still read it."""
        value.alive = False  # before the waits, or the last of them would free it
        value.replaced = True
        for handle in value.reading:
            self.emit_wait(handle)

    def _issue(self, op: Op, handle: Handle[Any], read: Value | None) -> None:
        self.ops.append(op)
        self.handles = handles = self.handles + 1
        if handles > self._next_count:
            self._count_ops()
        self._outstanding[handle.number] = handle
        if read is not None:
            read.reading += (handle,)


def _has_missing_part(spec: Spec, refusal: Refused) -> bool:
    """Return whether a spec has the microbatches or slices that a refused op lacked."""
    if spec.kind is Kind.GRAD_WEIGHT and refusal.rule == "missing microbatches":
        return not mask_of(refusal.missing) & ~spec.cells
    return spec.kind is Kind.WEIGHT and spec.holds.complete
