"""The verbs that communicate: each starts at once and returns a handle; await it for the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardlab.program.handle import Handle
from shardlab.program.mesh import Group, group_among
from shardlab.program.place import Place
from shardlab.program.tape import Message, Op, OpKind
from shardlab.program.value import Value
from shardlab.program.values import AUTOGRAD_KINDS, Kind, mask_of

STORES = {kind.value: kind for kind in Kind if kind not in AUTOGRAD_KINDS}
"""The kinds of value that a program can hold, by the name of the store."""

Expected = tuple[str, int, "int | Iterable[int] | None"]
"""(store's name, layer, microbatch or microbatches): the message that a receive means."""


class CommunicationVerbs(Place):
    """Collectives over an axis of the mesh, and messages between two ranks."""

    def all_reduce(self, value: Value, *, axis: str | None = None, among: Sequence[int] | None = None) -> Handle[Value]:
        """The sum of the members' gradients, on every member.

        Args:
            axis: along which the members lie (None: all ranks).
            among: instead of an axis, the members' numbers; all of them name the same ones in the same order.
        """
        return self._collective(OpKind.ALL_REDUCE, value, axis, among)

    def all_gather(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """The members' pieces side by side, on every member."""
        return self._collective(OpKind.ALL_GATHER, value, axis)

    def reduce_scatter(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """The sum of the members' gradients, slice i of it on the group's i-th member."""
        return self._collective(OpKind.REDUCE_SCATTER, value, axis)

    def all_to_all(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        """From every expert's buffers of a rank's microbatches to its own experts' of all members', or back again.

        Which way follows from the value: complete buffers are dispatched, those of some experts are returned, in the
        group's order of microbatches.
        """
        return self._collective(OpKind.ALL_TO_ALL, value, axis)

    def _collective(
        self, kind: OpKind, value: Value, axis: str | None, among: Sequence[int] | None = None
    ) -> Handle[Value]:
        spec = self._read(value)
        group = self.group(axis) if among is None else self._among(kind.value, axis, among)
        handle = self._world.collectives.issue(self, kind, value, group)
        result = handle.result
        op = Op(kind, spec.layer, (value.number,), (result.number,), handle.number, group)
        self._issue(op, handle, value)
        self._world.collectives.meet(handle)
        return handle

    def _among(self, op: str, axis: str | None, ranks: Sequence[int]) -> Group:
        """The group of the ranks named."""
        if axis is not None:
            self.refuse(f"{op}: both axis {axis!r} and among={ranks!r} were given; give one of them.")
        try:
            named = tuple(ranks)
        except TypeError:
            named = ()
        if not set(named) <= set(range(self.world)) or self.index not in named or len(set(named)) < len(named):
            self.refuse(
                f"{op}: among={ranks!r} was given; name rank {self.index} itself and others of 0-{self.world - 1}, "
                "each once."
            )
        return group_among(named)

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

    def _check_peer(self, op: str, peer: int) -> None:
        if not isinstance(peer, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' programs are not checked
            self.refuse(f"{op} {peer!r}: a rank is named by its number.")
        if peer == self.index or not 0 <= peer < self.world:
            why = "that is this rank itself" if peer == self.index else f"the world has ranks 0-{self.world - 1}"
            self.refuse(f"{op} rank {peer}: {why}.")
