"""Communication in the replay of `dataflow`: the members of each communication, their results, and the state of a rank.

`CommunicationCheck` matches the collectives and messages of all ranks. Sends are buffered, and messages between two
ranks arrive in the order in which they were sent. `RankState`, at the end, has the values and the communications in
flight of one rank, and refuses its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from shardlab.check.buffers import may_share_batch
from shardlab.common.errors import Rule
from shardlab.common.text import counted, plural
from shardlab.language import ExpectedValue, Group, Holds, Kind, Op, OpKind, Program, Refused, Spec, collective_calls
from shardlab.language.collective_calls import Call, call_of, call_text
from shardlab.language.mesh import group_of
from shardlab.language.ops import COLLECTIVES, POINT_TO_POINT, Stream
from shardlab.language.rules import refusals
from shardlab.language.rules.kinds import AUTOGRAD_KINDS
from shardlab.language.rules.layer_rules import LayerRules
from shardlab.language.rules.refusals import require_on_device
from shardlab.language.rules.spec import Form
from shardlab.language.tape import Communication, Matcher, Participant
from shardlab.language.values import Wait

COLLECTIVE, MESSAGE, COPY = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY

_participant: Callable[[type[Participant], tuple[int, int, int]], Participant] = cast(Any, tuple).__new__
"""Constructor of a Participant without the Python call of a NamedTuple's own constructor."""

Contribution = tuple[Participant, Spec | None, Call | None]
"""A rank's part in a communication: its handle and op, the spec of its input (None: it has none), and the call of a
collective (None for a message)."""


