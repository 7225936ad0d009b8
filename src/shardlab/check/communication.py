"""The rules of communication on tapes: who meets whom, and what each receives.

Sends are buffered here, and messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from shardlab.check.buckets import alike
from shardlab.check.rank_state import RankState
from shardlab.program import ExpectedValue, Group, Op, OpKind, Refused, Spec, rooted
from shardlab.program.matching import Communication, Matcher, Participant
from shardlab.program.mesh import group_of
from shardlab.program.ops import COLLECTIVES, POINT_TO_POINT, Stream
from shardlab.program.rooted import Call, call_of, call_text
from shardlab.program.values import Wait
from shardlab.rules import place
from shardlab.rules.pieces import counted, plural
from shardlab.rules.place import want_here

COLLECTIVE, MESSAGE, COPY = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY

_participant: Callable[[type[Participant], tuple[int, int, int]], Participant] = cast(Any, tuple).__new__
"""Makes a Participant without the call that a NamedTuple's own constructor is."""

Contribution = tuple[Participant, Spec | None, Call | None]
"""A rank's part in a communication: what it gives, and of a collective how it calls it."""


class CommunicationCheck:
    """Replays all communications of the ranks.

    Args:
        states: the ranks.
        wake: called with a rank whose awaited communication has got all its members.

    Attributes:
        communications: every communication that has come about.
        communication_of: for each rank, its handles' places in `communications`.
        half_batched: the first message with one end in an exchange and the other not; None if there is none.
        batches: whether collectives are issued together.
        rules: one an op.
    """

    def __init__(self, states: Sequence[RankState], wake: Callable[[RankState], None]) -> None:
        self.states = states
        self.communications: list[Communication] = []
        self.communication_of: list[dict[int, int]] = [{} for _ in states]
        self.half_batched: Communication | None = None
        self.batches = False
        self.rules = {
            OpKind.SEND: self._send,
            OpKind.RECV: self._recv,
            OpKind.OFFLOAD: self._offload,
            OpKind.RELOAD: self._reload,
            **dict.fromkeys(COLLECTIVES, self._collective),
        }
        self._wake = wake
        self._matcher = Matcher[Contribution]()

    def arrive(self, state: RankState, op: Op) -> None:
        """WAIT for a communication that has come about: its result may be used, what it read may be freed."""
        _, _, inputs, outputs, handle, *_ = op
        if inputs or outputs:
            remedy = "name what arrives in its communication"
            state.refuse("malformed tape", "a wait reads and makes no value", remedy)
        issued = state.flying.pop(handle, None)
        if issued is None:
            refuse_second_wait(state, op)
        source, reading = state.ops[issued], state.reading
        for number in source[2]:
            if reading[number] > 1:
                reading[number] -= 1
            else:
                del reading[number]
        spec = state.arrived[handle]
        if spec is not None:
            state.make(source[3][0], spec)

    def waiting(self, state: RankState) -> Wait:
        """Say what a blocked rank waits for."""
        op = state.ops[state.flying[state.waits_for]]
        if op[0] is OpKind.RECV:
            return Wait(str(op), [op.peer])
        assert op.group is not None
        mine = Participant(state.index, state.waits_for, state.flying[state.waits_for])
        arrived = next(each for each in self._matcher.left() if state.index in each and each[state.index][0] == mine)
        missing = [rank for rank in op.group.ranks if rank not in arrived]
        names = ", ".join(map(str, missing))
        spec = arrived[state.index][1]
        return Wait(f"{call_text(_call(op), spec)} on {op.group} for {plural('rank', len(missing))} {names}", missing)

    def finish(self) -> None:
        """Refuse a message that nobody has received.

        Raises:
            Refused: naming the first that was not.
        """
        for arrived in self._matcher.left():
            for member, spec, call in arrived.values():
                state = self.states[member.rank]
                to = state.ops[member.op].peer
                if call is None:
                    given = f"no receive on rank {to} takes this message, {spec}"
                    state.refuse("not received", given, "receive it there, or leave it out", member.op)

    def _issue(self, state: RankState, op: Op) -> Participant:
        handle, at, batch = op[4], state.at, op.batch
        if handle in state.flying or handle in state.arrived or handle < 0:
            state.refuse("number in use", f"issues handle {handle}, which must be a new one", "number handles from 0")
        if batch >= 0:
            if state.batches.get(batch, at - 1) != at - 1:
                given = f"is of batch {batch}, but other ops stand between it and the rest of its batch"
                state.refuse("batch of messages", given, "put them before or after the batch")
            if (op[0] in COLLECTIVES or batch in state.batches) and not _together(state, op):
                given = "is issued together with what is not of its kind, its group and its dtype"
                state.refuse("batch of collectives", given, "give it a batch of its own")
            state.batches[batch] = at
            self.batches |= op[0] in COLLECTIVES
        state.flying[handle] = at
        for number in op[2]:
            state.reading[number] = state.reading.get(number, 0) + 1
        return _participant(Participant, (state.index, handle, at))

    def _collective(self, state: RankState, op: Op) -> None:
        group = op.group
        if group is None or group not in state.groups:
            group = _join(state, op)
        call = _call(op)
        spec = _given(state, op, call, group)
        member = self._issue(state, op)
        queue = self._matcher[group]
        arrived = queue.next(state.index)
        if arrived:
            first, first_spec, first_call = next(iter(arrived.values()))
            assert first_call is not None
            if not rooted.agree(first_call, first_spec, call, spec):
                first_text = call_text(first_call, first_spec)
                raise rooted.disagreement(call, spec, group, first.rank, first.op, first_text)
        arrived[state.index] = (member, spec, call)
        if len(arrived) == len(group.ranks):
            parts = queue.whole()
            specs = rooted.collective(call, [gave for _, gave, _ in parts], group.ranks, state.rules)
            for (other, gave, _), received in zip(parts, specs, strict=True):
                if gave is None and received is not None:
                    self._want_expected(other, call, received)
            self._meet(Communication(COLLECTIVE, group, [part[0] for part in parts]), specs)

    def _want_expected(self, member: Participant, call: Call, received: Spec) -> None:
        """Refuse what comes from a root if the receiving rank's op expects another value."""
        expect = self.states[member.rank].ops[member.op].expect
        assert expect is not None, "it is looked at when it is issued"
        try:
            rooted.want_expected(call, expect, received)
        except Refused as refusal:
            raise refusal.at(member.rank, member.op) from None

    def _send(self, state: RankState, op: Op) -> None:
        spec, peer = state.live[op[2][0]], op.peer
        state.want_layer(op, spec[0].layer)
        want_here(op.about, spec)
        member = self._issue(state, op)
        state.arrived[op[4]] = None  # buffered: the sender never waits
        _check_peer(state, op)
        self._deliver(state.index, peer, (member, spec, None))

    def _recv(self, state: RankState, op: Op) -> None:
        peer, expect = op.peer, op.expect
        if expect is None:
            state.refuse("malformed tape", "the tape does not say which message is meant", "say what it expects")
        if expect.microbatches < 0:
            given = f"no set of microbatches is the number {expect.microbatches}"
            raise Refused("malformed tape", f"recv from rank {peer}", given, "expect a bit set")
        state.want_layer(op, expect.layer)
        member = self._issue(state, op)
        _check_peer(state, op)
        self._deliver(peer, state.index, (member, None, None))

    def _offload(self, state: RankState, op: Op) -> None:
        self._copy(state, op, place.offload(state.live[op[2][0]], op.place))

    def _reload(self, state: RankState, op: Op) -> None:
        self._copy(state, op, place.reload(state.live[op[2][0]]))

    def _copy(self, state: RankState, op: Op, made: Spec) -> None:
        """A copy on one rank, which waits for nobody."""
        state.want_layer(op, made[0].layer)
        member = self._issue(state, op)
        self._meet(Communication(COPY, None, [member]), [made])

    def _deliver(self, source: int, to: int, part: Contribution) -> None:
        """One end of a message comes; with the other one there, it is delivered."""
        rank, queue = part[0][0], self._matcher[source, to]
        arrived = queue.next(rank)
        arrived[rank] = part
        if len(arrived) < 2:
            return
        (sender, spec, _), (receiver, _, _) = queue.whole()
        sent, received = self.states[source].ops[sender.op], self.states[to].ops[receiver.op]
        expect = received.expect
        assert spec is not None
        assert expect is not None, "a recv is looked at when it is issued"
        if expect != ExpectedValue.of(spec):
            try:
                rooted.want_delivered(source, expect, spec)
            except Refused as refusal:
                raise refusal.at(to, receiver.op) from None
        communication = Communication(MESSAGE, None, [sender, receiver])
        if (sent.batch < 0) != (received.batch < 0):
            self.half_batched = self.half_batched or communication
        self._meet(communication, [None, spec])

    def _meet(self, communication: Communication, delivers: Sequence[Spec | None]) -> None:
        """A communication has all its members: note what each receives, and let those go on that wait for it."""
        number, states, communication_of = len(self.communications), self.states, self.communication_of
        self.communications.append(communication)
        for (rank, handle, _), delivered in zip(communication.participants, delivers, strict=True):
            communication_of[rank][handle] = number
            state = states[rank]
            state.arrived[handle] = delivered
            if state.waits_for == handle:
                state.waits_for = -1
                self._wake(state)


