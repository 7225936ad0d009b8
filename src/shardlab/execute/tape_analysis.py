"""Facts of a tape that the executor needs before the first step: memory of values, ops in place, shapes of tensors.

`Analysis` finds the ops that write in place, and assigns buffers to gathered weights. `ArenaTensors` allocates the
arena of a step, and the tensors of the values in it. `Shapes` gives the length of each layer's flat buffer, and the
shape of each value's tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.check.buffers import Buckets, BufferBytes, arenas_of, fewest_slices
from shardlab.check.in_place import FREE, InPlace, KeptWeights, ending_ops, last_copies, last_reads, memory_ends
from shardlab.language import Holds, Kind, Op, OpKind, Spec, UserError
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import AUTOGRAD_KINDS, ROW_KINDS, bits
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.language.rules.spec import fraction_held, fraction_of_pieces
from shardlab.models import LayerLayout, Model

_BUFFERED = COMMUNICATION | {OpKind.CONCATENATE, OpKind.CAST}
"""Kinds of ops that write a weight into a buffer, whose memory is allocated for the weight and freed after it."""


class Analysis:
    """Facts about one rank's tape.

    Attributes:
        in_place: the ops that overwrite their input.
        buckets: memory of the tensors of batched collectives.
        halved: indices of FORWARD and RECOMPUTE ops whose backward pass is split.
        saved_of: numbers of the values that layers save between passes, by the number of the activation that the layer
            reads.
        gradient_factor: factor of the gradients of a backward pass, by the number of the value saved in the forward
            pass.
        kept_weights: weights that outlive the step, and weights that are received into the memory of such a weight.
        homes: for each value that lies in another value's memory (a slice, or a weight that an update writes): the
            number of that other value.
        stepped_at: place where an update is computed (device or host), by the (layer, slices) of its optimizer state.
        slot: index of the buffer of each gathered or received weight, by the number of the weight.
        slots: number of buffers.
        consecutive_updates: indices of UPDATE ops that run in one call with the UPDATE after them.
        last_reads: for each FORWARD or RECOMPUTE after which no op reads its activation: the number of the activation.
        last_copies: indices of collectives that send a copy of an activation or gradient that no other op reads
            afterwards.
        empties: index of the buffer that is freed after an op, by the index of the op.
        freed_weights: for each FREE after which a kept weight's memory is unused until a new weight arrives there, by
            index: the number of the kept weight.
    """

    def __init__(self, checked: Checked, rank: int) -> None:
        self.tape = checked.program.tapes[rank]
        self.specs = checked.specs[rank]
        self.in_place = InPlace(self.tape)
        self.buckets = Buckets(self.tape, self.in_place)
        self.saved_of: dict[int, list[int]] = defaultdict(list)
        for op in self.tape:
            for number in op.outputs:
                if self.specs[number].kind in AUTOGRAD_KINDS:
                    self.saved_of[op.inputs[0]].append(number)
        self.gradient_factor = {
            op.inputs[op.kind.row.saved_input]: self.specs[op.inputs[1]].form.factor
            for op in self.tape
            if op.kind is OpKind.BACKWARD or op.kind is OpKind.BACKWARD_INPUT
        }
        self.kept_weights = KeptWeights(self.tape, self.specs)
        self.homes = self.kept_weights.owners
        self._memory_ends = memory_ends(ending_ops(self.tape), self.homes)
        self.stepped_at = {
            (op.layer, self.specs[op.inputs[2]].holds): self.specs[op.inputs[1]].form.place
            for op in self.tape
            if op.kind is OpKind.UPDATE
        }
        self.slot: dict[int, int] = {}
        self.empties: dict[int, int] = {}
        self.slots = self._share_buffers()
        self.freed_weights = self._find_freed_weights()
        self.halved = self._find_halved()
        homes = (self.homes[self.tape[index].outputs[0]] for index in self.kept_weights.copied_updates)
        self.consecutive_updates = consecutive_updates(self.tape, {self._memory_ends.get(home, -1) for home in homes})
        self.last_reads = last_reads(self.tape, self.specs)
        self.last_copies = last_copies(self.tape, self.specs)

    def _find_freed_weights(self) -> dict[int, int]:
        kept_weights, ends = self.kept_weights, self._memory_ends
        arriving = {kept_weights.final[number] for number in kept_weights.arriving}
        updated_weights = {kept_weights.memory_of(*key) for key in self.stepped_at}
        return {
            ends[number]: number
            for number, key in kept_weights.loads.items()
            if key in arriving - updated_weights and not kept_weights.place_of[key] and number in ends
            if self.tape[ends[number]].kind is OpKind.FREE
        }

    def _find_halved(self) -> set[int]:
        forward_of = {
            op.outputs[-1]: index for index, op in enumerate(self.tape) if op.kind in (OpKind.FORWARD, OpKind.RECOMPUTE)
        }
        return {forward_of[op.inputs[3]] for op in self.tape if op.kind is OpKind.BACKWARD_INPUT}

    def _share_buffers(self) -> int:
        """Assign each gathered or received weight the first buffer that is free while the weight is live.

        Returns the number of buffers.
        """
        free_from: list[int] = []
        dtypes: list[str] = []
        for index, op in enumerate(self.tape):
            if op.kind in _BUFFERED and op.outputs and self.specs[op.outputs[0]].kind is Kind.WEIGHT:
                number, form = op.outputs[0], self.specs[op.outputs[0]].form
                if number in self.kept_weights.arriving or form.place or op.offset >= 0:
                    continue
                dtype = form.dtype
                fits = (i for i, free in enumerate(free_from) if free < index and dtypes[i] == dtype)
                slot = next(fits, len(free_from))
                if slot == len(free_from):
                    free_from.append(0)
                    dtypes.append(dtype)
                free_from[slot] = self._memory_ends.get(number, len(self.tape))
                self.slot[number] = slot
                self.empties[free_from[slot]] = slot
        return len(free_from)


def loss_owners(checked: Checked) -> dict[int, tuple[int, int]]:
    """Return, for each cell of the batch, (rank, index of the op) of the LOSS that reports it: the first LOSS on it."""
    owners: dict[int, tuple[int, int]] = {}
    for rank, tape in enumerate(checked.program.tapes):
        for index, op in enumerate(tape):
            if op.kind is OpKind.LOSS:
                for piece in bits(checked.specs[rank][op.inputs[0]].cells):
                    owners.setdefault(piece, (rank, index))
    return owners


def consecutive_updates(tape: Sequence[Op], barriers: Collection[int] = ()) -> set[int]:
    """Find the UPDATE ops that another UPDATE follows with only FREE ops between them.

    Such updates run in one call, because a small update consists mostly of call overhead.

    Args:
        tape: the ops of one rank.
        barriers: indices of FREE ops before which the updates must have run.

    Returns:
        Indices of all UPDATE ops of each such sequence except the last one.
    """
    updates: set[int] = set()
    last = -1
    for index, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            if last >= 0:
                updates.add(last)
            last = index
        elif op.kind is not FREE or index in barriers:
            last = -1
    return updates


class ArenaTensors:
    """Arena of one rank: one allocation for a whole step, and the tensors in it.

    Args:
        memory_of: arena of another program whose memory this one uses (None: allocate it). The two programs never run
            at the same time. The memory grows if necessary.

    Attributes:
        whole: memory of the arena, (bytes,) uint8.
        tensors: tensors by number of the value. They are reused in every step.
        side_by_side: for values that lie side by side: one tensor of all of them, by the number of each value.
    """

    def __init__(
        self,
        checked: Checked,
        rank: int,
        shapes: Shapes,
        dtype: Callable[[Spec], torch.dtype],
        device: torch.device,
        memory_of: ArenaTensors | None,
    ) -> None:
        specs, arena = checked.specs[rank], arenas_of(checked.program, checked.specs)[rank]
        size = BufferBytes(checked.program, checked.specs)
        # In float64, casts keep float64 (see `Settings`), so values that are cast are wider than on the tape.
        wider = 1
        for buffer, _ in arena.buffers:
            for spec in (specs[number] for number in buffer.values):
                if size(spec):  # some layers of a bucket may have no parameters
                    wider = max(wider, -(-math.prod(shapes.shape(spec)) * dtype(spec).itemsize // size(spec)))
        bytes = wider * arena.bytes
        self.whole = torch.empty(bytes, dtype=torch.uint8, device=device) if memory_of is None else memory_of.whole
        if self.whole.nbytes < bytes:
            self.whole.resize_(bytes)  # the tensors of the other program move with the memory
        self.tensors: dict[int, Tensor] = {}
        self.side_by_side: dict[int, Tensor] = {}
        for buffer, begin in arena.buffers:
            offset = wider * begin
            for number in buffer.values:  # adjacent by their real sizes: `wider` is too large for some buffers
                self.tensors[number] = self._at(offset, shapes.shape(specs[number]), dtype(specs[number]))
                offset += self.tensors[number].nbytes
            if len(buffer.values) > 1:
                length, first = sum(len(self.tensors[number]) for number in buffer.values), specs[buffer.values[0]]
                whole = self._at(wider * begin, (length,), dtype(first))
                self.side_by_side |= dict.fromkeys(buffer.values, whole)

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that begins at a byte.

        It is not a view of `whole`, because autograd would count writes to other tensors as changes of this one.
        """
        empty: Any = torch.empty(0, dtype=dtype, device=self.whole.device)
        return empty.set_(self.whole.untyped_storage(), offset // dtype.itemsize, shape)


OF_GRADIENT = {gradient: kind for kind, gradient in GRADIENT_OF.items()}
"""Kind of the value to which a kind of gradient belongs. Both have the same shape."""


class Shapes:
    """Shapes of a program's values when it trains `model` on microbatches of `rows` sequences.

    Every layer's flat buffer is padded so that its length is divisible by each number of slices that a value uses.
    """

    def __init__(self, checked: Checked, model: Model, rows: int, flat: list[int] | None = None) -> None:
        """Compute the lengths of all layers' flat buffers, unless `flat` has them."""
        cuts = fewest_slices(checked.specs)
        self.model = model
        self.rows = rows
        self._sizes = checked.program.sizes
        self.layouts = [model.layout(layer) for layer in range(model.layers)]
        self.flat = flat or [layout.padded(cuts[layer]) for layer, layout in enumerate(self.layouts)]

    def layout_of_weight(self, layer: int) -> LayerLayout:
        """Return the layout of the weight that a layer computes with, and of its gradient."""
        return self.layouts[self._sizes.weight_of(layer)]

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Return the shape of a value's tensor: its slices, or the rows of its microbatches, concatenated."""
        if spec.kind in ROW_KINDS:
            return self._row_shape(spec)
        if spec.kind is Kind.SCALAR:
            return (1,)
        return (self.flat[spec.layer] // spec.holds.of * spec.holds.pieces,)

    def sections(self, spec: Spec) -> tuple[int, ...]:
        """Return the number of features of each section of a value that can be split by heads.

        Keys and values have two sections, and so has the output of attention: its values, and its log-sum-exp. A head
        has a part of each section.
        """
        attend = self.model.attention_after(spec.layer - (spec.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION)))
        if spec.kind in (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES):
            return attend.kv_width, attend.values_width
        queries = spec.kind in (Kind.QUERIES, Kind.GRAD_QUERIES)
        return (attend.width,) if queries else (attend.result_width, attend.heads)

    def tokens(self, spec: Spec) -> Sequence[int]:
        """Return the positions in each sequence of the tokens that a value holds, ascending; a range if consecutive.

        Raises:
            UserError: if sequences do not divide into the program's slices.
        """
        slices, length = spec.form.space.sequence, self.model.seq_len
        if spec.whole_sequences:
            return range(length)
        if length % slices:
            raise UserError(
                f"sequences of {length} tokens do not divide into {slices} slices (remainder {length % slices}); "
                f"choose a seq_len that is a multiple of {slices} ({self._sizes.slices_per_rank} slices for each "
                "context-parallel rank, times the tensor-parallel ranks)"
            )
        numbers = sorted({cell % slices for cell in bits(spec.cells)})  # equal for every sequence, as the check ensures
        first, last = numbers[0] * length // slices, (numbers[-1] + 1) * length // slices
        if len(numbers) == numbers[-1] + 1 - numbers[0]:
            return range(first, last)
        return [token for token in range(first, last) if token * slices // length in numbers]

    def positions(self, whole: Spec, part: Spec) -> Sequence[int]:
        """Return the positions of the tokens of `part` among those of `whole`; a range if they are consecutive."""
        places = {token: place for place, token in enumerate(self.tokens(whole))}
        positions = [places[token] for token in self.tokens(part)]
        run = range(positions[0], positions[-1] + 1)
        return run if len(run) == len(positions) else positions

    def ranges(self, layer: int, holds: Holds) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of a value's slices in the layer's flat buffer, in order."""
        size = self.flat[layer] // holds.of
        runs: list[tuple[int, int]] = []
        for piece in bits(holds.mask):
            start, stop = piece * size, (piece + 1) * size
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return runs

    def places(self, layer: int, holds: Holds, part: Holds) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of the slices `part` in the tensor of a value with the slices `holds`."""
        places: list[tuple[int, int]] = []
        offset = 0
        for start, stop in self.ranges(layer, holds):
            for begin, end in self.ranges(layer, part):
                if start <= begin and end <= stop:
                    places.append((offset + begin - start, offset + end - start))
            offset += stop - start
        return places

    def _row_shape(self, spec: Spec) -> tuple[int, ...]:
        microbatches = spec.microbatches.bit_count()
        rows = microbatches * self.rows
        carried_features = self.model.carried_features.get(OF_GRADIENT.get(spec.kind, spec.kind))
        if carried_features is not None:
            return (rows, len(self.tokens(spec)), carried_features)
        first, *others = self.model.activation_shape(spec.layer, self.rows)
        if self.model.is_buffers(spec.layer):
            return (int(microbatches * first * fraction_of_pieces(spec.form)), *others)
        features = others[1:]
        if spec.kind in (Kind.QUERIES, Kind.GRAD_QUERIES):
            features = [self.model.attention_features[0]]
        if spec.kind in (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES):
            features = [self.model.attention_features[1]]
        if spec.kind is Kind.STATS:
            return (rows, len(self.tokens(spec)), 3 * spec.pieces(self._sizes.scores_index).bit_count())
        if spec.form.slices:
            features = [int(features[0] * fraction_held(spec.form))]
        return (rows, len(self.tokens(spec)), *features)
