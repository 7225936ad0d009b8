"""The independent judge: executes tapes on small integer arrays and compares the results with those of one device.

It knows ops only by their effects on arrays, and uses neither the rules of tracing nor the checks. A value is its
numbers and their positions (elements of a layer, or rows of a batch). Arithmetic is exact, modulo a prime, and each
result depends on all inputs of its op. Therefore a wrong layer, microbatch, slice or version of a weight, or a gradient
counted twice, changes the numbers of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardlab.language import OpKind, Program
from tests.support.interpreter_collectives import Links, output_scale
from tests.support.interpreter_rank import JudgedRank
from tests.support.judged_compute import COMPUTE, PLACE, output_dtype, output_place
from tests.support.one_device import one_device
from tests.support.pieces import ELEMENTS, BrokenTape
from tests.support.toy_network import network_of

ARITY: dict[OpKind, tuple[tuple[int, ...], tuple[int, ...]]] = {
    OpKind.LOAD_WEIGHT: ((0,), (1,)),
    OpKind.LOAD_OPT_STATE: ((0,), (1,)),
    OpKind.LOAD_BATCH: ((0,), (1,)),
    OpKind.FORWARD: ((2, 3, 4), (1, 2, 3, 4)),
    OpKind.RECOMPUTE: ((2, 3), (1,)),
    OpKind.ATTEND: ((2,), (1,)),
    OpKind.ATTEND_BACKWARD: ((4,), (2,)),
    OpKind.LOSS_STATS: ((1,), (1,)),
    OpKind.LOSS: ((1, 2), (1,)),
    OpKind.BACKWARD: ((4, 5, 6), (2, 3, 4)),
    OpKind.BACKWARD_INPUT: ((4, 5, 6), (2, 3, 4)),
    OpKind.BACKWARD_WEIGHT: ((3,), (1,)),
    OpKind.ADD: ((2,), (1,)),
    OpKind.NORM: ((1,), (1,)),
    OpKind.SCALE: ((1,), (1,)),
    OpKind.CAST: ((1,), (1,)),
    OpKind.ZERO_GRADIENT: ((0,), (1,)),
    OpKind.SLICE: ((1,), (1,)),
    OpKind.CONCATENATE: (tuple(range(1, 100)), (1,)),
    OpKind.DIRECTION: ((2, 3), (1,)),
    OpKind.UPDATE: ((3, 4, 5), (2,)),
    OpKind.ALL_REDUCE: ((1,), (1,)),
    OpKind.ALL_GATHER: ((1,), (1,)),
    OpKind.REDUCE_SCATTER: ((1,), (1,)),
    OpKind.ALL_TO_ALL: ((1,), (1,)),
    OpKind.BROADCAST: ((0, 1), (0, 1)),
    OpKind.SCATTER: ((0, 1), (1,)),
    OpKind.GATHER: ((1,), (0, 1)),
    OpKind.REDUCE: ((1,), (0, 1)),
    OpKind.BARRIER: ((0,), (0,)),
    OpKind.SEND: ((1,), (0,)),
    OpKind.RECV: ((0,), (1,)),
    OpKind.OFFLOAD: ((1,), (1,)),
    OpKind.RELOAD: ((1,), (1,)),
    OpKind.WAIT: ((0,), (0,)),
    OpKind.FREE: ((1,), (0,)),
}
"""Number of inputs and outputs that each op may have; those of layers depend on the layer."""


class Outcome(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    HANGS = "hangs"
    BROKEN = "broken"


@dataclass(frozen=True)
class Verdict:
    """Right; Wrong: numbers differ from one device's; Hangs; Broken: an op is impossible, or something is left over."""

    outcome: Outcome
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.outcome is Outcome.RIGHT


class Interpreter:
    """All ranks of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.network = network_of(program)
        self.ranks = [JudgedRank(index, ops) for index, ops in enumerate(program.tapes)]
        self.links = Links(self.ranks, self.network.sequence)

    def judge(self) -> Verdict:
        try:
            progress = True
            while progress:
                progress = any(self._go_on(rank) for rank in self.ranks)
            stuck = [rank for rank in self.ranks if rank.at < len(rank.ops)]
            if stuck:
                return Verdict(Outcome.HANGS, f"rank {stuck[0].index} waits for ever at op {stuck[0].at}")
            return self._compare()
        except BrokenTape as error:
            return Verdict(Outcome.BROKEN, str(error))

    def _go_on(self, rank: JudgedRank) -> bool:
        start = rank.at
        while rank.at < len(rank.ops):
            op = rank.ops[rank.at]
            reads, makes = ARITY.get(op.kind, ((), ()))  # nothing is right for what this judge does not know
            if len(op.inputs) not in reads or len(op.outputs) not in makes:
                raise BrokenTape(f"rank {rank.index}, op {rank.at}: {op.kind.value} has other inputs or outputs")
            try:
                if op.kind is OpKind.WAIT:
                    if not rank.wait(op.handle):
                        break
                elif op.kind in COMPUTE:
                    dtype, place = output_dtype(rank, op), output_place(rank, op)
                    scale = output_scale(rank, op, self.program.microbatches)
                    COMPUTE[op.kind](rank, op, self.network, self.program.microbatches)
                    if dtype is not None:
                        rank.memory[op.outputs[0]].dtype = dtype
                    for number in op.outputs if place else ():
                        rank.memory[number].place = place
                    for number in op.outputs:
                        if number in rank.memory:
                            rank.memory[number].scale = scale
                else:
                    self.links.start(rank, op, output_place(rank, op))
            except ValueError as error:  # arrays of other shapes
                raise BrokenTape(f"rank {rank.index}, op {rank.at} {op}: {error}") from None
            rank.at += 1
        return rank.at > start

    def _compare(self) -> Verdict:
        """Compare the final slices with those of one device, and require that nothing is left over."""
        self.links.finish()
        clips = any(rank.clips for rank in self.ranks)
        trained = {layer for rank in self.ranks for kind, layer, _ in rank.load_places if kind is OpKind.LOAD_OPT_STATE}
        frozen = frozenset(range(len(self.network.weights))) - trained if trained else frozenset[int]()
        final = one_device(self.network, self.program.microbatches, clips, frozen)
        covered: set[tuple[int, int]] = set()
        for rank in self.ranks:
            if rank.in_flight:
                raise BrokenTape(f"rank {rank.index} ends with communications in flight")
            if rank.weights.twice:
                return Verdict(
                    Outcome.WRONG, f"rank {rank.index} writes layer {min(rank.weights.twice)} twice in a step"
                )
            remaining = list(rank.memory.values())
            for (kind, layer, positions), place in rank.load_places.items():
                expected = final[layer][PLACE[kind]][list(positions)]
                candidates = [p.positions == positions and p.place == place and not p.dtype for p in remaining]
                updated = [
                    fits and bool((p.data == expected).all()) for p, fits in zip(remaining, candidates, strict=True)
                ]
                at = next((i for i, equal in enumerate(updated) if equal), None)
                if at is None:
                    return Verdict(Outcome.WRONG, f"rank {rank.index} does not end with layer {layer} updated")
                del remaining[at]
                if kind is OpKind.LOAD_WEIGHT:
                    covered |= {(layer, element) for element in positions}
            if remaining:
                raise BrokenTape(f"rank {rank.index} ends with {len(remaining)} values left over")
        if len(covered) < len(self.network.weights) * ELEMENTS:
            return Verdict(Outcome.WRONG, "some elements are updated nowhere")
        return Verdict(Outcome.RIGHT)


def judge(program: Program) -> Verdict:
    """Execute a program's tapes, and return the results."""
    return Interpreter(program).judge()
