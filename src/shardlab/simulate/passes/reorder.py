"""A new order for one tape: some ops are wished elsewhere, and what depends on them, or they on, goes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.check.checked import Dependences
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.pass_names import Ahead

FREE, WAIT = OpKind.FREE, OpKind.WAIT

LIGHT = frozenset({OpKind.ADD, OpKind.SCALE, OpKind.CAST, OpKind.SLICE, OpKind.CONCATENATE, OpKind.NORM})
"""Ops that follow what is moved, as reloads follow what starts earlier. Others stay, and hold back what they need."""


class Ordering:
    """Wishes for one tape. Ops that nobody moves stay in their order.

    Args:
        needs: what must come before what on it.

    Attributes:
        needs: as given.
        rank: whose tape it is.
    """

    def __init__(self, needs: Dependences) -> None:
        self.needs = needs
        self.rank = needs.rank
        self._tape = needs.tape
        self._places = _places(self._tape)
        reloads = [at for at, op in enumerate(self._tape) if op.kind is OpKind.RELOAD]
        light = (at for at, op in enumerate(self._tape) if op.kind in LIGHT)
        self._follows = {*light, *reloads, *map(needs.over, reloads)}
        self._raised: dict[int, float] = {}
        self._sunk: dict[int, float] = {}

    def start_before(self, at: int, other: int) -> None:
        """Have an op start before another, or as soon afterwards as what it needs is there."""
        self._raise(at, self._places[max(0, other)] - 0.5)

    def start_at_once(self, *together: int) -> None:
        """Have ops start as soon as what they need is there; what follows them comes with them, and no earlier."""
        place = max(map(self._ready, together))
        for at in together:
            self._raise(at, place)

    def end_before(self, at: int, other: int) -> None:
        """Have an op go down to just before another (the tape's length: to the end), or to the first that needs it."""
        self._sunk[at] = len(self._tape) if other >= len(self._tape) else self._places[other] - 0.5

    def start_ahead(self, starts: Sequence[int], ahead: int | Ahead) -> None:
        """Have communications start so many uses of what they bring ahead, and be awaited just before their own use."""
        ahead, but = (ahead.number, ahead.but) if isinstance(ahead, Ahead) else (ahead, frozenset[int]())
        brought = [self.needs.readers[self._tape[at].outputs[0]] for at in starts]
        uses = [min(readers, default=at) for at, readers in zip(starts, brought, strict=True)]
        for number, (at, use) in enumerate(zip(starts, uses, strict=True)):
            if number in but:
                continue
            self.start_before(at, uses[number - ahead] if number >= ahead else starts[0])
            if use > at:
                self.end_before(self.needs.over(at), use)

    def _raise(self, at: int, place: float) -> None:
        if place < self._raised.get(at, self._places[at]):
            self._raised[at] = place
            for other in self.needs.before[at]:
                if other in self._follows:
                    self._raise(other, place)

    def _ready(self, at: int) -> float:
        """Where the last of what an op needs is, but for what follows it."""
        needed = self.needs.before[at]
        return max((self._ready(each) if each in self._follows else self._place(each) for each in needed), default=-1.0)

    def tape(self) -> list[Op]:
        """The tape in its new order."""
        if not self._raised and not self._sunk:
            return list(self._tape)
        tape, before, after = self._tape, self.needs.before, self.needs.after
        latest = [float(len(tape))] * len(tape)  # where each op is needed
        for at in reversed(range(len(tape))):
            for other in after[at]:
                follows = tape[other].kind in LIGHT or tape[other].kind is FREE or other in self._sunk
                latest[at] = min(latest[at], latest[other] if follows else self._place(other))
        places: list[float] = []
        for at, op in enumerate(tape):
            there = max((places[other] for other in before[at]), default=-1.0)
            if op.kind is FREE:
                place = there
            elif at in self._sunk:
                place = max(there, min(self._sunk[at], latest[at]))
            else:
                place = max(there, self._place(at))
            places.append(place)
        return [tape[at] for at in sorted(range(len(tape)), key=lambda at: (places[at], at))]

    def _place(self, at: int) -> float:
        return self._raised.get(at, self._places[at])


def _places(tape: Sequence[Op]) -> list[float]:
    """Where each op stands: what is issued together, at its first op's place, so that nothing comes between."""
    places: list[float] = []
    for at, op in enumerate(tape):
        together = op.batch >= 0 and at > 0 and tape[at - 1].batch == op.batch
        places.append(places[-1] if together else float(at))
    return places


# Tapes in another order, on every rank alike.


Tapes = list[list[Op]]


class CannotApply(Exception):
    """A pass has nothing to do on a program; its text, half a sentence, says why."""


def reordered(checked: Checked, wish: Callable[[Ordering], None]) -> Tapes:
    """Every rank's tape, in the order that its wishes give; `wish` says what goes where on one tape."""
    found: Tapes = []
    for needs in checked.dependences:
        order = Ordering(needs)
        wish(order)
        found.append(order.tape())
    return found


# Gradients are reduced while earlier layers' are computed: a reduction is awaited as late as memory allows.


REDUCTIONS = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.REDUCE})


