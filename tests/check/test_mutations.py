"""Mistakes of every kind, put into right tapes: the check refuses those that change numbers, hang or break.

The mutants are judged by executing them on numbers (`tests/support/interpreter.py`). The check must refuse each wrong
one in a sentence with the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from shardlab.language import Mesh, Op, OpKind, Program, Rank, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from tests.check import casting_programs, offloading_programs, slicing_programs
from tests.check.programs import PLACE, built_in
from tests.check.scaling_programs import sum_of_tokens
from tests.check.term_programs import terms_exchanged
from tests.support import long_run
from tests.support.interpreter import judge
from tests.support.interpreter_collectives import combined
from tests.support.mutations import MUTATIONS, changed, places
from tests.support.one_device import initial
from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, Column, Piece, labels, owned
from tests.support.random_layers import random_attention, random_experts
from tests.support.random_plans import MODELS, Planned
from tests.support.random_programs import Shape, random_program
from tests.support.refusing import ExpectedRefusal, matches, refusal, refusal_by, require_refusal
from tests.support.thorough import examples
from tests.support.toy_layers import batch_rows
from tests.support.toy_network import Network
from tests.support.toy_routing import EXPERTS
from tests.train.user_programs import split_fsdp, split_pipeline, zero_1

SAMPLE, SAMPLE_OF_PLANS = 2, 1
"""Mutants tried of one kind and program. There may be thousands, which `make verify-all` tries."""

PROGRAMS = 2 * examples(15)
"""Programs that each kind of mistake is put into, drawn for each; more where none of them shows that it matters."""

RANDOM_SHAPES = [  # all of them clip and split backward passes; the first two have states finer than their weights
    Shape(pp=2, dp_replicate=1, dp_shard=2, layers=3, microbatches=5, seed=15),
    Shape(pp=1, dp_replicate=2, dp_shard=2, layers=2, microbatches=6, seed=13),
    Shape(pp=3, dp_replicate=1, dp_shard=1, layers=3, microbatches=3, seed=20),
    Shape(pp=2, dp_replicate=1, dp_shard=1, layers=2, microbatches=4, seed=20),
]

SHARD = ("dp_shard",)
CUT = ("cp", "dp_shard")
PLANS = {  # half-blocks: with and without slices of sequences, states, pipelines, halves of backward passes
    "tensor": Planned(Plan(Mesh(tp=2), "gpipe"), 2, "halves", 1),
    "sequence": Planned(Plan(Mesh(tp=2), "zb-h1", sequence_parallel=True), 2, "halves", 2),
    "tensor zero_1": Planned(
        Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD, sequence_parallel=True), 2, "halves", 2
    ),
    "tensor fsdp": Planned(Plan(Mesh(dp_shard=2, tp=2), "gpipe", None, (), SHARD, SHARD, SHARD), 1, "halves", 2),
    "tensor pipeline": Planned(Plan(Mesh(pp=2, tp=2), "zb-h1", sequence_parallel=True), 3, "halves", 2),
    # a head tied to the embedding: on one rank, on the two ends of a pipeline, in slices
    "tied": Planned(Plan(Mesh(dp_shard=2), shard_optimizer=SHARD), 1, "tied", 2),
    "tied pipeline": Planned(Plan(Mesh(pp=2), "zb-h1"), 2, "tied", 2),
    "tied tensor": Planned(Plan(Mesh(pp=2, tp=2)), 2, "tied", 1),
    # attention over cut sequences
    "ring": Planned(Plan(Mesh(cp=3)), 2, "context", 1),
    "gathered": Planned(Plan(Mesh(cp=2), "zb-h1", context="all_gather"), 2, "context", 2),
    "ring fsdp": Planned(Plan(Mesh(cp=2, dp_shard=2), "1f1b", None, (), CUT, CUT, CUT), 2, "context", 2),
    # heads and sequences cut, attention and blocks computed again
    "heads and sequences": Planned(Plan(Mesh(cp=2, tp=2), sequence_parallel=True), 2, "context", 1),
    "heads again": Planned(Plan(Mesh(tp=2), "zb-h1", recompute="selective"), 2, "context", 2),
    "blocks again": Planned(Plan(Mesh(tp=2), sequence_parallel=True, recompute="full"), 2, "halves", 1),
    "all again": Planned(Plan(Mesh(cp=2, tp=2), context="all_gather", recompute="full"), 2, "context", 1),
    # slices of sequences exchanged for heads, also for parts of a rank's heads
    "heads exchanged": Planned(Plan(Mesh(cp=2), "zb-h1", context="ulysses"), 2, "context", 2),
    "heads exchanged tensor": Planned(
        Plan(Mesh(cp=2, tp=2), context="ulysses", sequence_parallel=True, recompute="full"), 2, "context", 1
    ),
    "heads exchanged in a ring": Planned(Plan(Mesh(cp=4), ulysses_degree=2), 2, "context", 1),
    "stripes": Planned(Plan(Mesh(cp=2), "zb-h1", stripes=3), 2, "context", 1),
    # experts, whole and in slices
    "experts pipeline": Planned(Plan(Mesh(pp=2, ep=2), "zb-h1"), 3, "mixture", 4),
    "experts zero_1": Planned(Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD, recompute="full"), 2, "mixture", 4),
    "experts tensor": Planned(Plan(Mesh(tp=2, ep=2)), 2, "routed", 2),
    "experts apart": Planned(Plan(Mesh(tp=2, ep=2), "zb-h1", recompute="selective"), 2, "routed apart", 4),
    "experts shared": Planned(Plan(Mesh(cp=2)), 2, "routed apart", 1),
    # matrices that are stepped whole, of which ranks keep slices
    "muon zero_1": Planned(Plan(Mesh(dp_shard=2), shard_optimizer=SHARD), 2, "whole", 2, muon=True),
    "muon tensor zero_1": Planned(Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD), 1, "halves", 2, muon=True),
    "muon experts": Planned(Plan(Mesh(tp=2, ep=2)), 2, "routed", 2, muon=True),
}

UNHARMFUL = {
    "another value from the root",
    "broken batch",
    "weight read after its update",
    "wrong expected message",
}
"""Kinds that leave the numbers right when sends are buffered: the check refuses them for what they say."""


@cache
def subjects() -> dict[str, Program]:
    """The programs that mistakes are put into."""
    programs = {name: built_in(name) for name in STRATEGIES}
    programs |= {user.__name__: trace(user, 2, 2, 2) for user in (zero_1, split_fsdp, split_pipeline)}
    programs |= {str(shape): random_program(shape) for shape in RANDOM_SHAPES}
    programs |= {
        by_hand.__name__: trace(by_hand, 2, 2 if by_hand is casting_programs.messages_in_half else 1, 2)
        for by_hand in BY_HAND
    }
    programs |= {"experts' terms": trace(terms_exchanged, Mesh(tp=2, ep=2), MODELS["routed"](2), 2)}
    programs |= {"attention at random": random_attention(36), "experts at random": random_experts(2)}
    programs |= {"heads exchanged at random": random_attention(22)}
    return programs | {name: plan.program for name, plan in PLANS.items()}


async def ring(rank: Rank) -> None:
    """The example's, for short."""
    await load(str(Path(__file__).parents[2] / "examples" / "ring_all_reduce.py:ring_all_reduce")).program(rank)


