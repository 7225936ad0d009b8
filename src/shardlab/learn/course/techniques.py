"""Techniques that exercises require, as small predicates on a checked program.

Each function takes parameters and a sentence for the student, and returns a `Technique`: a function that returns "" if
a program uses the technique, or else the sentence. Equal calls return the same object, so that techniques of exercises
can be compared. `{found}` in a sentence is replaced by what was found in the program.

The functions are in this order: ops that a program uses or avoids, overlap, memory, pipelines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import groupby

from shardlab.check import Checked
from shardlab.common.text import listed
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.ops import COLLECTIVES
from shardlab.learn.course.exercise import Technique

PASSES = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
"""Ops that compute a layer."""

BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})

COMPUTES = PASSES | {OpKind.LOSS, OpKind.UPDATE}
"""Ops that compute a layer, the loss or an update."""

REDUCTIONS = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE})


@cache
def uses(kind: OpKind, sentence: str, *, of: Kind | None = None) -> Technique:
    """Require every rank to use an op on values of the kind `of` (None: of any kind)."""
    return _technique(
        lambda checked: "" if all(any(_ops(checked, rank, kind, of)) for rank in _ranks(checked)) else "none", sentence
    )


@cache
def avoids(kinds: frozenset[OpKind], sentence: str, *, of: Kind | None = None) -> Technique:
    """Forbid ops of `kinds` on values of kind `of` (None: any). `{found}` is the first such op and its rank."""

    def find_violation(checked: Checked, rank: int) -> str:
        for kind in kinds:
            for op in _ops(checked, rank, kind, of):
                return f"{op} on rank {rank}"
        return ""

    return _on_every_rank(find_violation, sentence)


def no_collective_of(of: Kind, sentence: str) -> Technique:
    """Forbid collectives of a kind of value, such as weights in a pipeline. `{found}` is the first one."""
    return avoids(COLLECTIVES, sentence, of=of)


@cache
def at_most_of(kinds: frozenset[OpKind], limit: int, sentence: str, *, of: Kind, axis: str | None = None) -> Technique:
    """Limit the calls of some ops by one rank for one layer. `{found}` is the largest number of calls.

    Args:
        kinds: the ops.
        limit: the limit for each layer.
        of: kind of the values.
        axis: count only collectives along this axis of the mesh (None: all).
    """

    def find_violation(checked: Checked) -> str:
        counts = Counter(
            (rank, op.layer)
            for rank in _ranks(checked)
            for kind in kinds
            for op in _ops(checked, rank, kind, of)
            if axis is None or (op.group is not None and op.group.axis == axis)
        )
        largest = max(counts.values(), default=0)
        return str(largest) if largest > limit else ""

    return _technique(find_violation, sentence)


@cache
def hidden(kinds: frozenset[OpKind], sentence: str, *, of: Kind, behind: frozenset[OpKind] = PASSES) -> Technique:
    """Require all but one of each rank's communications of `kinds` to overlap with compute, whatever the costs are.

    A communication overlaps if the tape has an op of `behind` between its start and its await. `{found}` is the number
    that overlap, such as "3 of 4". One communication of each rank is exempt, since the first gather and the last
    reduction have nothing to hide behind.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        tape = checked.program.tapes[rank]
        ends = {op.handle: at for at, op in enumerate(tape) if op.kind is OpKind.WAIT}
        spans = [
            (at, ends[op.handle])
            for at, op in enumerate(tape)
            if op.kind in kinds and _is_of(op, checked.specs[rank], of)
        ]
        overlapping = sum(any(tape[index].kind in behind for index in range(*span)) for span in spans)
        return f"{overlapping} of {len(spans)}" if not spans or overlapping < len(spans) - 1 else ""

    return _on_every_rank(find_violation, sentence)


@cache
def starts_before_last(
    kinds: frozenset[OpKind], sentence: str, *, of: Kind, passes: frozenset[OpKind] = PASSES
) -> Technique:
    """Require every rank to start its first communication of `kinds` before the last op of `passes` on this rank."""

    def find_violation(checked: Checked, rank: int) -> str:
        tape, specs = checked.program.tapes[rank], checked.specs[rank]
        first = next((index for index, op in enumerate(tape) if op.kind in kinds and _is_of(op, specs, of)), len(tape))
        last = max((index for index, op in enumerate(tape) if op.kind in passes), default=-1)
        return f"rank {rank}" if first > last else ""

    return _on_every_rank(find_violation, sentence)


