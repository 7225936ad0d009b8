"""Replicas: which copies of a weight stay equal bit by bit, which may drift apart, and what ranks can compare in a run.

The check proves exact arithmetic, in which the order of a sum does not matter. In floating point it does: if each rank
updates its copy from its own sum of the same gradients, the copies become unequal, and nothing makes them equal again.

The method is value numbering. `ValueNumbering` replays one step and numbers all values so that equal numbers mean equal
bits; `NumberTable` has the numbers. `drifts_of` lists copies whose numbers differ after the step, with a cause and a
remedy. `replicas_of` and `results_of` list the copies and results that must be equal, which an audit compares in a run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from shardlab.check.buffers import batches_of
from shardlab.check.checked import Checked
from shardlab.check.in_place import InPlace
from shardlab.common.text import listed
from shardlab.language import Holds, Kind, Op, OpKind, Spec
from shardlab.language.ops import COMMUNICATION, COPIES, POINT_TO_POINT, ROOT_GIVES, Combiner
from shardlab.language.rules.kinds import ROW_KINDS, Reduction, bits
from shardlab.language.tape import Communication
from shardlab.language.world import gc_paused

_ONE_GIVES = ROOT_GIVES | POINT_TO_POINT | COPIES
"""Ops that deliver one rank's value."""


FUSED_ADD = OpKind.ADD, OpKind.BACKWARD
"""Key of a gradient that its backward pass added to an older one: product and sum are rounded together."""

SUMS = frozenset(kind for kind in OpKind if kind.row.combines is Combiner.SUM)
"""Ops that add up values. Their keys do not depend on the order of operands."""

COMPARED = frozenset(
    {
        OpKind.FORWARD,
        OpKind.BACKWARD,
        OpKind.BACKWARD_INPUT,
        OpKind.BACKWARD_WEIGHT,
        OpKind.ATTEND,
        OpKind.ATTEND_BACKWARD,
        OpKind.LOSS,
    }
)
"""Ops whose results an audit compares."""

_CHANGING = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.ADD, OpKind.SCALE})
"""Ops other than an update that change the weights that they read."""

LoadKey = tuple[int, OpKind, int, Holds | None]
"""(rank, op, layer, slices) of a load: key of a value that a rank keeps from step to step."""

Key = tuple[tuple[object, ...], tuple[int, ...]]
"""(operation, numbers of its operands) by which a value was computed."""


class Drift(NamedTuple):
    """Copies of some layers' weights that may not stay equal.

    Attributes:
        kind: `weights`; or `opt_states`, if only those drift.
        layers: the layers.
        groups: the ranks, grouped by equal copies.
        cause: the difference, and the remedy.
    """

    kind: str
    layers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    cause: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the sentence, for JSON."""
        return {**self._asdict(), "text": str(self)}

    def __str__(self) -> str:
        alone = all(len(ranks) == 1 for ranks in self.groups)
        groups = [sorted(ranks[0] for ranks in self.groups)] if alone else self.groups
        ranks = " against ".join(map(listed, groups))
        return f"replicas of {self.kind}[{listed(self.layers)}] on ranks {ranks} may drift: {self.cause}."


class Replica(NamedTuple):
    """Slices of a layer's weights that several ranks keep, and that are bitwise equal after every step."""

    layer: int
    holds: Holds
    ranks: tuple[int, ...]


class OpResult(NamedTuple):
    """Result of an op, for comparison between ranks when all microbatches have the same data.

    Attributes:
        op: index of the op on the tape.
        number: number of the value.
        key: results with equal keys must be equal, also on different ranks.
    """

    op: int
    number: int
    key: Hashable


class ParameterCopy(NamedTuple):
    """Slices of a layer's weight or optimizer state on one rank, which share one value number."""

    holds: Holds
    number: int
    rank: int


FOLLOWING_CAUSE = "their gradients depend on other weights that drift; fix those, and these stay equal"
"""Cause of a drift that begins one step after another drift."""


def drifts_of(checked: Checked) -> list[Drift]:
    """List all replicas of a program that may drift, layer by layer. Layers with the same drift are listed together."""
    with gc_paused():
        numbering = ValueNumbering(checked)
        first = _drifts(numbering, _copies(numbering))
        if not first:
            return []
        drifting = {layer for drift in first for layer in drift.layers}
        later = number_steady_step(checked)
        follow = {key: copies for key, copies in _copies(later).items() if key[1] not in drifting}
        return first + [drift._replace(cause=FOLLOWING_CAUSE) for drift in _drifts(later, follow)]


