"""Messages between two ranks: each starts at once and returns a handle; await it for the result."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from shardlab.errors import Refused, of_layer
from shardlab.program.communications import RecvHandle, SendHandle
from shardlab.program.ops import COMMUNICATION, OpKind
from shardlab.program.tape import ExpectedValue, communication_op
from shardlab.program.tracing import RankContext
from shardlab.program.values import Handle, Value
from shardlab.rules.kind import AUTOGRAD_KINDS, Kind
from shardlab.rules.pieces import mask_of
from shardlab.rules.place import want_here
from shardlab.rules.spec import Spec

STORES = {kind.value: kind for kind in Kind if kind not in AUTOGRAD_KINDS}
"""Every kind of value that a program can hold, by the name of its store."""

Expected = tuple[str, int, "int | Iterable[int] | None"]
"""The message that a receive means: (store's name, layer, microbatch or microbatches)."""

SEND, RECV = OpKind.SEND, OpKind.RECV
_APART = COMMUNICATION | {OpKind.WAIT}
"""Ops that wait for others, which may wait for the messages of a batch that is open."""


class MessageVerbs(RankContext):
    """Messages between two ranks.

    Each verb issues one, or two, and returns a handle; `await` it for the result. What it reads may not be updated
    before that.

    Every verb raises `Refused`, with the rank, the op and the line, for a value that was freed, that belongs to another
    rank or that is still a handle.
    """

    def send(self, value: Value, *, to: int) -> Handle[None]:
        """Send a value to another rank.

        On NCCL and gloo awaiting the handle waits for the peer's receive; among ranks that share memory, and in unit
        costs, a send ends by itself.

        Args:
            to: the receiver's number.

        Raises:
            Refused: for a rank that does not exist, and for this rank itself.
        """
        handle = self._send("send", value, to, self._batch)
        self._world.channels.deliver(handle)
        return handle

    def recv(self, *, source: int, expect: Expected | None = None) -> Handle[Value]:
        """Receive the next value that `source` sends here. Messages between two ranks keep their order.

        Args:
            source: the sender's number.
            expect: the message that is meant, as (store's name, layer, microbatch or microbatches).

        Raises:
            Refused: for a rank that does not exist, for this rank itself, and when another message comes than the
                expected one.
        """
        handle = self._recv(source, expect, self._batch)
        self._world.channels.deliver(handle)
        return handle

    @contextmanager
    def batch_p2p(self) -> Generator[None, None, None]:
        """Issue the sends and receives of a `with` block together, as one group: none must come before another.

        This is NCCL's group call, and torch's `batch_isend_irecv`: all are issued when the block ends, after what else
        is done in it. Awaiting one of the handles, after the block, waits for all of them.
        """
        if self._batch >= 0:
            self.refuse("batch of messages", "batch_p2p", "a batch of messages is open already", "end its block first")
        start, first = len(self.ops), self.handles
        self._batch, self._batches = self._batches, self._batches + 1
        try:
            yield
        finally:
            batch, self._batch = self._batch, -1
        done = self.ops[start:]
        stray = next((op for op in done if op.batch != batch and op.kind in _APART), None)
        if stray is not None:
            given = f"{stray} stands in a batch of messages, which are issued when its block ends"
            self.refuse("batch of messages", "batch_p2p", given, "put it before or after the block")
        messages = [op for op in done if op.batch == batch]
        self.ops[start:] = [*(op for op in done if op.batch != batch), *messages]
        issued = [self._outstanding[number] for number in range(first, self.handles)]
        for handle, at in zip(issued, range(len(self.ops) - len(messages), len(self.ops)), strict=True):
            handle.op = at
            handle.others = tuple([other for other in issued if other is not handle])

    def exchange(self, value: Value, *, to: int, source: int, expect: Expected | None = None) -> Handle[Value]:
        """Send to one rank and receive from one, issued together so that neither must come first.

        Awaiting the handle waits for both, and gives the value received.

        Args:
            to, source, expect: as in `send` and `recv`.

        Raises:
            Refused: as `send` and `recv` do.
        """
        if self._batch >= 0:
            remedy = "send and receive in it, or end its block first"
            self.refuse("batch of messages", "exchange", "a batch of messages is open", remedy)
        self._batches += 1
        sent = self._send("exchange", value, to, self._batches - 1)
        received = self._recv(source, expect, self._batches - 1)
        received.others = (sent,)
        self._world.channels.deliver(sent)
        self._world.channels.deliver(received)
        return received

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
            self.refuse("unknown microbatch", of_layer(op, layer), f"microbatches {numbers} were expected", remedy)
        return ExpectedValue(kind, layer, mask)

    def _check_peer(self, op: str, peer: int) -> None:
        if not isinstance(peer, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' programs are not checked
            self.refuse("unknown rank", f"{op} {peer!r}", "this is no rank", "a rank is named by its number, give that")
        if peer == self.index or not 0 <= peer < self.world:
            why = "that is this rank itself" if peer == self.index else "it does not exist"
            remedy = f"the world has ranks 0-{self.world - 1}, name another of these"
            self.refuse("unknown rank", f"{op} rank {peer}", why, remedy)

    def _refuse_elsewhere(self, verb: str, spec: Spec) -> None:
        """Refuse to communicate what is not on the device."""
        try:
            want_here(spec.about(verb), spec)
        except Refused as refusal:
            raise refusal.at(self.index, len(self.ops)) from None