BY_HAND = (
    ring, slicing_programs.updates_in_chunks, slicing_programs.a_rank_without_a_microbatch, sum_of_tokens,
    *casting_programs.RIGHT, *offloading_programs.RIGHT,
)  # fmt: skip


def mutants(kind: str, name: str) -> list[Program]:
    """A sample of a program's mutants, the same every time."""
    sample = SAMPLE_OF_PLANS if any(layer.cut for layer in subjects()[name].sizes.signatures) else SAMPLE
    random = Random(f"{kind} {name}")
    chosen_mutants: list[Program] = []
    for count, mutant in enumerate(MUTATIONS[kind](subjects()[name])):  # each is kept with the same chance
        place = count if count < sample else int(random.random() * (count + 1))
        if place < sample:
            chosen_mutants[place : place + 1] = [mutant]
    return chosen_mutants


@pytest.mark.hypothesis  # so that `make verify-all` runs it, with more programs
@pytest.mark.parametrize("kind", [kind for kind in MUTATIONS if kind != "another world"])
def test_each_mistake_that_matters_is_refused_and_the_place_is_named(kind: str) -> None:
    """Every mutant that passes is judged, and enough refused ones to see that the mistake matters."""
    wrong = refused = False
    names = list(subjects())
    for count, name in enumerate(Random(kind).sample(names, len(names))):
        if count >= PROGRAMS and refused and (wrong or kind in UNHARMFUL):
            return
        for number, mutant in enumerate(mutants(kind, name)):
            sentence = refusal(mutant)
            if sentence is None:
                verdict = judge(mutant)
                assert verdict.right, f"{kind} {number} of {name} passes, but: {verdict.reason}"
            else:
                assert re.match(PLACE, str(sentence)), str(sentence)
                refused = True
                wrong = wrong or not judge(mutant).right
    assert refused
    assert wrong or kind in UNHARMFUL