def replicas_of(checked: Checked) -> list[Replica]:
    """List all replicas that stay bitwise equal, also in later steps (see `number_steady_step`), by layer."""
    with gc_paused():
        numbering = number_steady_step(checked)
    copies: dict[tuple[int, int], list[tuple[Holds, int]]] = defaultdict(list)  # (layer, number) -> (slices, rank)
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = checked.specs[rank][value]
            if spec.kind is Kind.WEIGHT:
                for holds, piece in numbering.numbers.find_parts(number, spec.holds):
                    copies[spec.layer, piece].append((holds, rank))
    replicas: list[Replica] = []
    for (layer, _), shares in sorted(copies.items()):
        of = math.lcm(*(holds.of for holds, _ in shares))
        ranks_at: dict[int, set[int]] = defaultdict(set)
        for holds, rank in shares:
            for piece in bits(holds.refined(of).mask):
                ranks_at[piece].add(rank)
        masks: dict[tuple[int, ...], int] = defaultdict(int)
        for piece, ranks in ranks_at.items():
            masks[tuple(sorted(ranks))] |= 1 << piece
        replicas += [Replica(layer, Holds(mask, of).simplified(), ranks) for ranks, mask in masks.items() if ranks[1:]]
    return replicas


def results_of(checked: Checked) -> list[list[OpResult]]:
    """List each rank's results that can be compared; none if ops other than updates change weights."""
    tapes, specs = checked.program.tapes, checked.specs
    if any(
        op.kind in _CHANGING and specs[rank][op.inputs[0]].kind is Kind.WEIGHT
        for rank, tape in enumerate(tapes)
        for op in tape
    ):
        return [[] for _ in tapes]
    return [_results(tape, specs[rank]) for rank, tape in enumerate(tapes)]


def compared_ranks(replicas: list[Replica], results: list[list[OpResult]]) -> bool:
    """Return whether any two ranks have a replica or a result in common."""
    ranks_of: dict[Hashable, set[int]] = defaultdict(set)
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            ranks_of[result.key].add(rank)
    return bool(replicas) or any(len(ranks) > 1 for ranks in ranks_of.values())


def number_steady_step(checked: Checked) -> ValueNumbering:
    """Number the values of a late step: all copies that ever drift apart differ at its start already."""
    numbering, classes = ValueNumbering(checked), dict[LoadKey, list[tuple[Holds, int]]]()
    while any(map(_drifted, _copies(numbering).values())):
        previous, classes = classes, _classes(numbering)
        if classes == previous:
            break
        numbering = ValueNumbering(checked, classes)
    return numbering


_LOADS = {Kind.WEIGHT: OpKind.LOAD_WEIGHT, Kind.OPT_STATE: OpKind.LOAD_OPT_STATE}


