"""What passes between judged ranks: sends are buffered, and messages between two ranks stay in order."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from shardlab.language import Op, OpKind
from tests.support.judged_rank import JudgedRank
from tests.support.judged_roots import received
from tests.support.judged_scales import common_scale
from tests.support.pieces import BrokenTape, Piece


class Links:
    """All messages and collectives of a program; `sequence` is the tokens of one."""

    def __init__(self, ranks: list[JudgedRank], sequence: int) -> None:
        self.ranks = ranks
        self.sequence = sequence
        self.channels: dict[tuple[int, int], deque[Piece]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.turns: dict[tuple[int, object], int] = defaultdict(int)
        self.communications: dict[tuple[object, int], dict[int, tuple[Op, Piece | None]]] = defaultdict(dict)

    def start(self, rank: JudgedRank, op: Op, place: str) -> None:
        """A rank issues its part of a communication; what a copy makes lies in a place."""
        if op.kind is OpKind.SEND:
            rank.issue(op)
            rank.arrived[op.handle] = None
            self.channels[rank.index, self._peer(rank, op)].append(rank.given(op.inputs[0]))
            self._deliver(rank.index, op.peer)
        elif op.kind is OpKind.RECV:
            rank.issue(op)
            self.receives[self._peer(rank, op), rank.index].append(op.handle)
            self._deliver(op.peer, rank.index)
        elif op.kind is OpKind.OFFLOAD or op.kind is OpKind.RELOAD:
            rank.issue(op)
            rank.arrived[op.handle] = replace(rank.given(op.inputs[0]), place=place)
        else:
            self._collective(rank, op)

    def finish(self) -> None:
        if any(self.channels.values()):
            raise BrokenTape("a message was never received")

    def _peer(self, rank: JudgedRank, op: Op) -> int:
        if not 0 <= op.peer < len(self.ranks) or op.peer == rank.index:
            raise BrokenTape(f"rank {op.peer} is no peer")
        return op.peer

    def _deliver(self, source: int, to: int) -> None:
        sent, wanted = self.channels[source, to], self.receives[source, to]
        while sent and wanted:
            self.ranks[to].arrived[wanted.popleft()] = sent.popleft()

    def _collective(self, rank: JudgedRank, op: Op) -> None:
        piece = rank.given(op.inputs[0]) if op.inputs else None
        rank.issue(op)
        if op.group is None or rank.index not in op.group.ranks:
            raise BrokenTape("this rank is not of the group")
        key = (op.group.axis, op.group.ranks)
        sequence_number = self.turns[rank.index, key]
        self.turns[rank.index, key] = sequence_number + 1
        members = self.communications[key, sequence_number]
        members[rank.index] = (op, piece)
        if len(members) < len(op.group.ranks):
            return
        del self.communications[key, sequence_number]
        ordered = [members[index] for index in op.group.ranks]
        if len({(call.kind, call.root, call.reduction) for call, _ in ordered}) > 1:
            raise BrokenTape("the members of a collective disagree about what it does")
        dtypes = {given.dtype for _, given in ordered if given is not None}
        if len(dtypes) > 1:
            raise BrokenTape("the members of a collective give other numbers")
        scale = common_scale(given for _, given in ordered if given is not None)
        results = received(op, op.group.ranks, [given for _, given in ordered], self.sequence)
        for index, (call, _), result in zip(op.group.ranks, ordered, results, strict=True):
            self.ranks[index].arrived[call.handle] = result and replace(result, dtype=max(dtypes), scale=scale)
