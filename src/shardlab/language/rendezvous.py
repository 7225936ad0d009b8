"""Communications under way while ranks are traced: the k-th that each rank issues on a channel is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlab.common.errors import Refused
from shardlab.language import collective_calls
from shardlab.language.collective_calls import Call, call_text
from shardlab.language.mesh import Group
from shardlab.language.ops import OpKind
from shardlab.language.rules.kinds import Kind, plural
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import Space, Spec, form_of
from shardlab.language.tape import ChannelQueue, ExpectedValue, Matcher
from shardlab.language.values import Handle, TracedRank, Value, Wait

Wake = Callable[[Handle[Any]], None]

BROADCAST = OpKind.BROADCAST
IN_FLIGHT = Spec(form_of(Kind.SAVED, -1, 0, Space(0)))
"""Stands in for the spec of a value that has not arrived."""


class CollectiveHandle(Handle[Value | None]):
    """A member's part in a collective."""

    __slots__ = ("arrived", "call", "group", "spec")

    def __init__(
        self, rank: TracedRank, call: Call, value: Value | None, group: Group, arrived: dict[int, CollectiveHandle]
    ) -> None:
        _, made = collective_calls.values_of(call, rank.index)
        result = rank.make(IN_FLIGHT) if made else value if call[0] is BROADCAST else None
        self._begin(rank, result, value)
        self.call = call
        self.spec = None if value is None else value.spec
        self.group = group
        self.arrived = arrived

    def wait(self) -> Wait:
        missing = [rank for rank in self.group.ranks if rank not in self.arrived]
        names = ", ".join(str(rank) for rank in missing)
        return Wait(f"{self} for {plural('rank', len(missing))} {names}", missing)

    def __str__(self) -> str:
        return f"{call_text(self.call, self.spec)} on {self.group}"


class OpenCollectives:
    """Collectives under way: the k-th that each member of a group issues on it is one."""

    def __init__(self, wake: Wake, rules: Rules) -> None:
        self._wake = wake
        self._rules = rules
        self._matcher = Matcher[CollectiveHandle]()

    def issue(self, rank: TracedRank, call: Call, value: Value | None, group: Group) -> CollectiveHandle:
        """Issue this rank's part in the group's next collective that it has not joined yet."""
        arrived = self._matcher[group].next(rank.index)
        if arrived:
            first = next(iter(arrived.values()))
            spec = None if value is None else value.spec
            if not collective_calls.agree(first.call, first.spec, call, spec):
                first_text = call_text(first.call, first.spec)
                refusal = collective_calls.disagreement(call, spec, group, first.rank.index, first.op, first_text)
                raise refusal.at(rank.index, len(rank.ops))
        handle = arrived[rank.index] = CollectiveHandle(rank, call, value, group, arrived)
        return handle

    def meet(self, handle: CollectiveHandle) -> None:
        """Give each member its result, if all have come."""
        group = handle.group
        if len(handle.arrived) < len(group.ranks):
            return
        members = self._matcher[group].whole()
        specs = [member.spec for member in members]
        try:
            results = collective_calls.collective(handle.call, specs, group.ranks, self._rules)
        except Refused as refusal:
            raise refusal.at(handle.rank.index, handle.op) from None
        for member, spec in zip(members, results, strict=True):
            if spec is not None:
                self._arrives(member, spec)
            self._wake(member)

    def _arrives(self, member: CollectiveHandle, spec: Spec) -> None:
        assert member.result is not None
        member.result.spec = spec
        if member.spec is None:  # it comes from the root alone, so only now is known what it is
            rank = member.rank
            op, message = rank.ops[member.op], ExpectedValue.of(spec)
            if op.expect is None:
                rank.ops[member.op] = op._replace(layer=spec.layer, expect=message)
            elif op.expect != message:
                try:
                    collective_calls.want_expected(member.call, op.expect, spec)
                except Refused as refusal:
                    raise refusal.at(rank.index, member.op) from None


class SendHandle(Handle[None]):
    """A message on its way; while tracing it is buffered, so the sender never waits."""

    __slots__ = ("queue", "spec")

    def __init__(self, rank: TracedRank, value: Value, queue: ChannelQueue[Any]) -> None:
        self._begin(rank, None, value, ready=True)
        self.spec = value.spec
        self.queue = queue


class RecvHandle(Handle[Value]):
    """A receive that waits for its message."""

    __slots__ = ("expect", "queue", "source")

    def __init__(self, rank: TracedRank, source: int, expect: ExpectedValue | None, queue: ChannelQueue[Any]) -> None:
        self._begin(rank, rank.make(IN_FLIGHT), None)
        self.source = source
        self.expect = expect
        self.queue = queue

    def wait(self) -> Wait:
        about = f" of {self.expect}" if self.expect else ""
        return Wait(f"recv{about} from rank {self.source}", [self.source])


class Channels:
    """Messages from one rank to another arrive in the order in which they were sent."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._matcher = Matcher[Any]()  # of a send and a receive

    def post_send(self, rank: TracedRank, value: Value, to: int) -> SendHandle:
        queue, index = self._matcher[rank.index, to], rank.index
        handle = queue.next(index)[index] = SendHandle(rank, value, queue)
        return handle

    def post_recv(self, rank: TracedRank, source: int, expect: ExpectedValue | None) -> RecvHandle:
        queue, index = self._matcher[source, rank.index], rank.index
        handle = queue.next(index)[index] = RecvHandle(rank, source, expect, queue)
        return handle

    def deliver(self, posted: SendHandle | RecvHandle) -> None:
        """Hand a message over, once both ends have come."""
        queue = posted.queue
        if not queue.open or len(queue.open[0]) < 2:
            return
        sent: SendHandle
        handle: RecvHandle
        sent, handle = queue.whole()
        spec = sent.spec
        rank = handle.rank
        message = ExpectedValue.of(spec)
        if handle.expect is None:
            rank.ops[handle.op] = rank.ops[handle.op]._replace(layer=spec.layer, expect=message)
        elif handle.expect != message:
            try:
                collective_calls.want_delivered(handle.source, handle.expect, spec)
            except Refused as refusal:
                raise refusal.at(rank.index, handle.op) from None
        handle.result.spec = spec
        self._wake(handle)