class ValueNumbering:
    """Replay of one step of a checked program that numbers all values.

    Args:
        checked: the program.
        initial: for each load, its parts with labels; parts of a layer with equal labels are equal (None: all copies of
            a layer are equal).

    Attributes:
        numbers: the table of numbers.
        live: for each rank, the numbers of the values that are live when its tape ends.
    """

    def __init__(self, checked: Checked, initial: Mapping[LoadKey, Sequence[tuple[Holds, int]]] | None = None) -> None:
        self.checked = checked
        self._initial = initial or {}
        self._fused = [InPlace(tape).fused for tape in checked.program.tapes]
        self.numbers = NumberTable()
        tapes = checked.program.tapes
        self.live: list[dict[int, int]] = [{} for _ in tapes]
        layers = checked.program.rules.layers
        self._directed = checked.program.sizes.directed
        self._atomic = {rules.layer_number for rules in layers if any(node.atomic for node in rules.layer.nodes)}
        self._contributed: list[dict[int, int]] = [{} for _ in checked.communications]  # rank -> number
        self._batches: dict[int, dict[int, list[int]]] = {}
        self._delivered: dict[int, int] = {}  # communication -> number of its result
        self._distributing: set[int] = set()  # communications that give each member another value
        self._waiters: dict[int, list[int]] = defaultdict(list)  # communication -> ranks
        self._runnable = deque(range(len(tapes)))
        self._in_flight: list[dict[int, tuple[int, ...]]] = [{} for _ in tapes]  # handle -> values that it will deliver
        positions = [0] * len(tapes)
        while self._runnable:
            rank = self._runnable.popleft()
            positions[rank] = self._replay(rank, positions[rank])

    def _replay(self, rank: int, start: int) -> int:
        """Replay one rank until it waits for a value that has not arrived, and return the index of the next op."""
        ops, specs, live = self.checked.program.tapes[rank], self.checked.specs[rank], self.live[rank]
        numbers, communication_of, in_flight = self.numbers, self.checked.communication_of[rank], self._in_flight[rank]
        for index in range(start, len(ops)):
            op = ops[index]
            kind, layer, inputs, outputs, handle = op[:5]
            if kind is OpKind.FREE:
                del live[inputs[0]]
            elif kind is OpKind.WAIT:
                for number in in_flight[handle]:
                    value = self._delivered.get(communication_of[handle])
                    if value is None:
                        self._waiters[communication_of[handle]].append(rank)
                        return index
                    if communication_of[handle] in self._distributing:
                        value = numbers.number_of(("member", rank), (value,))
                    live[number] = numbers.at(value, positions(specs[number])) if value in numbers.pieces else value
            elif kind in COMMUNICATION:
                in_flight[handle] = outputs
                if inputs:
                    self._give(rank, op, communication_of[handle], live[inputs[0]])
            elif kind is OpKind.ADD and index in self._fused[rank]:
                rule = partial(numbers.of_all, FUSED_ADD)
                operands = [live[number] for number in self._fused[rank][index]]
                live[outputs[0]] = numbers.element_wise(rule, operands, positions(specs[outputs[0]]))
            elif kind is OpKind.ADD:
                term = specs[inputs[0]].form.term
                plain = term is None or not term.merged
                rule = numbers.sum if plain else partial(numbers.of_all, ("merged", layer))
                operands = [live[number] for number in inputs]
                live[outputs[0]] = numbers.element_wise(rule, operands, positions(specs[outputs[0]]))
            elif kind is OpKind.SCALE or kind is OpKind.CAST:
                rule = partial(numbers.of_all, (kind, op.factor, op.dtype))
                live[outputs[0]] = numbers.element_wise(rule, [live[inputs[0]]], positions(specs[inputs[0]]))
            elif kind is OpKind.SLICE:
                value = live[inputs[0]]
                live[outputs[0]] = numbers.at(value, positions(specs[outputs[0]])) if value in numbers.pieces else value
            elif kind is OpKind.CONCATENATE:
                live[outputs[0]] = self._number_union(op, [specs[n] for n in inputs], [live[n] for n in inputs])
            elif kind is OpKind.DIRECTION:
                _, state, *norm = inputs
                rule = partial(numbers.of_all, (kind, layer, *[live[number] for number in norm]))
                operands = [live[number] for number in inputs[:2]]
                live[outputs[0]] = numbers.element_wise(rule, operands, positions(specs[state]))
            elif kind is OpKind.UPDATE:
                _, weight, state, *others = inputs
                form = specs[state].form  # a host and a device round differently, and so do one matrix and several
                place = form.place, form.holds if layer in self._directed else None
                rule = partial(numbers.of_all, (OpKind.UPDATE, layer, *place, *[live[number] for number in others]))
                operands = [live[number] for number in inputs[:3]]
                del live[weight], live[state]
                number = numbers.element_wise(rule, operands, positions(specs[state]))
                live[outputs[0]] = live[outputs[1]] = number
            else:
                self._compute(rank, op, specs, live)
        return len(ops)

    def _compute(self, rank: int, op: Op, specs: dict[int, Spec], live: dict[int, int]) -> None:
        """Number the results of loads, passes, norms and losses. The same op on equal values of the same form has equal
        results.
        """
        kind, layer, inputs, outputs = op[:4]
        operands = tuple([live[number] for number in inputs])
        key: tuple[object, ...] = (OpKind.FORWARD if kind is OpKind.RECOMPUTE else kind, layer)
        if not inputs:
            parts = self._initial.get((rank, kind, layer, op.holds))
            number = self.numbers.number_of(key)
            if parts is not None:
                number = self.numbers.join([(holds, self.numbers.number_of((*key, label))) for holds, label in parts])
            live[outputs[0]] = number
            return
        key += (specs[inputs[0]][1], *[specs[number][0] for number in inputs])
        if kind is OpKind.ATTEND_BACKWARD or (kind.row.saved_input >= 0 and layer in self._atomic):
            key += (rank, outputs[0])
        for number in outputs:
            live[number] = self.numbers.number_of((*key, specs[number][0]), operands)

    def _give(self, rank: int, op: Op, communication: int, number: int) -> None:
        """Record one member's value. After the last member, wake the waiting ranks."""
        numbers, details = self._contributed[communication], self.checked.communications[communication]
        numbers[rank] = number
        if op.kind in _ONE_GIVES:
            self._delivered[communication] = number
        elif len(numbers) == len(details.participants):
            if op.kind.row.combines is None and op.kind is not OpKind.ALL_TO_ALL:
                self._distributing.add(communication)
            self._delivered[communication] = self._number_reduction(
                op, details, [numbers[member.rank] for member in details.participants]
            )
        else:
            return
        self._runnable.extend(self._waiters.pop(communication, ()))

    def _number_union(self, op: Op, specs: Sequence[Spec], numbers: Sequence[int]) -> int:
        """Number the result of concatenating or exchanging pieces."""
        forms = [spec.form for spec in specs]
        joinable = specs[0].kind not in ROW_KINDS or len(set(forms)) == 1
        if joinable and op.kind.row.combines is Combiner.UNION:
            return self.numbers.join(zip(map(positions, specs), numbers, strict=True))
        # the pieces are of another index than the batch
        return self.numbers.number_of((op.kind, *forms, *[spec.cells for spec in specs]), tuple(numbers))

    def _bucket(self, communication: Communication) -> tuple[object, ...]:
        """Return the position of a collective in the buffer of its batch, and the lengths of all values there."""
        rank, _, at = communication.participants[0]
        tape = self.checked.program.tapes[rank]
        if tape[at].batch < 0:
            return ()
        batches = self._batches.setdefault(rank, batches_of(tape))
        batch = batches[tape[at].batch]
        specs = [self.checked.specs[rank][tape[index].inputs[0]] for index in batch]
        lengths = [(spec.layer, spec.holds.mask.bit_count(), spec.holds.of) for spec in specs]
        return (batch.index(at), *lengths)

    def _number_reduction(self, op: Op, communication: Communication, operands: Sequence[int]) -> int:
        """Number the result of a collective, which is the same for all members, from their values in group order."""
        tapes, numbers = self.checked.program.tapes, self.numbers
        if len(operands) == 1:
            return operands[0]
        specs = [
            self.checked.specs[rank][tapes[rank][index].inputs[0]] for rank, _, index in communication.participants
        ]
        first = specs[0]
        if op.kind.row.combines is not Combiner.SUM:
            return self._number_union(op, specs, operands)
        if len(operands) == 2 and op.reduction is Reduction.SUM:
            return numbers.element_wise(numbers.sum, operands, positions(first))
        # the order of a longer sum depends on the algorithm, and on the element's place in the buffer
        op_key = (op.kind, op.reduction, positions(first), *self._bucket(communication))
        return numbers.element_wise(partial(numbers.of_all, op_key), operands, positions(first))