class CommunicationCheck:
    """Replay of the communications of all ranks.

    Args:
        states: the ranks.
        wake: callback for a rank when all members of the communication for which it waits have arrived.

    Attributes:
        communications: every communication whose members have all arrived.
        communication_of: for each rank, a map from handle to the index in `communications`.
        half_batched: the first message of which one end is in an exchange and the other is a single call; None if there
            is none.
        batches: whether any rank issues collectives together, as a batch.
        rules: for each kind of communication op, the method that replays it.
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
        """Replay the WAIT for a complete communication: its result becomes live, and its input may be freed."""
        _, _, inputs, outputs, handle, *_ = op
        if inputs or outputs:
            remedy = "number the received value in its communication"
            state.refuse("malformed tape", "a wait reads and makes no value", remedy)
        issue_op = state.in_flight.pop(handle, None)
        if issue_op is None:
            refuse_second_wait(state, op)
        source, reading = state.ops[issue_op], state.reading
        for number in source[2]:
            if reading[number] > 1:
                reading[number] -= 1
            else:
                del reading[number]
        spec = state.arrived[handle]
        if spec is not None:
            state.make(source[3][0], spec)

    def find_wait(self, state: RankState) -> Wait:
        """Return the communication that a blocked rank waits for, and its missing members."""
        op = state.ops[state.in_flight[state.waits_for]]
        if op[0] is OpKind.RECV:
            return Wait(str(op), [op.peer])
        assert op.group is not None
        part = Participant(state.index, state.waits_for, state.in_flight[state.waits_for])
        arrived = next(
            parts for parts in self._matcher.incomplete() if state.index in parts and parts[state.index][0] == part
        )
        missing = [rank for rank in op.group.ranks if rank not in arrived]
        names = ", ".join(map(str, missing))
        spec = arrived[state.index][1]
        return Wait(f"{call_text(_call(op), spec)} on {op.group} for {plural('rank', len(missing))} {names}", missing)

    def finish(self) -> None:
        """Refuse a message that no rank has received.

        Raises:
            Refused: for the first such message.
        """
        for arrived in self._matcher.incomplete():
            for member, spec, call in arrived.values():
                state = self.states[member.rank]
                to = state.ops[member.op].peer
                if call is None:
                    fault = f"no receive on rank {to} takes this message, {spec}"
                    state.refuse("not received", fault, "receive it there, or leave it out", member.op)

    def _issue(self, state: RankState, op: Op) -> Participant:
        handle, index, batch = op[4], state.at, op.batch
        if handle in state.in_flight or handle in state.arrived or handle < 0:
            state.refuse("number in use", f"issues handle {handle}, which must be a new one", "number handles from 0")
        if batch >= 0:
            if state.batches.get(batch, index - 1) != index - 1:
                fault = f"is of batch {batch}, but other ops stand between it and the rest of its batch"
                state.refuse("batch of messages", fault, "put them before or after the batch")
            if (op[0] in COLLECTIVES or batch in state.batches) and not _together(state, op):
                fault = "is issued together with ops of another kind, group or dtype"
                state.refuse("batch of collectives", fault, "give it a batch of its own")
            state.batches[batch] = index
            self.batches |= op[0] in COLLECTIVES
        state.in_flight[handle] = index
        for number in op[2]:
            state.reading[number] = state.reading.get(number, 0) + 1
        return _participant(Participant, (state.index, handle, index))

    def _collective(self, state: RankState, op: Op) -> None:
        group = op.group
        if group is None or group not in state.groups:
            group = _join(state, op)
        call = _call(op)
        spec = _input_spec(state, op, call, group)
        member = self._issue(state, op)
        queue = self._matcher[group]
        arrived = queue.join(state.index)
        if arrived:
            first, first_spec, first_call = next(iter(arrived.values()))
            assert first_call is not None
            if not collective_calls.calls_match(first_call, first_spec, call, spec):
                first_text = call_text(first_call, first_spec)
                raise collective_calls.disagreement(call, spec, group, first.rank, first.op, first_text)
        arrived[state.index] = (member, spec, call)
        if len(arrived) == len(group.ranks):
            parts = queue.pop_complete()
            specs = collective_calls.collective_results(
                call, [member_spec for _, member_spec, _ in parts], group.ranks, state.rules
            )
            for (other, member_spec, _), received in zip(parts, specs, strict=True):
                if member_spec is None and received is not None:
                    self._want_expected(other, call, received)
            self._meet(Communication(COLLECTIVE, group, [part[0] for part in parts]), specs)

    def _want_expected(self, member: Participant, call: Call, received: Spec) -> None:
        """Refuse a value from the root that differs from the value expected by the receiving rank's op."""
        expect = self.states[member.rank].ops[member.op].expect
        assert expect is not None, "it is looked at when it is issued"
        try:
            collective_calls.require_expected_value(call, expect, received)
        except Refused as refusal:
            raise refusal.at(member.rank, member.op) from None

    def _send(self, state: RankState, op: Op) -> None:
        spec, peer = state.live[op[2][0]], op.peer
        state.want_layer(op, spec[0].layer)
        require_on_device(op.about, spec)
        member = self._issue(state, op)
        state.arrived[op[4]] = None  # buffered: the sender never waits
        _check_peer(state, op)
        self._deliver(state.index, peer, (member, spec, None))

    def _recv(self, state: RankState, op: Op) -> None:
        peer, expect = op.peer, op.expect
        if expect is None:
            state.refuse("malformed tape", "the op does not name its message", "give the expected value")
        if expect.microbatches < 0:
            fault = f"no set of microbatches is the number {expect.microbatches}"
            raise Refused("malformed tape", f"recv from rank {peer}", fault, "expect a bit set")
        state.want_layer(op, expect.layer)
        member = self._issue(state, op)
        _check_peer(state, op)
        self._deliver(peer, state.index, (member, None, None))

    def _offload(self, state: RankState, op: Op) -> None:
        self._copy(state, op, refusals.offload(state.live[op[2][0]], op.place))

    def _reload(self, state: RankState, op: Op) -> None:
        self._copy(state, op, refusals.reload(state.live[op[2][0]]))

    def _copy(self, state: RankState, op: Op, spec: Spec) -> None:
        """Replay a copy, which involves no other rank."""
        state.want_layer(op, spec[0].layer)
        member = self._issue(state, op)
        self._meet(Communication(COPY, None, [member]), [spec])

    def _deliver(self, source: int, to: int, part: Contribution) -> None:
        """Record one end of a message, and deliver the message if the other end is there."""
        rank, queue = part[0][0], self._matcher[source, to]
        arrived = queue.join(rank)
        arrived[rank] = part
        if len(arrived) < 2:
            return
        (sender, spec, _), (receiver, _, _) = queue.pop_complete()
        send_op, recv_op = self.states[source].ops[sender.op], self.states[to].ops[receiver.op]
        expect = recv_op.expect
        assert spec is not None
        assert expect is not None, "a recv is looked at when it is issued"
        if expect != ExpectedValue.of(spec):
            try:
                collective_calls.require_expected_message(source, expect, spec)
            except Refused as refusal:
                raise refusal.at(to, receiver.op) from None
        communication = Communication(MESSAGE, None, [sender, receiver])
        if (send_op.batch < 0) != (recv_op.batch < 0):
            self.half_batched = self.half_batched or communication
        self._meet(communication, [None, spec])

    def _meet(self, communication: Communication, delivers: Sequence[Spec | None]) -> None:
        """Record a complete communication: note each member's result, and wake the ranks that wait for it."""
        number, states, communication_of = len(self.communications), self.states, self.communication_of
        self.communications.append(communication)
        for (rank, handle, _), delivered in zip(communication.participants, delivers, strict=True):
            communication_of[rank][handle] = number
            state = states[rank]
            state.arrived[handle] = delivered
            if state.waits_for == handle:
                state.waits_for = -1
                self._wake(state)