def test_tapes_of_another_world_are_refused() -> None:
    """More tapes than ranks, another number of layers or microbatches: there is not always a rank to name."""
    for program in subjects().values():
        for mutant in MUTATIONS["another world"](program):
            assert refusal(mutant) is not None


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("dropped op", "single", refusal_by("never updated", layer=1)),
        ("dropped op", "ddp", refusal_by("nothing to wait for")),
        ("dropped op", "gpipe", refusal_by("freed", layer=0)),
        ("duplicated op", "single", refusal_by("number in use", layer=0)),
        ("duplicated op with new numbers", "single", refusal_by("loaded twice", layer=0)),
        ("swapped neighbours", "single", refusal_by("freed", layer=0)),
        ("swapped with a later op", "pipeline", refusal_by("freed", layer=0)),
        ("wrong layer", "single", refusal_by("wrong layer", layer=0)),
        ("wrong layer", "gpipe", refusal_by("wrong layer", layer=2)),
        ("wrong value", "single", refusal_by("wrong layer", layer=1)),
        ("wrong microbatch", "single", refusal_by("missing microbatches", layer=0, missing=(0,))),
        ("wrong microbatch", "ddp", refusal_by("counted twice", layer=1, doubled=(1,))),
        ("wrong microbatch", "grad-accum", refusal_by("counted twice", layer=1, doubled=(1,))),
        ("wrong microbatch", "gpipe", refusal_by("other message", layer=1)),
        ("early free", "single", refusal_by("freed", layer=2)),
        ("early free", "ddp", refusal_by("in flight")),
        ("missing free", "single", refusal_by("left over")),
        ("missing reduce", "ddp", refusal_by("missing microbatches", layer=1, missing=(1,))),
        ("missing reduce", "fsdp", refusal_by("missing microbatches", layer=1, missing=(0,))),
        ("double reduce", "ddp", refusal_by("counted twice", layer=1, doubled=(0, 1))),
        ("early update", "single", refusal_by("freed", layer=0)),
        ("stale weight", "single", refusal_by("freed", layer=1)),
        ("weight read after its update", "single", refusal_by("stale weight", layer=0)),
        ("weight left stale", "fsdp", refusal_by("never updated", layer=0)),
        ("second update", "ddp", refusal_by("wrong step", layer=1)),
        ("swapped senders values", "gpipe", refusal_by("freed", layer=1)),
        ("swapped sends", "gpipe", refusal_by("freed", layer=1)),
        ("collective of another kind", "fsdp", refusal_by("other order", layer=0)),
        ("collectives in another order", "fsdp", refusal_by("other order", layer=0)),
        ("wrong shard", "fsdp", refusal_by("pieces overlap", layer=0, doubled=(1,))),
        ("missing gather", "fsdp", refusal_by("partial weight", layer=0, missing=(1,))),
        ("dropped send", "pipeline", refusal_by("deadlock")),
        ("dropped recv", "pipeline", refusal_by("freed", layer=1)),
        ("collective dropped on one rank", "ddp", refusal_by("missing microbatches", layer=0, missing=(1,))),
        ("missing wait", "ddp", refusal_by("in flight")),
        ("wrong group", "fsdp", refusal_by("unknown group", layer=0)),
        ("wrong peer", "pipeline", refusal_by("unknown rank", layer=1)),
        ("malformed op", "ddp", refusal_by("malformed tape", layer=1)),
        ("weight half left out", "split_pipeline", refusal_by("missing microbatches", layer=1, missing=(0,))),
        ("weight half done twice", "split_fsdp", refusal_by("no forward", layer=1)),
        ("weight half done twice", "split_fsdp", refusal_by("counted twice", layer=1, doubled=(0,))),
        ("weight half of another microbatch", "split_pipeline", refusal_by("no forward", layer=0)),
        ("weight half of another microbatch", "split_pipeline", refusal_by("other tokens", layer=0)),
        ("weight half before its input half", "split_fsdp", refusal_by("no forward", layer=1)),
        ("whole backward and a weight half", "split_fsdp", refusal_by("no forward", layer=1)),
        ("state of another shard", "zero_1", refusal_by("pieces overlap", layer=0, doubled=(1,))),
        ("new weight not gathered", "zero_1", refusal_by("not kept", layer=0)),
        ("norm without a layer", "zero_1", refusal_by("partial norm", layer=0, missing=(0,))),
        ("part of the norm twice", "zero_1", refusal_by("counted twice", doubled=(0,))),
        ("norm of an unfinished gradient", "zero_1", refusal_by("missing microbatches", layer=1, missing=(1,))),
        ("update with a part of the norm", "split_fsdp", refusal_by("partial norm", layer=0, missing=(1, 3))),
        ("update without the norm", "zero_1", refusal_by("norm for some", layer=1)),
        ("update without the norm", "zero_1", refusal_by("norm on some ranks", layer=0)),
        ("missing reduce", "tensor", refusal_by("missing terms", layer=1, missing=(1,))),
        ("missing reduce", "sequence", refusal_by("missing microbatches", layer=1, missing=(1, 3))),
        ("missing gather", "sequence", refusal_by("cut sequences", layer=2)),
        ("missing gather", "tensor", refusal_by("missing pieces", layer=7)),
        ("double reduce", "tensor", refusal_by("no term", layer=1)),
        ("collective too many", "tensor", refusal_by("no term", layer=7)),
        ("collective too many", "tensor", refusal_by("other slices", layer=6)),
        ("collective over another axis", "tensor zero_1", refusal_by("other slices", layer=6)),
        ("residual for branch", "sequence", refusal_by("wrong kind", layer=3)),
        ("block met twice", "ring", refusal_by("counted twice", layer=3, doubled=(0, 5))),
        ("block left out", "ring", refusal_by("missing terms", layer=3, missing=(0,))),
        ("blocks of another meeting", "ring", refusal_by("counted twice", layer=3, doubled=(0, 5))),
        ("attended in part", "ring", refusal_by("missing terms", layer=3, missing=(1, 2, 3, 4))),
        ("another block sent", "ring", refusal_by("other message", layer=2)),
        ("hop the other way", "ring", refusal_by("other values", layer=2)),
        ("hop left out", "ring", refusal_by("counted twice", layer=3, doubled=(0, 5))),
        ("slices dealt otherwise", "gathered", refusal_by("pieces overlap", layer=2, doubled=(1,))),
        ("exchange left out", "expert-parallel", refusal_by("other pieces", layer=1)),
        ("exchange left out", "expert-parallel", refusal_by("missing pieces", layer=0, missing=(1,))),
        ("exchange left out", "heads exchanged", refusal_by("other pieces", layer=2)),
        ("exchange in another order", "heads exchanged", refusal_by("other order", layer=3)),
        ("missing reduce", "experts tensor", refusal_by("other values", layer=6)),
        ("another part of the experts", "experts shared", refusal_by("other pieces", layer=6)),
        ("missing gather", "experts shared", refusal_by("cut sequences", layer=5)),
        ("missing reduce", "experts shared", refusal_by("missing terms", layer=8, missing=(1,))),
        ("missing reduce", "experts shared", refusal_by("missing microbatches", layer=5, missing=(0, 1, 2, 3))),
        ("double reduce", "experts tensor", refusal_by("no term", layer=6)),
        ("exchanged twice", "expert-parallel", refusal_by("other pieces", layer=1)),
        ("value of another exchange", "expert-parallel", refusal_by("wrong kind", layer=1)),
        ("carried of another pass", "experts pipeline", refusal_by("wrong layer", layer=4)),
        ("collective too many", "expert-parallel", refusal_by("no term", layer=2)),
        ("use of a tied weight left out", "tied", refusal_by("missing microbatches", layer=0, missing=(2,))),
        ("use of a tied weight twice", "tied", refusal_by("counted twice", layer=0, doubled=(2,))),
        ("one use of a tied weight for the other", "tied", refusal_by("counted twice", layer=0, doubled=(2,))),
        ("squares of a tied weight twice", "tied", refusal_by("counted twice", doubled=(0, 4))),
        ("head updated as if alone", "tied pipeline", refusal_by("missing microbatches", layer=0, missing=(0, 1))),
        ("residual for branch", "sequence", refusal_by("wrong kind", layer=1)),
        ("update without the direction", "muon zero_1", refusal_by("cut matrices", layer=0, missing=(1,))),
        ("direction not gathered", "muon tensor zero_1", refusal_by("cut matrices", layer=0, missing=(0, 2, 3))),
        ("direction not gathered", "muon experts", refusal_by("cut matrices", layer=5, missing=(1,))),
        ("direction of another layer", "muon zero_1", refusal_by("wrong layer", layer=1)),
        ("direction of another gradient", "muon zero_1", refusal_by("missing microbatches", layer=0, missing=(0,))),
        ("direction without the norm", "muon zero_1", refusal_by("norm for some", layer=1)),
        ("direction with a part of the norm", "muon zero_1", refusal_by("partial norm", layer=0, missing=(1, 2, 3))),
        ("direction with a new state", "muon zero_1", refusal_by("freed", layer=0)),
        ("slice of another rank", "tensor", refusal_by("pieces overlap", layer=7, doubled=(1,))),
        ("squares counted on every rank", "tensor", refusal_by("counted twice", doubled=(2, 3, 6, 7, 10, 11))),
        ("double reduce", "split_fsdp", refusal_by("counted twice", doubled=(0, 1, 2, 3))),
    ],
)
def test_the_refusal_says_what_the_mistake_is(kind: str, name: str, expected: ExpectedRefusal) -> None:
    others: set[str] = set()
    for mutant in MUTATIONS[kind](subjects()[name]):
        refused = refusal(mutant)
        if refused and matches(refused, expected):
            return
        others.add(str(refused))
    pytest.fail(f"no mutant is refused so, only with: {sorted(others)}")


