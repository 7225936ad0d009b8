"""Every kind of mistake, put into tapes that were right: what computes other numbers, hangs or breaks is refused.

The mutants are judged by executing them on numbers (`tests/support/interpreter.py`); the check must refuse each one
that is not right, with a sentence that says where.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random

import pytest

from shardlab.program import Mesh, Op, OpKind, Program, Rank, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.load import load
from shardlab.strategies.plan import Plan
from tests.check import slicing_programs
from tests.check.programs import PLACE, built_in
from tests.check.scaling_programs import sum_of_tokens
from tests.support.interpreter import judge
from tests.support.mutations import MUTATIONS, changed, places
from tests.support.random_attention import random_attention
from tests.support.random_experts import random_experts
from tests.support.random_plans import Planned
from tests.support.random_programs import Shape, random_program
from tests.support.refusing import refusal
from tests.train.user_programs import split_fsdp, split_pipeline, zero_1

SAMPLE, SAMPLE_OF_PLANS = 12, 4
"""Mutants of one kind and program that are tried; there may be thousands."""

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
    # experts, whole and in slices
    "experts pipeline": Planned(Plan(Mesh(pp=2, ep=2), "zb-h1"), 3, "mixture", 4),
    "experts zero_1": Planned(Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD, recompute="full"), 2, "mixture", 4),
    "experts tensor": Planned(Plan(Mesh(tp=2, ep=2)), 2, "routed", 2),
    "experts apart": Planned(Plan(Mesh(tp=2, ep=2), "zb-h1", recompute="selective"), 2, "routed apart", 4),
    "experts shared": Planned(Plan(Mesh(cp=2)), 2, "routed apart", 1),
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
    programs |= {by_hand.__name__: trace(by_hand, 2, 1, 2) for by_hand in BY_HAND}
    programs |= {"attention at random": random_attention(36), "experts at random": random_experts(2)}
    programs |= {"heads exchanged at random": random_attention(22)}
    return programs | {name: plan.program for name, plan in PLANS.items()}


async def ring(rank: Rank) -> None:
    """The example's, for short."""
    await load(str(Path(__file__).parents[2] / "examples" / "ring_all_reduce.py:ring_all_reduce")).program(rank)


BY_HAND = (ring, slicing_programs.updates_in_chunks, slicing_programs.a_rank_without_a_microbatch, sum_of_tokens)


def mutants(kind: str, name: str) -> list[Program]:
    """A sample of a program's mutants, the same every time."""
    sample = SAMPLE_OF_PLANS if any(layer.cut for layer in subjects()[name].sizes.signatures) else SAMPLE
    random = Random(f"{kind} {name}")
    kept: list[Program] = []
    for count, mutant in enumerate(MUTATIONS[kind](subjects()[name])):  # each is kept with the same chance
        place = count if count < sample else random.randrange(count + 1)
        kept[place : place + 1] = [mutant] if place < sample else []
    return kept


