"""Chains: layers that follow one another, forward and backward, with nothing between. Autograd sees them as one.

A layer's graph costs as much as a small layer's arithmetic: its ends are cut from its neighbours', and every backward
pass starts autograd's engine anew. A pipeline's stage is a chain of its layers, and so is the whole model where one
bucket has all gradients. Layers whose passes are written out have no graph, and are in no chain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from shardlab.check.accumulation import InPlace
from shardlab.check.buckets import Buckets
from shardlab.execute.gradient_room import gradient_room, own_columns, parameters_of
from shardlab.execute.graph import Graph
from shardlab.execute.state import State
from shardlab.program import Op, OpKind

Instruction = Callable[[], None]


class Chain(NamedTuple):
    """Indices of a tape's ops.

    Attributes:
        forwards: those of its layers, in order.
        backwards: of the same layers, the last first; the first of them does the work of all.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


def chains_of(tape: Sequence[Op], in_place: InPlace, buckets: Buckets, alone: set[int]) -> list[Chain]:
    """Find the chains of a tape.

    Nobody else reads what is handed on within one, and its gradients have their memory before it runs backwards: it
    takes no more memory than its layers do one by one.

    Args:
        alone: indices of FORWARDs that no chain may have.
    """
    acting = [at for at, op in enumerate(tape) if not _idle(at, op, in_place, buckets)]
    place = {at: number for number, at in enumerate(acting)}
    readers: dict[int, list[int]] = defaultdict(list)
    made = {number: at for at, op in enumerate(tape) for number in op.outputs}
    for at in acting:
        for number in tape[at].inputs:
            readers[number].append(at)

    def backward_of(forward: int) -> int:
        """The BACKWARD of a FORWARD; -1 where there is none, or more than that reads what it saves."""
        reading = readers[tape[forward].outputs[-1]]
        return reading[0] if len(reading) == 1 and tape[reading[0]].kind is OpKind.BACKWARD else -1

    def has_room(backward: int, begun: int) -> bool:
        """Whether a gradient's memory is there when a chain has begun to run backwards."""
        older, gradient = in_place.accumulates.get(backward), tape[backward].outputs[0]
        if older is not None:
            return made[older] < begun
        return made.get(buckets.first.get(gradient, -1), backward) < backward

    def linked(one: int, other: int) -> bool:
        first, then = tape[one], tape[other]
        if first.outputs[:-1] != (then.inputs[0], *then.inputs[2:]):
            return False
        back, before = backward_of(one), backward_of(other)
        if back < 0 or before < 0 or place[back] != place[before] + 1:
            return False
        gradients = tape[before].outputs[1:]
        if (tape[back].inputs[1], *tape[back].inputs[4:]) != gradients:
            return False
        if any(not {*readers[number]} <= {other, before} for number in first.outputs[:-1]):
            return False
        return all(readers[number] == [back] for number in gradients)

    def with_room(layers: Sequence[int]) -> Iterator[list[int]]:
        """Layers, the last first, as often as not all of their gradients have memory when the first runs backwards."""
        part: list[int] = []
        for at in layers:
            if part and not has_room(backward_of(at), backward_of(part[0])):
                yield part
                part = []
            part.append(at)
        yield part

    chains: list[Chain] = []
    chain: list[int] = []
    for at in acting:
        goes_on = tape[at].kind is OpKind.FORWARD and at not in alone
        if chain and not (goes_on and linked(chain[-1], at)):
            parts = [part for part in with_room(chain[::-1]) if len(part) > 1]
            chains += [Chain(tuple(part[::-1]), tuple(map(backward_of, part))) for part in parts]
            chain = []
        if goes_on:
            chain.append(at)
    return chains


def _idle(at: int, op: Op, in_place: InPlace, buckets: Buckets) -> bool:
    """Whether an op does nothing that a chain could not be around."""
    waits_for_its_batch = at in buckets.batched and at != buckets.batches[op.batch][-1]
    return op.kind is OpKind.FREE or at in in_place.fused or waits_for_its_batch


def chained(state: State, chains: Sequence[Chain]) -> Mapping[int, Instruction]:
    """What the ops of some chains do, by their index."""
    found: dict[int, Instruction] = {}
    for chain in chains:
        for before, at in zip((None, *chain.forwards), chain.forwards, strict=False):
            found[at] = _forward(state, before, at, last=at == chain.forwards[-1])
        first, *others = chain.backwards
        found[first] = _backward(state, chain)
        found |= dict.fromkeys(others, _nothing)
    return found


def _nothing() -> None:
    """The chain's first BACKWARD has done it."""


def _forward(state: State, before: int | None, at: int, *, last: bool) -> Instruction:
    """A layer, in the graph that the one before has begun; the last one's outputs are the chain's."""
    op, values = state.tape[at], state.values
    layer, (x, weight, *carried), (*outputs, saved) = state.layers[op.layer], op.inputs, op.outputs
    over, keeps = at in state.analysis.last_reads, state.keeps_inputs(op.layer)
    share, inner = state.share(op), None if before is None else state.tape[before].outputs[-1]

    def run() -> None:
        settings = state.flat_weight(op.layer, weight), state.scaled(share), state.dropout(op)
        if inner is None:
            graph = Graph(layer, [values[number] for number in (x, *carried)], *settings, keeps_inputs=keeps)
            if over:
                values[x] = None  # autograd has what it needs of it
        else:
            graph = values[inner]
            graph.go_on(layer, *settings)
        values[saved] = graph
        if last:
            for number, made in zip(outputs, graph.take_outputs(), strict=True):
                values[number] = made

    return run


def _backward(state: State, chain: Chain) -> Instruction:
    """Through all layers of a chain at once; each gradient goes where its own BACKWARD would put it."""
    ops, values = [state.tape[at] for at in chain.backwards], state.values
    rooms = [gradient_room(state, at, op) for at, op in zip(chain.backwards, ops, strict=True)]
    layouts = [state.shapes.layout_of_weight(op.layer) for op in ops]
    given, own = (ops[0].inputs[1], *ops[0].inputs[4:]), own_columns(state, ops[0])
    outputs = ops[-1].outputs[1:]

    def run() -> None:
        graph: Graph = values[ops[0].inputs[3]]
        places: list[Tensor] = []
        for op, room, layout in zip(ops, rooms, layouts, strict=True):
            values[op.inputs[3]] = None
            into = values[op.outputs[0]] = room()
            places[:0] = parameters_of(into, layout)
        made = graph.backward([own(values[number]) for number in given], None, places)
        for number, gradient in zip(outputs, made, strict=False):
            values[number] = gradient  # there is none for tokens

    return run
