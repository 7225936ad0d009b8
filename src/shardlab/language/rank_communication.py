"""Verbs that communicate: messages and collectives. Each starts at once and returns a handle to `await`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shardlab.common.errors import Refused, about_layer
from shardlab.language import collective_calls
from shardlab.language.collective_calls import Call, call_of
from shardlab.language.mesh import Group, group_among, group_of
from shardlab.language.ops import COLLECTIVES, COMMUNICATION, ROOTED, OpKind
from shardlab.language.rendezvous import RecvHandle, SendHandle
from shardlab.language.rules.kinds import AUTOGRAD_KINDS, Kind, Reduction, mask_of
from shardlab.language.rules.refusals import require_on_device
from shardlab.language.rules.spec import Spec
from shardlab.language.tape import ExpectedValue, communication_op
from shardlab.language.tracing import Tracer
from shardlab.language.values import Handle, Value

STORES = {kind.value: kind for kind in Kind if kind not in AUTOGRAD_KINDS}
"""Kinds of values that a program can hold, by the name of their store."""

Expected = tuple[str, int, "int | Iterable[int] | None"]
"""The message that a receive expects: (store's name, layer, microbatches); the third is a number, several numbers, or
None."""

SEND, RECV = OpKind.SEND, OpKind.RECV
_OUTSIDE_BATCHES = COMMUNICATION | {OpKind.WAIT}
"""Ops that are refused in a batch of messages: other ranks may need the batch before they join such an op."""

By = Literal["sum", "mean", "min", "max"]
"""How a reduction combines the members' values.

Gradients and partial results are summed, each contribution once. `mean`, `min` and `max` take weights or gradients that
are equal on all members, and return that value. Gradients are shares of the step's mean already, so a mean of different
gradients is only a fraction of the step's mean, which `update` does not accept (see `scale`). Scalars take all four
reductions, but `update` takes only their sum as a norm.
"""

_ALL_REDUCE, _BARRIER = OpKind.ALL_REDUCE, call_of(OpKind.BARRIER)
_ALL_GATHER, _REDUCE_SCATTER = call_of(OpKind.ALL_GATHER), call_of(OpKind.REDUCE_SCATTER)
_ALL_TO_ALL = call_of(OpKind.ALL_TO_ALL)
_REDUCTIONS = {reduction.value: reduction for reduction in Reduction}
_MAY_GIVE_NONE = frozenset(kind for kind in COLLECTIVES if 0 in kind.row.inputs)


class CommunicationVerbs(Tracer):
    """Verbs that send and receive messages between two ranks, and collectives over an axis of the mesh.

    Each verb issues one communication, or two, and returns a handle; `await` it for the result. The input must not be
    updated before its handle has been awaited. All members of a group must issue its collectives in the same order.

    Every verb raises `Refused`, with the rank, the op and the line, for a value that was freed, that belongs to another
    rank or that is still a handle, and for an axis that the mesh does not have. Values of different members are
    compared when the last member has issued its part.
    """

    def send(self, value: Value, *, to: int) -> Handle[None]:
        """Send a value to another rank.

        On NCCL and gloo awaiting the handle waits for the peer's receive. Among ranks that share memory, and in a
        simulation without a cluster, a send completes without the receive.

        Args:
            to: the receiver's number.

        Raises:
            Refused: for a rank that does not exist, and for this rank itself.
        """
        handle = self._send("send", value, to, self._batch)
        self._world.channels.deliver(handle)
        return handle

    def recv(self, *, source: int, expect: Expected | None = None) -> Handle[Value]:
        """Receive the next value that `source` sends to this rank. Messages between two ranks keep their order.

        Args:
            source: the sender's number.
            expect: the expected message, as (store's name, layer, microbatch or microbatches).

        Raises:
            Refused: for a rank that does not exist, for this rank itself, and when the message is not the expected one.
        """
        handle = self._recv(source, expect, self._batch)
        self._world.channels.deliver(handle)
        return handle

    def exchange(self, value: Value, *, to: int, source: int, expect: Expected | None = None) -> Handle[Value]:
        """Send to one rank and receive from the same or another one. Both are issued together, so their order does
        not matter.

        Awaiting the handle waits for both, and returns the received value.

        Args:
            to, source, expect: as in `send` and `recv`.

        Raises:
            Refused: as `send` and `recv` do.
        """
        if self._batch >= 0:
            remedy = "send and receive in it, or end its block first"
            self.refuse("batch of messages", "exchange", "a batch of messages is open", remedy)
        self._batches += 1
        send_handle = self._send("exchange", value, to, self._batches - 1)
        recv_handle = self._recv(source, expect, self._batches - 1)
        recv_handle.others = (send_handle,)
        self._world.channels.deliver(send_handle)
        self._world.channels.deliver(recv_handle)
        return recv_handle

    @contextmanager
    def batch_p2p(self) -> Generator[None, None, None]:
        """Issue the sends and receives of a `with` block together, as one group, so that their order does not matter.

        This is NCCL's group call, and torch's `batch_isend_irecv`. All messages are issued at the end of the block,
        after the other ops in it. Awaiting one of the handles, after the block, waits for all of them.
        """
        if self._batch >= 0:
            self.refuse("batch of messages", "batch_p2p", "a batch of messages is open already", "end its block first")
        self._batch_start, first_handle = len(self.ops), self.handles
        self._batch, self._batches = self._batches, self._batches + 1
        try:
            yield
        finally:
            batch, self._batch = self._batch, -1
        start = self._batch_start
        block_ops = self.ops[start:]
        stray = next((op for op in block_ops if op.batch != batch and op.kind in _OUTSIDE_BATCHES), None)
        if stray is not None:
            fault = f"{stray} is in a batch of messages, which are issued at the end of its block"
            self.refuse("batch of messages", "batch_p2p", fault, "put it before or after the block")
        messages = [op for op in block_ops if op.batch == batch]
        self.ops[start:] = [*(op for op in block_ops if op.batch != batch), *messages]
        handles = [self._outstanding[number] for number in range(first_handle, self.handles)]
        for handle, index in zip(handles, range(len(self.ops) - len(messages), len(self.ops)), strict=True):
            handle.op = index
            handle.others = tuple([other for other in handles if other is not handle])

    def all_reduce(
        self,
        value: Value,
        *,
        axis: str | None = None,
        among: Sequence[int] | None = None,
        reduction: By = "sum",
    ) -> Handle[Value]:
        """Sum the members' values; every member receives the sum.

        Args:
            value: a gradient, a term of an activation, or a scalar.
            axis: the mesh axis along which the members lie (None: all ranks).
            among: global numbers of the member ranks. All must lie in this rank's group along `axis` (None: the whole
                group). Every member must pass the same numbers in the same order.
            reduction: how the values are combined (see `By`).

        Raises:
            Refused: when a contribution would be counted twice, when the members hold different slices, for the minimum
                or maximum of gradients that differ, and for weights that differ or are to be summed.
        """
        call = call_of(_ALL_REDUCE, -1, self._reduction("all_reduce", reduction))
        return self._collective(call, value, self._members("all_reduce", axis, among))

    def all_gather(self, value: Value, *, axis: str | None = None, among: Sequence[int] | None = None) -> Handle[Value]:
        """Concatenate the members' pieces; every member receives the whole.

        Args:
            value: a slice of parameters, some microbatches, or some slices of an index.
            axis, among: as in `all_reduce`.

        Raises:
            Refused: when two members hold the same piece, for pieces of different values, and for a term of a sum.
        """
        return self._collective(_ALL_GATHER, value, self._members("all_gather", axis, among))

    def reduce_scatter(
        self, value: Value, *, axis: str | None = None, among: Sequence[int] | None = None
    ) -> Handle[Value]:
        """Sum the members' values; the group's i-th member receives slice i of the sum.

        Args:
            value: a weight's gradient, or a term of an activation.
            axis, among: as in `all_reduce`.

        Raises:
            Refused: as `all_reduce` does, and when the sum does not divide among the members.
        """
        return self._collective(_REDUCE_SCATTER, value, self._members("reduce_scatter", axis, among))

    def all_to_all(self, value: Value, *, axis: str | None = None, among: Sequence[int] | None = None) -> Handle[Value]:
        """Exchange the members' pieces: each member sends a part of its value to every other member.

        The direction follows from the value. A buffer of all experts for this rank's microbatches becomes a buffer of
        this rank's experts for all members' microbatches. A buffer of some experts becomes a buffer of all experts for
        a part of the microbatches. These are the microbatches that this rank passed to the exchange before. If there
        was none, the group's i-th member gets the i-th of equal runs of microbatches. Slices of sequences and attention
        heads are exchanged in the same way.

        Args:
            value: an activation or its gradient.
            axis, among: as in `all_reduce`.

        Raises:
            Refused: when the pieces do not divide among the members, or do not belong together.
        """
        return self._collective(_ALL_TO_ALL, value, self._members("all_to_all", axis, among))

    def broadcast(
        self, value: Value | None, *, root: int, axis: str | None = None, expect: Expected | None = None
    ) -> Handle[Value]:
        """Send the root's value to every member.

        Args:
            value: on the root, the value to send, which its handle returns unchanged; None on the others.
            root: number of the sending rank, a member of the group.
            axis: the mesh axis along which the members lie (None: all ranks).
            expect: on the other ranks, the expected value, as in `recv`.

        Raises:
            Refused: for a root that is not a member, for a missing value on the root, for a value on another member,
                and when the value is not the expected one.
        """
        return self._from_root(Call(OpKind.BROADCAST, root), value, axis, expect)

    def scatter(
        self, value: Value | None, *, root: int, axis: str | None = None, expect: Expected | None = None
    ) -> Handle[Value]:
        """Cut the root's value: the group's i-th member receives slice i of parameters, or run i of microbatches.

        Args:
            value: on the root, the value to cut; None on the others.
            root, axis: as in `broadcast`.
            expect: on the other ranks, the expected slice, as in `recv`.

        Raises:
            Refused: as `broadcast` does, and when the value does not divide among the members.
        """
        return self._from_root(Call(OpKind.SCATTER, root), value, axis, expect)

    def gather(self, value: Value, *, root: int, axis: str | None = None) -> Handle[Value | None]:
        """Concatenate the members' pieces; the root receives the whole, the others None.

        Raises:
            Refused: for a root that is not a member, and as `all_gather` does.
        """
        return self._collective(Call(OpKind.GATHER, root), value, self.group(axis))

    def reduce(
        self, value: Value, *, root: int, axis: str | None = None, reduction: By = "sum"
    ) -> Handle[Value | None]:
        """Sum the members' values, or combine them otherwise (see `By`); the root receives the result, the others None.

        Raises:
            Refused: for a root that is not a member, and as `all_reduce` does.
        """
        call = Call(OpKind.REDUCE, root, self._reduction("reduce", reduction))
        return self._collective(call, value, self.group(axis))

    def barrier(self, *, axis: str | None = None) -> Handle[None]:
        """Synchronize the members: awaiting the handle waits until all have called `barrier`. No value is moved."""
        return self._collective(_BARRIER, None, self.group(axis))

    def _send(self, verb: str, value: Value, to: int, batch: int) -> SendHandle:
        spec = self._read(value, verb)
        if spec[0].place:
            self._refuse_elsewhere(verb, spec)
        self._check_peer("send to", to)
        handle = self._world.channels.post_send(self, value, to)
        op = communication_op(SEND, spec[0].layer, (value.number,), (), handle.number, None, to, None, batch)
        self._issue(op, handle, value)
        return handle

    def _recv(self, source: int, expect: Expected | None, batch: int) -> RecvHandle:
        self._check_peer("recv from", source)
        message = None if expect is None else self._message("recv", expect)
        handle = self._world.channels.post_recv(self, source, message)
        number = handle.result.number
        layer = -1 if message is None else message.layer
        op = communication_op(RECV, layer, (), (number,), handle.number, None, source, message, batch)
        self._issue(op, handle, None)
        return handle

    def _message(self, op: str, expect: Expected) -> ExpectedValue:
        """Check an `expect` argument, and convert it to an `ExpectedValue`."""
        if not isinstance(expect, tuple) or len(expect) != 3:  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "write (store's name, layer, microbatch or microbatches)"
            self.refuse("wrong expectation", op, f"{expect!r} was expected", remedy)
        name, layer, microbatches = expect
        kind = STORES.get(name)
        if kind is None:
            remedy = f"expect one of {', '.join(STORES)}"
            self.refuse("wrong expectation", op, f"{name!r} is not a store", remedy)
        total = len(self.microbatches)
        if microbatches.__class__ is int and 0 <= microbatches < total:  # pyright: ignore[reportOperatorIssue]
            return ExpectedValue(kind, layer, 1 << microbatches)  # pyright: ignore[reportOperatorIssue]
        numbers = [microbatches] if isinstance(microbatches, int) else list(microbatches or ())
        try:
            mask = mask_of(numbers)
        except ValueError:  # a negative number
            mask = -1
        if not 0 <= mask < 1 << total:
            remedy = f"the step has 0-{total - 1}, expect some of these"
            self.refuse("unknown microbatch", about_layer(op, layer), f"microbatches {numbers} were expected", remedy)
        return ExpectedValue(kind, layer, mask)

    def _check_peer(self, op: str, peer: int) -> None:
        if not isinstance(peer, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' programs are not checked
            self.refuse("unknown rank", f"{op} {peer!r}", "this is no rank", "a rank is named by its number, give that")
        if peer == self.index or not 0 <= peer < self.world:
            fault = "that is this rank itself" if peer == self.index else "it does not exist"
            remedy = f"the world has ranks 0-{self.world - 1}, name another of these"
            self.refuse("unknown rank", f"{op} rank {peer}", fault, remedy)

    def _collective(
        self, call: Call, value: Value | None, group: Group, expect: ExpectedValue | None = None
    ) -> Handle[Any]:
        kind, root, reduction = call
        spec = None
        if value is not None or kind not in _MAY_GIVE_NONE:
            spec = self._read(value, kind.row.name)  # pyright: ignore[reportArgumentType]  # None is refused there
            if spec[0].place:
                self._refuse_elsewhere(kind.row.name, spec)
        if kind in ROOTED:
            try:
                collective_calls.require_valid_call(call, group.ranks)
            except Refused as refusal:
                raise refusal.at(self.index, len(self.ops)) from None
        collectives = self._world.collectives
        handle = collectives.issue(self, call, value, group)
        result = handle.result
        inputs = () if value is None else (value.number,)
        outputs = () if result is None or result is value else (result.number,)
        layer = spec[0].layer if spec is not None else -1 if expect is None else expect.layer
        op = communication_op(kind, layer, inputs, outputs, handle.number, group, -1, expect, -1, root, reduction)
        self._issue(op, handle, value)
        collectives.complete(handle)
        return handle

    def _from_root(self, call: Call, value: Value | None, axis: str | None, expect: Expected | None) -> Handle[Value]:
        group, is_root = self.group(axis), call.root == self.index
        if is_root and value is None:
            remedy = "give one, the root's is what the others get"
            self.refuse("wrong root", str(call), "no value was given", remedy)
        if not is_root and value is not None:
            fault = f"rank {self.index} gives a value, but only the root does"
            self.refuse("wrong root", str(call), fault, "give None on the others")
        message = None if expect is None or is_root else self._message(call.kind.value, expect)
        return self._collective(call, value, group, message)

    def _reduction(self, op: str, by: str) -> Reduction:
        reduction = _REDUCTIONS.get(by)
        if reduction is None:
            remedy = f"give one of {', '.join(_REDUCTIONS)}"
            self.refuse("no reduction", op, f"there is no reduction {by!r}", remedy)
        return reduction

    def _members(self, op: str, axis: str | None, ranks: Sequence[int] | None) -> Group:
        """Return the group along an axis, or the group of some of its ranks."""
        group = self.group(axis)
        if ranks is None:
            return group
        try:
            members = tuple(ranks)
        except TypeError:
            members = ()
        if not set(members) <= set(group.ranks) or self.index not in members or len(set(members)) < len(members):
            others = f"0-{self.world - 1}" if axis is None else f"{', '.join(map(str, group.ranks))}, along {axis}"
            remedy = f"name rank {self.index} itself and others of {others}, each once"
            self.refuse("unknown group", op, f"among={ranks!r} was given", remedy)
        return group_among(members) if axis is None else group_of(axis, members)

    def _refuse_elsewhere(self, verb: str, spec: Spec) -> None:
        """Refuse to communicate a value that is not on the device."""
        try:
            require_on_device(spec.about(verb), spec)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
