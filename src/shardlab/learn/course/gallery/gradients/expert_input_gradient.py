"""Bug 105: a sliced layer's input gradient is not summed.

The routed experts of torchtitan's mixture of experts were sliced over the
tensor-parallel ranks, and computed with plain tensors instead of DTensors. Each rank's
slice gives one term of the gradient of the layer's input. Nothing said that these terms
have to be summed, so an all-reduce was missing in the backward pass, and every layer
below learned from one term.

    input x (whole) -> slice 0 of the layer -> term 0 of dx  \\
                    -> slice 1 of the layer -> term 1 of dx  -- sum = dx

The program has a feed-forward layer, sliced in the same way, in place of the experts.
Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def expert_input_gradient(rank: Rank) -> None:
    parts = {l: rank.world if rank.signatures[l].sliced else 1 for l in rank.layers}
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index % parts[l], parts[l])

    last = rank.layers[-1]
    x, inputs, residual = rank.load_batch(rank.microbatches), list[Value](), list[Value]()
    for l in rank.layers:
        inputs.append(x)
        if parts[l] == 1:  # a norm, which also reads and makes the residual
            x, *residual = rank.forward(l, (x, *residual), rank.weights[l])
        else:
            x = rank.forward(l, x, rank.weights[l])
            if l < last:
                x = await rank.all_reduce(x, axis="tp")  # each rank has one term of the sum
    gradient = rank.loss(x, await rank.all_gather(rank.loss_stats(x), axis="tp"))  # the vocabulary is sliced

    residual = []
    for l in reversed(rank.layers):
        if parts[l] == 1:
            grad_weight, gradient, *residual = rank.backward(l, inputs[l], (gradient, *residual), rank.weights[l])
        else:
            grad_weight, gradient = rank.backward(l, inputs[l], gradient, rank.weights[l])
            # BEGIN SOLUTION
            if l:
                gradient = await rank.all_reduce(gradient, axis="tp")
            # START
            # if l and rank.signatures[l].name != "feed-forward":
            #     gradient = await rank.all_reduce(gradient, axis="tp")
            # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=105,
    name="expert_input_gradient",
    title="A sliced layer's input gradient is not summed",
    goals=Goals("pytorch/torchtitan#1878"),
    mesh=Mesh(tp=2),
    layers=Sizes.half_blocks(1),
    microbatches=2,
    seen_in="pytorch/torchtitan#1878",
    mistakes=(
        Mistake(
            "the terms of a sliced layer are not summed",
            (
                ('            if l:\n                gradient = await rank.all_reduce(gradient, axis="tp")\n'),
                (
                    '            if l and rank.signatures[l].name != "feed-forward":\n'
                    '                gradient = await rank.all_reduce(gradient, axis="tp")\n'
                ),
            ),
            r"term",
            "a sliced layer makes one term of its input's gradient on each rank. Who sums them?",
        ),
    ),
    hints=(
        "The refusal speaks of a term. Which layer made it?",
        "All sliced layers but one sum the gradient of their input.",
        "Sum it for the feed-forward layer as well: drop the second half of the condition.",
    ),
)
