"""State of one rank while its program is traced: its tape, and which values are alive.

`Tracer` is the base of all verbs. It frees values, so that programs need not. A value is freed when its last store key
is deleted. A value that was never stored lives until the op that uses it ends; if no op uses it, until the step ends.
If a communication still reads a value, the tape waits for it before the FREE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from shardlab.common.errors import About, Refused, Rule, about_layer
from shardlab.common.user_code import VALUES_PER_COUNT, OpCount
from shardlab.language.mesh import AXES, WORLD, Group, Mesh, group_of
from shardlab.language.ops import OpKind
from shardlab.language.rendezvous import Channels, OpenCollectives
from shardlab.language.rules.kinds import Holds, Kind
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import Spec
from shardlab.language.sizes import Sizes
from shardlab.language.tape import Op
from shardlab.language.values import Handle, Value, new_value

FREE, WAIT = OpKind.FREE, OpKind.WAIT


@lru_cache(maxsize=1 << 16)
def free_op(number: int) -> Op:
    """Return the FREE of a value. Cached, since most ops are FREE and WAIT, and ranks share those of one number."""
    return Op(FREE, -1, (number,))


@lru_cache(maxsize=1 << 16)
def wait_op(handle: int) -> Op:
    """Return the WAIT of a communication."""
    return Op(WAIT, -1, handle=handle)


class TracedWorld(Protocol):
    """Interface of the world that a rank uses while it is traced (see `world.World`).

    Attributes:
        mesh: the grid of ranks.
        sizes: the elements and bytes of every value.
        microbatches: microbatches of the global batch.
        rules: derive what every op makes of its inputs.
        count: counts the ops on all tapes, which are limited.
        collectives, channels: open communications, in which the ranks meet.
        trained: the layers of which a rank has loaded an optimizer state so far, as a bit set.
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
        self._loaded: dict[tuple[Kind, int, Holds], int] = {}  # -> index of the op
        self._outstanding: dict[int, Handle[Any]] = {}
        self._batches = 0
        self._batch = -1  # number of the open batch of messages
        self._counted = 0
        # The next count is due at this number of values or handles. It costs one comparison an op.
        self._next_count = VALUES_PER_COUNT

    def refuse(self, rule: Rule, about: About | str, given: str, remedy: str) -> NoReturn:
        """Raise `Refused` about the verb that the program calls."""
        raise Refused(rule, about, given, remedy).at(self.index, len(self.ops))

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

    def refuse_to_store(self, kind: Kind, key: Hashable, value: object) -> NoReturn:
        """Refuse to store an object that is no live value of the store's kind."""
        if isinstance(value, Value) and value.rank is self and value.spec.kind is not kind:
            remedy = f"it belongs into rank.{value.spec.kind.value}, keep it there"
            self.refuse("wrong store", "", f"{kind.value}[{key!r}] was given {value.spec}", remedy)
        self._refuse_value(value, f"{kind.value}[{key!r}]")

    def forget_key(self, value: Value) -> None:
        """Remove one of the keys that name a value, and free the value with its last key."""
        value.keys -= 1
        if not value.keys and value.alive:
            self._free(value)

    def emit_wait(self, handle: Handle[Any]) -> None:
        """Append a handle's WAIT to the tape. What the communication read may then be freed."""
        handle.waited = True
        number, read = handle.number, handle.read
        del self._outstanding[number]
        self.ops.append(wait_op(number))
        if read is not None:
            reading = read.reading
            read.reading = () if len(reading) == 1 else tuple([other for other in reading if other is not handle])
            if not read.keys and handle.result is not read:
                self._done_with(read)

    def release(self) -> None:
        """Drop the tape and all values."""
        self.ops, self._values = [], []

    def end(self, frozen: int) -> None:
        """End the step: wait for what is in flight, then free all values but one of each loaded slice.

        Args:
            frozen: the layers whose weights stay as they were loaded, as a bit set.
        """
        for handle in list(self._outstanding.values()):
            if not handle.waited:
                self.emit_wait(handle)
        kept: set[Spec] = set()
        for value in self._values:
            if isinstance(value, Value) and value.alive:
                spec = value.spec
                at = self._loaded.get((spec.kind, spec.layer, spec.holds))
                loaded = at is not None and self.ops[at].place == spec.form.place
                final = spec.step or (spec.kind is Kind.WEIGHT and frozen >> spec.layer & 1)
                if value.keys and final and loaded and spec not in kept:
                    kept.add(spec)
                else:
                    self._free(value)
        self._count_ops()

    def _make_all(self, specs: Sequence[Spec]) -> list[Value]:
        """Make new values, as `make` does, without a call for each."""
        values = self._values
        made: list[Value] = []
        for spec in specs:
            value = new_value(self, len(values), spec)
            values.append(value)
            made.append(value)
        if len(values) > self._next_count:
            self._count_ops()
        return made

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
            value: what the program gave.
            verb, layer: the reader, for a refusal; a verb without a layer, such as the loss, goes by its name alone.
        """
        if value.__class__ is not Value or not value.alive or value.rank is not self:
            self._refuse_value(value, about_layer(verb, layer) if 0 <= layer < self.sizes.layers else verb)
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
            self.refuse("unknown layer", op, f"layer {layer} does not exist", remedy)

    def _refuse_value(self, value: object, about: About | str) -> NoReturn:
        if isinstance(value, Handle):
            issued = f"{self.ops[value.op]} (op {value.op})" if value.rank is self else "another rank's communication"
            given = f"the handle of {issued} was given where a value is wanted"
            self.refuse("not awaited", about, given, "await it first")
        if not isinstance(value, Value):
            hint = "unpack it, as in `a, b = ...`" if isinstance(value, tuple) else "compute on values from the stores"
            self.refuse("no value", about, f"{value!r} was given where a value is wanted", hint)
        if value.rank is not self:
            given = f"{value.spec} belongs to rank {value.rank.index}"
            self.refuse("another rank's value", about, given, "ranks share values only by communication, send it")
        given = f"{value.spec} is used after it was freed"
        if value.replaced:
            self.refuse(
                "replaced", about, f"{given} (an update replaced it in place)", "use the value that it returned"
            )
        if not value.was_stored:
            why = "it was never stored, so it lived until the op that used it ended"
            self.refuse("never stored", about, f"{given} ({why})", "keep it in a store")
        why = "its last key was deleted, or it was popped for one use and has had it"
        self.refuse("freed", about, f"{given} ({why})", "keep its key until its last use")

    def _done_with(self, *values: Value) -> None:
        """Free the inputs of an op that no key names."""
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
        """End a value that an update replaces, after waits for all that still reads it."""
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
