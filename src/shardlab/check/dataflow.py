"""Dataflow: every spec derived again from the tapes alone, op by op, with the same rules that tracing uses.

A tape may come from tracing, from a pass, from a file or from a mutation test; nothing but its ops is believed.
Sends are buffered here and messages between two ranks arrive in order, so this replay also decides the two
lenient channel models.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NoReturn

from shardlab.check.checked import Meeting, Member
from shardlab.program import Deadlock, Group, Holds, Kind, Op, OpKind, Program, Refused, Spec, transfer
from shardlab.program.mesh import group_of
from shardlab.program.tape import COLLECTIVES
from shardlab.program.values import bits, common, listed
from shardlab.program.waiting import Wait, explain


class RankState:
    """One rank during the replay."""

    def __init__(self, index: int, ops: list[Op]) -> None:
        self.index = index
        self.ops = ops
        self.at = 0
        self.specs: dict[int, Spec] = {}
        self.live = Live(self)
        self.saved_of: dict[int, int] = {}  # live activation -> what autograd saved from its forward
        self.reading: dict[int, int] = defaultdict(int)
        self.flying: dict[int, int] = {}  # handle -> index of the op that issued it
        self.arrived: dict[int, Spec | None] = {}  # handle -> what it delivers (None: nothing)
        self.loaded: dict[tuple[int, Holds], int] = {}
        self.groups: dict[Group, int] = {}  # group -> how many of its collectives this rank has issued
        self.batches: dict[int, int] = {}  # batch -> its latest op
        self.waits_for = -1

    def refuse(self, text: str, op: int | None = None) -> NoReturn:
        raise Refused(text).at(self.index, self.at if op is None else op)

    def refuse_input(self, number: int) -> NoReturn:
        """Say why an op may not use a value."""
        op = self.ops[self.at]
        flying = next((handle for handle, at in self.flying.items() if number in self.ops[at].outputs), None)
        if flying is not None:
            self.refuse(f"{op}: value {number} is still in flight; wait for handle {flying} first.")
        if number not in self.specs:
            self.refuse(f"{op}: value {number} has not been made yet.")
        if self.specs[number].kind is Kind.SAVED:
            self.refuse(f"{op}: value {number} is what autograd saved; only the backward of its activation reads it.")
        self.refuse(f"{op}: value {number}, {self.specs[number]}, was freed or replaced before this op.")


class Live(dict[int, Spec]):
    """The specs of the values that a rank's ops may use now, by number; asking for any other is refused."""

    def __init__(self, state: RankState) -> None:
        super().__init__()
        self.state = state

    def __missing__(self, number: int) -> NoReturn:
        self.state.refuse_input(number)


