"""Tensors of one rank while its tape runs: the tape's values, and the tensors that are kept from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.execute.offload import storage_at, tensor_at
from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.optimizers.settings import LossScale
from shardlab.execute.settings import GradientObserver, Settings, torch_dtype
from shardlab.execute.tape_analysis import Analysis, ArenaTensors, Shapes, loss_owners
from shardlab.execute.transport.collectives import Wait
from shardlab.language import Holds, Kind, Op, OpKind, Spec
from shardlab.language.precision import FP64
from shardlab.language.rules.kinds import Factor, bits
from shardlab.models import CutModel, Model
from shardlab.models.matrices import matrices_of
from shardlab.models.tensors import (
    CompiledPasses,
    Dropout,
    PreparedLayer,
    Share,
    compile_layers,
    initial_weights,
    pad_runs,
    parameter_views,
    prepare_layer,
)


class State:
    """State of one rank: a tensor for every live value of the tape, and all tensors that outlive the step.

    Attributes:
        values: tensors by value number; None for a value that is not live.
        kept: weights that this rank keeps from step to step, by (layer, slices).
        opt_states: optimizer states of these weights, or of smaller slices of them.
        buffers: buffers of gathered weights. Each is reused by weights that are not live at the same time.
        arena: the arena, one allocation for many values of a step, and the tensors in it.
        step: number of the optimizer step, from 0.
        microbatches: microbatches whose tokens or targets this rank reads.
        batch: this step's tokens and targets, by microbatch.
        tokens: number of this step's targets that count, in all microbatches.
        rate: this step's learning rate.
        captured: whether the step is being captured (see `StepGraph`). Scalars of the step are then device tensors, ().
        loss_owners: (rank, index of the op) of the LOSS that reports each cell of the batch, by cell.
        stepping: slices whose gradients are set, and that will be updated in one call.
        loss_scale: loss scale of float16; in other precisions, its `scale` is 1.
        finite: whether all norms of the step's gradients have been finite so far.
        not_finite: first layer of the step whose gradient on this rank is not finite (None: there is none).
        squared_norm: squared norm of the step's whole gradient; NaN if the program computes none.
        passes: forward and backward pass of each layer that this rank computes, by layer.
        loss: sum of the losses of the tokens that this rank reports, and the number of these tokens: (2,) float64, on
            the device.
        rehearses: whether the tape runs without dropout and without changes to tensors that outlive the step.
    """

    rehearses = False
    captured = False

    def __init__(
        self,
        checked: Checked,
        rank: int,
        model: Model,
        rows: int,
        settings: Settings,
        observer: GradientObserver | None,
        weights_of: State | None = None,
    ) -> None:
        self.checked = checked
        self.rank = rank
        self.model = model
        self.settings = settings
        self.observer = observer
        self.tape = checked.program.tapes[rank]
        self.specs = checked.specs[rank]
        self.signatures = checked.program.sizes.signatures
        self.shapes = Shapes(checked, model, rows, None if weights_of is None else weights_of.shapes.flat)
        self.passes = self._passes()
        self.loss_owners = loss_owners(checked)
        self.analysis = Analysis(checked, rank)
        self.values: list[Any] = [None] * (max(self.specs, default=-1) + 1)
        keys = self.analysis.kept_weights.loads.values()
        self.kept: dict[tuple[int, Holds], Tensor] = {
            key: self._initial(*key) if weights_of is None else weights_of.kept[key] for key in keys
        }
        shared_state = weights_of if checked.trains else None
        self.opt_states: dict[tuple[int, Holds], Slice] = {} if shared_state is None else shared_state.opt_states
        for spec in (self.specs[op.outputs[0]] for op in self.tape if op.kind is OpKind.LOAD_OPT_STATE):
            if (spec.layer, spec.holds) not in self.opt_states:
                self.optimizer(spec.layer, spec.holds)
                self.put_opt_state(spec)()
        self.buffers = self._make_buffers()
        arena = None if weights_of is None else weights_of.arena
        self.arena = ArenaTensors(checked, rank, self.shapes, self.dtype, settings.device, arena)
        self.step = 0
        readers = (OpKind.LOAD_BATCH, OpKind.LOSS)
        masks = [self.specs[(op.inputs or op.outputs)[0]].microbatches for op in self.tape if op.kind in readers]
        masks += [mask for op in self.tape if op.factor is not None for mask, _ in op.factor.tokens]
        self.microbatches = sorted({m for mask in masks for m in bits(mask)})
        self.batch: dict[int, tuple[Tensor, Tensor]] = {}
        self.tokens: int | Tensor = 0
        self.rate: float | Tensor = 0.0
        self.loss_scale = LossScale(settings.loss_scale if settings.precision.scaled else 1.0)
        if shared_state is not None:
            self.loss_scale = shared_state.loss_scale
        self.squared_norm: float | Tensor = math.nan
        self._numbers: dict[int, float] = {}
        self.begin()
        self._weights: dict[tuple[int, int, int], list[Tensor]] = {}
        self._last_weights: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        self.stepping: list[Slice] = []
        self._given_back: dict[tuple[int, Holds], int] = {}  # sizes in bytes of kept weights whose memory is freed
        self._side_by_side: dict[int, Tensor] = {}

    def make_moments(self, key: tuple[int, Holds], updates: int) -> None:
        """Allocate an optimizer's moments in the place where the tape keeps them. The caller fills them in.

        Args:
            key: (layer, slices) of the optimizer state.
            updates: number of updates that the moments include.
        """
        part = self.opt_states[key]
        part.reload()()
        part.make_moments(updates)
        for spec in (self.specs[op.outputs[0]] for op in self.tape if op.kind is OpKind.LOAD_OPT_STATE):
            if (spec.layer, spec.holds) == key:
                self.put_opt_state(spec)()

    def put_opt_state(self, spec: Spec) -> Wait:
        """Start to move an optimizer's moments to the place (device, host or disk) that `spec` names."""
        part, place = self.opt_states[spec.layer, spec.holds], spec.form.place
        if place == self.analysis.stepped_at.get((spec.layer, spec.holds), place):
            return part.reload()
        return part.offload(partial(storage_at, place, device=self.settings.device))

    def optimizer(self, layer: int, holds: Holds) -> Slice:
        """Return the optimizer of some slices. The first call creates it. Every element belongs to one optimizer."""
        key = layer, holds
        if key not in self.opt_states:
            self.opt_states[key] = self._optimizer(*key)
        return self.opt_states[key]

    def tokens_of(self, microbatches: int) -> int:
        """Return the number of this step's targets that count in some microbatches; at least 1, as it is a divisor."""
        return max(1, sum(int((self.batch[m][1] >= 0).sum()) for m in bits(microbatches)))

    def share(self, op: Op) -> Share:
        """Return the share of its layer that a FORWARD or RECOMPUTE computes: the whole layer, or one slice."""
        spec, holds = self.specs[op.inputs[0]], self.specs[op.inputs[1]].holds.simplified()
        run = self.model.run(op.layer)
        numbers = run.numbers(holds.refined(run.slices).mask.bit_length() - 1) if holds.of > 1 else {}
        return Share(
            {index: (number, run.pieces[index]) for index, number in numbers.items()},
            self.shapes.tokens(spec),
            spec.microbatches.bit_count(),
            self.checked.program.microbatches,
            op.holds or Holds(spec.pieces("expert"), spec.form.space.count("expert")),
        )

    def value_of(self, factor: Factor) -> float:
        """Return the value that a factor of gradients has in this step."""
        number = float(factor.ratio)
        for microbatches, power in factor.tokens:
            number *= float(self.tokens_of(microbatches)) ** power
        return number

    def scaled(self, share: Share, factor: Factor) -> Share:
        """Return a share with its `gradient_scale` set: the factor of its gradients times this step's loss scale."""
        scale = self.loss_scale.scale * self.value_of(factor)
        return share if scale == 1 else replace(share, gradient_scale=scale)

    def dropout(self, op: Op) -> Dropout | None:
        """Return this step's dropout masks for the layer and the microbatches of an op; None without dropout."""
        if not self.model.dropout or self.rehearses:
            return None
        microbatches = tuple(bits(self.specs[op.inputs[0]].microbatches))
        return Dropout(self.model.dropout, self.settings.seed, self.step, op.layer, microbatches)

    def first_token(self, logits: Spec) -> int:
        """Return the first token of the vocabulary that a slice of the logits covers."""
        assert isinstance(self.model, CutModel), "only a cut model has slices of the logits"
        return self.model.first_token(logits.pieces(self.checked.program.sizes.scores_index).bit_length() - 1)

    def begin(self) -> None:
        """Reset the loss and the norms at the beginning of a step."""
        self.loss = torch.zeros(2, dtype=torch.float64, device=self.settings.device)
        self.finite = True
        self.not_finite: int | None = None
        self._numbers.clear()

    def number(self, scalar: int) -> float | Tensor:
        """Return a scalar as a number, read from the device once a step; in a captured step, as a device tensor ()."""
        if self.captured:
            return self.values[scalar].reshape(())
        if scalar not in self._numbers:
            self._numbers[scalar] = float(self.values[scalar])
        return self._numbers[scalar]

    def keep(self) -> None:
        """Copy a step's final weights into the kept weights, if they lie in other memory."""
        for number, key in self.analysis.kept_weights.final.items():
            if self.values[number].data_ptr() != self.kept[key].data_ptr():
                self.kept[key].copy_(self.values[number])

    def dtype(self, spec: Spec) -> torch.dtype:
        """Return the dtype of a value: the dtype it was cast to, or the dtype of its kind.

        Scalars are in float64. Outputs of attention that are merged are in float32 or float64.
        """
        precision, kind, layer = self.settings.precision, spec.kind, spec.layer
        if spec.form.dtype:
            return torch_dtype(spec.form.dtype if precision is not FP64 else "float64")
        if kind is Kind.SCALAR:
            return torch.float64
        if kind is Kind.ACTIVATION and layer == 0:
            return torch.int64
        attended = layer > 0 and self.signatures[layer - 1].projects and kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION)
        return self.exact if attended else torch_dtype(precision.dtype(kind))

    @property
    def exact(self) -> torch.dtype:
        """Dtype of activations, but with at least 32 bits."""
        return torch.promote_types(torch_dtype(self.settings.precision.activations), torch.float32)

    def memory_for(self, number: int) -> Tensor:
        """Return memory for a value: that of a kept weight, a part of the arena, a buffer of weights, or new memory."""
        spec = self.specs[number]
        if number in self.analysis.kept_weights.arriving:
            return self.kept_memory(number)
        if number in self.arena.tensors:
            return self.arena.tensors[number]
        slot = self.analysis.slot.get(number)
        return self.empty(spec) if slot is None else self.fill_buffer(slot, *self.shapes.shape(spec))

    def empty(self, spec: Spec) -> Tensor:
        """Allocate memory for a value."""
        if place := spec.form.place:
            shape = self.shapes.shape(spec)
            return tensor_at(place, shape, self.dtype(spec), self.settings.device)
        return torch.empty(self.shapes.shape(spec), dtype=self.dtype(spec), device=self.settings.device)

    def memory_beside(self, number: int) -> Callable[[], Tensor]:
        """Return a function that allocates a gradient's memory beside the gradients all-reduced together with it."""
        buckets, tensors, device = self.analysis.buckets, self._side_by_side, self.settings.device
        first = buckets.first[number]
        numbers = buckets.buffers[first]
        lengths = [self.shapes.shape(self.specs[other])[0] for other in numbers]
        index, dtype = numbers.index(number), self.dtype(self.specs[first])
        whole, start, length = sum(lengths), sum(lengths[:index]), lengths[index]

        in_arena, own_tensor = self.arena.side_by_side.get(first), self.arena.tensors.get(number)

        def make() -> Tensor:
            if number == first:
                tensors[first] = torch.empty(whole, dtype=dtype, device=device) if in_arena is None else in_arena
            return tensors[first].narrow(0, start, length) if own_tensor is None else own_tensor

        return make

    def take_side_by_side(self, number: int) -> Tensor | None:
        """Return a gradient and those adjacent to it as one tensor. None if there are none, or they were returned."""
        return self._side_by_side.pop(self.analysis.buckets.first.get(number, -1), None)

    def fill_buffer(self, slot: int, length: int) -> Tensor:
        """Allocate an empty buffer's memory for a weight of `length` elements."""
        buffer = self.buffers[slot]
        buffer.untyped_storage().resize_(length * buffer.itemsize)
        return buffer[:length]

    def give_back(self, number: int) -> None:
        """Free the memory of a kept weight until a new weight arrives there."""
        key = self.analysis.kept_weights.loads[number]
        memory = self.kept[key].untyped_storage()
        self._given_back[key] = memory.nbytes()
        memory.resize_(0)

    def kept_memory(self, number: int) -> Tensor:
        """Return the memory of the kept weight that an arriving weight replaces. If it was freed, allocate it again."""
        key = self.analysis.kept_weights.final[number]
        if size := self._given_back.pop(key, 0):
            self.kept[key].untyped_storage().resize_(size)
        return self.kept[key]

    def empty_buffer(self, slot: int) -> None:
        """Free a buffer's memory. Views of it become invalid."""
        self.buffers[slot].untyped_storage().resize_(0)

    def weights_of(self, layer: int, number: int) -> list[Tensor]:
        """Return views of a layer's parameters in the weight with this value number.

        The views are created once for each buffer and layer.
        """
        flat: Tensor = self.values[number]
        entry = self._last_weights.get((layer, number))
        if entry is not None and entry[0] is flat:  # kept weights and whole buffers keep their memory
            return entry[1]
        root = self.analysis.homes.get(number, number)
        slot = self.analysis.slot.get(root)
        if slot is None:
            slot = -1 - root if root in self.analysis.freed_weights.values() else flat.data_ptr()
        key = (layer, slot, int(flat.storage_offset()))
        if key not in self._weights:
            self._weights[key] = parameter_views(self.shapes.layout_of_weight(layer), flat)
        self._last_weights[layer, number] = flat, self._weights[key]
        return self._weights[key]

    def _passes(self) -> dict[int, PreparedLayer | CompiledPasses]:
        """Prepare the forward and backward passes of the layers that this rank computes."""
        model = self.model
        numbers = {op.layer for op in self.tape if op.kind in (OpKind.FORWARD, OpKind.RECOMPUTE)}
        if self.settings.compile:
            compiled = compile_layers(model)
            return {number: CompiledPasses(compiled[number]) for number in numbers}
        device = self.settings.device.type
        attended = {number + 1 for number, run in enumerate(model.runs) if run.attend is not None}
        return {number: prepare_layer(model.run(number), device, attended=number in attended) for number in numbers}

    def _initial(self, layer: int, holds: Holds) -> Tensor:
        """Return the initial weights of some slices, in the place (device, host or disk) in which they are kept."""
        first = self._first(layer, holds, torch_dtype(self.settings.precision.parameters))
        return self._at(self.analysis.kept_weights.place_of.get((layer, holds), ""), first)

    def _first(self, layer: int, holds: Holds, dtype: torch.dtype) -> Tensor:
        """Return the initial weights of some slices: read from files, or drawn from the seed."""
        ranges = self.shapes.ranges(layer, holds)
        if self.settings.initial is not None:
            return self.settings.initial(layer, self.shapes.flat[layer], ranges, dtype)
        whole = initial_weights(self.model, layer, self.settings.seed, dtype)
        padded = pad_runs(self.shapes.layouts[layer], whole, self.shapes.flat[layer])
        return torch.cat([padded[a:b] for a, b in ranges])

    def _at(self, place: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to a place: "" is the device; others are the host's memory and the disk."""
        if not place:
            return tensor.to(self.settings.device)
        return tensor_at(place, tensor.shape, tensor.dtype, self.settings.device).copy_(tensor)

    def _optimizer(self, layer: int, holds: Holds) -> Slice:
        """Create the optimizer of some slices.

        It updates the kept weights that contain the slices or, if there are none, weights that are created here. If the
        kept weights lie in another place than the update, each update receives a copy of them.
        """
        owner = self.analysis.kept_weights.memory_of(layer, holds)
        place = self.analysis.stepped_at.get((layer, holds), "")
        if owner is None:
            flat = self._at(place, self._initial(layer, holds))
        elif self.analysis.kept_weights.place_of[owner] == place:
            flat = self.kept[owner]
        else:
            flat = torch.empty_like(self.kept[owner], device="cpu" if place else self.settings.device)
        runs = [flat[a:b] for a, b in self.shapes.places(layer, owner[1] if owner else holds, holds)]
        starts = [start for start, _ in self.shapes.ranges(layer, holds)]
        decayed = self.shapes.layouts[layer].decayed_runs(self.shapes.flat[layer])
        precision = self.settings.precision
        exact = self._at(place, self._first(layer, holds, torch_dtype(precision.state))) if precision.copy else None
        whole = self.checked.program.sizes.whole_matrices
        matrices = matrices_of(self.model.run(layer), self.shapes.flat[layer]) if whole else ()
        optimizer = Slice(runs, starts, decayed, self.settings.optimizer, exact, matrices)
        if owner is not None and self.analysis.kept_weights.place_of[owner] != place:
            flat.untyped_storage().resize_(0)
        return optimizer

    def _make_buffers(self) -> list[Tensor]:
        """Create the buffers of gathered and received weights. A buffer has no memory until a weight arrives."""
        largest: dict[int, Spec] = {}
        for number, slot in self.analysis.slot.items():
            largest[slot] = max(largest.get(slot, self.specs[number]), self.specs[number], key=self.shapes.shape)
        buffers = [self.empty(largest[slot]) for slot in range(self.analysis.slots)]
        for buffer in buffers:
            buffer.untyped_storage().resize_(0)
        return buffers
