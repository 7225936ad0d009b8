"""Live memory at every op of every rank, in all and by what it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shardlab.check.accumulation import InPlace
from shardlab.check.buckets import Buckets
from shardlab.check.kept import Kept
from shardlab.check.rooms import NO_ARENA, Arena, arenas_of
from shardlab.check.views import last_reads, roots_of
from shardlab.program import Kind, Op, OpKind, Sizes, Spec
from shardlab.rules.place import PLACES
from shardlab.rules.spec import Form
from shardlab.timeline.prices import Bytes
from shardlab.timeline.traced import Traced


class Category(Enum):
    """Purposes of memory.

    GATHERED: weights put together for a use. COMMUNICATION: results that are on their way. ARENA: where buffers lie
    (see `shardlab.check.rooms`), as long as the step takes.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    COMMUNICATION = "communication"
    ARENA = "arena"


CATEGORIES = tuple(Category)
FREE, WAIT = OpKind.FREE, OpKind.WAIT

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}
_PARAMETERS, _GATHERED, _COMMUNICATION = (
    _INDEX[category] for category in (Category.PARAMETERS, Category.GATHERED, Category.COMMUNICATION)
)
CATEGORY_OF_KIND = dict.fromkeys(Kind, _INDEX[Category.ACTIVATIONS]) | {
    Kind.WEIGHT: _PARAMETERS,
    Kind.OPT_STATE: _INDEX[Category.OPTIMIZER],
    Kind.GRAD_WEIGHT: _INDEX[Category.GRADIENTS],
    Kind.DIRECTION: _INDEX[Category.GRADIENTS],
}


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in a step.

    Attributes:
        before: for each op what is live when it starts, before its own result is stored.
        during: for each op what is live while it runs: what was there, and its own result.
        peak: the largest of `during`.
        peak_op: index of the first op with which the peak is reached.
        by_category: the peak, in the order of `CATEGORIES`.
        counters: for each op what is live while it runs, by category (empty unless asked for).
        at_starts: for each op what is live when it starts, by category (empty unless asked for).
    """

    before: list[int]
    during: list[int]
    peak: int
    peak_op: int
    by_category: tuple[int, ...]
    counters: list[tuple[int, ...]]
    at_starts: list[tuple[int, ...]]


def live_memory(traced: Traced, of: Collection[Kind] = tuple(Kind)) -> list[list[int]]:
    """Count for each rank and op the elements that are live when it starts, before its own result is stored.

    Only values of some kinds are counted, if `of` names them.

    Results of communication count from issue, what layers keep goes with its BACKWARD or with its activation,
    and an update's results take the place of what it was given. A gradient that BACKWARD adds to an older one takes no
    room of its own, and neither does their sum.
    """
    elements = traced.program.sizes.elements

    def size(spec: Spec) -> int:
        return elements(spec) if spec.kind in of else 0

    return [account(tape, traced.specs[row], size).before for row, tape in enumerate(traced.program.tapes)]


def peak_elsewhere(traced: Traced) -> dict[str, int]:
    """The most elements of any rank in each place beside its device; none where nothing is offloaded."""
    used = {spec.form.place for specs in traced.specs for spec in specs.values()}
    elements, tapes = traced.program.sizes.elements, traced.program.tapes
    return {
        place: max(account(tape, traced.specs[row], elements, memory=place).peak for row, tape in enumerate(tapes))
        for place in PLACES
        if place in used
    }


def peak_elsewhere_in_bytes(traced: Traced, place: str) -> list[int]:
    """The most bytes of each rank in a place beside its device."""
    size = Bytes(traced.program.sizes)
    tapes = enumerate(traced.program.tapes)
    return [account(tape, traced.specs[row], size, real=True, memory=place).peak for row, tape in tapes]


def memory_in_bytes(traced: Traced, kept: Sizes | None = None, *, counters: bool = False) -> list[RankMemory]:
    """Count bytes as the executor holds them, with the peak; with all categories at every op for `counters`.

    Args:
        kept: how large values are in memory, if not as traced.
    """
    size = Bytes(kept or traced.program.sizes)
    arenas = arenas_of(traced.program, traced.specs)
    return [
        account(
            tape,
            traced.specs[row],
            size,
            real=True,
            counters=counters,
            arena=arenas[row],
            sizes=size.sizes,
        )
        for row, tape in enumerate(traced.program.tapes)
    ]


def account(
    tape: Sequence[Op],
    specs: Mapping[int, Spec],
    size: Callable[[Spec], int],
    *,
    real: bool = False,
    counters: bool = False,
    memory: str = "",
    arena: Arena = NO_ARENA,
    sizes: Sizes | None = None,
) -> RankMemory:
    """Follow one tape, with every value as large as `size` says.

    Args:
        arena: of the rank; what lies there takes no memory of its own.
        sizes: say which of their inputs layers keep. An input goes with the last of its layer's
            backward passes, or, if it is not kept, when it was read for the last time, as the executor lets it (None:
            when it is freed). They also say where a residual stream lies in what layers keep: there it takes no room
            of its own, as long as this lives, and until it is read by anything but a forward pass that keeps all. What
            else reads it, such as a message, may have it for longer.
        memory: which is followed, of `rules.place.PLACES` ("": the device's); other values take none of it.
        real: whether ALL_REDUCE and ADD write over an input that nobody reads any more, as the executor does; the
            puzzles count both.
        counters: whether to note all categories at every op.
    """
    in_place = InPlace(tape)
    taken_over = {at: older for at, (older, _) in in_place.fused.items()}
    buckets = Buckets(tape if real else (), in_place)
    if real:
        written = (at for at in in_place.first_input if at not in taken_over and tape[at].outputs)  # some have a root
        taken_over |= {at: tape[at].inputs[0] for at in written}
        if buckets.batched:
            taken_over = {
                at: older
                for at, older in taken_over.items()
                if at not in buckets.batched and older not in buckets.first
            }
    buffers: dict[int, tuple[list[int], int]] = {}  # handle to those of its batch, and to the bytes of their buffer
    free_of_room = {newer for _, newer in in_place.fused.values()}
    room, category_of = ([0] * (max(specs, default=-1) + 1) for _ in range(2))  # of each value: its bytes, its category
    owned: dict[int, dict[Form, int]] = {}  # what layers keep for an activation
    views = Views(tape, specs, buckets.first)
    keeps_input, saves_residual = (sizes.keeps_input, sizes.saves_residual) if sizes else ((), ())
    read_last = last_reads(tape, specs) if keeps_input else {}
    left: set[int] = set()  # activations that their layers alone keep
    inside: dict[int, int] = {}  # residual that lies in what layers keep, to its bytes
    residual_in: dict[int, int] = {}  # what layers keep, to the residual in it
    issued: dict[int, tuple[int, ...]] = {}
    live, peak, peak_op = arena.bytes, 0, 0
    by_category = [0] * len(CATEGORIES)
    by_category[_INDEX[Category.ARENA]] = arena.bytes
    at_peak = tuple(by_category)
    before: list[int] = []
    during: list[int] = []
    curve: list[tuple[int, ...]] = []
    starts: list[tuple[int, ...]] = []
    for at, op in enumerate(tape):
        kind, inputs, handle = op[0], op[2], op[4]
        row = kind.row
        before.append(live)
        if counters:
            starts.append(tuple(by_category))
        if kind is not FREE and kind is not WAIT:
            saves = row.keeps is Kind.SAVED and specs[op[3][-1]][0].kind is Kind.SAVED
            for number in inputs if inside and not saves else ():
                if number in inside:
                    room[number] = bytes = inside.pop(number)
                    by_category[category_of[number]] += bytes
                    live += bytes
            for number in op[3]:
                spec = specs[number]
                elsewhere = spec[0].place != memory or number in free_of_room or number in views.roots
                elsewhere = elsewhere or number in arena.values
                bytes = 0 if elsewhere else size(spec)
                if number in buckets.rooms and number not in arena.values:
                    bytes = sum(size(specs[other]) for other in buckets.rooms[number])
                if saves and saves_residual and saves_residual[op[1]] and spec[0].kind is Kind.RESIDUAL:
                    inside[number], residual_in[op[3][-1]], bytes = bytes, number, 0
                room[number] = bytes
                slot = CATEGORY_OF_KIND[spec[0].kind]
                if handle >= 0:
                    gathers = kind is OpKind.ALL_GATHER and slot == _PARAMETERS and spec[0].step == 0
                    slot = _GATHERED if gathers else _COMMUNICATION
                    issued[handle] = op[3]
                category_of[number] = slot
                by_category[slot] += bytes
                live += bytes
            if at in buckets.buffers:
                bytes = sum(size(specs[number]) for number in buckets.buffers[at])
                handles = [tape[other][4] for other in buckets.batches[op.batch]]
                buffers |= dict.fromkeys(handles, (handles, bytes))
                by_category[_COMMUNICATION] += bytes
                live += bytes
            if at in taken_over:  # the result is that value's buffer, and from now on that is all that counts
                older = taken_over[at]
                live -= room[older]
                by_category[category_of[older]] -= room[older]
                room[older] = 0
            ended = views.ended(tuple([inputs[at_input] for at_input in row.ends])) if row.ends else ()
            for number in ended:  # in place: what is made is what was given
                live -= room[number]
                by_category[category_of[number]] -= room[number]
            if live > peak:
                peak, peak_op, at_peak = live, at, tuple(by_category)
        during.append(live)
        if at in read_last:
            number = read_last[at]
            if keeps_input[op.layer]:
                left.add(number)
            else:
                live -= room[number]
                by_category[category_of[number]] -= room[number]
                room[number] = 0
        if counters:
            curve.append(tuple(by_category))
        if kind is FREE:  # what most ops are
            gone = inputs if inputs[0] not in owned else (inputs[0], *owned.pop(inputs[0]).values())
            gone = views.ended(gone)
        elif row.saved >= 0 or row.keeps:
            kept = owned.setdefault(inputs[0], {})
            gone = (kept.pop(specs[inputs[row.saved]][0]),) if row.saved >= 0 else ()
            if row.keeps and (made := specs[op[3][-1]][0]).kind is row.keeps:
                gone = (*gone, kept[made]) if made in kept else gone
                kept[made] = op[3][-1]
            if not kept and inputs[0] in left:
                gone = (*gone, inputs[0])
        else:
            if kind is WAIT:
                if handle in buffers:
                    handles, bytes = buffers[handle]
                    for other in handles:
                        del buffers[other]
                    by_category[_COMMUNICATION] -= bytes
                    live -= bytes
                for number in issued.pop(handle, ()):
                    if category_of[number] == _COMMUNICATION:  # it has arrived
                        by_category[_COMMUNICATION] -= room[number]
                        category_of[number] = CATEGORY_OF_KIND[specs[number].kind]
                        by_category[category_of[number]] += room[number]
            continue
        for number in gone:
            live -= room[number]
            by_category[category_of[number]] -= room[number]
            room[number] = 0
            if number in inside:
                del inside[number]
            elif number in residual_in and (residual := residual_in.pop(number)) in inside:
                room[residual] = bytes = inside.pop(residual)
                by_category[category_of[residual]] += bytes
                live += bytes
    return RankMemory(before, during, peak, peak_op, at_peak, curve, starts)


class Views:
    """Which values take no room of their own, and when the room that they share is given back.

    Attributes:
        roots: number of a slice, or of what an update makes in memory that slices share, to the value whose memory it
            lies in; of gradients side by side, to the first.
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], neighbours: Mapping[int, int]) -> None:
        self.roots = roots_of(tape, specs)
        if self.roots:
            loaded = {op.outputs[0] for op in tape if op[0] is OpKind.LOAD_OPT_STATE}
            states = {op.outputs[1]: self.roots.get(op.inputs[2]) for op in tape if op[0] is OpKind.UPDATE}
            viewed = set(self.roots.values())
            self.roots |= {number: home for number, home in Kept(tape, specs).homes.items() if home in viewed}
            self.roots |= {number: root for number, root in states.items() if root in loaded}
        self.roots = {number: neighbours.get(root, root) for number, root in self.roots.items()}
        self.roots |= {number: first for number, first in neighbours.items() if number != first}
        self._left = Counter(self.roots.values())  # views that have not ended, and the value itself
        self._left.update(self._left.keys())

    def ended(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The values whose room is given back when some end: not those in which others still lie."""
        if not self.roots:
            return numbers
        roots = [self.roots.get(number, number) for number in numbers]
        self._left.subtract(roots)
        return tuple([root for root in roots if self._left[root] <= 0])