def test_swapped_sends_are_refused_by_name() -> None:
    """The first rank of a GPipe sends its two activations in the other order; nothing is freed early for it."""
    program = built_in("gpipe")
    tape = program.tapes[0]
    sends = [op for op in tape if op.kind is OpKind.SEND]
    frees = [Op(OpKind.FREE, -1, op.inputs) for op in sends]
    position = max(at for at, op in enumerate(tape) if set(op.outputs) & {n for send in sends for n in send.inputs})
    waits = [op for op in tape if op.kind is OpKind.WAIT and op.handle in {send.handle for send in sends}]
    rest = [op for op in tape if op not in (*sends, *frees, *waits)]
    position = rest.index(tape[position]) + 1
    for order in (sends, sends[::-1]):
        ops = [*rest[:position], *order, *waits, *frees, *rest[position:]]
        mutant = Program(program.mesh, program.microbatches, program.sizes, [ops, program.tapes[1]])
        if order is sends:
            assert refusal(mutant) is None
            assert judge(mutant).right
        else:
            assert not judge(mutant).right
            require_refusal(refusal(mutant), "other message", rank=1, op=2, layer=1)


@pytest.mark.hypothesis  # so that `make verify-all` runs it, with more ops
@pytest.mark.parametrize("name", STRATEGIES)
def test_leaving_out_any_op_is_noticed(name: str) -> None:
    """No entry of a tape is idle: even a lost FREE or WAIT is refused. Of long tapes, the suite tries 200 ops."""
    program = built_in(name)
    ops = list(places(program))
    for rank, at, op in Random(name).sample(ops, min(len(ops), examples(1000))):
        assert refusal(changed(program, rank, at)), f"rank {rank}, op {at} {op} can be dropped"


