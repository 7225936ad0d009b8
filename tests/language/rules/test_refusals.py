"""Each sentence of the rules, once; all other tests ask for a refusal's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.language import test_collective_calls
from tests.language.rules import test_collectives, test_layer_graph, test_layer_rules, test_optimizer_step
from tests.support.refused_tapes import RULES
from tests.support.refusing import ExpectedRefusal, refusal_of, sentence_of

Table = Mapping[str, tuple[Callable[[], object], ExpectedRefusal]]

TABLES: dict[str, Table] = {
    "update": test_optimizer_step.REFUSALS,
    "collectives": test_collectives.REFUSALS,
    "layers": test_layer_rules.REFUSALS,
    "half blocks": test_layer_graph.REFUSED,
    "collectives by call": test_collective_calls.REFUSALS,
}
CALLS = {name: {case: call for case, (call, _) in table.items()} for name, table in TABLES.items()}
CALLS["rules"] = RULES

SENTENCES = {
    ("update", "loss, kind"): (
        "loss: the activation given is grad_activations[2] (microbatches 0-1); give a value of activations."
    ),
    ("update", "loss, layer"): (
        "loss: the activation given is activations[1] (microbatches 0-1); the loss reads the last one, "
        "activations[2], give that."
    ),
    ("update", "add, kind"): (
        "add(grad_weights[1]): the first value gave grad_weights[1] (microbatches 0-3) and the second value "
        "weights[1]; sum gradients of one layer."
    ),
    ("update", "add, weights"): (
        "add(weights[1]): the first value gave weights[1]; only gradients of weights are summed, and "
        "partial results of sliced layers; give one of these."
    ),
    ("update", "add, slices"): (
        "add(grad_weights[1]): the first value gave slice 0 of 2 and the second value gave slice 1 of 2; sum equal "
        "slices, or join different ones by rank.concatenate."
    ),
    ("update", "add, twice"): (
        "add(grad_weights[1]): microbatch 1 would be counted twice (in the first value and in the second"
        " value); let each microbatch reach a gradient once."
    ),
    ("update", "update, layer"): (
        "update(layer 1): opt_states[0] was given; update layer 1 from its own gradient, weight and state."
    ),
    ("update", "update, twice"): (
        "update(layer 1): the weight is of step 1, the optimizer state of step 1 and the gradient of step 0; "
        "all three must be of one step. Update each slice exactly once a step."
    ),
    ("update", "update, microbatches"): (
        "update(layer 1): microbatches 1, 3 are missing from grad_weights[1] (microbatches 0, 2); an update "
        "wants every microbatch exactly once. Add or reduce the missing gradients first."
    ),
    ("update", "update, gradient's slices"): (
        "update(layer 1): the gradient holds slice 0 of 2, but the optimizer state holds all of the layer; give a "
        "gradient that contains every slice that is updated."
    ),
    ("update", "update, part of the norm"): (
        "update(layer 1): the norm given lacks parts 0, 3 of 4 of the model's parameters; add and all_reduce "
        "the squares of every slice of every layer, each once."
    ),
    ("update", "update, norm's step"): (
        "update(layer 1): the norm given is of step 1, the gradient of step 0; give both of one step."
    ),
    ("update", "update, the largest of norms"): (
        "update(layer 1): the norm given is scalars (the max of several ranks'); give the sum of all squares,"
        " which alone is the gradient's norm."
    ),
    ("update", "update, a part of a matrix"): (
        "update(layer 1): the optimizer state holds slice 0 of 2, but Muon steps whole matrices; all_gather "
        "rank.direction(layer, gradient, opt_state) over the ranks that have the other slices, and give it as "
        "direction; or take a plan, such as zero-3, which does so."
    ),
    ("update", "update, a direction of a part"): (
        "update(layer 1): the direction holds slices 0-1 of 4, but Muon steps whole matrices; all_gather "
        "rank.direction(layer, gradient, opt_state) over the ranks that have the other slices, and give it as "
        "direction; or take a plan, such as zero-3, which does so."
    ),
    ("update", "update, an old direction"): (
        "update(layer 1): directions[1] (step 1) was given, with grad_weights[1] (microbatches 0-3); give the "
        "direction of this layer and step."
    ),
    ("update", "direction, elements"): (
        "direction(layer 1): the optimizer steps each element of this layer by itself; leave it out, and update with "
        "the gradient alone."
    ),
    ("update", "direction, stale state"): (
        "direction(layer 1): the optimizer state is of step 1 and the gradient of step 0; both must be of one step. "
        "Update each slice exactly once a step."
    ),
    ("update", "norm, layer"): (
        "norm(layer 0): grad_weights[1] (microbatches 0-3) was given; give a gradient of layer 0."
    ),
    ("update", "norm, microbatches"): (
        "norm(layer 1): microbatches 1, 3 are missing from grad_weights[1] (microbatches 0, 2); squares do "
        "not add up over microbatches. Add or reduce the missing gradients first."
    ),
    ("update", "add, a scalar and a gradient"): (
        "add(scalars): the first value gave scalars (parts 0 of 4 of the model) and the second value "
        "grad_weights[1] (microbatches 0-3); sum scalars of one step."
    ),
    ("update", "add, a replica's squares"): (
        "add(scalars): part 1 of 4 of the model would come from the second value and from an earlier one as well;"
        " each parameter's square counts once. Count replicas on one rank only."
    ),
    ("update", "add, the mean of norms"): (
        "add(scalars): the second value gave scalars (parts 1 of 4 of the model, the mean of several ranks'),"
        " and only sums of squares add up to a norm; give the sum of squares of the gradients."
    ),
    ("collectives", "all_gather, scalars"): "all_gather(scalars): a scalar has no slices; all_reduce it.",
    ("collectives", "reduce_scatter, scalars"): "reduce_scatter(scalars): a scalar has no slices; all_reduce it.",
    ("collectives", "all_gather, slices overlap"): (
        "all_gather(weights[1]): slice 1 of 2 would come from rank 1 and from an earlier rank as well; gather "
        "pieces that do not overlap."
    ),
    ("collectives", "all_gather, whole already"): (
        "all_gather(weights[1]): weights[1] is whole on these ranks already, so all of it would come from rank 1 "
        "and from an earlier rank as well; use it without this gather, or gather the shard: keep it under a key of "
        "its own."
    ),
    ("collectives", "all_gather, rows overlap"): (
        "all_gather(activations[1]): microbatches 0-1 would come from rank 1 and from an earlier rank as "
        "well; gather pieces that do not overlap."
    ),
    ("collectives", "all_gather, steps"): (
        "all_gather(weights[1]): rank 0 gave weights[1] (shard 0 of 2) and rank 1 weights[1] (shard 1 of 2, "
        "step 1); gather pieces of one value."
    ),
    ("collectives", "all_gather, sums"): (
        "all_gather(grad_weights[1]): rank 0 gave grad_weights[1] (microbatch 0, shard 0 of 2) and rank 1 "
        "grad_weights[1] (microbatch 1, shard 1 of 2); the pieces sum different microbatches, so together "
        "they are the gradient of neither. Reduce before gathering."
    ),
    ("layers", "forward, layer"): (
        "forward(layer 1): the activation given is activations[2] (microbatches 0-1); layer 1 reads "
        "activations[1], give that."
    ),
    ("layers", "forward, weight's layer"): (
        "forward(layer 1): the weight given is weights[0]; layer 1 computes with weights[1], give that."
    ),
    ("layers", "forward, partial weight"): (
        "forward(layer 1): the weight given is partial, weights[1] (shard 0, 2 of 4); slices 1, 3 of 4 are "
        "missing. Gather the whole layer first (all_gather)."
    ),
    ("layers", "forward, updated weight"): (
        "forward(layer 1): the weight given is weights[1] (step 1), of optimizer step 1, but the batch "
        "belongs to step 0; it was already updated. Compute with the weight from before its update."
    ),
    ("layers", "forward, too many values"): (
        "forward(layer 1): 2 values were given; this whole layer reads activations[1] alone, give that."
    ),
    ("layers", "backward, gradient's step"): (
        "backward(layer 1): grad_activations[2] (microbatches 0-1, step 1) was given with values of step 0; "
        "give all of one step."
    ),
    ("layers", "backward, microbatches"): (
        "backward(layer 1): the activation is of microbatch 0 and the gradient of microbatches 1-2; give both"
        " of the same tokens and step."
    ),
    ("half blocks", "forward, terms"): (
        "forward(layer 2): the activation given is activations[2] (microbatch 0, the term of head slice 0 of "
        "2); head slice 1 is missing. Put all together first: reduce the terms over the ranks that have them "
        "(all_reduce, or reduce_scatter along the sequence)."
    ),
    ("half blocks", "forward, slices"): (
        "forward(layer 2): the activation given is activations[2] (microbatch 0, head slice 0 of 2); head "
        "slice 1 is missing. Give it to the layer that takes it with the same head slice of the weight: heads stay "
        "where they are, since attention and the layer after it take their own."
    ),
    ("half blocks", "forward, sequence"): (
        "forward(layer 2): activations[2] (sequence slice 1 of microbatch 0) was given; this layer wants "
        "whole sequences. Gather their slices first."
    ),
    ("half blocks", "forward, weight cut finer"): (
        "forward(layer 2): the weight given is weights[2] (shard 0 of 4), which is not made of whole slices "
        "of 2; gather a slice first."
    ),
    ("half blocks", "backward, gradient's slices"): (
        "backward(layer 2): the gradient given is grad_activations[3] (microbatch 0, head slice 0 of 2); head"
        " slice 1 is missing. Give it to the layer that takes it with the same head slice of the weight: heads stay "
        "where they are, since attention and the layer after it take their own."
    ),
    ("half blocks", "backward, head's gradient of another slice"): (
        "backward(layer 6): the gradient given is grad_activations[7] (microbatch 0, vocabulary slice 1 of 2); give "
        "vocabulary slice 0 of 2 alone, as the weight has."
    ),
    ("half blocks", "loss_stats, all logits"): (
        "loss_stats: activations[7] (microbatch 0) was given; give slices of the logits, activations[7]."
    ),
    ("half blocks", "loss, a term"): (
        "loss: the activation given is activations[7] (microbatch 0, the term of vocabulary slice 0 of 2); "
        "reduce its terms first, over the ranks that have them."
    ),
    ("half blocks", "loss, no stats"): (
        "loss: activations[7] (microbatch 0, vocabulary slice 0 of 2) was given without stats; give slices of"
        " the logits with the gathered loss_stats of all slices, and no others."
    ),
    ("half blocks", "loss, no stats at all"): (
        "loss: the stats given are activations[7] (microbatch 0); all_gather the loss_stats of all slices first."
    ),
    ("half blocks", "loss, other tokens"): (
        "loss: the stats are stats[7] (microbatches 0-1) and the logits activations[7] (microbatch 0, "
        "vocabulary slice 0 of 2); give both of the same tokens."
    ),
    ("half blocks", "reduce, logits"): (
        "all_reduce(activations[7]): rank 0 gave activations[7] (microbatch 0, vocabulary slice 0 of 2), "
        "vocabulary slices of the whole and no term of a sum; all_gather the slices, which lie side by side, "
        "or leave them where they are if the next layer takes vocabulary slices."
    ),
    ("half blocks", "reduce, other tokens"): (
        "all_reduce(activations[3]): rank 0 gave activations[3] (microbatch 0, the term of head slice 0 of 2)"
        " and rank 1 activations[3] (microbatches 0-1, the term of head slice 1 of 2); put terms of one value"
        " together, for the same tokens."
    ),
    ("half blocks", "reduce, complete"): (
        "all_reduce(activations[3]): rank 0 gave activations[3] (microbatch 0), which is complete; summing it"
        " again would count it twice. Use it as it is."
    ),
    ("half blocks", "reduce, twice"): (
        "reduce_scatter(activations[3]): the term of head slice 0 of 2 would be counted twice (rank 1 and an "
        "earlier one both have it); sum each term once."
    ),
    ("half blocks", "scatter, sequences that do not divide"): (
        "reduce_scatter(activations[3]): activations[3] (sequence slice 0 of microbatch 0) has sequences of 2"
        " slices, which do not divide among 2 ranks; scatter over an axis whose ranks divide them."
    ),
    ("half blocks", "gather, terms"): (
        "all_gather(activations[3]): rank 0 gave activations[3] (sequence slice 0 of microbatch 0, the term "
        "of head slice 0 of 2), which is one term of a sum and no piece of the whole; reduce before gathering"
        " (all_reduce, or reduce_scatter along the sequence)."
    ),
    ("half blocks", "gather, one slice's stats twice"): (
        "all_gather(stats[7]): vocabulary slice 0 would be counted twice (rank 1 and an earlier rank both "
        "have it); give each vocabulary slice once."
    ),
    ("collectives by call", "the mean of gradients, updated with"): (
        "update(layer 1): the gradient given is grad_weights[1] (microbatches 0-5, times 1/3), 1/3 of the "
        "step's; losses are weighted by tokens, so the plain sum over microbatches and ranks is the mean already. "
        "Reduce by sum, not by mean, and do not divide by a number of ranks or microbatches."
    ),
    ("collectives by call", "the least gradient"): (
        "reduce(grad_weights[1]) by min: rank 4 gave grad_weights[1] (microbatch 0) and rank 6 "
        'grad_weights[1] (microbatch 2); the min of different gradients is no gradient. Take reduction="sum".'
    ),
    ("collectives by call", "the mean of other weights"): (
        "all_reduce(weights[1]) by mean: rank 4 gave weights[1] and rank 6 weights[1] (step 1); the mean of "
        "different weights is no weight. Give the same on all ranks."
    ),
    ("collectives by call", "the mean of activations"): (
        "all_reduce(activations[0]) by mean: activations[0] (microbatch 0) was given; reduce weights, their "
        "gradients and scalars by anything."
    ),
    ("collectives by call", "the mean of means"): (
        "all_reduce(scalars) by mean: rank 4 gave scalars (parts 0 of 4 of the model, the mean of several "
        "ranks') and rank 5 scalars (parts 1 of 4 of the model, the mean of several ranks'); take the mean of "
        "sums of squares of one step."
    ),
    ("collectives by call", "a scalar scattered"): (
        "scatter(scalars): scalars (parts 0 of 4 of the model) was given; scatter weights, optimizer states, "
        "activations and their gradients."
    ),
    ("collectives by call", "four microbatches among three"): (
        "scatter(activations[0]): activations[0] (microbatches 0-3) has 4 microbatches, no multiple of 3; give each "
        "rank the same number of whole microbatches."
    ),
    ("collectives by call", "a root outside"): (
        "reduce: the root is rank 3, but the group has the ranks 4, 5, 6; name one of them."
    ),
    ("collectives by call", "a root too many"): "barrier: names root 4, but it has none; name no root.",
    ("collectives by call", "a gather by max"): (
        "gather: is by max; take reduce or all_reduce for anything but a sum."
    ),
    ("rules", "masked keys"): (
        "attend(layer 1): all of keys_values[1] (sequence slice 1 of microbatch 0) comes after queries[1] "
        "(sequence slice 0 of microbatch 0), which do not see it; leave this op out."
    ),
    ("rules", "merged terms"): (
        "all_reduce(activations[2]): activations[2] (sequence slice 1 of microbatch 0, keys and values 0 of 2 "
        "alone) is no term of a sum, since each rank has its own queries; add these parts on the rank that has the "
        "queries."
    ),
    ("rules", "not exchanged"): (
        "all_to_all(activations[0]): activations[0] (microbatch 0) was given; exchange what may be cut along "
        "another index than the batch, as experts' buffers are: what goes into experts or comes out of them."
    ),
    ("rules", "not gathered"): (
        "all_gather(activations[1]): activations[1] (microbatch 0, head slice 0 of 2) was given, which cannot be "
        "gathered; heads stay where they are, since attention and the layer after it take"
        " their own."
    ),
    ("rules", "other indices"): (
        "all_gather(activations[1]): rank 0 gave activations[1] (microbatch 0, feed-forward slice 0 of 2, head "
        "slice 0 of 2) and rank 1 activations[1] (microbatch 0, feed-forward slice 1 of 2, head slice 1 of 2), "
        "which differ in more than one index; put together along one index, then along the other."
    ),
    ("rules", "other factors"): (
        "add(grad_weights[1]): the first value gave grad_weights[1] (sequence slice 0 of microbatch 0) and the "
        "second value grad_weights[1] (sequence slice 1 of microbatch 0, times 2); scale them by the same factor "
        "first, since values with different factors cannot be combined."
    ),
    ("rules", "frozen in the norm"): (
        "update(layer 1): the norm given has parts 1 of 2 of the model's parameters, which are frozen, since no "
        "rank loads their optimizer state; leave frozen layers out of the norm."
    ),
    ("rules", "missing terms, of keys"): (
        "attend_backward(layer 1): the activation given is activations[2] (sequence slice 1 of microbatch 0, keys"
        " and values 0 of 2 alone); the keys and values of slice 1 of the sequence are missing in it. Attend"
        " to these as well, and add the parts."
    ),
    ("rules", "other tokens, of keys"): (
        "attend(layer 1): queries[1] (microbatch 0) cannot meet keys_values[1] (microbatch 1); give both of the "
        "same microbatches and step."
    ),
    ("rules", "other tokens, of one microbatch"): (
        "attend(layer 1): queries[1] (sequence slice 1 of microbatch 0 and sequence slice 0 of microbatch 1) was "
        "given; give the same slices of each microbatch."
    ),
    ("rules", "wrong layer, of queries"): (
        "attend(layer 2): the queries given are queries[1] (sequence slice 0 of microbatch 0); this op reads "
        "queries[2], give that."
    ),
    ("rules", "other pieces, of keys"): (
        "attend(layer 1): the keys and values given are keys_values[1] (sequence slice 0 of microbatch 0, head "
        "slice 0 of 2) and the queries queries[1] (sequence slice 0 of microbatch 0); give the same heads of "
        "queries, keys and values, of one step."
    ),
    ("rules", "unknown slice"): ("slice(weights[1]): slice 3 of 2 was asked for; of 2 slices, name one of 0-1."),
    ("rules", "unknown slice, of a layer that deals nothing"): (
        "forward(layer 5): part 0 of 2 was asked for, but this experts layer makes its output whole; ask for no part."
    ),
    ("rules", "wrong kind, sliced"): (
        "slice(scalars): scalars was given; slice weights, optimizer states, activations or gradients."
    ),
    ("rules", "wrong kind, scaled"): (
        "scale(weights[1]): weights[1] was given; scale only gradients; scaling the loss's gradient scales all of them."
    ),
    ("rules", "wrong factor"): "scale(grad_weights[1]): the factor is 0; give zero_gradient instead.",
    ("rules", "does not divide, sliced"): (
        "slice(activations[1]): activations[1] (microbatch 0) has 1 microbatch, no multiple of 2; take a number "
        "of parts that divides them."
    ),
    ("rules", "does not divide, slices of sequences"): (
        "slice(activations[1]): activations[1] (sequence slice 0 of microbatch 0) has 1 sequence slice, no "
        "multiple of 2; take a number of parts that divides them."
    ),
    ("rules", "does not divide, into parts of the experts"): (
        "forward(layer 4): part 0 of 3 was asked for, but the layer has 2 experts; ask for a number of parts that"
        " divides them."
    ),
    ("rules", "does not divide, experts"): (
        "all_to_all(activations[5]): 2 experts cannot be divided evenly among 3 ranks; use a group whose size divides "
        "their number."
    ),
    ("rules", "does not divide, one expert"): (
        "all_to_all(activations[5]): 1 expert cannot be divided evenly among 2 ranks; use a group whose size divides "
        "their number."
    ),
    ("rules", "does not divide, microbatches"): (
        "all_to_all(activations[5]): activations[5] (microbatch 0, expert 0 of 2) does not divide among 2 ranks; "
        "give each rank the same number of microbatches."
    ),
    ("rules", "other order, of experts"): (
        "all_to_all(activations[5]): the ranks have their experts in another order than the group's; let them "
        "meet in its order."
    ),
    ("rules", "other tokens, of experts"): (
        "all_to_all(activations[5]): rank 0 gave activations[5] (microbatches 0-1, expert 0 of 2) and rank 1 "
        "activations[5] (microbatches 2-3, expert 1 of 2); give the same microbatches."
    ),
    ("rules", "other tokens, more of them"): (
        "all_to_all(activations[5]): rank 0 gave activations[5] (microbatch 0) and rank 1 activations[5] "
        "(microbatches 1-2); give the same number of microbatches on all ranks."
    ),
    ("rules", "other values, exchanged"): (
        "all_to_all(activations[5]): rank 0 gave activations[5] (microbatch 0) and rank 1 activations[5] "
        "(microbatch 0, expert 0 of 2); let all members give buffers of all experts, or all of some experts, of one "
        "layer."
    ),
    ("rules", "other values, gathered"): (
        "all_gather(activations[1]): rank 0 gave activations[1] (sequence slice 0 of microbatch 0, feed-forward "
        "slice 0 of 2) and rank 1 activations[1] (sequence slice 1 of microbatch 0, feed-forward slice 1 of 2); "
        "put pieces of one value together, for the same tokens."
    ),
    ("rules", "other factors, gathered"): (
        "all_gather(grad_weights[1]): rank 0 gave grad_weights[1] (sequence slice 0 of microbatch 0) and rank 1 "
        "grad_weights[1] (sequence slice 1 of microbatch 0, times 2); scale them by the same factor first, since "
        "values with different factors cannot be combined."
    ),
    ("rules", "other factors, of one pass"): (
        "backward(layer 1): grad_activations[2] (sequence slice 0 of microbatch 0) and grad_residuals[3] "
        "(sequence slice 0 of microbatch 0, times 2) were given; scale them by the same factor first, since values "
        "with different factors cannot be combined."
    ),
    ("rules", "other sums"): (
        "add(activations[1]): the first value gave activations[1] (sequence slice 0 of microbatch 0, the term of "
        "feed-forward slice 0 of 2) and the second value activations[1] (sequence slice 0 of microbatch 0, the "
        "term of head slice 0 of 2); sum terms of one sum."
    ),
    ("rules", "other pieces, of experts"): (
        "forward(layer 5): the activation given is activations[5] (microbatch 0, expert 0 of 2) and the weight "
        "weights[5] (shard 1 of 2); experts compute only on their own buffers. Exchange the buffers "
        "by all_to_all, and give the weight of the slice that arrived."
    ),
    ("rules", "other pieces, of the routing"): (
        "backward(layer 4): the routing's gradient given is grad_routing[6] (microbatch 0, the term of expert 1 "
        "of 2); give that of 0 alone, as was dealt."
    ),
    ("rules", "missing microbatches, of cut sequences"): (
        "norm(layer 1): microbatch 1 is missing from grad_weights[1] (microbatch 0); squares do not add up over "
        "microbatches. Add or reduce the missing gradients first."
    ),
    ("rules", "other dtypes"): (
        "cast(grad_weights[1]): 'float7' was given; give one of float64, float32, bfloat16, float16, or none to "
        "cast back."
    ),
    ("rules", "other dtypes, of one sum"): (
        "add(grad_weights[1]): the first value gave grad_weights[1] (sequence slice 0 of microbatch 0) and the "
        "second value grad_weights[1] (sequence slice 1 of microbatch 0, in bfloat16); cast them to the same dtype "
        "first."
    ),
    ("rules", "other dtypes, of what is computed with"): (
        "forward(layer 0): the weight given is weights[0] (in bfloat16); cast it back first, with no dtype named."
    ),
    ("rules", "elsewhere"): "offload(weights[0]): 'attic' is no place; name one of host, disk.",
    ("rules", "elsewhere, on the disk"): (
        "offload(grad_weights[1]): grad_weights[1] (sequence slice 0 of microbatch 0) was given, and values on the "
        "disk cannot be added to; offload it to the host."
    ),
    ("rules", "elsewhere, on the device"): (
        "reload(weights[0]): weights[0] was given, which is on the device; use it as it is."
    ),
    ("rules", "elsewhere, computed with"): ("forward(layer 0): weights[0] (on the host) was given; reload it first."),
    ("rules", "elsewhere, of one sum"): (
        "add(grad_weights[1]): grad_weights[1] (sequence slice 0 of microbatch 0) and grad_weights[1] (sequence slice "
        "1 of microbatch 0, on the host) were given, which lie in different places; offload the one, or reload the "
        "other."
    ),
    ("rules", "wrong kind, offloaded"): (
        "offload(scalars): scalars was given; offload weights, their gradients, optimizer states or activations."
    ),
    ("rules", "missing terms, offloaded"): (
        "offload(activations[1]): activations[1] (sequence slice 0 of microbatch 0, the term of feed-forward slice 0 "
        "of 2) was given, which is a term of a sum; reduce the terms first, over the ranks that have them."
    ),
    ("rules", "wrong kind, cast"): (
        "cast(scalars): scalars was given, whose dtype is fixed; cast weights, activations or gradients."
    ),
    ("rules", "wrong step, cast"): (
        "cast(weights[1]): weights[1] (step 1) was given, which this step has updated; a cast would lose its "
        "last bits for ever. Leave it as it is, and cast it where it is used in the next step."
    ),
}
"""Of a call, by its table and its name there, the whole sentence without the line of the user's file."""


@pytest.mark.parametrize("case", SENTENCES, ids=": ".join)
def test_a_refusal_is_a_sentence(case: tuple[str, str]) -> None:
    table, name = case
    assert sentence_of(CALLS[table][name]) == SENTENCES[case]


@pytest.mark.parametrize("case", RULES)
def test_a_refusal_is_by_the_rule_that_its_case_is_named_for(case: str) -> None:
    assert refusal_of(RULES[case]).rule == case.split(", ")[0]
