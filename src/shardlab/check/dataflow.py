"""Dataflow: every spec derived again from the tapes alone, op by op, with the same rules that tracing uses.

A tape may come from tracing, from a pass, from a file or from a mutation test; nothing but its ops is believed.
Since sends are buffered here and messages between two ranks arrive in order, this replay also decides the two
lenient channel models.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from shardlab.check import kept, runnable
from shardlab.check.communication import CommunicationCheck, refuse_second_wait
from shardlab.check.compute import COMPUTE_RULES, Rule
from shardlab.check.ending import check_coverage, check_losses, check_rank_ending, trained_layers
from shardlab.check.rank_state import RankState
from shardlab.program import Op, OpKind, Program, Refused
from shardlab.program.ops import BOOKKEEPING, COMMUNICATION
from shardlab.program.values import deadlock
from shardlab.rules.pieces import counted


class Dataflow:
    """Replays all tapes together; the first op that breaks a rule raises Refused.

    Args:
        program: the tapes.
        trains: whether updates of weights are wanted, or else every microbatch's loss and no update.

    Attributes:
        trained: the layers whose weights are updated, as a bit set.
        states: the ranks, with the spec of every value once the replay has ended.
        communication: replays every communication.
    """

    def __init__(self, program: Program, *, trains: bool = True) -> None:
        ranks = program.mesh.world
        if ranks != program.ranks:
            given = f"the mesh has {counted(ranks, 'rank')}, but the program has {counted(program.ranks, 'tape')}"
            raise Refused("malformed tape", "", given, "give one for each rank")
        self.trained = trained = trained_layers(program) if trains else 0
        self._trains = trains
        self.states = [RankState(index, program, trained) for index in range(ranks)]
        self._runnable = deque(self.states)
        self.communication = CommunicationCheck(self.states, self._runnable.append)
        rules: dict[OpKind, Rule] = {**COMPUTE_RULES, **self.communication.rules}
        self._rules = {shape: rules[shape[0]] for shape in SHAPES if shape[0] not in BOOKKEEPING}
        self._rule_of_any = rules

    def run(self) -> None:
        """Replay to the end.

        Raises:
            Deadlock: when no rank can go on although sends are buffered.
            Refused: at the first op that breaks a rule, or for what is missing at the end.
        """
        while self._runnable:
            state = self._runnable.popleft()
            try:
                self._replay(state)
            except Refused as refusal:
                raise refusal.at(state.index, state.at) from None
        blocked = {state.index: self.communication.waiting(state) for state in self.states if state.waits_for >= 0}
        if blocked:
            raise deadlock(blocked)
        self.communication.finish()
        for state in self.states:
            check_rank_ending(state)
        check_coverage(self.states, self.states[0].program.layers)
        if not self._trains:
            check_losses(self.states)

    def release(self) -> None:
        """Let go of tapes and specs: all these refer to each other, and would stay until the collector comes."""
        for state in self.states:
            vars(state.live).clear()
        self._rules.clear()
        self._rule_of_any.clear()
        self.communication.rules.clear()

    def _replay(self, state: RankState) -> None:
        """Go on with one rank until it ends or waits for something that has not happened."""
        ops, rules, arrived, live, reading = state.ops, self._rules, state.arrived, state.live, state.reading
        saved_of, half_of, concerned = state.saved_of, state.half_of, state.concerned
        arrive = self.communication.arrive
        for at in range(state.at, len(ops)):
            op = ops[at]
            kind = op[0]
            if kind is FREE:  # half of all entries, so its rule stands here
                numbers = op[2]
                if len(numbers) != 1 or op[3]:
                    state.at = at
                    _refuse_shape(state, op)
                number = numbers[0]
                if number in reading or number not in live:
                    state.at = at
                    given = f"{live[number]} is still read by a communication in flight"
                    state.refuse("in flight", given, "wait for it first")
                del live[number]
                if number in saved_of:
                    del saved_of[number]
                if number in half_of:
                    del half_of[number]
                continue
            state.at = at
            if kind is not WAIT:
                rule = rules.get((kind, len(op[2]), len(op[3]), op[4] >= 0))
                if rule is None:
                    if not _takes_any(op):
                        _refuse_shape(state, op)
                    rule = self._rule_of_any[kind]
                if kind in CONCERNED:
                    concerned.append(at)
                rule(state, op)
            elif op[4] in arrived:
                arrive(state, op)
            else:
                if op[4] not in state.flying:
                    refuse_second_wait(state, op)
                state.waits_for = op[4]
                return
        state.at = len(ops)


FREE, WAIT = OpKind.FREE, OpKind.WAIT

CONCERNED = kept.CONCERNED | runnable.CONCERNED
"""Ops that are looked at again once all tapes have passed."""

SHAPES = frozenset(
    (kind, reads, makes, handle)
    for kind in OpKind
    for reads in kind.row.inputs
    for makes in kind.row.outputs
    for handle in ((False, True) if kind in COMMUNICATION else (False,))
)
"""(op, values that it reads, values that it makes, whether it has a handle) for each way in which an op may be called.

A communication without a handle is refused where it is issued.
"""


def _takes_any(op: Op) -> bool:
    """Whether an op is rightly given any number of values."""
    row = op.kind.row
    return not row.inputs and len(op.inputs) > 0 and len(op.outputs) in row.outputs and op.handle < 0


def _refuse_shape(state: RankState, op: Op) -> NoReturn:
    """An op that reads or makes another number of values than its kind does, or has a handle and is not under way."""
    if op.handle >= 0 and op.kind not in COMMUNICATION:
        given = f"has handle {op.handle}, but only a collective or a message has one"
        state.refuse("malformed tape", given, "leave it out")
    has = f"has {counted(len(op.inputs), 'input')} and {counted(len(op.outputs), 'output')}"
    state.refuse("malformed tape", f"{has}, which it never has", "give what it reads and makes")