class NumberTable:
    """Numbers of values, and how each value was computed.

    A number stands for a function of all positions: elements of a layer's parameters, or cells of the batch. A value's
    spec gives the positions at which it has elements. So a slice has the same number as the whole, and gathering slices
    with one number gives that number.

    Attributes:
        keys: by number, the operation and operands by which the value was computed.
        pieces: for each number that was joined from others, (positions, number) of each part.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.pieces: dict[int, list[tuple[Holds, int]]] = {}
        self._number_of: dict[Key, int] = {}

    def number_of(self, op_key: tuple[object, ...], numbers: tuple[int, ...] = ()) -> int:
        """Return the number of the value that this operation computes from operands with these numbers."""
        key = op_key, numbers
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self.keys)
            self.keys.append(key)
        return number

    def find_parts(self, number: int, holds: Holds) -> list[tuple[Holds, int]]:
        """Return the parts of a value that lie at some positions: (positions, number) of each part."""
        pieces = self.pieces.get(number)
        if pieces is None:
            return [(holds, number)]
        overlaps = [(holds & part, piece) for part, piece in pieces]
        return [(part, piece) for part, piece in overlaps if part.mask]

    def join(self, parts: Iterable[tuple[Holds, int]]) -> int:
        """Return the number of the concatenation of some parts."""
        whole: dict[int, Holds] = {}
        for holds, number in parts:
            for part, piece in self.find_parts(number, holds):
                whole[piece] = whole.get(piece, Holds(0, 1)) | part
        if len(whole) == 1:
            return next(iter(whole))
        pieces = [(whole[piece].simplified(), piece) for piece in sorted(whole)]
        number = self.number_of(("pieces", *(part for part, _ in pieces)), tuple(piece for _, piece in pieces))
        self.pieces[number] = pieces
        return number

    def at(self, number: int, holds: Holds) -> int:
        """Return the number of a value's slice at some positions."""
        return self.join([(holds, number)]) if number in self.pieces else number

    def element_wise(self, rule: Callable[[Sequence[int]], int], numbers: Sequence[int], holds: Holds) -> int:
        """Return the number of an element-wise result. `rule` returns it for one piece, from the operands' numbers
        there.
        """
        if self.pieces.keys().isdisjoint(numbers):
            return rule(numbers)
        cuts = [holds]
        for number in numbers:
            cuts = [part for cut in cuts for part, _ in self.find_parts(number, cut)]
        return self.join([(cut, rule([self.at(number, cut) for number in numbers])) for cut in cuts])

    def of_all(self, op_key: tuple[object, ...], numbers: Sequence[int]) -> int:
        """Return the number of an op's result. With `op_key` bound, this is the `rule` argument of `element_wise`."""
        return self.number_of(op_key, tuple(numbers))

    def sum(self, numbers: Sequence[int]) -> int:
        """Return the number of the sum of two values, which is the same in either order."""
        one, other = numbers
        return self.number_of((OpKind.ADD,), (one, other) if one < other else (other, one))

    def terms(self, number: int) -> list[int]:
        """Return the numbers of all terms of a sum, ascending. A term that is itself a sum is replaced by its terms."""
        stack, result = [number], list[int]()
        while stack:
            op_key, numbers = self.keys[number := stack.pop()]
            stack.extend(numbers) if op_key[0] in SUMS else result.append(number)
        return sorted(result)