def _call(op: Op) -> Call:
    return call_of(op[0], op.root, op.reduction)


def _given(state: RankState, op: Op, call: Call, group: Group) -> Spec | None:
    """Get what this rank gives; the op must read and make what its part in the call says."""
    rooted.want_sound(call, group.ranks)
    reads, makes = rooted.values_of(call, state.index)
    if (len(op[2]), len(op[3])) != (reads, makes):
        given = f"has {counted(len(op[2]), 'input')} and {counted(len(op[3]), 'output')}"
        remedy = f"the part of rank {state.index} reads {reads} and makes {makes}, give these"
        state.refuse("malformed tape", given, remedy)
    if reads:
        spec = state.live[op[2][0]]
        state.want_layer(op, spec[0].layer)
        if spec[0].place:
            want_here(spec.about(call.kind.row.name), spec)
        return spec
    if makes:
        if op.expect is None:
            state.refuse("malformed tape", "the tape does not say what comes from the root", "say what it expects")
        state.want_layer(op, op.expect.layer)
    return None


def _join(state: RankState, op: Op) -> Group:
    """This rank's first collective on a group; equal groups are one object, so that members find one another."""
    group, ranks = op.group, state.program.ranks
    if group is None:
        state.refuse("unknown group", "no group is given for this collective", "give one")
    if (
        state.index not in group.ranks
        or len(set(group.ranks)) < len(group.ranks)
        or not all(0 <= rank < ranks for rank in group.ranks)
    ):
        remedy = f"give rank {state.index} itself and others of 0-{ranks - 1}, each once"
        state.refuse("unknown group", f"the group has the ranks {group.ranks}", remedy)
    if group is not group_of(group.axis, group.ranks):
        given = f"the group {group} was not made by group_of, so its members would not find each other"
        state.refuse("unknown group", given, "make it by group_of")
    state.groups.add(group)
    return group


def _together(state: RankState, op: Op) -> bool:
    """Whether an op may be of the batch of the one before it: messages with messages, collectives with others alike."""
    first = state.ops[state.batches.get(op.batch, state.at)]
    return alike(first, op, state.specs) if op[0] in COLLECTIVES else first[0] in POINT_TO_POINT


def _check_peer(state: RankState, op: Op) -> None:
    if op.peer == state.index or not 0 <= op.peer < state.program.ranks:
        remedy = f"the world has ranks 0-{state.program.ranks - 1}, name another of these"
        state.refuse("unknown rank", f"rank {op.peer} is none that this rank can message", remedy)


def refuse_second_wait(state: RankState, op: Op) -> NoReturn:
    """Refuse a WAIT for what is not under way."""
    state.refuse("nothing to wait for", f"handle {op.handle} is not in flight", "wait for each communication once")