@cache
def loads_at_most(kind: Kind, share: Fraction, sentence: str) -> Technique:
    """Limit the share of each layer's weights or optimizer state (`kind`) that a rank keeps from step to step.

    `{found}` is the largest share of a layer, such as "1/2" or "all".
    """

    def find_violation(checked: Checked) -> str:
        largest = max(_loaded_shares(checked, kind), default=Fraction(0))
        return ("all" if largest == 1 else str(largest)) if largest > share else ""

    return _technique(find_violation, sentence)


@cache
def loads_at_least(kind: Kind, share: Fraction, sentence: str) -> Technique:
    """Require every rank that loads a part of a layer to keep at least a share of it from step to step.

    The share is that of the layer's weights or optimizer state (`kind`). `{found}` is the smallest share.
    """

    def find_violation(checked: Checked) -> str:
        smallest = min(_loaded_shares(checked, kind), default=Fraction(0))
        return str(smallest) if smallest < share else ""

    return _technique(find_violation, sentence)


@cache
def live_at_most(kind: Kind, limit: int, sentence: str) -> Technique:
    """Limit the number of live elements of a kind on any rank.

    `{found}` is the largest number. The sentence continues with the values that the rank holds then.
    """

    def technique(checked: Checked) -> str:
        largest, index, rank = max((*_most_live(checked, rank, kind), rank) for rank in _ranks(checked))
        if largest <= limit:
            return ""
        op, specs = checked.program.tapes[rank][index], checked.specs[rank]
        values = [*live_values(checked, rank, index), *(specs[number] for number in op.outputs)]
        names = values_text(spec for spec in values if spec.kind is kind)
        return f"{sentence.format(found=f'{largest:,}')} In {op}, rank {rank} holds {names} (op {index})."

    return technique


SHOWN_VALUES = 3
"""Most groups of values that a sentence lists."""


def values_text(specs: Iterable[Spec]) -> str:
    """Return values as text, grouped by kind and slices, such as `activations[0, 3-4] (microbatch 0)`."""
    layers: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for spec in specs:
        kind, _, rest = str(spec).partition(f"[{spec.layer}]")
        layers[kind, rest].add(spec.layer)
    texts = [f"{kind}[{listed(sorted(numbers))}]{rest}" for (kind, rest), numbers in layers.items()]
    omitted_count = len(texts) - SHOWN_VALUES
    return ", ".join(texts[:SHOWN_VALUES]) + (" and others" if omitted_count > 0 else "")


def live_values(checked: Checked, rank: int, index: int) -> list[Spec]:
    """Return the values that a rank holds when an op starts, in the order in which they were made."""
    live: dict[int, Spec] = {}
    for op in checked.program.tapes[rank][:index]:
        live |= {number: checked.specs[rank][number] for number in op.outputs}
        for place in op.kind.row.ends:
            live.pop(op.inputs[place], None)
    return list(live.values())


@cache
def frees_after_last_use(kind: Kind, sentence: str) -> Technique:
    """Require every value of a kind to be freed after its last use, before the next op that computes.

    For a value that is never read, the op that creates it counts as its last use. `{found}` is the first value that is
    not freed in time, such as `activations[1]`.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        specs, last_use = checked.specs[rank], dict[int, int]()
        freed_values: set[int] = set()
        for index, op in enumerate(checked.program.tapes[rank]):
            freed_values.update(op.inputs[place] for place in op.kind.row.ends)
            if op.kind in COMPUTES:
                stale_numbers = [
                    number for number, use in last_use.items() if number not in freed_values and use < index
                ]
                later_numbers = _read_from(checked.program.tapes[rank], index)
                for number in stale_numbers:
                    if number not in later_numbers:
                        return f"{specs[number].kind.value}[{specs[number].layer}]"
            if op.kind is not OpKind.FREE:
                numbers = (*op.inputs, *op.outputs)
                last_use.update({number: index for number in numbers if specs[number].kind is kind})
        return ""

    return _on_every_rank(find_violation, sentence)


@cache
def gathers_for_each_pass(sentence: str) -> Technique:
    """Forbid that a rank keeps a gathered weight from one pass to another while it waits for a message between them.

    `{found}` is the weight, with its rank.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        tape, specs = checked.program.tapes[rank], checked.specs[rank]
        messages = {op.handle for op in tape if op.kind is OpKind.RECV}
        waits = [index for index, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle in messages]
        for gather in _ops(checked, rank, OpKind.ALL_GATHER, Kind.WEIGHT):
            (whole,) = gather.outputs
            passes = [index for index, op in enumerate(tape) if op.kind in PASSES and whole in op.inputs]
            if any(passes[0] < index < passes[-1] for index in waits if passes):
                return f"{specs[whole]} on rank {rank}"
        return ""

    return _on_every_rank(find_violation, sentence)


