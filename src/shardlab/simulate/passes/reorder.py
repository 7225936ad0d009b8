"""Passes that reorder the ops of tapes, and `Ordering`, which computes the order.

A pass asks an `Ordering` to start some ops earlier and to end others later. `Ordering.tape` moves each as far as the
dependences allow. Light ops (`LIGHT`: sums, casts, ...) that prepare a moved op move with it; all other ops stay in
their order. The passes of this file only request moves: `defer`, `prefetch`, `early_copies`, `early_receives` and
`early_updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from shardlab.check import Checked
from shardlab.check.checked import Dependences
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.pass_names import EarlyStart

FREE, WAIT = OpKind.FREE, OpKind.WAIT

LIGHT = frozenset({OpKind.ADD, OpKind.SCALE, OpKind.CAST, OpKind.SLICE, OpKind.CONCATENATE, OpKind.NORM})
"""Ops that move with the op that needs their result. All others stay, so dependences on them limit moves."""


class Ordering:
    """Reordering of one tape, computed from requests to move ops. All other ops stay in their order.

    Args:
        needs: dependences between the ops of the tape.

    Attributes:
        needs: these dependences.
        rank: the rank of the tape.
    """

    def __init__(self, needs: Dependences) -> None:
        self.needs = needs
        self.rank = needs.rank
        self._tape = needs.tape
        self._places = _places(self._tape)
        reloads = [index for index, op in enumerate(self._tape) if op.kind is OpKind.RELOAD]
        light = (index for index, op in enumerate(self._tape) if op.kind in LIGHT)
        self._follows = {*light, *reloads, *map(needs.end_of, reloads)}
        self._raised: dict[int, float] = {}
        self._sunk: dict[int, float] = {}

    def start_before(self, index: int, other: int) -> None:
        """Start an op before another, or right after the last op on which it depends, if that is later."""
        self._raise(index, self._places[max(0, other)] - 0.5)

    def start_at_once(self, *indices: int) -> None:
        """Start ops together, right after the last op on which any of them depends."""
        place = max(map(self._ready, indices))
        for index in indices:
            self._raise(index, place)

    def end_before(self, index: int, other: int) -> None:
        """Move an op down to just before another one, or before the first op that depends on it if that is earlier.

        Args:
            index: index of the op.
            other: index of the other op (the length of the tape: move to its end).
        """
        self._sunk[index] = len(self._tape) if other >= len(self._tape) else self._places[other] - 0.5

    def start_ahead(self, starts: Sequence[int], ahead: int | EarlyStart) -> None:
        """Start some communications early, and await each just before its result is used.

        Args:
            starts: the communications, in order.
            ahead: each starts just before the first use of another result, that of the communication `ahead` places
                earlier in `starts`.
        """
        ahead, but = (ahead.number, ahead.but) if isinstance(ahead, EarlyStart) else (ahead, frozenset[int]())
        brought = [self.needs.readers[self._tape[index].outputs[0]] for index in starts]
        uses = [min(readers, default=index) for index, readers in zip(starts, brought, strict=True)]
        for number, (index, use) in enumerate(zip(starts, uses, strict=True)):
            if number in but:
                continue
            self.start_before(index, uses[number - ahead] if number >= ahead else starts[0])
            if use > index:
                self.end_before(self.needs.end_of(index), use)

    def _raise(self, index: int, place: float) -> None:
        if place < self._raised.get(index, self._places[index]):
            self._raised[index] = place
            for other in self.needs.predecessors[index]:
                if other in self._follows:
                    self._raise(other, place)

    def _ready(self, index: int) -> float:
        """Return the position of the last op on which an op depends, except those that move with it."""
        needed = self.needs.predecessors[index]
        return max(
            (
                self._ready(dependence) if dependence in self._follows else self.place(dependence)
                for dependence in needed
            ),
            default=-1.0,
        )

    def tape(self) -> list[Op]:
        """Return the tape in its new order."""
        if not self._raised and not self._sunk:
            return list(self._tape)
        tape, dependences, dependents = self._tape, self.needs.predecessors, self.needs.successors
        latest = [float(len(tape))] * len(tape)  # position of the first op that needs each op
        for index in reversed(range(len(tape))):
            for other in dependents[index]:
                follows = tape[other].kind in LIGHT or tape[other].kind is FREE or other in self._sunk
                latest[index] = min(latest[index], latest[other] if follows else self.place(other))
        places: list[float] = []
        for index, op in enumerate(tape):
            ready = max((places[other] for other in dependences[index]), default=-1.0)
            if op.kind is FREE:
                place = ready
            elif index in self._sunk:
                place = max(ready, min(self._sunk[index], latest[index]))
            else:
                place = max(ready, self.place(index))
            places.append(place)
        return [tape[index] for index in sorted(range(len(tape)), key=lambda index: (places[index], index))]

    def place(self, index: int) -> float:
        """Return the position of an op, given the requests so far to start ops earlier. Ops of a batch share one."""
        return self._raised.get(index, self._places[index])


def _places(tape: Sequence[Op]) -> list[float]:
    """Return the position of each op. Ops of a batch share the position of the first, so that they stay adjacent."""
    places: list[float] = []
    for index, op in enumerate(tape):
        in_batch = op.batch >= 0 and index > 0 and tape[index - 1].batch == op.batch
        places.append(places[-1] if in_batch else float(index))
    return places


Tapes = list[list[Op]]


class CannotApply(Exception):
    """Error of a pass that has nothing to do on a program. The message is a clause with the reason."""


def reordered(checked: Checked, wish: Callable[[Ordering], None]) -> Tapes:
    """Return every rank's tape in a new order; `wish` requests the moves on one tape."""
    tapes: Tapes = []
    for needs in checked.dependences:
        order = Ordering(needs)
        wish(order)
        tapes.append(order.tape())
    return tapes


