"""Numbers of the values of all tapes: which values on which ranks have equal bits."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial

from shardlab.check.accumulation import InPlace
from shardlab.check.buckets import batches_of
from shardlab.check.checked import Checked
from shardlab.check.numbers import Numbers, positions
from shardlab.program import Holds, Op, OpKind, Spec
from shardlab.program.matching import Communication
from shardlab.program.ops import COMMUNICATION, COPIES, POINT_TO_POINT, ROOT_GIVES, Combiner
from shardlab.rules.kind import ROW_KINDS, Reduction

_ONE_GIVES = ROOT_GIVES | POINT_TO_POINT | COPIES
"""Ops that deliver what one rank gives."""


FUSED_ADD = OpKind.ADD, OpKind.BACKWARD
"""How a gradient is computed that its backward pass has added to an older one: a product rounds with the sum."""

Loaded = tuple[int, OpKind, int, Holds | None]
"""(rank, op, layer, slices) of what a rank keeps from step to step."""


class Numbering:
    """Replays one step of a checked program.

    Args:
        checked: the program.
        begins: for what ranks load, which parts of it are equal to which: to those with the same label. None: all that
            is loaded of a layer is equal.

    Attributes:
        numbers: the table.
        live: for each rank, the numbers of the values that are left when its tape ends.
    """

    def __init__(self, checked: Checked, begins: Mapping[Loaded, Sequence[tuple[Holds, int]]] | None = None) -> None:
        self.checked = checked
        self._begins = begins or {}
        self._fused = [InPlace(tape).fused for tape in checked.program.tapes]
        self.numbers = Numbers()
        tapes = checked.program.tapes
        self.live: list[dict[int, int]] = [{} for _ in tapes]
        layers = checked.program.rules.layers
        self._directed = checked.program.sizes.directed
        self._atomic = {rules.layer_number for rules in layers if any(node.atomic for node in rules.layer.nodes)}
        self._given: list[dict[int, int]] = [{} for _ in checked.communications]  # by rank
        self._batches: dict[int, dict[int, list[int]]] = {}
        self._made: dict[int, int] = {}  # communication -> the number of all that it delivers
        self._apart: set[int] = set()  # communications that deliver another value to each member
        self._waiting: dict[int, list[int]] = defaultdict(list)  # communication -> ranks
        self._runnable = deque(range(len(tapes)))
        self._coming: list[dict[int, tuple[int, ...]]] = [{} for _ in tapes]  # handle -> what it will deliver
        at = [0] * len(tapes)
        while self._runnable:
            rank = self._runnable.popleft()
            at[rank] = self._replay(rank, at[rank])

    def _replay(self, rank: int, start: int) -> int:
        """Go on with one rank until it waits for a value that is not there yet; where to go on."""
        ops, specs, live = self.checked.program.tapes[rank], self.checked.specs[rank], self.live[rank]
        numbers, communication_of, coming = self.numbers, self.checked.communication_of[rank], self._coming[rank]
        for index in range(start, len(ops)):
            op = ops[index]
            kind, layer, inputs, outputs, handle = op[:5]
            if kind is OpKind.FREE:
                del live[inputs[0]]
            elif kind is OpKind.WAIT:
                for number in coming[handle]:
                    made = self._made.get(communication_of[handle])
                    if made is None:
                        self._waiting[communication_of[handle]].append(rank)
                        return index
                    if communication_of[handle] in self._apart:
                        made = numbers.of(("member", rank), (made,))
                    live[number] = numbers.at(made, positions(specs[number])) if made in numbers.pieces else made
            elif kind in COMMUNICATION:
                coming[handle] = outputs
                if inputs:
                    self._give(rank, op, communication_of[handle], live[inputs[0]])
            elif kind is OpKind.ADD and index in self._fused[rank]:
                made = partial(numbers.of_all, FUSED_ADD)
                given = [live[number] for number in self._fused[rank][index]]
                live[outputs[0]] = numbers.element_wise(made, given, positions(specs[outputs[0]]))
            elif kind is OpKind.ADD:
                term = specs[inputs[0]].form.term
                plain = term is None or not term.merged
                made = numbers.sum if plain else partial(numbers.of_all, ("merged", layer))
                given = [live[number] for number in inputs]
                live[outputs[0]] = numbers.element_wise(made, given, positions(specs[outputs[0]]))
            elif kind is OpKind.SCALE or kind is OpKind.CAST:
                made = partial(numbers.of_all, (kind, op.factor, op.dtype))
                live[outputs[0]] = numbers.element_wise(made, [live[inputs[0]]], positions(specs[inputs[0]]))
            elif kind is OpKind.SLICE:
                made = live[inputs[0]]
                live[outputs[0]] = numbers.at(made, positions(specs[outputs[0]])) if made in numbers.pieces else made
            elif kind is OpKind.CONCATENATE:
                live[outputs[0]] = self._gathered(op, [specs[n] for n in inputs], [live[n] for n in inputs])
            elif kind is OpKind.DIRECTION:
                _, state, *norm = inputs
                made = partial(numbers.of_all, (kind, layer, *[live[number] for number in norm]))
                given = [live[number] for number in inputs[:2]]
                live[outputs[0]] = numbers.element_wise(made, given, positions(specs[state]))
            elif kind is OpKind.UPDATE:
                _, weight, state, *others = inputs
                form = specs[state].form  # a host rounds otherwise than a device, and a matrix otherwise than several
                where = form.place, form.holds if layer in self._directed else None
                made = partial(numbers.of_all, (OpKind.UPDATE, layer, *where, *[live[number] for number in others]))
                given = [live[number] for number in inputs[:3]]
                del live[weight], live[state]
                number = numbers.element_wise(made, given, positions(specs[state]))
                live[outputs[0]] = live[outputs[1]] = number
            else:
                self._compute(rank, op, specs, live)
        return len(ops)

    def _compute(self, rank: int, op: Op, specs: dict[int, Spec], live: dict[int, int]) -> None:
        """Number the results of loads, passes, norms and losses: equal for one op on equal values of one form."""
        kind, layer, inputs, outputs = op[:4]
        given = tuple([live[number] for number in inputs])
        what: tuple[object, ...] = (OpKind.FORWARD if kind is OpKind.RECOMPUTE else kind, layer)
        if not inputs:
            parts = self._begins.get((rank, kind, layer, op.holds))
            number = self.numbers.of(what)
            if parts is not None:
                number = self.numbers.joined([(holds, self.numbers.of((*what, label))) for holds, label in parts])
            live[outputs[0]] = number
            return
        what += (specs[inputs[0]][1], *[specs[number][0] for number in inputs])
        if kind is OpKind.ATTEND_BACKWARD or (kind.row.saved >= 0 and layer in self._atomic):
            what += (rank, outputs[0])
        for number in outputs:
            live[number] = self.numbers.of((*what, specs[number][0]), given)

    def _give(self, rank: int, op: Op, communication: int, number: int) -> None:
        """Give one member's value; the last one to do so wakes those that wait."""
        given, found = self._given[communication], self.checked.communications[communication]
        given[rank] = number
        if op.kind in _ONE_GIVES:
            self._made[communication] = number
        elif len(given) == len(found.participants):
            if op.kind.row.combines is None and op.kind is not OpKind.ALL_TO_ALL:
                self._apart.add(communication)
            self._made[communication] = self._united(op, found, [given[each.rank] for each in found.participants])
        else:
            return
        self._runnable.extend(self._waiting.pop(communication, ()))

    def _gathered(self, op: Op, specs: Sequence[Spec], given: Sequence[int]) -> int:
        """What pieces make that are laid side by side, or exchanged."""
        forms = [spec.form for spec in specs]
        alike = specs[0].kind not in ROW_KINDS or len(set(forms)) == 1
        if alike and op.kind.row.combines is Combiner.UNION:
            return self.numbers.joined(zip(map(positions, specs), given, strict=True))
        # along another index than the batch
        return self.numbers.of((op.kind, *forms, *[spec.cells for spec in specs]), tuple(given))

    def _bucket(self, communication: Communication) -> tuple[object, ...]:
        """Describe the buffer in which a collective runs as one with others: its own place, and how long each is."""
        rank, _, at = communication.participants[0]
        tape = self.checked.program.tapes[rank]
        if tape[at].batch < 0:
            return ()
        batches = self._batches.setdefault(rank, batches_of(tape))
        together = batches[tape[at].batch]
        specs = [self.checked.specs[rank][tape[each].inputs[0]] for each in together]
        lengths = [(spec.layer, spec.holds.mask.bit_count(), spec.holds.of) for spec in specs]
        return (together.index(at), *lengths)

    def _united(self, op: Op, communication: Communication, given: Sequence[int]) -> int:
        """Number what a collective makes of all that is given, in the group's order: one number for all members."""
        tapes, numbers = self.checked.program.tapes, self.numbers
        if len(given) == 1:
            return given[0]
        specs = [self.checked.specs[rank][tapes[rank][at].inputs[0]] for rank, _, at in communication.participants]
        first = specs[0]
        if op.kind.row.combines is not Combiner.SUM:
            return self._gathered(op, specs, given)
        if len(given) == 2 and op.reduction is Reduction.SUM:
            return numbers.element_wise(numbers.sum, given, positions(first))
        # in which order more are added up depends on the algorithm, and on the element's place in the buffer
        how = (op.kind, op.reduction, positions(first), *self._bucket(communication))
        return numbers.element_wise(partial(numbers.of_all, how), given, positions(first))
