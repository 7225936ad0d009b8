"""Programs that several tests of the check use, and the words in which refusals say where."""

from __future__ import annotations

from functools import cache

from shardlab.language import Program, Rank, Strategy, UserError, Value, trace
from shardlab.strategies import STRATEGIES

PLACE = r"^(rank \d+, op \d+[: ]|deadlock: rank \d+ waits in )"
"""How every refusal of a tape begins."""


FEWEST = {
    "single": 1,
    "grad-accum": 1,
    "hsdp": 4,
    "partially-sharded": 4,
    "pipeline-fsdp": 4,
    "breadth-first-fsdp": 4,
    "3d": 4,
    "4d": 4,
}
"""The fewest ranks that show what a strategy does, where they are not 2."""


def fits(name: str, ranks: int) -> bool:
    """Whether a built-in strategy has a grid for so many ranks."""
    try:
        STRATEGIES[name].grid(ranks)
    except UserError:
        return False
    return True


def layers_for(name: str, ranks: int) -> int:
    """Layers with which each pipeline rank has two; without a pipeline, four are as good as more."""
    return 2 * max(2, STRATEGIES[name].mesh(ranks).pp)


@cache
def built_in(name: str, ranks: int = 0, layers: int = 0, microbatches: int = 0) -> Program:
    """A built-in strategy's tapes; what is not given is as small as it can be, but of at least 2 layers and batches.

    A strategy that cuts layers or their sequences has a model of one block, where it needs no more.
    """
    entry = STRATEGIES[name]
    ranks = ranks or FEWEST.get(name, 2)
    mesh = entry.mesh(ranks)
    columns = mesh.dp_replicate * mesh.dp_shard
    blocks = (mesh.tp > 1 or mesh.ep > 1) and not entry.columns
    layers = layers or max(1 if blocks else 2, entry.plan(ranks).natural_layers() if entry.plan and not blocks else 1)
    return trace(entry.program, mesh, entry.puzzle(ranks, layers), microbatches or max(2, columns))


async def one_layer_gradient(rank: Rank, microbatches: list[int]) -> Value:
    """This rank's gradient of layer 0, the only one."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(microbatches)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    rank.grad_weights["mine"], _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])
    return rank.grad_weights["mine"]


def finish(rank: Rank, other: Value) -> None:
    """Update layer 0 from both ranks' gradients."""
    total = rank.grad_weights.pop("mine") + other
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def exchanged(order: str) -> Strategy:
    """Two ranks tell each other their gradients by messages: data parallelism without collectives."""

    async def program(rank: Rank) -> None:
        mine, peer = await one_layer_gradient(rank, [rank.index]), 1 - rank.index
        expect = ("grad_weights", 0, peer)
        if order == "send first":
            await rank.send(mine, to=peer)
            other = await rank.recv(source=peer, expect=expect)
        elif order == "receive first":
            other = await rank.recv(source=peer, expect=expect)
            await rank.send(mine, to=peer)
        elif order == "one sends first":
            if rank.index == 0:
                await rank.send(mine, to=peer)
            other = await rank.recv(source=peer, expect=expect)
            if rank.index == 1:
                await rank.send(mine, to=peer)
        elif order == "send un-awaited":
            pending = rank.send(mine, to=peer)
            other = await rank.recv(source=peer, expect=expect)
            await pending
        else:
            assert order == "exchange"
            other = await rank.exchange(mine, to=peer, source=peer, expect=expect)
        finish(rank, other)

    return program


async def two_microbatches_ahead(rank: Rank) -> None:
    """A pipeline of two ranks whose first sends two activations and then receives both their gradients."""
    stage, ms = rank.index, rank.microbatches
    rank.weights[stage], rank.opt_states[stage] = rank.load_weights(stage)
    if stage == 0:
        for m in ms:
            rank.activations[0, m] = rank.load_batch([m])
            rank.activations[1, m] = rank.forward(0, rank.activations[0, m], rank.weights[0])
        for m in ms:
            await rank.send(rank.activations[1, m], to=1)
    for m in ms:
        if stage == 0:
            gradient = await rank.recv(source=1, expect=("grad_activations", 1, m))
        else:
            rank.activations[1, m] = await rank.recv(source=0, expect=("activations", 1, m))
            last = rank.forward(1, rank.activations[1, m], rank.weights[1])
            gradient = rank.loss(last)
        grad_weight, down = rank.backward(stage, rank.activations.pop((stage, m)), gradient, rank.weights[stage])
        rank.grad_weights[0] = rank.grad_weights[0] + grad_weight if m else grad_weight
        if stage == 1:
            await rank.send(down, to=0)
    total = rank.grad_weights.pop(0)
    rank.weights[stage], rank.opt_states[stage] = rank.update(stage, total, rank.weights[stage], rank.opt_states[stage])


def gradients_swapped(*, swapped: bool) -> Program:
    """The tapes of `two_microbatches_ahead`, and those whose two sends have changed places."""
    program = trace(two_microbatches_ahead, 2, 2, 2)
    if not swapped:
        return program
    tape = list(program.tapes[0])
    one, other = (at for at, op in enumerate(tape) if op.kind.value == "send")
    tape[one], tape[other] = (
        tape[one]._replace(inputs=tape[other].inputs),
        tape[other]._replace(inputs=tape[one].inputs),
    )
    return Program(program.mesh, program.microbatches, program.sizes, [tape, program.tapes[1]])