REDUCTIONS = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.REDUCE})


def defer(checked: Checked, ahead: int) -> Tapes:
    """Delay the wait for each reduced gradient while later reductions start, and update right after the wait.

    Wait and update move to just before the `ahead`-th reduction after this one, or to the end of the step, so at most
    `ahead` reductions are in flight. A bucket counts as one reduction. Gradients are then reduced while gradients of
    earlier layers are computed.

    Raises:
        CannotApply: if no gradient is reduced.
    """
    if not any(map(_reductions, checked.program.tapes, checked.specs)):
        raise CannotApply("no gradient of weights is reduced, so none can be awaited later")
    return reordered(checked, partial(_wish_defer, checked, ahead))


def _wish_defer(checked: Checked, ahead: int, order: Ordering) -> None:
    needs = order.needs
    started = _reductions(needs.tape, checked.specs[order.rank])
    buckets = [list(bucket) for _, bucket in groupby(started, order.place)]
    for number, bucket in enumerate(buckets):
        later = buckets[number + ahead][0] if number + ahead < len(buckets) else len(needs.tape)
        for awaited in map(needs.end_of, bucket):
            for late in (awaited, *_updates(order, awaited)):
                order.end_before(late, later)


def _updates(order: Ordering, awaited: int) -> Iterator[int]:
    """Yield the updates that read an op's result, directly or through `LIGHT` ops."""
    for index in order.needs.successors[awaited]:
        kind = order.needs.tape[index].kind
        if kind is OpKind.UPDATE:
            yield index
        elif kind in LIGHT:
            yield from _updates(order, index)