def defer(checked: Checked, ahead: int) -> Tapes:
    """Await each reduction of a gradient, and update by it, when so many more have been started.

    Raises:
        CannotApply: when no gradient is reduced.
    """
    if not any(map(_reductions, checked.program.tapes, checked.specs)):
        raise CannotApply("no gradient of weights is reduced, so none can be awaited later")
    return reordered(checked, partial(_wish_defer, checked, ahead))


def _wish_defer(checked: Checked, ahead: int, order: Ordering) -> None:
    needs = order.needs
    started = _reductions(needs.tape, checked.specs[order.rank])
    for number, at in enumerate(started):
        later = started[number + ahead] if number + ahead < len(started) else len(needs.tape)
        awaited = needs.over(at)
        for late in (awaited, *_updates(order, awaited)):
            order.end_before(late, later)


def _updates(order: Ordering, awaited: int) -> Iterator[int]:
    """The updates that an op's result goes to, at once or by what follows it."""
    for at in order.needs.after[awaited]:
        kind = order.needs.tape[at].kind
        if kind is OpKind.UPDATE:
            yield at
        elif kind in LIGHT:
            yield from _updates(order, at)


def _reductions(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    return [at for at, op in enumerate(tape) if op.kind in REDUCTIONS and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]


# Weights are gathered ahead of their use, while earlier layers compute.
#
# FSDP's prefetching (Zhao et al. 2023, arXiv 2304.11277, section 3.3.2), on any tape.


def prefetch(checked: Checked, ahead: int | Ahead) -> Tapes:
    """Start each gather of weights so many uses of gathered weights ahead.

    Raises:
        CannotApply: when none are gathered before they are used.
    """
    if not any(map(gathers_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no weights are gathered for a pass, so there is nothing to gather ahead")
    return reordered(checked, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int | Ahead, order: Ordering) -> None:
    order.start_ahead(gathers_ahead(order.needs.tape, checked.specs[order.rank]), ahead)


def gathers_ahead(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    """Where a tape gathers weights that this step uses; new ones are for the next."""
    gathered = [at for at, op in enumerate(tape) if op.kind is OpKind.ALL_GATHER]
    wholes = [specs[tape[at].outputs[0]] for at in gathered]
    return [at for at, whole in zip(gathered, wholes, strict=True) if whole.kind is Kind.WEIGHT and not whole.step]


# Copies from the host or the disk start ahead of their use, and copies to there go on beside what follows.


OFFLOAD, RELOAD = OpKind.OFFLOAD, OpKind.RELOAD


def early_copies(checked: Checked, ahead: int) -> Tapes:
    """Start each reload so many uses of reloaded values ahead, and await each offload when so many more have begun.

    Raises:
        CannotApply: when nothing is copied.
    """
    if not any(_copies(tape, RELOAD) or _copies(tape, OFFLOAD) for tape in checked.program.tapes):
        raise CannotApply("nothing is kept on the host or the disk")
    return reordered(checked, partial(_wish_early_copies, ahead))


def _wish_early_copies(ahead: int, order: Ordering) -> None:
    needs = order.needs
    order.start_ahead(_copies(needs.tape, RELOAD), ahead)
    away = _copies(needs.tape, OFFLOAD)
    for number, at in enumerate(away):
        later = number + ahead
        order.end_before(needs.over(at), away[later] if later < len(away) else len(needs.tape))


def _copies(tape: Sequence[Op], kind: OpKind) -> list[int]:
    return [at for at, op in enumerate(tape) if op.kind is kind]


# Receives are posted before what they bring is needed, so that messages travel while their receiver computes.


def early_receives(checked: Checked, ahead: int | Ahead) -> Tapes:
    """Post each receive so many uses of received values ahead.

    Raises:
        CannotApply: when there are none, or all stand in exchanges, whose messages are issued together.
    """
    if not any(map(receives_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no rank receives a message, or only in exchanges, which are issued whole")
    return reordered(checked, partial(_wish_early_receives, ahead))


def _wish_early_receives(ahead: int | Ahead, order: Ordering) -> None:
    order.start_ahead(receives_ahead(order.needs.tape, {}), ahead)


def receives_ahead(tape: Sequence[Op], _: Mapping[int, Spec]) -> list[int]:
    """Where a tape posts receives that stand alone."""
    return [at for at, op in enumerate(tape) if op.kind is OpKind.RECV and op.batch < 0]


# The optimizer steps a layer as soon as its gradient is final, beside the communication that is left.


def early_updates(checked: Checked, _: int) -> Tapes:
    """Have every update follow its gradient.

    Raises:
        CannotApply: when nothing is updated, or no gradient is final before the norm of all is known.
    """
    if not checked.trains:
        raise CannotApply("nothing is updated")
    if checked.clips:
        raise CannotApply("gradients are clipped by a norm, so none is final before the last")
    return reordered(checked, _wish_early_updates)


def _wish_early_updates(order: Ordering) -> None:
    tape, needs = order.needs.tape, order.needs
    for at, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            order.start_at_once(at)
            for away in (reader for made in op.outputs for reader in needs.readers[made]):
                if tape[away].kind is OpKind.OFFLOAD:
                    order.start_at_once(away)
                    order.start_at_once(needs.over(away))