@cache
def clips(sentence: str) -> Technique:
    """Require that every update clips the gradient by a norm. `{found}` is the first update without one."""

    def find_violation(checked: Checked, rank: int) -> str:
        for op in _ops(checked, rank, OpKind.UPDATE, None):
            if not any(checked.specs[rank][number].kind is Kind.SCALAR for number in op.inputs):
                return f"{op} on rank {rank}"
        return ""

    return _on_every_rank(find_violation, sentence)


@cache
def computes_again(sentence: str) -> Technique:
    """Require a second forward pass of some layer for the same microbatch: recomputation."""

    def find_violation(checked: Checked) -> str:
        for rank in _ranks(checked):
            specs, keys = checked.specs[rank], set[tuple[int, int]]()
            for op in checked.program.tapes[rank]:
                if op.kind is OpKind.RECOMPUTE:
                    return ""
                if op.kind is OpKind.FORWARD:
                    key = op.layer, specs[op.inputs[0]].cells
                    if key in keys:
                        return ""
                    keys.add(key)
        return "none"

    return _technique(find_violation, sentence)


@cache
def in_flight_at_most(limits: int | tuple[int, ...], sentence: str) -> Technique:
    """Limit the microbatches between forward and backward pass on a pipeline rank, as papers count schedules' memory.

    A microbatch counts by the share of the rank's layers that have computed its forward pass, but not its backward
    pass.

    Args:
        limits: limit for every rank, or one limit for each.
        sentence: sentence for the student. `{found}` is the rank that exceeds its limit, with its number.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        in_flight = peak = Fraction(0)
        layers = {op.layer for op in checked.program.tapes[rank] if op.kind is OpKind.FORWARD}
        for op in checked.program.tapes[rank]:
            if op.kind is OpKind.FORWARD:
                in_flight += Fraction(checked.specs[rank][op.inputs[0]].cells.bit_count(), len(layers))
                peak = max(peak, in_flight)
            elif op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
                in_flight -= Fraction(checked.specs[rank][op.inputs[0]].cells.bit_count(), len(layers))
        limit = limits[rank] if isinstance(limits, tuple) else limits
        return f"rank {rank} has {float(peak):g}" if peak > limit else ""

    return _on_every_rank(find_violation, sentence)


@cache
def reduces_in_buckets(minimum: int, maximum: int, sentence: str) -> Technique:
    """Require `minimum` to `maximum` all-reduces of weights' gradients on each rank. A bucket counts once.

    `{found}` is the number of all-reduces.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        ops = list(_ops(checked, rank, OpKind.ALL_REDUCE, Kind.GRAD_WEIGHT))
        count = len({op.batch for op in ops if op.batch >= 0}) + sum(op.batch < 0 for op in ops)
        return "" if minimum <= count <= maximum else str(count)

    return _on_every_rank(find_violation, sentence)


@cache
def runs_on(backend: str, sentence: str) -> Technique:
    """Require that a program can run on a backend, "gloo" or "nccl". `{found}` is the reason why it cannot."""

    def find_violation(checked: Checked) -> str:
        why_not = checked.why_not(backend)
        return str(why_not) if why_not else ""

    return _technique(find_violation, sentence)


@cache
def computes_at_most(layers: int, sentence: str) -> Technique:
    """Limit the number of layers whose forward passes a rank computes. `{found}` is the largest number."""

    def find_violation(checked: Checked) -> str:
        forward = ({op.layer for op in tape if op.kind is OpKind.FORWARD} for tape in checked.program.tapes)
        largest = max(map(len, forward))
        return str(largest) if largest > layers else ""

    return _technique(find_violation, sentence)


