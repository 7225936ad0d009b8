"""The check of a whole program."""

from __future__ import annotations

from shardlab.check.arena import check_arena
from shardlab.check.buckets import check_batches
from shardlab.check.channels import decide_models
from shardlab.check.checked import Checked
from shardlab.check.dataflow import Dataflow
from shardlab.check.kept import check_kept
from shardlab.check.rooms import has_arena
from shardlab.check.runnable import why_not_runnable
from shardlab.program import Program
from shardlab.program.world import gc_paused
from shardlab.rules.pieces import bits


def check(program: Program) -> Checked:
    """Prove, from the tapes alone, that a program computes the gradient of one device and cannot hang.

    Every layer's gradient reaches its update from every microbatch exactly once; every slice of every weight is
    updated exactly once, from step t to t + 1; no value is used freed, stale, partial, written over or of the wrong
    layer; every message reaches the receive that was meant; the members of a group issue its collectives in one order.

    The result also says under which channel models the program runs; a backend whose model deadlocks is not for it.

    Raises:
        Refused: naming rank, op, layer and what is missing or doubled.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=True)


def check_forward(program: Program) -> Checked:
    """Prove that a program computes the loss of every microbatch with the weights that it leaves, and cannot hang.

    As `check`, but for a program that trains nothing (see `forward_only`).

    Raises:
        Refused: naming rank, op, layer and what is missing; for an update as well.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=False)


def _checked(program: Program, *, trains: bool) -> Checked:
    with gc_paused():
        dataflow = Dataflow(program, trains=trains)
        try:
            dataflow.run()
        finally:
            dataflow.release()
        for state in dataflow.states:
            check_kept(state.index, state.ops, state.specs, state.concerned)
        found = dataflow.communication
        communications, communication_of = found.communications, found.communication_of
        if found.batches:
            check_batches(program, communications, communication_of)
        if any(map(has_arena, program.tapes)):
            check_arena(program, [state.specs for state in dataflow.states])
        models = decide_models(program, communications, communication_of, found.half_batched)
    specs = [state.specs for state in dataflow.states]
    untrained = bits(~dataflow.trained & ((1 << program.layers) - 1))
    frozen = tuple(layer for layer in untrained if program.sizes.weights[program.sizes.weight_of(layer)])
    why_not = why_not_runnable(program, specs, communications, [state.concerned for state in dataflow.states])
    return Checked(program, specs, communications, communication_of, models, why_not, frozen)