@pytest.mark.parametrize("kind", [kind for kind in MUTATIONS if kind != "another world"])
def test_each_mistake_that_matters_is_refused_and_the_place_is_named(kind: str) -> None:
    """What passes is always judged; of what is refused, enough to see that the mistake is one that matters."""
    wrong = refused = False
    for name in subjects():
        for number, mutant in enumerate(mutants(kind, name)):
            sentence = refusal(mutant)
            if sentence is None:
                verdict = judge(mutant)
                assert verdict.right, f"{kind} {number} of {name} passes, but: {verdict.reason}"
            else:
                assert re.match(PLACE, sentence), sentence
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
    ("kind", "name", "words"),
    [
        ("dropped op", "single", "the step ends without weights[1] (step 1)"),
        ("dropped op", "ddp", "wait: handle 0 is not in flight; each communication is waited for once"),
        ("dropped op", "gpipe", "value 5 has not been made yet"),
        ("duplicated op", "single", "makes value 4, which must be a new one"),
        ("duplicated op with new numbers", "single", "the same slice was loaded by op 0 already"),
        ("swapped neighbours", "single", "has not been made yet"),
        ("swapped with a later op", "pipeline", "has not been made yet"),
        ("wrong layer", "single", "the weight given is weights[1]; layer 0 computes with weights[0]"),
        ("wrong layer", "gpipe", "the op says layer 2, but it acts on layer 1"),
        ("wrong value", "single", "the weight given is weights[0]; layer 1 computes with weights[1]"),
        ("wrong microbatch", "single", "microbatch 0 is missing from grad_weights[0] (microbatch 1)"),
        ("wrong microbatch", "ddp", "microbatch 1 would be counted twice (rank 0 and rank 1 both summed it)"),
        ("wrong microbatch", "grad-accum", "microbatch 1 would be counted twice (the first value and the second"),
        ("wrong microbatch", "gpipe", "expected activations[1] of microbatch 0, but the next message on this channel"),
        ("early free", "single", "was freed or replaced before this op"),
        ("early free", "ddp", "is still read by a communication in flight"),
        ("missing free", "single", "still live; a step leaves only the slices it loaded"),
        ("missing reduce", "ddp", "update(layer 1): microbatch 1 is missing from grad_weights[1] (microbatch 0)"),
        ("missing reduce", "fsdp", "is missing from grad_weights[1]"),
        ("double reduce", "ddp", "all_reduce(grad_weights[1]): microbatches 0-1 would be counted twice"),
        ("early update", "single", "update(layer 0): value 12 has not been made yet"),
        ("stale weight", "single", "update(layer 1): value 10 has not been made yet"),
        ("weight read after its update", "single", "of optimizer step 1, but the batch belongs to step 0: it was"),
        ("weight left stale", "fsdp", "every slice that is loaded must be updated once"),
        ("second update", "ddp", "all three must be of one step: each slice is updated exactly once a step"),
        ("swapped senders values", "gpipe", "send to rank 1: value 6 has not been made yet"),
        ("swapped sends", "gpipe", "send to rank 0: value 13 has not been made yet"),
        ("collective of another kind", "fsdp", "rank 0 meets it with"),
        ("collectives in another order", "fsdp", "in one order, of one kind and for one layer"),
        ("wrong shard", "fsdp", "slice 1 of 2 comes from rank 1 and from an earlier rank as well"),
        ("missing gather", "fsdp", "slices 1 of 2 are missing. Gather the whole layer first (all_gather)"),
        ("dropped send", "pipeline", "deadlock: rank 0 waits in recv from rank 1 of grad_activations[1]"),
        ("dropped recv", "pipeline", "forward(layer 1): value 2 has not been made yet"),
        ("collective dropped on one rank", "ddp", "microbatch 1 is missing from grad_weights[0]"),
        ("missing wait", "ddp", "is still read by a communication in flight"),
        ("wrong group", "fsdp", "a group has rank 0 itself and others of 0-1, each once"),
        ("wrong peer", "pipeline", "the world has ranks 0-1, and a rank does not message itself"),
        ("malformed op", "ddp", "update: has 2 inputs and 2 outputs"),
        (
            "weight half left out",
            "split_pipeline",
            "norm(layer 1): microbatch 0 missing from grad_weights[1] (microbatch",
        ),
        ("weight half done twice", "split_fsdp", "is not what the first half of this activation's backward left for"),
        ("weight half done twice", "split_fsdp", "add(grad_weights[1]): microbatch 0 would be counted twice"),
        ("weight half of another microbatch", "split_pipeline", "is not what the first half of this activation's"),
        (
            "weight half of another microbatch",
            "split_pipeline",
            "the activation is of microbatch 1 and the gradient of",
        ),
        ("weight half before its input half", "split_fsdp", "is not what the first half of this activation's backward"),
        ("whole backward and a weight half", "split_fsdp", "is not what the first half of this activation's backward"),
        ("state of another shard", "zero_1", "slice 1 of 2 comes from rank 1 and from an earlier rank as well"),
        ("new weight not gathered", "zero_1", "load_weight(layer 0): the step ends without weights[0] (step 1)"),
        ("norm without a layer", "zero_1", "the norm given lacks parts 0 of 2 of the model's parameters"),
        ("part of the norm twice", "zero_1", "add(scalars): parts 0 of 2 of the model come from the second value"),
        ("norm of an unfinished gradient", "zero_1", "squares do not add up over microbatches"),
        ("update with a part of the norm", "split_fsdp", "the norm given lacks parts 1, 3 of 4 of the model"),
        ("update without the norm", "zero_1", "some updates of this rank are given the gradient's norm and some are"),
        ("update without the norm", "zero_1", "is not given the gradient's norm, but rank 0's updates are"),
        (
            "missing reduce",
            "tensor",
            "head slice 1 is missing. Put all together first: reduce the terms over the ranks that have them",
        ),
        ("missing reduce", "sequence", "norm(layer 1): sequence slice 1 of microbatch 0"),
        ("missing gather", "sequence", "this layer wants whole sequences. Gather their slices first"),
        (
            "missing gather",
            "tensor",
            "the stats given are stats[7] (microbatch 0, vocabulary slice 1 of 2); all_gather the",
        ),
        ("double reduce", "tensor", "which is complete; summing it again would count it twice"),
        (
            "collective too many",
            "tensor",
            "vocabulary slices of the whole and no term of a sum; all_gather the slices, which lie side by side",
        ),
        ("collective too many", "tensor", "gave slices 0 of 2 and rank 1 1 of 2; only equal slices can be summed"),
        ("collective over another axis", "tensor zero_1", "only equal slices can be summed"),
        ("residual for branch", "sequence", "the activation given is residuals[3]"),
        ("block met twice", "ring", "earlier one both have it); queries meet each block once"),
        ("block left out", "ring", "the keys and values of slice 0 of the sequence are missing in it"),
        ("blocks of another meeting", "ring", "earlier one both have it); queries meet each block once"),
        ("attended in part", "ring", "keys and values 0, 5 of 6 alone); the keys and values of slices 1-4"),
        ("another block sent", "ring", "the next message on this channel is keys_values[2] of microbatch 0"),
        ("hop the other way", "ring", "only terms of one value, for the same tokens, are put together"),
        ("hop left out", "ring", "add(activations[3]): keys and values 0, 5 of 6 alone would be counted twice"),
        ("slices dealt otherwise", "gathered", "from an earlier rank as well; gathered pieces must not overlap"),
        ("exchange left out", "expert-parallel", "experts compute on their own buffers and on no others"),
        (
            "exchange left out",
            "expert-parallel",
            "backward(layer 0): the gradient given is grad_activations[1] (microbatches 0-1, expert 0 of 2); expert 1",
        ),
        ("exchange left out", "heads exchanged", "attention takes the same heads of queries, keys and values"),
        ("exchange in another order", "heads exchanged", "the ranks have their head slices in another order than the"),
        (
            "missing reduce",
            "experts tensor",
            "feed-forward slice 1 of 2) was given; an all_to_all exchanges",
        ),
        ("another part of the experts", "experts shared", "experts compute on their own buffers and on no others"),
        ("missing gather", "experts shared", "this layer wants whole sequences. Gather their slices first"),
        ("missing reduce", "experts shared", "the term of expert 0 of 2); expert 1 is missing. Put all together first"),
        ("missing reduce", "experts shared", "microbatch 0 of expert 0 missing from grad_weights"),
        ("double reduce", "experts tensor", "of the whole and no term of a sum; exchange the experts' buffers"),
        ("exchanged twice", "expert-parallel", "experts compute on their own buffers and on no others"),
        ("value of another exchange", "expert-parallel", "give a value of grad_activations"),
        ("carried of another pass", "experts pipeline", "the residual given is residuals[2] (microbatch 1)"),
        (
            "collective too many",
            "expert-parallel",
            "experts of the whole and no term of a sum; exchange the experts' buffers by",
        ),
        ("use of a tied weight left out", "tied", "microbatch 0 as the head missing from grad_weights[0]"),
        ("use of a tied weight twice", "tied", "microbatch 0 as the head would be counted twice"),
        ("one use of a tied weight for the other", "tied", "microbatch 0 as the head would be counted twice"),
        ("squares of a tied weight twice", "tied", "each parameter's square counts once"),
        (
            "head updated as if alone",
            "tied pipeline",
            "microbatches 0-1 as the embedding are missing from grad_weights[0]",
        ),
        ("residual for branch", "sequence", "the gradient given is grad_residuals[3]"),
        (
            "slice of another rank",
            "tensor",
            "vocabulary slice 1 would be counted twice (rank 1 and an earlier rank both have it)",
        ),
        ("squares counted on every rank", "tensor", "of the model come from rank 1 and from an earlier one as well"),
        ("double reduce", "split_fsdp", "all_reduce(scalars): parts 0-3 of 4 of the model come from rank 1"),
    ],
)
def test_the_refusal_says_what_the_mistake_is(kind: str, name: str, words: str) -> None:
    sentences = [refusal(mutant) for mutant in MUTATIONS[kind](subjects()[name])]
    assert any(sentence and words in sentence for sentence in sentences), sorted({s for s in sentences if s})