def _reductions(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    return [
        index for index, op in enumerate(tape) if op.kind in REDUCTIONS and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT
    ]


def prefetch(checked: Checked, ahead: int | EarlyStart) -> Tapes:
    """Start each gather of weights early, so that it runs while earlier layers compute.

    It starts just before the first use of the weights that are gathered `ahead` gathers before it. This is FSDP's
    prefetching (Zhao et al. 2023, arXiv 2304.11277, section 3.3.2) on any tape. Programs that follow a plan prefetch by
    themselves (`shardlab.strategies.plan.sharding.ParameterGatherer`).

    Raises:
        CannotApply: if no weights are gathered before they are used.
    """
    if not any(map(gathers_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no weights are gathered for a pass, so there is nothing to gather ahead")
    return reordered(checked, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int | EarlyStart, order: Ordering) -> None:
    order.start_ahead(gathers_ahead(order.needs.tape, checked.specs[order.rank]), ahead)


def gathers_ahead(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    """Return the indices of gathers of weights for this step.

    Gathers of updated weights, for the next step, are left out.
    """
    gathered = [index for index, op in enumerate(tape) if op.kind is OpKind.ALL_GATHER]
    wholes = [specs[tape[index].outputs[0]] for index in gathered]
    return [
        index for index, whole in zip(gathered, wholes, strict=True) if whole.kind is Kind.WEIGHT and not whole.step
    ]


OFFLOAD, RELOAD = OpKind.OFFLOAD, OpKind.RELOAD


def early_copies(checked: Checked, ahead: int) -> Tapes:
    """Start each reload early, and await each offload late, so that copies run during compute.

    A reload starts just before the first use of the value that is reloaded `ahead` reloads before it. An offload is
    awaited just before the `ahead`-th offload after it starts.

    Raises:
        CannotApply: if nothing is copied.
    """
    if not any(_copies(tape, RELOAD) or _copies(tape, OFFLOAD) for tape in checked.program.tapes):
        raise CannotApply("nothing is kept on the host or the disk")
    return reordered(checked, partial(_wish_early_copies, ahead))


def _wish_early_copies(ahead: int, order: Ordering) -> None:
    needs = order.needs
    order.start_ahead(_copies(needs.tape, RELOAD), ahead)
    away = _copies(needs.tape, OFFLOAD)
    for number, index in enumerate(away):
        later = number + ahead
        order.end_before(needs.end_of(index), away[later] if later < len(away) else len(needs.tape))


def _copies(tape: Sequence[Op], kind: OpKind) -> list[int]:
    return [index for index, op in enumerate(tape) if op.kind is kind]


def early_receives(checked: Checked, ahead: int | EarlyStart) -> Tapes:
    """Post each receive early, so that its message arrives during compute.

    It is posted just before the first use of the value that is received `ahead` receives before it.

    Raises:
        CannotApply: if there are no receives, or all are part of exchanges, whose messages are issued together.
    """
    if not any(map(receives_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no rank receives a message, or only in exchanges, which are issued whole")
    return reordered(checked, partial(_wish_early_receives, ahead))


def _wish_early_receives(ahead: int | EarlyStart, order: Ordering) -> None:
    order.start_ahead(receives_ahead(order.needs.tape, {}), ahead)


def receives_ahead(tape: Sequence[Op], _: Mapping[int, Spec]) -> list[int]:
    """Return the indices of receives that are not part of an exchange."""
    return [index for index, op in enumerate(tape) if op.kind is OpKind.RECV and op.batch < 0]


def early_updates(checked: Checked, _: int) -> Tapes:
    """Run every update as soon as its gradient is final, beside the remaining communication.

    Raises:
        CannotApply: if nothing is updated, or if gradients are clipped, since the norm of all gradients comes first.
    """
    if not checked.trains:
        raise CannotApply("nothing is updated")
    if checked.clips:
        raise CannotApply("gradients are clipped by their common norm, so no gradient is final until all are")
    return reordered(checked, _wish_early_updates)


def _wish_early_updates(order: Ordering) -> None:
    tape, needs = order.needs.tape, order.needs
    for index, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            order.start_at_once(index)
            for away in (reader for value in op.outputs for reader in needs.readers[value]):
                if tape[away].kind is OpKind.OFFLOAD:
                    order.start_at_once(away)
                    order.start_at_once(needs.end_of(away))