def positions(spec: Spec) -> Holds:
    """Return the positions at which a value has elements: cells of the batch, or slices of a layer's parameters."""
    form, cells, _ = spec
    return Holds(cells, form.space.cells) if form.kind in ROW_KINDS else form.holds


def _copies(numbering: ValueNumbering) -> dict[tuple[Kind, int], list[ParameterCopy]]:
    """Return the copies of weights and optimizer states at the end of the step, by kind and layer."""
    checked = numbering.checked
    copies: dict[tuple[Kind, int], list[ParameterCopy]] = defaultdict(list)
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = checked.specs[rank][value]
            if spec.step == 1 and spec.kind in _LOADS:
                pieces = numbering.numbers.find_parts(number, spec.holds)
                copies[spec.kind, spec.layer] += [ParameterCopy(holds, piece, rank) for holds, piece in pieces]
    return copies


def _classes(numbering: ValueNumbering) -> dict[LoadKey, list[tuple[Holds, int]]]:
    """Label the values that ranks load in the next step: equal labels mean equal bits. Each layer has labels from 0."""
    classes: dict[LoadKey, list[tuple[Holds, int]]] = {}
    labels: dict[tuple[Kind, int], dict[int, int]] = defaultdict(dict)
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = numbering.checked.specs[rank][value]
            if spec.kind in _LOADS:
                label_of = labels[spec.kind, spec.layer]
                pieces = numbering.numbers.find_parts(number, spec.holds)
                classes[rank, _LOADS[spec.kind], spec.layer, spec.holds] = [
                    (holds, label_of.setdefault(piece, len(label_of))) for holds, piece in pieces
                ]
    return classes


def _drifts(numbering: ValueNumbering, copies: Mapping[tuple[Kind, int], list[ParameterCopy]]) -> list[Drift]:
    """List the copies that differ, in groups of layers with the same ranks and cause."""
    layers_of: dict[tuple[Kind, tuple[tuple[int, ...], ...], str], list[int]] = defaultdict(list)
    drifting: set[int] = set()
    for kind, layer in sorted(copies, key=lambda key: (key[0] is Kind.OPT_STATE, key[1])):
        differing = _drifted(copies[kind, layer])
        if differing and layer not in drifting:
            drifting.add(layer)
            first = differing[0].holds.mask & -differing[0].holds.mask  # other elements may have another cause
            cause = _cause(numbering.numbers, sorted({copy.number for copy in differing if copy.holds.mask & first}))
            layers_of[kind, _groups(differing), cause].append(layer)
    return [Drift(kind.value, tuple(layers), groups, cause) for (kind, groups, cause), layers in layers_of.items()]