@cache
def in_one_run(sentence: str) -> Technique:
    """Require the forward passes of each layer to be consecutive on its rank, and also its backward passes.

    `{found}` is the first layer whose passes are interrupted by those of another layer, with its rank.
    """

    def find_violation(checked: Checked, rank: int) -> str:
        for kinds in ({OpKind.FORWARD}, {OpKind.BACKWARD, OpKind.BACKWARD_INPUT}):
            runs = [layer for layer, _ in groupby(op.layer for op in checked.program.tapes[rank] if op.kind in kinds)]
            for layer in runs:
                if runs.count(layer) > 1:
                    return f"layer {layer} on rank {rank}"
        return ""

    return _on_every_rank(find_violation, sentence)


@cache
def microbatches_each(limit: int, sentence: str) -> Technique:
    """Limit the microbatches of one forward pass. `{found}` is the largest number."""

    def find_violation(checked: Checked) -> str:
        largest = max(
            (
                checked.specs[rank][op.inputs[0]].microbatches.bit_count()
                for rank in _ranks(checked)
                for op in checked.program.tapes[rank]
                if op.kind is OpKind.FORWARD
            ),
            default=0,
        )
        return str(largest) if largest > limit else ""

    return _technique(find_violation, sentence)


def _technique(find_violation: Callable[[Checked], str], sentence: str) -> Technique:
    """Return a technique, given a function that returns what violates it in a program, or ""."""

    def technique(checked: Checked) -> str:
        violation = find_violation(checked)
        return sentence.format(found=violation) if violation else ""

    return technique


def _on_every_rank(find_violation: Callable[[Checked, int], str], sentence: str) -> Technique:
    """Return a technique that every rank must use, given a function that returns what violates it on a rank, or ""."""
    return _technique(
        lambda checked: next(filter(None, (find_violation(checked, rank) for rank in _ranks(checked))), ""), sentence
    )


def _ranks(checked: Checked) -> range:
    return range(checked.program.ranks)


def _ops(checked: Checked, rank: int, kind: OpKind, of: Kind | None) -> Iterator[Op]:
    """Yield a rank's ops of a kind on values of a kind. Collectives of a single rank are skipped."""
    for op in checked.program.tapes[rank]:
        is_single = op.kind in COLLECTIVES and op.group is not None and len(op.group.ranks) == 1
        if op.kind is kind and not is_single and (of is None or _is_of(op, checked.specs[rank], of)):
            yield op


def _is_of(op: Op, specs: Mapping[int, Spec], of: Kind) -> bool:
    """Return whether the inputs of an op, or its outputs if it has no inputs, are of a kind."""
    numbers: Sequence[int] = op.inputs or op.outputs
    return any(specs[number].kind is of for number in numbers)


def _loaded_shares(checked: Checked, kind: Kind) -> list[Fraction]:
    """Return for each rank, and each layer of which it loads a part, the share of the layer that it loads."""
    load = {Kind.WEIGHT: OpKind.LOAD_WEIGHT, Kind.OPT_STATE: OpKind.LOAD_OPT_STATE}[kind]
    shares: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for rank in _ranks(checked):
        for op in checked.program.tapes[rank]:
            if op.kind is load and op.holds is not None:
                shares[rank, op.layer] += Fraction(op.holds.mask.bit_count(), op.holds.of)
    return list(shares.values())


def _read_from(tape: Sequence[Op], start: int) -> set[int]:
    """Return the numbers of the values that ops read from index `start` on. To free a value is not to read it."""
    return {number for op in tape[start:] if op.kind is not OpKind.FREE for number in op.inputs}


def _most_live(checked: Checked, rank: int, kind: Kind) -> tuple[int, int]:
    """Return the largest number of live elements of a kind on a rank, and the index of an op that reaches it."""
    specs, sizes = checked.specs[rank], checked.program.sizes
    live_elements, peak, peak_op = 0, 0, 0
    for index, op in enumerate(checked.program.tapes[rank]):
        for number in op.outputs:
            if specs[number].kind is kind:
                live_elements += sizes.elements(specs[number])
        if live_elements > peak:
            peak, peak_op = live_elements, index
        for place in op.kind.row.ends:
            if specs[op.inputs[place]].kind is kind:
                live_elements -= sizes.elements(specs[op.inputs[place]])
    return peak, peak_op
