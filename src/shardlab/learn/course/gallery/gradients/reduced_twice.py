"""Bug 106: a complete gradient is summed once more.

In torchtitan's gpt-oss, a bias that every tensor-parallel rank has was added to a
partial sum. In the backward pass, its gradient was marked as partial too, although each
rank had the complete gradient. So it was all-reduced once more, and was as many times
too large as there are ranks.

    each rank: dx (whole)  ->  all-reduce over 2 ranks  ->  2 dx

The program is a transformer block between an embedding and a head, on two ranks. Find
the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def reduced_twice(rank: Rank) -> None:
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
        if l and parts[l] > 1:
            gradient = await rank.all_reduce(gradient, axis="tp")
        # START
        # if l:
        #     gradient = await rank.all_reduce(gradient, axis="tp")
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=106,
    name="reduced_twice",
    title="A complete gradient is summed once more",
    goals=Goals("pytorch/torchtitan#2106"),
    mesh=Mesh(tp=2),
    layers=Sizes.half_blocks(1),
    microbatches=2,
    seen_in="pytorch/torchtitan#2106",
    mistakes=(
        Mistake(
            "the gradient of a norm is reduced over tp",
            (
                ('        if l and parts[l] > 1:\n            gradient = await rank.all_reduce(gradient, axis="tp")\n'),
                ('        if l:\n            gradient = await rank.all_reduce(gradient, axis="tp")\n'),
            ),
            r"all_reduce.*twice",
            "which layers leave a term on each rank, and which leave the whole gradient?",
        ),
    ),
    hints=(
        "The refusal names a value that both ranks have whole. Which layer made it?",
        "A norm is not sliced. Each rank computes all of it, for all tokens.",
        "Reduce after sliced layers only: `if l and parts[l] > 1:`.",
    ),
)