# The judge's toy layers: each one's backward pass is the derivative of its forward, and slices add up to the whole.


QUERIES, KEYS_VALUES = labels(range(WIDTH), "query"), labels(range(WIDTH), "key", "value")

TOKENS = 4
HALVES = ("sliced", "norm", "sliced", "norm", "sliced", "norm", "sliced")
CONTEXT = ("tokenwise", "norm", "project", "row", "norm", "project", "row", "norm", "tokenwise")
COLUMNS = ("column", "column", "row", "column")
MIXTURE = ("norm", "experts", "norm", "experts", "norm")
ROUTED = ("tokenwise", "norm", "sliced", "norm", "routing", "experts", "combining", "norm", "tokenwise")
NETWORKS = {
    "whole": Network(("whole", "whole")),
    "halves": Network(HALVES, TOKENS),
    "context": Network(CONTEXT, TOKENS),
    "mixture": Network(MIXTURE),
    "gated": Network(MIXTURE, gates=True),
    "routed": Network(ROUTED, TOKENS, slices=(2, 3), gates=True),
    "columns": Network(COLUMNS, TOKENS),
}
LAYERS = [(name, layer) for name, network in NETWORKS.items() for layer in range(len(network.kinds))]


def some(rows: int, width: int, seed: int, columns: tuple[Column, ...] = ()) -> Piece:
    """Numbers, the same every time."""
    numbers = batch_rows(tuple(1000 * seed + i for i in range(rows * -(-width // WIDTH))))
    return Piece(tuple(range(rows)), numbers.reshape(rows, -1)[:, :width], columns)


def weight_of(layer: int) -> Piece:
    return Piece(tuple(range(ELEMENTS)), initial(layer)[0])


def inputs_of(network: Network, layer: int) -> list[Piece]:
    """Return the inputs of a layer, of two microbatches."""
    kind, previous = network.kinds[layer], network.kinds[layer - 1] if layer else ""
    rows = 2 * network.sequence
    x = some(rows, 2 * WIDTH if previous == "project" else WIDTH, 1, EXPERTS if "experts" in (kind, previous) else ())
    carried = int(kind == "norm" and kind in network.kinds[:layer]) + (network.gates and previous == "experts")
    return [x, weight_of(layer), *(some(rows, WIDTH, 2 + number) for number in range(carried))]


def assert_derivative(
    forward: Callable[[list[Piece]], list[Piece]],
    inputs: list[Piece],
    grad_outputs: list[Piece],
    gradients: list[Piece],
) -> None:
    """Outputs are polynomials of degree 8 or less in any one number: eight points give the derivative exactly."""

    def value(place: int, index: int, step: int) -> int:
        """The sum of all outputs, each times its gradient, with one number of one input changed."""
        changed_inputs = list(inputs)
        data = changed_inputs[place].data.copy()
        data.reshape(-1)[index] = (data.reshape(-1)[index] + step) % PRIME
        changed_inputs[place] = Piece(changed_inputs[place].positions, data, changed_inputs[place].columns)
        outputs = forward(changed_inputs)
        return sum(int((y.data * dy.data % PRIME).sum()) for y, dy in zip(outputs, grad_outputs, strict=True)) % PRIME

    assert len(gradients) == len(inputs)
    for place, gradient in enumerate(gradients):
        for index in (0, 7, gradient.data.size // 2 + 1, gradient.data.size - 1):
            apart = (value(place, index, step) - value(place, index, -step) for step in (1, 2, 3, 4))
            times = (672, -168, 32, -3)
            derivative = sum(a * b for a, b in zip(times, apart, strict=True)) * pow(840, -1, PRIME) % PRIME
            assert derivative == gradient.data.reshape(-1)[index] % PRIME, f"input {place}, number {index}"


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_backward_pass_is_the_derivative_of_the_forward(name: str, layer: int) -> None:
    network = NETWORKS[name]
    toy, inputs = network.layer(layer), inputs_of(network, layer)
    outputs, ctx = toy.forward(inputs)
    grad_outputs = [some(len(y.positions), y.data.shape[1], 7 + i, y.columns) for i, y in enumerate(outputs)]
    grad_outputs[0].scale = 0  # so nothing adds a gradient of its own
    grad_inputs, half = toy.backward_input([inputs[0], grad_outputs[0], inputs[1], *grad_outputs[1:]], ctx)
    gradients = [grad_inputs[0], toy.backward_weight(inputs[0], grad_outputs[0], half), *grad_inputs[1:]]
    read = inputs
    if layer and network.kinds[layer - 1] == "project":  # the gradient is that of what it reads: mix * weights
        met = inputs[0].data[:, :WIDTH] * inputs[0].data[:, WIDTH:] % PRIME
        ones = np.ones_like(met)
        read = [Piece(inputs[0].positions, np.concatenate([met, ones], axis=1)), *inputs[1:]]
        gradients[0] = Piece(
            read[0].positions, np.concatenate([grad_inputs[0].data, grad_inputs[0].data * met % PRIME], axis=1)
        )
    assert_derivative(lambda changed: toy.forward(changed)[0], read, grad_outputs, gradients)


@pytest.mark.parametrize(("name", "layer"), [("gated", 0), ("routed", 4)])
def test_the_auxiliary_gradient_of_routing_has_the_gradient_scale(name: str, layer: int) -> None:
    toy, inputs = NETWORKS[name].layer(layer), inputs_of(NETWORKS[name], layer)
    outputs, ctx = toy.forward(inputs)
    zero, *others = [replace(y, data=np.zeros_like(y.data)) for y in outputs]
    once, twice = (
        toy.backward_input([inputs[0], replace(zero, scale=scale), inputs[1], *others], ctx)[0][0].data
        for scale in (1, 2)
    )
    assert once.any()
    assert (twice == 2 * once % PRIME).all()


def test_attentions_backward_pass_is_the_derivative_of_what_the_next_layer_reads() -> None:
    network, layer = NETWORKS["context"], 2
    queries, block = some(2 * TOKENS, WIDTH, 1), some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)

    def read(pieces: list[Piece]) -> list[Piece]:
        attended = network.attend(layer, *pieces)
        return [Piece(attended.positions, attended.data[:, :WIDTH] * attended.data[:, WIDTH:] % PRIME)]

    grad_output = some(2 * TOKENS, WIDTH, 3)
    gradients = network.attend_backward(layer, queries, block, network.attend(layer, queries, block), grad_output)
    assert_derivative(read, [queries, block], [grad_output], list(gradients))


def total(pieces: Iterable[Piece]) -> Array:
    """The sum of equally placed numbers."""
    return np.sum([piece.data for piece in pieces], axis=0) % PRIME


def cut(piece: Piece, rows: list[int]) -> Piece:
    return Piece(tuple(piece.positions[i] for i in rows), piece.data[rows], piece.columns)


def test_queries_that_meet_all_blocks_in_any_order_have_attended_to_all() -> None:
    """Forward, and the gradients of both: of the queries over the blocks, of a block over the queries."""
    network, layer = NETWORKS["context"], 2
    queries, block = some(2 * TOKENS, WIDTH, 1), some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)
    gradient = some(2 * TOKENS, WIDTH, 3)
    attended = network.attend(layer, queries, block)
    whole = network.attend_backward(layer, queries, block, attended, gradient)
    parts = [[i for i in range(2 * TOKENS) if i % TOKENS in places] for places in ((3,), (0, 2), (1,))]
    assert (total(network.attend(layer, queries, cut(block, part)) for part in parts) == attended.data).all()
    met = [network.attend_backward(layer, queries, cut(block, part), attended, gradient) for part in parts]
    assert (total(dq for dq, _ in met) == whole[0].data).all()
    for part, (_, dkv) in zip(parts, met, strict=True):
        assert (dkv.data == whole[1].data[part]).all()
    met = [
        network.attend_backward(layer, cut(queries, part), block, cut(attended, part), cut(gradient, part))
        for part in parts
    ]
    assert (total(dkv for _, dkv in met) == whole[1].data).all()


def test_no_query_sees_a_later_key_or_another_sequence() -> None:
    network, queries = NETWORKS["context"], some(2 * TOKENS, WIDTH, 1)
    block = some(2 * TOKENS, 2 * WIDTH, 2, KEYS_VALUES)
    for query, key in ((0, 1), (2, 3), (4, 3), (7, 0)):
        assert not network.attend(2, cut(queries, [query]), cut(block, [key])).data.any()
    assert network.attend(2, cut(queries, [5]), cut(block, [4])).data.any()


def slices_of(piece: Piece, count: int) -> list[Piece]:
    cuts = [slice(i * ELEMENTS // count, (i + 1) * ELEMENTS // count) for i in range(count)]
    if piece.data.ndim == 1:
        return [Piece(piece.positions[part], piece.data[part]) for part in cuts]
    return [Piece(piece.positions, piece.data[:, part], piece.columns[part]) for part in cuts]


def test_slices_of_half_blocks_add_up_to_the_whole() -> None:
    """Terms of a body's branch and of its input's gradient; and the loss of slices of the logits, with their sums."""
    network = NETWORKS["halves"]
    x, dy, weight = some(TOKENS, WIDTH, 1), some(TOKENS, WIDTH, 2), weight_of(2)

    def through(layer: int, part: Piece) -> tuple[Piece, Piece]:
        (y,), ctx = network.layer(layer).forward([x, part])
        (dx,), _ = network.layer(layer).backward_input([x, y if layer == 6 else dy, part], ctx)
        return y, dx

    for layer in (0, 2):
        y, dx = through(layer, weight)
        terms = [through(layer, part) for part in slices_of(weight, 3)]
        assert (total(term for term, _ in terms) == y.data).all()
        assert (total(term for _, term in terms) == dx.data).all()
    logits, _ = through(6, weight)
    parts = [through(6, part)[0] for part in slices_of(weight, 3)]
    (stats, *_) = combined(OpKind.ALL_GATHER, [network.stats(part) for part in parts], TOKENS)
    losses = [network.loss([part, stats]).data for part in parts]
    assert (np.concatenate(losses, axis=1) == network.loss([logits]).data).all()


def test_slices_of_columns_lie_side_by_side_and_rows_take_them_as_they_are() -> None:
    """Whoever has which slice, what is gathered is in order; of a complete gradient a column takes its own."""
    network, weight, other = NETWORKS["columns"], weight_of(1), weight_of(2)
    column, row, x, dy = network.layer(1), network.layer(2), some(TOKENS, WIDTH, 1), some(TOKENS, WIDTH, 2)
    (y,), ctx = column.forward([x, weight])
    (output,), _ = row.forward([y, other])
    (dx,), _ = column.backward_input([x, dy, weight], ctx)
    (grad_between,), _ = row.backward_input([y, dy, other], ctx)
    slices: list[Piece] = []
    terms: list[Piece] = []
    input_terms: list[Piece] = []
    for part, row_part in zip(slices_of(weight, 3), slices_of(other, 3), strict=True):
        (slice_,), ctx = column.forward([x, part])
        slices.append(slice_)
        input_terms.append(column.backward_input([x, dy, part], ctx)[0][0])
        (term,), ctx = row.forward([slice_, row_part])
        terms.append(term)
        (gradient,), _ = row.backward_input([slice_, dy, row_part], ctx)
        columns = np.array([number for _, number in gradient.columns], np.int64)
        assert (gradient.data == grad_between.data[:, columns]).all()
    gathered = combined(OpKind.ALL_GATHER, slices[::-1], TOKENS)[0]
    assert gathered.columns == y.columns
    assert (gathered.data == y.data).all()
    assert (total(terms) == output.data).all()
    assert (total(input_terms) == dx.data).all()


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (2, 3), (4, 2)])
def test_experts_on_many_ranks_make_what_they_make_on_one(ep: int, tp: int) -> None:
    """Buffers travel to their experts and back, in both directions; slices of experts make terms."""
    network, rows = Network(MIXTURE, slices=(ep, tp)), 2 * ep
    experts = network.layer(1)
    x, dy, weight = some(rows, WIDTH, 1, EXPERTS), some(rows, WIDTH, 2, EXPERTS), weight_of(1)
    mine = [list(range(2 * rank, 2 * rank + 2)) for rank in range(ep)]
    (y,), ctx = experts.forward([x, weight])
    (dx,), half = experts.backward_input([x, dy, weight], ctx)
    grad_weight = experts.backward_weight(x, dy, half)
    to = combined(OpKind.ALL_TO_ALL, [cut(x, part) for part in mine], 1)
    of = combined(OpKind.ALL_TO_ALL, [cut(dy, part) for part in mine], 1)
    output_terms: list[list[Piece]] = [[] for _ in range(ep)]
    input_terms: list[list[Piece]] = [[] for _ in range(ep)]
    grads: list[Piece] = []
    for rank, part in enumerate(slices_of(weight, ep * tp)):
        inbox, gradient = to[rank // tp], of[rank // tp]
        (results,), ctx = experts.forward([inbox, part])
        (lower,), half = experts.backward_input([inbox, gradient, part], ctx)
        output_terms[rank // tp] += owned([results], inbox)
        input_terms[rank // tp] += owned([lower], inbox)
        grads.append(experts.backward_weight(inbox, gradient, half))
    assert (np.concatenate([part.data for part in grads]) == grad_weight.data).all()
    for whole, terms in ((y, output_terms), (dx, input_terms)):
        parts = [combined(OpKind.ALL_REDUCE, pieces, 1)[0] for pieces in terms]
        for part, back in zip(mine, combined(OpKind.ALL_TO_ALL, parts, 1), strict=True):
            assert (back.positions, back.columns) == (tuple(part), EXPERTS)
            assert (back.data == whole.data[part]).all()


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), (3, 2), (3, 4), (2, 3)])
def test_heads_exchanged_for_sequence_slices_attend_as_on_one_device(cp: int, tp: int) -> None:
    """Each rank's heads are dealt once more, for an early and a late slice of every sequence; and back."""
    tokens = 2 * cp
    network, layer = Network(CONTEXT, tokens), 2
    queries, block = some(2 * tokens, WIDTH, 1, QUERIES), some(2 * tokens, 2 * WIDTH, 2, KEYS_VALUES)
    gradient = some(2 * tokens, WIDTH, 3, labels(range(WIDTH), "feature"))
    attended = network.attend(layer, queries, block)
    expected = [attended, *network.attend_backward(layer, queries, block, attended, gradient)]
    mine = [[row for row in range(2 * tokens) if row % tokens in (rank, tokens - 1 - rank)] for rank in range(cp)]
    for slice_ in range(tp):

        def exchanged(pieces: list[Piece]) -> list[Piece]:
            return combined(OpKind.ALL_TO_ALL, pieces, tokens)

        def heads(piece: Piece, slice_: int = slice_) -> Piece:
            columns = [n for n, (_, head) in enumerate(piece.columns) if head * tp // WIDTH == slice_]
            return Piece(piece.positions, piece.data[:, columns], tuple(piece.columns[n] for n in columns))

        inputs = [exchanged([cut(heads(piece), rows) for rows in mine]) for piece in (queries, block, gradient)]
        outputs: list[list[Piece]] = [[], [], []]
        for q, kv, dy in zip(*inputs, strict=True):
            mixed = network.attend(layer, q, kv)
            for results, piece in zip(outputs, [mixed, *network.attend_backward(layer, q, kv, mixed, dy)], strict=True):
                results += owned([piece], q)
        for whole, parts in zip(expected, outputs, strict=True):
            for rows, back in zip(mine, exchanged(parts), strict=True):
                assert (back.positions, back.columns) == (tuple(rows), heads(whole).columns)
                assert (back.data == heads(whole).data[rows]).all()


def test_gradients_of_keys_and_values_are_dealt_to_whom_the_pieces_belonged() -> None:
    """An early run and a late one for each rank, if it gave these; rows that nobody has put together go in runs."""
    whole = some(4, 2 * WIDTH, 1, KEYS_VALUES)
    gathered, _ = combined(OpKind.ALL_GATHER, [cut(whole, [0, 3]), cut(whole, [1, 2])], 4)
    assert (gathered.positions, gathered.columns) == (whole.positions, KEYS_VALUES)
    for columns in (slice(0, 2 * WIDTH), slice(6, 12)):
        (piece,) = owned([Piece(whole.positions, whole.data[:, columns], KEYS_VALUES[columns])], gathered)
        parts = combined(OpKind.REDUCE_SCATTER, [piece, piece], 4)
        assert [part.positions for part in parts] == [(0, 3), (1, 2)]
        assert all((part.data == 2 * piece.data[list(part.positions)] % PRIME).all() for part in parts)
    plain = Piece(whole.positions, whole.data)
    assert [part.positions for part in combined(OpKind.REDUCE_SCATTER, [plain, plain], 4)] == [(0, 1), (2, 3)]


def test_a_short_long_run_reports_no_survivor_and_no_false_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    long_run.mutants(20, Random(0))
    long_run.programs(2 * len(long_run.WRITERS), Random(0))
    report = capsys.readouterr().out
    assert " mutants, 0 that are not right passed\n" in report
    assert report.endswith(f"{2 * len(long_run.WRITERS)} valid programs, 0 false alarms\n")
