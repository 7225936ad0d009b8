"""Each sentence of a refusal, once (those of sums and layers in tests/language/rules); other tests ask for fields."""

from __future__ import annotations

from typing import get_args

import pytest

from shardlab.common.errors import Rule
from tests.language.rules import test_refusals as of_rules
from tests.support.refused_calls import PROGRAMS, PUZZLES
from tests.support.refused_tapes import TAPES
from tests.support.refusing import refusal_of, sentence_of

CALLS = {"programs": PROGRAMS, "puzzles": PUZZLES}

SENTENCES = {
    ("programs", "another rank's value"): (
        "rank 1, op 1 slice: activations[0] (microbatch 0) belongs to rank 0; ranks share values only by "
        "communication, send it."
    ),
    ("programs", "awaited something else"): (
        "rank 0, op 0: the program awaited something else than a communication of its own rank; await the handles that "
        "this rank's verbs return, one by one."
    ),
    ("programs", "batch of messages, in a batch"): (
        "rank 0, op 0 batch_p2p: a batch of messages is open already; end its block first."
    ),
    ("programs", "deadlock"): (
        "deadlock: rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 0. Let one of them send first, or "
        "let each send and receive at once with rank.exchange."
    ),
    ("programs", "endless"): (
        "rank 0, op 257: the step has more than 100 ops here, and no more are traced; if this goes on for "
        "ever, let the loops end whatever the numbers are; otherwise raise --max-ops, or take fewer "
        "microbatches."
    ),
    ("programs", "stalled"): (
        "rank 0, op 1 has not come within 0.05 s of CPU time; let the loop end, or raise --max-seconds-per-op"
        " if the program is only slow."
    ),
    ("programs", "the program raised"): "rank 0, op 0: the program raised KeyError: 'cheese'; fix it there.",
    ("programs", "freed"): (
        "rank 0, op 2 loss: activations[0] (microbatch 0) is used after it was freed (its last key in a store was "
        "deleted or overwritten); keep a key until the last use, or take the value out with `pop`: a variable or a "
        "list does not keep it."
    ),
    ("programs", "replaced"): (
        "rank 0, op 9 forward(layer 0): weights[0] is used after it was freed (an update replaced it in "
        "place); use the value that it returned."
    ),
    ("programs", "loaded twice"): (
        "rank 0, op 1 load_weight(layer 0): the same slice was loaded by op 0 already; load each slice once."
    ),
    ("programs", "no value"): (
        "rank 0, op 0 loss: 3 was given where a value is wanted; compute on values from the stores."
    ),
    ("programs", "no value, a tuple"): (
        "rank 0, op 0 loss: a tuple was given where a value is wanted; unpack it, as in `a, b = ...`."
    ),
    ("programs", "not awaited"): (
        "rank 0, op 2 loss: the handle of all_gather(layer 0) on world (op 1) was given where a value is "
        "wanted; await it first."
    ),
    ("programs", "not awaited, and needed"): (
        "rank 0, op 8 all_reduce(layer 0) on world: an `await` is missing here, and update(layer 0) needs the result: "
        "microbatch 1 is missing from grad_weights[0] (microbatch 0); an update wants every microbatch exactly once. "
        "Wait for it, and use its result: `x = await rank.all_reduce(x)`."
    ),
    ("programs", "unused result"): (
        "rank 1, op 8 all_reduce(layer 0) on world: its result is dropped here, and update(layer 0) needs the "
        "result: microbatch 0 is missing from grad_weights[0] (microbatch 1); an update wants every microbatch exactly "
        "once. Use its result: `x = await rank.all_reduce(x)`."
    ),
    ("programs", "no operator, a product"): (
        "rank 0, op 1: grad_weights[0] (zero) * 0.5 is no operation on values; write rank.scale(value, Fraction(1, 2)) "
        "if it is meant. Gradients are shares of the step's mean already, and their sum needs no factor."
    ),
    ("programs", "no operator, a step"): (
        "rank 0, op 2: weights[0] - grad_weights[0] (zero) is no operation on values; rank.update(layer, gradient, "
        "weight, opt_state) takes the optimizer's step."
    ),
    ("programs", "unknown verb"): (
        "rank 0, op 0: rank.weight does not exist; did you mean rank.weights? Other stores are opt_states, "
        "activations, grad_activations, grad_weights, directions, scalars, residuals, grad_residuals, routing, "
        "grad_routing, stats, queries, keys_values, grad_queries, grad_keys_values."
    ),
    ("programs", "unknown verb, of a value"): (
        "rank 0, op 1: weights[0] has no `grad`; rank.backward returns the gradients of the weight and of the input."
    ),
    ("programs", "no forward, second half"): (
        "rank 0, op 6 backward_weight(layer 0): no backward_input has come before it for activations[0] "
        "(microbatches 0-1); call it first: it saves the input of this half."
    ),
    ("programs", "tied weight"): (
        "rank 0, op 0 load_weight(layer 6): the head is tied to the embedding and has no weight of its own; "
        "it computes with weights[0], load layer 0."
    ),
    ("programs", "unknown axis"): (
        "rank 0, op 0: axis 'rows' is not an axis of a mesh; the axes are pp, dp_replicate, dp_shard, cp, tp,"
        " ep, name one of these."
    ),
    ("programs", "unknown key"): (
        "rank 0, op 0: weights[3] does not exist; the store is empty, first write rank.weights[3] = value."
    ),
    ("programs", "unknown layer"): (
        "rank 0, op 0 load_weight: layer 7 does not exist; the model has layers 0-0, name one of these."
    ),
    ("programs", "unknown microbatch"): (
        "rank 0, op 0 load_batch: [7] was given; give one or more of the microbatches 0-1, each once."
    ),
    ("programs", "unknown microbatch, a number"): (
        "rank 0, op 0 load_batch: the number 0 was given; give a list: load_batch([0])."
    ),
    ("programs", "unknown microbatch, tokens"): (
        "rank 0, op 0 tokens: [7] was given; give one or more of the microbatches 0-1."
    ),
    ("programs", "unknown microbatch, expected"): (
        "rank 0, op 0 recv(layer 0): microbatches [9] were expected; the step has 0-1, expect some of these."
    ),
    ("programs", "unknown slice"): (
        "rank 0, op 0 load_weight(layer 0): shard 2 of 2 does not exist; of 2 shards, name one of 0-1."
    ),
    ("programs", "unknown slice, no number"): (
        "rank 0, op 0 load_weight(layer 0): shard 'a' of 2 was asked for; give whole numbers."
    ),
    ("programs", "unknown slice, of a batch"): (
        "rank 0, op 0 load_batch: [0], [3] was given; give one or more of the slices 0-0, each once."
    ),
    ("programs", "unknown slice, of a value"): (
        "rank 0, op 1 slice(activations[0]): slice 0.5 of 2 was asked for; give whole numbers."
    ),
    ("programs", "unknown rank"): (
        "rank 0, op 0 recv from rank 3: it does not exist; the world has ranks 0-0, name another of these."
    ),
    ("programs", "unknown rank, itself"): (
        "rank 0, op 0 recv from rank 0: that is this rank itself; the world has ranks 0-0, name another of these."
    ),
    ("programs", "unknown rank, no number"): (
        "rank 0, op 0 recv from '0': this is no rank; a rank is named by its number, give that."
    ),
    ("programs", "unknown group"): (
        "rank 0, op 1 all_reduce: among=[4] was given; name rank 0 itself and others of 0-0, each once."
    ),
    ("programs", "unknown group along an axis"): (
        "rank 0, op 1 all_reduce: among=[0, 1] was given; name rank 0 itself and others of 0, along tp, each once."
    ),
    ("programs", "wrong expectation"): (
        "rank 0, op 0 recv: 'weight' is not a store; expect one of weights, opt_states, activations, "
        "grad_activations, grad_weights, directions, residuals, grad_residuals, routing, grad_routing, stats, queries, "
        "keys_values, grad_queries, grad_keys_values, scalars."
    ),
    ("programs", "wrong expectation, of one word"): (
        "rank 0, op 0 recv: 'weight' was expected; write (store's name, layer, microbatch or microbatches)."
    ),
    ("programs", "wrong factor"): (
        "rank 0, op 6 scale(grad_activations[1]): 0 was given; give a Fraction that is not 0, or token counts."
    ),
    ("programs", "wrong root, given nothing"): (
        "rank 0, op 0 broadcast with root 0: no value was given; give one, the root's is what the others get."
    ),
    ("programs", "wrong root, given too much"): (
        "rank 1, op 1 broadcast with root 0: rank 1 gives a value, but only the root does; give None on the others."
    ),
    ("programs", "no reduction"): (
        "rank 0, op 1 all_reduce: there is no reduction 'median'; give one of sum, mean, min, max."
    ),
    ("programs", "wrong store"): (
        "rank 0, op 1: weights[0] was given activations[0] (microbatch 0); it belongs in rank.activations, "
        "keep it there."
    ),
    ("programs", "wrong number, nothing to concatenate"): (
        "rank 0, op 0 concatenate: no value was given; give the pieces."
    ),
    ("programs", "other order"): (
        "rank 1, op 1 all_gather(weights[0] (shard 1 of 2)) on world: rank 0 meets it with "
        "all_reduce(weights[0] (shard 0 of 2)) (its op 1); all members of a group must issue its collectives "
        "in one order, of one kind and for one layer. Issue the same collective there: look for an `if` or a loop that "
        "differs between these ranks."
    ),
    ("programs", "other message"): (
        "rank 0, op 0 recv from rank 1: expected activations[0] of microbatch 0, but the next message on this"
        " channel is weights[0]; messages between two ranks arrive in the order they were sent. Make rank 1's"
        " sends and this rank's receives agree."
    ),
    ("programs", "moved twice"): (
        "rank 0, op 19 update(layer 0): op 18 update(layer 0) has moved slice 0 of 2 of the weights[0] that "
        "this rank keeps one step on already, for another optimizer state; each element moves once a step. "
        "Load one optimizer state for each slice, and no two that overlap."
    ),
    ("programs", "stepped again"): (
        "rank 0, op 18 update(layer 0): op 16 recv from rank 1 of weights[0] has put the new values of slice"
        " 0 of 2 of the weights[0] that this rank keeps in the old ones' place; this update would move them a"
        " second step. Update before they arrive, or load no optimizer state of what other ranks update."
    ),
    ("programs", "in flight, written"): (
        "rank 0, op 19 update(layer 0): writes over weights[0], but send to rank 1 (handle 3) is still reading that; "
        "wait for it first."
    ),
    ("programs", "not received"): (
        "rank 1, op 15 send to rank 0: no receive on rank 0 takes this message, weights[0] (step 1); receive "
        "it there, or leave it out."
    ),
    ("programs", "not loaded"): (
        "weights[0]: no rank loads this weight, so no rank updates it; load and update every slice of "
        "every layer on at least one rank."
    ),
    ("programs", "not runnable"): (
        "rank 0, op 15 broadcast(layer 0) on world: an optimizer state stays on the rank that loaded it; "
        "load it where it is updated."
    ),
    ("programs", "can hang"): (
        "on gloo this program can hang: deadlock: rank 0 waits in send to rank 1 (its op 15); rank 1 waits in"
        " send to rank 0 (its op 15). Issue in one order on all ranks, or put messages that cross into one "
        "exchange."
    ),
    ("programs", "other forward"): (
        "rank 0, op 24 backward(layer 4): the forward pass was by other slices of the layer than weights[4] "
        "(shard 0 of 2) and its gradient; give the slices of the forward pass."
    ),
    ("programs", "written over"): (
        "rank 0, op 17 all_gather(layer 0) on world: weights[0] (shard 0 of 2) is read here, but op 15 "
        "update(layer 0) has written its new values there; read it before that, or update it itself."
    ),
    ("programs", "norm on some ranks"): (
        "rank 0, op 10 update(layer 0): is not given the gradient's norm, but rank 1's updates are; replicas "
        "would drift apart and layers learn at different rates. Give the norm to all updates."
    ),
    ("programs", "norm for some"): (
        "rank 0, op 16 update(layer 0): some updates of this rank are given the gradient's norm and some are "
        "not; give it to all."
    ),
    ("programs", "frozen and not kept"): (
        "rank 0, op 0 load_weight(layer 0): the step ends without weights[0]; no rank loads an optimizer "
        "state of layer 0, so it is frozen. Keep the weight that is loaded in a store."
    ),
    ("programs", "batch of messages, with a collective"): (
        "rank 0, op 1 batch_p2p: barrier on world is in a batch of messages, which are issued at the end of its block; "
        "put it before or after the block."
    ),
    ("programs", "batch of messages, with an exchange"): (
        "rank 0, op 1 exchange: a batch of messages is open; send and receive in it, or end its block first."
    ),
    ("programs", "other message, from a root"): (
        "rank 1, op 0 broadcast with root 0: expected weights[1], but rank 0 gave weights[0]; make both mean the same."
    ),
    ("programs", "unknown slice, of the experts"): (
        "rank 0, op 6 forward(layer 0): part 2 of 2 was asked for; count parts from 0, below their number."
    ),
    ("programs", "wrong number, of outputs"): (
        "rank 0, op 22 forward(layer 1): this layer makes 2 values; give its inputs as a tuple."
    ),
    ("programs", "wrong number, of gradients"): (
        "rank 0, op 21 backward(layer 5): this layer read 2 values; give the gradients as a tuple."
    ),
    ("programs", "no forward, saved"): (
        "rank 0, op 21 backward(layer 5): no forward has come before it for activations[5] (microbatch 0), and a "
        "layer of several values is not recomputed; call forward before it, with save=True."
    ),
    ("puzzles", "made up"): (
        "rank 0, op 0 fake_grad(layer 0): grad_weights[0] (microbatch 0) was made up; let a solution compute "
        "its gradients."
    ),
    ("puzzles", "frozen"): (
        "no rank loads an optimizer state of layer 0, so it is frozen; all layers are trained, load it."
    ),
    ("puzzles", "partial"): (
        "rank 0, op 0 shard(grad_weights[0]): grad_weights[0] (microbatch 0, shard 0 of 2) is partial; cut a "
        "complete value."
    ),
    ("puzzles", "no value"): (
        "rank 0, op 0 combine(weights[0]): the other value given is 'cheese'; give a value of the puzzles."
    ),
    ("puzzles", "other values"): (
        "rank 0, op 0 combine(weights[0]): the first value gave weights[0] (shard 0 of 2) and the second "
        "value weights[1] (shard 1 of 2); put pieces of one value together."
    ),
    ("puzzles", "unknown slice"): (
        "rank 0, op 0 Weight of layer 0: shards [4] of 4 were given; give at least one shard, counted from 0."
    ),
    ("puzzles", "unknown slice, no number"): (
        "rank 0, op 0 Weight of layer 0: shards are 4; give a collection of numbers, which count from 0."
    ),
    ("puzzles", "wrong number"): "Model.check: no models were given; give those of all ranks.",
    ("puzzles", "not kept"): "Model.check: no rank has set the final weight of layer 0; call set_final_weight.",
    ("puzzles", "not awaited"): (
        "rank 0, op 0: receive() was called without `await`, so it has not run; write `await model.receive()`."
    ),
    ("puzzles", "unknown layer"): (
        "rank 0, op 0 forward(layer 3): layer 3 does not exist; the model has layers 0-0, name one of these."
    ),
}
"""Of a call, by its table and its name there, the whole sentence without the line of the user's file."""


@pytest.mark.parametrize("case", SENTENCES, ids=": ".join)
def test_what_is_refused_is_said_in_a_sentence(case: tuple[str, str]) -> None:
    table, name = case
    assert sentence_of(CALLS[table][name]) == SENTENCES[case]


def test_every_rule_is_broken_in_a_table_and_says_what_to_do() -> None:
    calls = [
        of[table][name]
        for of, pinned in ((CALLS, SENTENCES), (of_rules.CALLS, of_rules.SENTENCES))
        for table, name in pinned
    ]
    refused = [refusal_of(call) for call in (*calls, *TAPES.values())]
    assert {refusal.rule for refusal in refused} == set(get_args(Rule))
    assert all(refusal.remedy for refusal in refused)