def refuse_second_wait(state: RankState, op: Op) -> NoReturn:
    """Refuse a WAIT for a communication that is not in flight."""
    state.refuse("nothing to wait for", f"handle {op.handle} is not in flight", "wait for each communication once")


class RankState:
    """State of one rank during the replay: its live values, its communications in flight, and its loads.

    Attributes:
        trained: bit set of the layers whose weights are updated.
        rules: the program's rules, from the inputs of an op to its outputs.
        layers: the rules of each layer.
        at: index of the current op.
        specs: the spec of every value made so far, by number.
        live: the specs of the values that ops may use now, by number.
        saved_of: for each live activation, the values that layers saved with it in forward passes, by form. A later
            forward pass with the same slices of the layer replaces the value of its form.
        half_of: for each live activation, the values that the first halves of backward passes left for the second
            halves, by form.
        reading: for each value, the number of communications in flight that read it. A value that none reads is absent.
        in_flight: for each handle of a communication in flight, the index of the op that issued it.
        arrived: for each handle of a complete communication, the spec that it delivers (None: it delivers nothing).
        loads: for each (kind, layer, slices), the index of the op that loaded them.
        clips: whether the updates so far clip, that is, take the gradient's norm (None: there was no update).
        groups: the groups on which this rank has issued a collective.
        batches: for each batch, the index of its latest op.
        concerned: indices of the ops that later checks read again. If each of these checks walked the whole tape, this
            would take a tenth of the time of all checks.
        waits_for: the handle that the rank waits for (-1: it does not wait).
    """

    def __init__(self, index: int, program: Program, trained: int) -> None:
        self.index = index
        self.program = program
        self.trained = trained
        self.ops = program.tapes[index]
        self.rules = program.rules
        self.layers = program.rules.layers
        self.at = 0
        self.specs: dict[int, Spec] = {}
        self.live = LiveValues(self)
        self.saved_of: dict[int, dict[Form, int]] = {}
        self.half_of: dict[int, dict[Form, int]] = {}
        self.reading: dict[int, int] = {}
        self.in_flight: dict[int, int] = {}
        self.arrived: dict[int, Spec | None] = {}
        self.loads: dict[tuple[Kind, int, Holds], int] = {}
        self.clips: bool | None = None
        self.groups: set[Group] = set()
        self.batches: dict[int, int] = {}
        self.concerned: list[int] = []
        self.waits_for = -1

    def make(self, number: int, spec: Spec) -> None:
        """Add a live value, whose number must be new."""
        if number in self.specs or number < 0:
            self._refuse_number(number)
        self.specs[number] = self.live[number] = spec

    def note(self, number: int, spec: Spec) -> None:
        """Add a value that is not live: only the op for which a layer saves it may read it."""
        if number in self.specs or number < 0:
            self._refuse_number(number)
        self.specs[number] = spec

    def make_all(self, numbers: Sequence[int], specs: Sequence[Spec]) -> None:
        """Add the outputs of the current op as live values, and refuse a wrong number of them."""
        if len(numbers) != len(specs):
            fault = f"numbers {counted(len(numbers), 'value')}, but makes {len(specs)} beside what the layer keeps"
            self.refuse("malformed tape", fault, "number all its outputs")
        all_specs, live = self.specs, self.live
        for number, spec in zip(numbers, specs, strict=True):
            if number in all_specs or number < 0:  # as in `make`, without a call for each
                self._refuse_number(number)
            all_specs[number] = live[number] = spec

    def layer(self, op: Op) -> LayerRules:
        """Return the rules of the layer that an op computes."""
        if not 0 <= op[1] < len(self.layers):
            remedy = f"the model has layers 0-{len(self.layers) - 1}, name one of these"
            self.refuse("unknown layer", f"layer {op[1]} does not exist", remedy)
        return self.layers[op[1]]

    def want_layer(self, op: Op, layer: int) -> None:
        """Refuse an op whose layer differs from the layer of its values."""
        if op[1] != layer:
            self.refuse("wrong layer", f"the op says layer {op[1]}, but it acts on layer {layer}", "name that layer")

    def refuse(self, rule: Rule, fault: str, remedy: str, op: int | None = None) -> NoReturn:
        """Refuse the current op, another op, or the end of the tape."""
        index = self.at if op is None else op
        about = self.ops[index].about if index < len(self.ops) else ""
        raise Refused(rule, about, fault, remedy).at(self.index, index)

    def refuse_input(self, number: int) -> NoReturn:
        """Refuse an input that is not live, and say why it is not."""
        in_flight = next(
            (handle for handle, index in self.in_flight.items() if number in self.ops[index].outputs), None
        )
        if in_flight is not None:
            self.refuse("in flight", f"value {number} is still in flight", f"wait for handle {in_flight} first")
        if number not in self.specs:
            self.refuse("freed", f"value {number} has not been made yet", "make it before")
        if self.specs[number].kind in AUTOGRAD_KINDS:
            remedy = "leave it to the backward of its activation"
            self.refuse("the layer's own", f"a layer keeps value {number} for itself", remedy)
        fault = f"value {number}, {self.specs[number]}, was freed or replaced before this op"
        self.refuse("freed", fault, "free it after its last use")

    def _refuse_number(self, number: int) -> NoReturn:
        self.refuse("number in use", f"makes value {number}, which must be a new one", "number values from 0")


