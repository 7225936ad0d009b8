"""Each sentence of the check about a tape, once; all other tests ask for a refusal's fields."""

from __future__ import annotations

import pytest

from tests.support.refused_tapes import TAPES
from tests.support.refusing import refusal_of, sentence_of

SENTENCES = {
    "the layer's own": (
        "rank 0, op 4 free(value 4): value 4 is what a layer keeps; leave it to the backward of its activation."
    ),
    "freed, not made": "rank 0, op 3 forward(layer 0): value 77 has not been made yet; make it before.",
    "freed, on a tape": (
        "rank 0, op 11 update(layer 0): value 0, weights[0], was freed or replaced before this op; free it after "
        "its last use."
    ),
    "in flight": (
        "rank 0, op 10 free(value 6): grad_weights[0] (microbatch 0) is still read by a communication in flight; "
        "wait for it first."
    ),
    "left over": (
        "rank 0, op 13: the step ends with value 70, activations[0] (microbatch 0), still live; a step leaves "
        "only the slices it loaded. Free it."
    ),
    "loaded twice, on a tape": (
        "rank 0, op 1 load_weight(layer 0): the same slice was loaded by op 0 already; load each slice once."
    ),
    "malformed tape": (
        "rank 0, op 4 loss(layer 1): has 0 inputs and 1 output, which it never has; give what it reads and makes."
    ),
    "malformed tape, a handle": (
        "rank 0, op 4 loss(layer 1): has handle 3, but only a collective or a message has one; leave it out."
    ),
    "unknown group, none": "rank 0, op 9 all_reduce(layer 0): no group is given for this collective; give one.",
    "number in use": "rank 0, op 4 loss(layer 1): makes value 0, which must be a new one; number values from 0.",
    "number in use, of a handle": (
        "rank 0, op 9 all_reduce(layer 0) on world: issues handle -1, which must be a new one; number handles from 0."
    ),
    "nothing to wait for": "rank 0, op 10 wait(handle 9): handle 9 is not in flight; wait for each communication once.",
    "not kept": (
        "rank 0, op 0 load_weight(layer 0): the step ends without weights[0] (step 1); update every slice that is"
        " loaded once, and keep the result in a store."
    ),
    "no forward, on a tape": (
        "rank 0, op 6 backward(layer 0): value 0 is not what the layer kept of this activation's forward; read "
        "what that saved, once."
    ),
    "unknown layer, on a tape": (
        "rank 0, op 3 forward(layer 5): layer 5 does not exist; the model has layers 0-0, name one of these."
    ),
    "unknown microbatch, on a tape": (
        "rank 0, op 2 load_batch(batch): None is not a set of the step's 2 microbatches; name some of them."
    ),
    "unknown slice, on a tape": (
        "rank 0, op 0 load_weight(layer 0): there is no slice None of layer 0; name slices that it has."
    ),
    "wrong layer, on a tape": (
        "rank 0, op 2 load_batch(batch): the op says layer 3, but it acts on layer 0; say that one."
    ),
    "unknown group, made by hand": (
        "rank 0, op 9 all_reduce(layer 0) on world: the group world was not made by group_of, so its members "
        "would not find each other; make it by group_of."
    ),
    "malformed tape, another world": "the mesh has 1 rank, but the program has 2 tapes; give one for each rank.",
    "malformed tape, a layer's outputs": (
        "rank 0, op 3 forward(layer 0): has 3 outputs, but this layer makes 1 value; number these, and what is saved."
    ),
    "malformed tape, a gradient's outputs": (
        "rank 0, op 40 backward_input(layer 6): numbers 2 values, but makes 1 beside what the layer keeps; number "
        "what it makes."
    ),
    "malformed tape, a wait": (
        "rank 0, op 10 wait(handle 0): a wait reads and makes no value; name what arrives in its communication."
    ),
    "malformed tape, nothing expected": (
        "rank 0, op 0 recv from rank 1: the tape does not say which message is meant; say what it expects."
    ),
    "malformed tape, nothing expected of a root": (
        "rank 0, op 0 broadcast(layer 0) on world: the tape does not say what comes from the root; say what it expects."
    ),
    "malformed tape, a root's part": (
        "rank 0, op 0 broadcast(layer 0) on world: has 0 inputs and 0 outputs; the part of rank 0 reads 0 and "
        "makes 1, give these."
    ),
    "malformed tape, no set of microbatches": (
        "rank 0, op 0 recv from rank 1: no set of microbatches is the number -1; expect a bit set."
    ),
    "unknown group, a rank twice": (
        "rank 0, op 9 all_reduce(layer 0) on world: the group has the ranks (0, 0); give rank 0 itself and others"
        " of 0-1, each once."
    ),
    "unknown rank, on a tape": (
        "rank 0, op 0 recv from rank 7 of weights[0]: rank 7 is none that this rank can message; the world has "
        "ranks 0-1, name another of these."
    ),
    "batch of messages, apart": (
        "rank 0, op 2 recv from rank 1 of weights[0]: is of batch 0, but other ops stand between it and the rest "
        "of its batch; put them before or after the batch."
    ),
    "batch of collectives": (
        "rank 0, op 0 barrier on world: is issued together with what is not of its kind, its group and its dtype; "
        "give it a batch of its own."
    ),
    "batch of collectives, on one rank": (
        "rank 1, op 14 all_reduce(layer 0) on world: is issued alone, and as one of 2 on another rank; issue the same "
        "together on all ranks."
    ),
    "in flight, not arrived": "rank 0, op 1 free(value 0): value 0 is still in flight; wait for handle 0 first.",
    "in flight, updated": (
        "rank 0, op 10 update(layer 0): weights[0] is still read by a communication in flight; wait for it first."
    ),
    "in flight, at the end": "rank 0, op 0 barrier on world: is still in flight when the step ends; wait for it.",
    "left over, twice": (
        "rank 0, op 13: the step ends with value 70, weights[0] (step 1), which is live already; a step leaves "
        "each slice once. Free one of them."
    ),
    "unknown slice, of a value on a tape": (
        "rank 0, op 1 slice(layer 0): None is not one of the equal parts of a value; name one of them."
    ),
    "wrong factor, on a tape": (
        "rank 0, op 5 scale(layer 1): None is not a rational times counts of tokens of the step's microbatches; "
        "give such a factor."
    ),
    "tied weight, on a tape": (
        "rank 0, op 0 load_weight(layer 6): the head is tied to the embedding and has no weight of its own; it "
        "computes with weights[0], load layer 0."
    ),
    "other forward, on a tape": (
        "rank 0, op 46 backward_input(layer 4): the forward pass was by other slices of the layer than the weight"
        " and the gradient; give the slices of the forward pass."
    ),
    "no forward, recomputed": (
        "rank 0, op 16 recompute(layer 1): this norm layer takes or makes several values, and is not recomputed; "
        "save what its forward makes."
    ),
    "no forward, second half on a tape": (
        "rank 0, op 59 backward_weight(layer 6): value 0 is not what the first half of this activation's backward"
        " left for it; read what that left, once."
    ),
    "wrong offset, no room": (
        "rank 0, op 3 forward(layer 0): has an offset in the arena, but the executor does not choose where its result "
        "lies; leave it out."
    ),
    "wrong offset, no beginning": (
        "rank 0, op 6 backward(layer 0): has offset 1, but rooms begin at multiples of 64 bytes, and fill them side by "
        "side; leave offsets to the pass arena."
    ),
    "room taken": (
        "rank 0, op 12 backward(layer 0): bytes 0-1048575 of the arena are to hold grad_weights[0] (microbatch 1), "
        "but grad_weights[0] (microbatch 0) lies in 0-1048575 until op 24; give it another offset."
    ),
}
"""Of a tape, by its rule and what is special, the whole sentence."""


@pytest.mark.parametrize("case", SENTENCES)
def test_a_wrong_tape_is_refused_in_a_sentence(case: str) -> None:
    assert sentence_of(TAPES[case]) == SENTENCES[case]
    assert refusal_of(TAPES[case]).rule == case.split(", ")[0]