class Dataflow:
    """Replays all tapes together; the first op that breaks a rule raises Refused."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cells = (1 << program.microbatches) - 1
        self.states = [RankState(index, ops) for index, ops in enumerate(program.tapes)]
        self.meetings: list[Meeting] = []
        self.meeting_of: list[dict[int, int]] = [{} for _ in program.tapes]
        self._open: dict[tuple[Group, int], dict[int, tuple[Member, Spec]]] = {}
        self._sent: dict[tuple[int, int], deque[tuple[Member, Spec]]] = defaultdict(deque)
        self._wanted: dict[tuple[int, int], deque[Member]] = defaultdict(deque)
        self._runnable = deque(self.states)
        self._rules: dict[OpKind, Callable[[RankState, Op], None]] = {
            OpKind.FREE: self._free,
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD: self._backward,
            OpKind.RECOMPUTE: self._recompute,
            OpKind.ADD: self._add,
            OpKind.SEND: self._send,
            OpKind.RECV: self._recv,
            OpKind.UPDATE: self._update,
            OpKind.LOSS: self._loss,
            OpKind.LOAD_BATCH: self._load_batch,
            OpKind.LOAD_WEIGHTS: self._load_weights,
            **dict.fromkeys(COLLECTIVES, self._collective),
        }

    def run(self) -> None:
        """Replay to the end.

        Raises:
            Deadlock: when no rank can go on although sends are buffered.
            Refused: at the first op that breaks a rule, or for what is missing at the end.
        """
        ranks = self.program.mesh.world
        if ranks != len(self.states):
            raise Refused(f"the mesh has {ranks} ranks, but there are {len(self.states)} tapes; give one for each rank.")
        while self._runnable:
            state = self._runnable.popleft()
            try:
                self._replay(state)
            except Refused as refusal:
                raise refusal.at(state.index, state.at) from None
            except ValueError as error:  # unpacking its inputs and outputs failed
                op = state.ops[state.at]
                state.refuse(f"{op}: has {len(op.inputs)} inputs and {len(op.outputs)} outputs: {error}.")
        blocked = {state.index: self._wait(state) for state in self.states if state.waits_for >= 0}
        if blocked:
            raise Deadlock(explain(blocked))
        self._finish()

    def _replay(self, state: RankState) -> None:
        """Go on with one rank until it ends or waits for something that has not happened."""
        ops, rules, arrived, wait = state.ops, self._rules, state.arrived, OpKind.WAIT
        for at in range(state.at, len(ops)):
            op = ops[at]
            state.at = at
            if op[0] is not wait:
                rules[op[0]](state, op)
            elif op[4] in arrived:
                self._arrive(state, op)
            else:
                if op[4] not in state.flying:
                    state.refuse(f"wait: handle {op[4]} is not in flight; each communication is waited for once.")
                state.waits_for = op[4]
                return
        state.at = len(ops)

    # One rule an op. Inputs must be live here and now; outputs must be new.

    def _output(self, state: RankState, number: int, spec: Spec) -> None:
        if number in state.specs or number < 0:
            state.refuse(f"{state.ops[state.at]}: makes value {number}, which must be a new one, counted from 0.")
        state.specs[number] = state.live[number] = spec

    def _keep_saved(self, state: RankState, number: int, activation: int, spec: Spec) -> None:
        """Autograd's part: owned by the activation, it goes with that, with its backward, or for a newer one."""
        if number in state.specs or number < 0:
            state.refuse(f"{state.ops[state.at]}: makes value {number}, which must be a new one, counted from 0.")
        state.specs[number] = spec
        state.saved_of[activation] = number

    def _want_layer(self, state: RankState, op: Op, layer: int) -> None:
        if op[1] != layer:
            state.refuse(f"{op}: the op says layer {op[1]}, but it acts on layer {layer}.")

    def _free(self, state: RankState, op: Op) -> None:
        (number,) = op[2]
        spec = state.live[number]
        if state.reading.get(number):
            state.refuse(f"free: {spec} is still read by a communication in flight; wait for it first.")
        del state.live[number]
        if spec[0] is Kind.ACTIVATION:
            state.saved_of.pop(number, None)

    def _forward(self, state: RankState, op: Op) -> None:
        activation, weight = op[2]
        spec = state.live[activation]
        made = transfer.forward(op[1], spec, state.live[weight])
        if len(op[3]) == 1:
            self._output(state, op[3][0], made)
        else:
            output, saved = op[3]
            self._output(state, output, made)
            self._keep_saved(state, saved, activation, transfer.saved(op[1], spec))

    def _recompute(self, state: RankState, op: Op) -> None:
        (activation, weight), (saved,) = op[2], op[3]
        spec = state.live[activation]
        transfer.forward(op[1], spec, state.live[weight], "recompute")
        self._keep_saved(state, saved, activation, transfer.saved(op[1], spec))

    def _loss(self, state: RankState, op: Op) -> None:
        (activation,), (gradient,) = op[2], op[3]
        self._want_layer(state, op, self.program.layers)
        self._output(state, gradient, transfer.loss(self.program.layers, state.live[activation]))

    def _backward(self, state: RankState, op: Op) -> None:
        activation, gradient, weight, saved = op[2]
        grad_weight, grad_activation = op[3]
        live = state.live
        made = transfer.backward(op[1], live[activation], live[gradient], live[weight])
        if state.saved_of.pop(activation, None) != saved:
            state.refuse(f"{op}: value {saved} is not what autograd saved from this activation's forward.")
        self._output(state, grad_weight, made[0])
        self._output(state, grad_activation, made[1])

    def _add(self, state: RankState, op: Op) -> None:
        (a, b), (total,) = op[2], op[3]
        made = transfer.add(state.live[a], state.live[b])
        self._want_layer(state, op, made.layer)
        self._output(state, total, made)

    def _update(self, state: RankState, op: Op) -> None:
        gradient, weight, opt_state = op[2]
        new_weight, new_state = op[3]
        live = state.live
        made = transfer.update(op[1], live[gradient], live[weight], live[opt_state], self.cells)
        for number in (weight, opt_state):
            if state.reading.get(number):
                state.refuse(f"{op}: {live[number]} is still read by a communication in flight; wait for it.")
            del live[number]
        self._output(state, new_weight, made[0])
        self._output(state, new_state, made[1])

    def _load_batch(self, state: RankState, op: Op) -> None:
        holds, (activation,) = op.holds, op[3]
        if holds is None or holds.of != self.program.microbatches or not 0 < holds.mask <= self.cells:
            state.refuse(f"{op}: {holds} is not a set of the step's {self.program.microbatches} microbatches.")
        self._want_layer(state, op, 0)
        self._output(state, activation, Spec(Kind.ACTIVATION, 0, holds))

    def _load_weights(self, state: RankState, op: Op) -> None:
        holds, layer, (weight, opt_state) = op.holds, op[1], op[3]
        if holds is None or holds.of < 1 or not 0 < holds.mask < 1 << holds.of or not 0 <= layer < self.program.layers:
            state.refuse(f"{op}: there is no slice {holds} of layer {layer}.")
        if (layer, holds) in state.loaded:
            state.refuse(f"{op}: the same slice was loaded by op {state.loaded[layer, holds]} already.")
        state.loaded[layer, holds] = state.at
        self._output(state, weight, Spec(Kind.WEIGHT, layer, holds))
        self._output(state, opt_state, Spec(Kind.OPT_STATE, layer, holds))

    # Communication.

    def _issue(self, state: RankState, op: Op) -> Member:
        handle = op[4]
        if handle in state.flying or handle in state.arrived or handle < 0:
            state.refuse(f"{op}: issues handle {handle}, which must be a new one, counted from 0.")
        if op.batch >= 0:
            if state.batches.get(op.batch, state.at - 1) != state.at - 1:
                state.refuse(f"{op}: is of batch {op.batch}, but other ops stand between it and the rest of its batch.")
            state.batches[op.batch] = state.at
        state.flying[handle] = state.at
        if op[2]:
            state.reading[op[2][0]] += 1
        return Member(state.index, handle, state.at)

    def _collective(self, state: RankState, op: Op) -> None:
        group, (value,), (_,) = op.group, op[2], op[3]
        spec = state.live[value]
        if op[1] != spec.layer:
            self._want_layer(state, op, spec.layer)
        if group is None or group not in state.groups:
            group = self._join(state, op)
        member = self._issue(state, op)
        turn = state.groups[group]
        state.groups[group] = turn + 1
        meeting = self._open.setdefault((group, turn), {})
        if meeting:
            first, first_spec = next(iter(meeting.values()))
            there = self.states[first.rank].ops[first.op]
            if there[0] is not op[0] or first_spec.kind is not spec.kind or first_spec.layer != spec.layer:
                state.refuse(
                    f"{op[0].value}({spec}) on {group}: rank {first.rank} meets it with {there[0].value}({first_spec}) "
                    f"(its op {first.op}); all members of a group must issue its collectives in one order, of one kind "
                    "and for one layer."
                )
        meeting[state.index] = (member, spec)
        if len(meeting) == len(group.ranks):
            del self._open[group, turn]
            members = [meeting[rank] for rank in group.ranks]
            specs = transfer.collective(op[0], [given for _, given in members], group.ranks)
            self._meet(Meeting(group, [m for m, _ in members]), specs)

    def _join(self, state: RankState, op: Op) -> Group:
        """This rank's first collective on a group; equal groups are one object, so that members find one another."""
        group = op.group
        if group is None:
            state.refuse(f"{op}: no group is given for this collective.")
        if (
            state.index not in group.ranks
            or len(set(group.ranks)) < len(group.ranks)
            or not all(0 <= rank < self.program.ranks for rank in group.ranks)
        ):
            state.refuse(
                f"{op}: the group has the ranks {group.ranks}; a group has rank {state.index} itself and others of "
                f"0-{self.program.ranks - 1}, each once."
            )
        if group is not group_of(group.axis, group.ranks):
            state.refuse(f"{op}: the group {group} was not made by group_of, so its members would not find each other.")
        state.groups[group] = 0
        return group

    def _send(self, state: RankState, op: Op) -> None:
        (value,), peer = op[2], op.peer
        if op[3]:
            state.refuse(f"{op}: a send makes no value.")
        spec = state.live[value]
        if op[1] != spec.layer:
            self._want_layer(state, op, spec.layer)
        member = self._issue(state, op)
        state.arrived[op[4]] = None  # buffered: the sender never waits
        self._check_peer(state, op)
        self._sent[state.index, peer].append((member, spec))
        self._deliver(state.index, peer)

    def _recv(self, state: RankState, op: Op) -> None:
        (_,), peer = op[3], op.peer
        if op[2]:
            state.refuse(f"{op}: a recv reads no value.")
        if op.expect is None:
            state.refuse(f"{op}: the tape does not say which message is meant.")
        if op[1] != op.expect.layer:
            self._want_layer(state, op, op.expect.layer)
        member = self._issue(state, op)
        self._check_peer(state, op)
        self._wanted[peer, state.index].append(member)
        self._deliver(peer, state.index)

    def _check_peer(self, state: RankState, op: Op) -> None:
        if op.peer == state.index or not 0 <= op.peer < self.program.ranks:
            state.refuse(f"{op}: the world has ranks 0-{self.program.ranks - 1}, and a rank does not message itself.")

    def _deliver(self, source: int, to: int) -> None:
        sent, wanted = self._sent[source, to], self._wanted[source, to]
        while sent and wanted:
            (sender, spec), receiver = sent.popleft(), wanted.popleft()
            state = self.states[to]
            expect = state.ops[receiver.op].expect
            assert expect is not None, "a recv is looked at when it is issued"
            if expect != transfer.message_of(spec):
                try:
                    transfer.delivered(source, expect, spec)
                except Refused as refusal:
                    raise refusal.at(to, receiver.op) from None
            self._meet(Meeting(None, [sender, receiver]), [None, spec])

    def _meet(self, meeting: Meeting, delivers: list[Spec | None] | list[Spec]) -> None:
        """A communication has all its members: note what each receives, and let those go on that wait for it."""
        number = len(self.meetings)
        self.meetings.append(meeting)
        for member, spec in zip(meeting.members, delivers, strict=True):
            self.meeting_of[member.rank][member.handle] = number
            state = self.states[member.rank]
            state.arrived[member.handle] = spec
            if state.waits_for == member.handle:
                state.waits_for = -1
                self._runnable.append(state)

    def _arrive(self, state: RankState, op: Op) -> None:
        issued = state.flying.pop(op[4], None)
        if issued is None:
            state.refuse(f"wait: handle {op[4]} is not in flight; each communication is waited for once.")
        source = state.ops[issued]
        if source[2]:
            state.reading[source[2][0]] -= 1
        spec = state.arrived[op[4]]
        if spec is not None:
            self._output(state, source[3][0], spec)

    # The end of the step.

    def _wait(self, state: RankState) -> Wait:
        """What a blocked rank waits for."""
        op = state.ops[state.flying[state.waits_for]]
        if op[0] is OpKind.RECV:
            return Wait(str(op), [op.peer])
        assert op.group is not None
        turn = next(
            turn
            for (group, turn), meeting in self._open.items()
            if group is op.group and state.index in meeting and meeting[state.index][0].handle == state.waits_for
        )
        came = self._open[op.group, turn]
        missing = [rank for rank in op.group.ranks if rank not in came]
        names = ", ".join(map(str, missing))
        spec = came[state.index][1]
        return Wait(f"{op[0].value}({spec}) on {op.group} for rank{'s' * (len(missing) > 1)} {names}", missing)

    def _finish(self) -> None:
        """Every message received, nothing in flight, every slice loaded anywhere one step on, and nothing else left."""
        for (source, to), messages in self._sent.items():
            for member, spec in messages:
                self.states[source].refuse(
                    f"send({spec}) to rank {to}: no receive on rank {to} takes this message.", member.op
                )
        for state in self.states:
            for issued in state.flying.values():
                state.refuse(f"{state.ops[issued]}: is still in flight when the step ends; wait for it.", issued)
            self._finish_rank(state)
        held = [Holds(0, 1)] * self.program.layers
        for state in self.states:
            for layer, holds in state.loaded:
                mine, theirs = common(held[layer], holds)
                held[layer] = Holds(mine.mask | theirs.mask, mine.of)
        for layer, (mask, of) in enumerate(held):
            if not held[layer].complete:
                missing = listed(bits(~mask & ((1 << of) - 1)))
                raise Refused(
                    f"weights[{layer}]: no rank loads slice {missing} of {of}, so it is never updated; every slice "
                    "of every layer must be loaded and updated by at least one rank."
                )

    def _finish_rank(self, state: RankState) -> None:
        left = set(state.live.values())
        for (layer, holds), loaded in state.loaded.items():
            for kind in (Kind.WEIGHT, Kind.OPT_STATE):
                final = Spec(kind, layer, holds, 0, 1)
                if final not in left:
                    state.refuse(
                        f"load_weights(layer {layer}): the step ends without {final}; every slice that is loaded must "
                        "be updated once, and its result kept in a store.",
                        loaded,
                    )
        for number, spec in state.live.items():
            if spec.step != 1 or (spec.layer, spec.holds) not in state.loaded:
                state.refuse(
                    f"the step ends with value {number}, {spec}, still live; a step leaves only the slices it loaded.",
                    len(state.ops),
                )
            if spec not in left:
                state.refuse(
                    f"the step ends with value {number}, {spec}, which is live already; a step leaves each slice once.",
                    len(state.ops),
                )
            left.remove(spec)
