"""Communication between ranks during tracing: it matches the ranks' parts and wakes up the ranks that wait.

Each rank's k-th communication on a channel is the same communication. A rank *issues* its part, appends the op to its
tape, and then calls `OpenCollectives.complete` or `Channels.deliver`. When the last part is issued, the results get
their specs, and the ranks that wait for them resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlab.common.errors import Refused
from shardlab.common.text import plural
from shardlab.language import collective_calls
from shardlab.language.collective_calls import Call, call_text
from shardlab.language.mesh import Group
from shardlab.language.ops import OpKind
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import Space, Spec, form_of
from shardlab.language.tape import ChannelQueue, ExpectedValue, Matcher
from shardlab.language.values import Handle, TracedRank, Value, Wait

Wake = Callable[[Handle[Any]], None]

BROADCAST = OpKind.BROADCAST
IN_FLIGHT = Spec(form_of(Kind.SAVED, -1, 0, Space(0)))
"""Placeholder for the spec of a value that has not arrived yet."""


class CollectiveHandle(Handle[Value | None]):
    """Handle of one member's part in a collective."""

    __slots__ = ("arrived", "call", "group", "spec")

    def __init__(
        self, rank: TracedRank, call: Call, value: Value | None, group: Group, arrived: dict[int, CollectiveHandle]
    ) -> None:
        _, output_count = collective_calls.value_counts(call, rank.index)
        result = rank.make(IN_FLIGHT) if output_count else value if call[0] is BROADCAST else None
        self._begin(rank, result, value)
        self.call = call
        self.spec = None if value is None else value.spec
        self.group = group
        self.arrived = arrived

    def waits_for(self) -> Wait:
        missing = [rank for rank in self.group.ranks if rank not in self.arrived]
        names = ", ".join(str(rank) for rank in missing)
        return Wait(f"{self} for {plural('rank', len(missing))} {names}", missing)

    def __str__(self) -> str:
        return f"{call_text(self.call, self.spec)} on {self.group}"


class OpenCollectives:
    """Collectives of which only some members have issued their parts. The k-th parts on a group belong together."""

    def __init__(self, wake: Wake, rules: Rules) -> None:
        self._wake = wake
        self._rules = rules
        self._matcher = Matcher[CollectiveHandle]()

    def issue(self, rank: TracedRank, call: Call, value: Value | None, group: Group) -> CollectiveHandle:
        """Issue this rank's part in the group's first collective that it has not joined yet."""
        arrived = self._matcher[group].join(rank.index)
        if arrived:
            first = next(iter(arrived.values()))
            spec = None if value is None else value.spec
            if not collective_calls.calls_match(first.call, first.spec, call, spec):
                first_text = call_text(first.call, first.spec)
                refusal = collective_calls.disagreement(call, spec, group, first.rank.index, first.op, first_text)
                raise refusal.at(rank.index, len(rank.ops))
        handle = arrived[rank.index] = CollectiveHandle(rank, call, value, group, arrived)
        return handle

    def complete(self, handle: CollectiveHandle) -> None:
        """Give each member its result, if all members have arrived."""
        group = handle.group
        if len(handle.arrived) < len(group.ranks):
            return
        members = self._matcher[group].pop_complete()
        specs = [member.spec for member in members]
        try:
            results = collective_calls.collective_results(handle.call, specs, group.ranks, self._rules)
        except Refused as refusal:
            raise refusal.at(handle.rank.index, handle.op) from None
        for member, spec in zip(members, results, strict=True):
            if spec is not None:
                self._set_result(member, spec)
            self._wake(member)

    def _set_result(self, member: CollectiveHandle, spec: Spec) -> None:
        assert member.result is not None
        member.result.spec = spec
        if member.spec is None:  # the value comes from the root, so its spec is known only now
            rank = member.rank
            op, message = rank.ops[member.op], ExpectedValue.of(spec)
            if op.expect is None:
                rank.ops[member.op] = op._replace(layer=spec.layer, expect=message)
            elif op.expect != message:
                try:
                    collective_calls.require_expected_value(member.call, op.expect, spec)
                except Refused as refusal:
                    raise refusal.at(rank.index, member.op) from None


class SendHandle(Handle[None]):
    """Handle of a sent message. Tracing buffers messages, so the sender never waits."""

    __slots__ = ("queue", "spec")

    def __init__(self, rank: TracedRank, value: Value, queue: ChannelQueue[Any]) -> None:
        self._begin(rank, None, value, ready=True)
        self.spec = value.spec
        self.queue = queue


class RecvHandle(Handle[Value]):
    """Handle of a receive that waits for its message."""

    __slots__ = ("expect", "queue", "source")

    def __init__(self, rank: TracedRank, source: int, expect: ExpectedValue | None, queue: ChannelQueue[Any]) -> None:
        self._begin(rank, rank.make(IN_FLIGHT), None)
        self.source = source
        self.expect = expect
        self.queue = queue

    def waits_for(self) -> Wait:
        about = f" of {self.expect}" if self.expect else ""
        return Wait(f"recv{about} from rank {self.source}", [self.source])


class Channels:
    """Messages of which only the send or only the receive has been issued. Each channel keeps its messages in order."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._matcher = Matcher[Any]()  # parts are a SendHandle and a RecvHandle

    def post_send(self, rank: TracedRank, value: Value, to: int) -> SendHandle:
        """Issue the send of the next message from this rank to another."""
        queue, index = self._matcher[rank.index, to], rank.index
        handle = queue.join(index)[index] = SendHandle(rank, value, queue)
        return handle

    def post_recv(self, rank: TracedRank, source: int, expect: ExpectedValue | None) -> RecvHandle:
        """Issue the receive of the next message from `source` to this rank."""
        queue, index = self._matcher[source, rank.index], rank.index
        handle = queue.join(index)[index] = RecvHandle(rank, source, expect, queue)
        return handle

    def deliver(self, posted: SendHandle | RecvHandle) -> None:
        """Deliver the first message of a channel, if its send and its receive have been issued."""
        queue = posted.queue
        if not queue.open or len(queue.open[0]) < 2:
            return
        send_handle: SendHandle
        recv_handle: RecvHandle
        send_handle, recv_handle = queue.pop_complete()
        spec = send_handle.spec
        rank = recv_handle.rank
        message = ExpectedValue.of(spec)
        if recv_handle.expect is None:
            rank.ops[recv_handle.op] = rank.ops[recv_handle.op]._replace(layer=spec.layer, expect=message)
        elif recv_handle.expect != message:
            try:
                collective_calls.require_expected_message(recv_handle.source, recv_handle.expect, spec)
            except Refused as refusal:
                raise refusal.at(rank.index, recv_handle.op) from None
        recv_handle.result.spec = spec
        self._wake(recv_handle)