def test_swapped_sends_are_refused_by_name() -> None:
    """The first rank of a GPipe sends its two activations in the other order; nothing is freed early for it."""
    program = built_in("gpipe")
    tape = program.tapes[0]
    sends = [op for op in tape if op.kind is OpKind.SEND]
    frees = [Op(OpKind.FREE, -1, op.inputs) for op in sends]
    made = max(at for at, op in enumerate(tape) if set(op.outputs) & {n for send in sends for n in send.inputs})
    waits = [op for op in tape if op.kind is OpKind.WAIT and op.handle in {send.handle for send in sends}]
    rest = [op for op in tape if op not in (*sends, *frees, *waits)]
    made = rest.index(tape[made]) + 1
    for order in (sends, sends[::-1]):
        ops = [*rest[:made], *order, *waits, *frees, *rest[made:]]
        mutant = Program(program.mesh, program.microbatches, program.sizes, [ops, program.tapes[1]])
        if order is sends:
            assert refusal(mutant) is None
            assert judge(mutant).right
        else:
            assert not judge(mutant).right
            assert refusal(mutant) == (
                "rank 1, op 2 recv from rank 0: expected activations[1] of microbatch 0, but the next message on this "
                "channel is activations[1] of microbatch 1; messages between two ranks arrive in the order they were "
                "sent. Make rank 0's sends and this rank's receives agree."
            )


@pytest.mark.parametrize("name", STRATEGIES)
def test_leaving_out_any_op_is_noticed(name: str) -> None:
    """No entry of a tape is idle: even a lost FREE or WAIT is refused."""
    program = built_in(name)
    for rank, at, op in places(program):
        assert refusal(changed(program, rank, at)), f"rank {rank}, op {at} {op} can be dropped"
