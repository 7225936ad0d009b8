"""The pass `offload`: values move to the host's memory or the disk between their uses, and are copied back for each
use.

This is ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857)
on any tape. If weights and optimizer state both lie in the host's memory, the host's processors update them there
(ZeRO-Offload, section 4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlab.check import Checked
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.ops import COMMUNICATION
from shardlab.language.pass_names import OffloadTargets, Place
from shardlab.language.rules.refusals import HOST
from shardlab.simulate.passes.reorder import CannotApply, Tapes

FREE, WAIT, UPDATE, ADD = OpKind.FREE, OpKind.WAIT, OpKind.UPDATE, OpKind.ADD
OFFLOAD, RELOAD = OpKind.OFFLOAD, OpKind.RELOAD
FORWARDS = frozenset({OpKind.FORWARD, OpKind.SEND})
SUMMED = frozenset({ADD, OpKind.NORM, UPDATE, OpKind.DIRECTION})
"""Ops that may read an offloaded gradient."""


def offload(checked: Checked, homes: OffloadTargets) -> Tapes:
    """Keep weights, gradients, optimizer state and activations in the places that `homes` names.

    Each copy is awaited immediately; the pass `copy-early` overlaps them. Values that the program offloads itself stay
    where they are.

    Raises:
        CannotApply: if activations of layers in tiles are to be offloaded.
    """
    if homes.activations and checked.program.sizes.tiles > 1:
        raise CannotApply("an activation that is read by several tiles cannot leave; offload something else")
    return [OffloadedTape(tape, checked.specs[rank], homes).tape for rank, tape in enumerate(checked.program.tapes)]


class OffloadedTape:
    """Tape of one rank with offloaded values: the rank's ops, with copies between them.

    Attributes:
        tape: the new tape.
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], homes: OffloadTargets) -> None:
        self.tape: list[Op] = []
        self._specs, self._homes = specs, homes
        self._updates_on_host = homes.parameters == homes.optimizer == HOST
        self._values = max(specs, default=-1) + 1
        self._handles = max((op.handle for op in tape), default=-1) + 1
        self._away: dict[int, int] = {}  # value to its copy elsewhere, the only one that is kept
        self._back: dict[int, int] = {}  # activation or optimizer state to its reloaded copy
        self._recomputed: set[int] = set()  # saved activations that are recomputed
        self._arriving: dict[int, tuple[int, ...]] = {}  # handle to the results of its communication
        self._reading: dict[int, list[int]] = {}  # handle to the copies that it reads
        self._readers: dict[int, list[OpKind]] = defaultdict(list)  # kinds of the ops that will still read a value
        final = {number for op in tape for number in op.outputs if specs[number].step}
        for op in tape:
            final.difference_update(op.inputs[place] for place in op.kind.row.ends)
            for number in op.inputs:
                if op.kind is not FREE:
                    self._readers[number].append(op.kind)
        for op in tape:
            self._put(op)
        for number in final - self._away.keys():  # values that were read after their update
            self._leave([number])

    def _put(self, op: Op) -> None:
        kind = op.kind
        if kind is WAIT:
            self.tape.append(op)
            for number in self._reading.pop(op.handle, ()):
                self._free(number)
            self._leave(self._arriving.pop(op.handle, ()))
        elif kind is FREE:
            (number,) = op.inputs
            copies = [
                copies_by_value.pop(number) for copies_by_value in (self._away, self._back) if number in copies_by_value
            ]
            for copy in copies or [number]:
                self._free(copy)
        elif kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
            home = self._homes.parameters if kind is OpKind.LOAD_WEIGHT else self._homes.optimizer
            self.tape.append(op._replace(place=op.place or home))
            if home and not op.place:
                self._away[op.outputs[0]] = op.outputs[0]
        else:
            self._put_computing(op)

    def _put_computing(self, op: Op) -> None:
        """Append an op with the copies that it needs, and offload its results."""
        for number in op.inputs:
            self._readers[number].remove(op.kind)
        if op.kind is UPDATE:
            self._put_update(op)
            return
        if op.kind in (ADD, OpKind.NORM) and any(number in self._away for number in op.inputs):
            inputs, copies = self._to_host(op.inputs)
            self.tape.append(op._replace(inputs=inputs))
            if op.kind is ADD:
                self._away[op.outputs[0]] = op.outputs[0]
        else:
            inputs, copies = self._to_device(op)
            op = self._saving(op._replace(inputs=inputs), op)
            self.tape.append(op)
        if op.kind in COMMUNICATION:
            self._reading[op.handle], self._arriving[op.handle] = copies, op.outputs
            return
        for number in copies:
            self._free(number)
        self._leave(op.outputs)
        if op.kind in FORWARDS:
            self._leave_activation(op)

    def _put_update(self, op: Op) -> None:
        """Append an update: on the host if weight and optimizer state lie there, otherwise on the device."""
        gradient, weight, state, *others = op.inputs
        directed = any(self._specs[number].kind is Kind.DIRECTION for number in others)
        if self._updates_on_host and {weight, state} <= self._away.keys() and not directed:
            (host_gradient,), copies = self._to_host((gradient,))
            self.tape.append(op._replace(inputs=(host_gradient, self._away[weight], self._away[state], *others)))
            self._away |= {number: number for number in op.outputs}
        else:
            inputs, copies = self._to_device(op)
            self._back.pop(state, None)
            if weight in self._away:
                self._free(self._away[weight])  # the update would end it
                copies.remove(inputs[1])
            self.tape.append(op._replace(inputs=inputs))
            self._leave(op.outputs)
        for number in copies:
            self._free(number)

    def _to_device(self, op: Op) -> tuple[tuple[int, ...], list[int]]:
        """Copy an op's inputs to the device.

        Return the numbers of all inputs on the device, and of the copies to free after the op.
        """
        inputs: list[int] = []
        copies: list[int] = []
        for number in op.inputs:
            kind = self._specs[number].kind
            if number in self._away and number not in self._back and kind in (Kind.ACTIVATION, Kind.OPT_STATE):
                self._back[number] = self._copy(RELOAD, number)
                if kind is Kind.OPT_STATE:  # an optimizer state is in one place at a time
                    self._free(self._away.pop(number))
            if number in self._back:
                inputs.append(self._back[number])
            elif number in self._away:
                inputs.append(self._copy(RELOAD, number))
                copies.append(inputs[-1])
            else:
                inputs.append(number)
        return tuple(inputs), copies

    def _to_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        """Copy gradients to the host's memory.

        Return the numbers of all gradients there, and of the copies to free after their use.
        """
        copies: dict[int, int] = {}
        for number in numbers:
            if number not in self._away:
                copies[number] = self._copy(OFFLOAD, number, HOST)
        return tuple(copies.get(number, self._away.get(number, number)) for number in numbers), list(copies.values())

    def _saving(self, op: Op, original: Op) -> Op:
        """Return a forward pass without its saved value if the input of the layer is offloaded.

        Before a backward pass that reads such a saved value, append a RECOMPUTE, and return the backward pass with the
        result. Return any other op as it is.
        """
        if op.kind is OpKind.FORWARD and self._leaves(original):
            self._recomputed.add(op.outputs[-1])
            return op._replace(outputs=op.outputs[:-1])
        index = op.kind.row.saved_input
        if index >= 0 and op.inputs[index] in self._recomputed:
            recomputed = self._new()
            self.tape.append(Op(OpKind.RECOMPUTE, op.layer, (op.inputs[0], op.inputs[2]), (recomputed,)))
            return op._replace(inputs=(*op.inputs[:index], recomputed, *op.inputs[index + 1 :]))
        return op

    def _leaves(self, op: Op) -> bool:
        """Return whether a FORWARD's input is offloaded after it, since only a backward pass still reads it."""
        layer_input = self._specs[op.inputs[0]]
        plain = len(op.inputs) == 2 and len(op.outputs) == 2 and self._specs[op.outputs[-1]].kind is Kind.SAVED
        is_input = layer_input.layer > 0 and layer_input.form.term is None and layer_input.kind is Kind.ACTIVATION
        return bool(self._homes.activations) and plain and is_input and not FORWARDS & {*self._readers[op.inputs[0]]}

    def _leave_activation(self, op: Op) -> None:
        """Offload the activation that an op has just read, if only backward passes still read it."""
        number = op.inputs[0]
        if self._recomputed and op.kind is OpKind.FORWARD and len(op.outputs) == 1 and self._readers[number]:
            self._away[number] = self._copy(OFFLOAD, number, self._homes.activations)
            self._free(number)

    def _leave(self, numbers: Sequence[int]) -> None:
        """Offload new values: gradients that only sums and updates read, and the step's final weights and states."""
        for number in numbers:
            spec, readers = self._specs[number], {*self._readers[number]}
            if spec.form.place:
                continue
            home: Place = ""
            if spec.kind is Kind.GRAD_WEIGHT and readers and readers <= SUMMED:
                home = self._homes.gradients
            elif spec.kind in (Kind.WEIGHT, Kind.OPT_STATE) and spec.step and not readers:
                home = self._homes.parameters if spec.kind is Kind.WEIGHT else self._homes.optimizer
            if home and number not in self._away:
                self._away[number] = self._copy(OFFLOAD, number, home)
                self._free(number)

    def _copy(self, kind: OpKind, number: int, place: str = "") -> int:
        """Copy a value, and wait for it."""
        source = self._away[number] if kind is RELOAD else number
        copy, handle = self._new(), self._handles
        self._handles += 1
        layer = self._specs[number].layer
        self.tape += [Op(kind, layer, (source,), (copy,), handle, place=place), Op(WAIT, -1, handle=handle)]
        return copy

    def _new(self) -> int:
        self._values += 1
        return self._values - 1

    def _free(self, number: int) -> None:
        self.tape.append(Op(FREE, -1, (number,)))