class LiveValues(dict[int, Spec]):
    """Specs of the values that a rank's ops may use now, by number. Looking up any other value raises `Refused`."""

    def __init__(self, state: RankState) -> None:
        super().__init__()
        self.state = state

    def __missing__(self, number: int) -> NoReturn:
        self.state.refuse_input(number)


def _call(op: Op) -> Call:
    return call_of(op[0], op.root, op.reduction)


def _input_spec(state: RankState, op: Op, call: Call, group: Group) -> Spec | None:
    """Return the spec of this rank's input (None: it gives none). Refuse an op with more or fewer inputs or outputs."""
    collective_calls.require_valid_call(call, group.ranks)
    reads, makes = collective_calls.value_counts(call, state.index)
    if (len(op[2]), len(op[3])) != (reads, makes):
        fault = f"has {counted(len(op[2]), 'input')} and {counted(len(op[3]), 'output')}"
        remedy = f"the part of rank {state.index} reads {reads} and makes {makes}, give these"
        state.refuse("malformed tape", fault, remedy)
    if reads:
        spec = state.live[op[2][0]]
        state.want_layer(op, spec[0].layer)
        if spec[0].place:
            require_on_device(spec.about(call.kind.row.name), spec)
        return spec
    if makes:
        if op.expect is None:
            state.refuse("malformed tape", "the op does not name the value from the root", "give the expected value")
        state.want_layer(op, op.expect.layer)
    return None


def _join(state: RankState, op: Op) -> Group:
    """Check a group at this rank's first collective on it, and return it. Equal groups must be one object."""
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
        fault = f"the group {group} was not made by group_of, so its members would not find each other"
        state.refuse("unknown group", fault, "make it by group_of")
    state.groups.add(group)
    return group


def _together(state: RankState, op: Op) -> bool:
    """Return whether an op may be in the same batch as the op before it.

    A batch holds messages only, or collectives of one kind, group and dtype.
    """
    first = state.ops[state.batches.get(op.batch, state.at)]
    return may_share_batch(first, op, state.specs) if op[0] in COLLECTIVES else first[0] in POINT_TO_POINT


def _check_peer(state: RankState, op: Op) -> None:
    if op.peer == state.index or not 0 <= op.peer < state.program.ranks:
        remedy = f"the world has ranks 0-{state.program.ranks - 1}, name another of these"
        state.refuse("unknown rank", f"there is no other rank {op.peer}", remedy)