def _drifted(copies: list[ParameterCopy]) -> list[ParameterCopy]:
    """Return the parts of copies whose numbers differ between ranks, in pieces of one size."""
    numbers = {copy.number for copy in copies}
    if len(numbers) == 1:
        return []
    of = math.lcm(*[copy.holds.of for copy in copies])
    fine = [copy._replace(holds=copy.holds.refined(of)) for copy in copies]
    whole = dict.fromkeys(numbers, 0)
    for holds, number, _ in fine:
        whole[number] |= holds.mask
    once = twice = 0
    for mask in whole.values():
        twice |= once & mask
        once |= mask
    cut = [copy._replace(holds=Holds(copy.holds.mask & twice, of)) for copy in fine]
    return [copy for copy in cut if copy.holds.mask]


def _groups(copies: list[ParameterCopy]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks whose copies have equal numbers."""
    has: dict[int, set[tuple[Holds, int]]] = defaultdict(set)
    for holds, number, rank in copies:
        has[rank].add((holds, number))
    groups: dict[frozenset[tuple[Holds, int]], list[int]] = defaultdict(list)
    for rank in sorted(has):
        groups[frozenset(has[rank])].append(rank)
    return tuple(map(tuple, groups.values()))


def _cause(numbers: NumberTable, drifting: list[int]) -> str:
    """Return why copies differ, and how to make them equal."""
    op_keys, operands = zip(*[numbers.keys[number] for number in drifting], strict=True)
    if any(entry[0] is not OpKind.UPDATE for entry in op_keys):
        return "only some ranks made them equal again; do so on all ranks, by an all_reduce by mean or a broadcast"
    gradients, weights, _ = (set(column) for column in zip(*operands, strict=True))
    if len(gradients) > 1:
        if len({tuple(numbers.terms(gradient)) for gradient in gradients}) == 1:
            if len({_fused(numbers, gradient) for gradient in gradients}) > 1:
                return (
                    "some ranks add a gradient within its backward pass, where nothing else reads it, and others "
                    "afterwards; read it on all of them or on none, or all_reduce the sums by mean"
                )
            return (
                "their gradients were summed in different orders; all_reduce the gradients, or sum them on one rank "
                "and broadcast the sum"
            )
        return (
            "their gradients were computed apart, and are equal only up to rounding; all_reduce the gradients by mean, "
            "or compute them on one rank and broadcast them"
        )
    if len({entry[2:4] for entry in op_keys}) > 1:
        return (
            "they are updated in different places, or in different numbers of whole matrices; keep the same slices in "
            "the same place on all ranks"
        )
    if len(set(op_keys)) > 1:
        return (
            "the norms that clip their gradients were computed apart; all_reduce the norm, or sum it on one rank and "
            "broadcast it"
        )
    assert len(weights) > 1
    return "the weights differ before the update; use the weights as they were loaded"


def _fused(numbers: NumberTable, gradient: int) -> int:
    """Return how many terms of a sum were added within backward passes."""
    stack, count = [gradient], 0
    while stack:
        op_key, terms = numbers.keys[stack.pop()]
        if op_key[0] in SUMS:
            count += op_key == FUSED_ADD
            stack.extend(terms)
    return count


def _results(tape: list[Op], specs: dict[int, Spec]) -> list[OpResult]:
    accumulates = InPlace(tape).accumulates
    results: list[OpResult] = []
    for index, op in enumerate(tape):
        if op.kind not in COMPARED:
            continue
        older = accumulates.get(index)
        summed_count = 0 if older is None else specs[older].microbatches.bit_count()
        input_specs = tuple(_without_microbatches(specs[number]) for number in op.inputs)
        for place, number in enumerate(op.outputs):
            key = (op.kind, op.layer, op.holds, place, summed_count, input_specs, _without_microbatches(specs[number]))
            results.append(OpResult(index, number, key))
    return results


def _without_microbatches(spec: Spec) -> Hashable:
    """Return a key of a spec that ignores the numbers of its microbatches."""
    if spec.kind not in ROW_KINDS:
        return spec.form, spec.microbatches.bit_count()
    first = next(bits(spec.microbatches), 0)
    return spec.form, spec.cells >> (first * max(1, spec.form.space.sequence))
