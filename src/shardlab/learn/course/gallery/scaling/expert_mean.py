"""Bug 109: expert gradients are averaged over too few ranks.

Each rank's loss is a mean over its own tokens, so the sum of all ranks' gradients has
to be divided by the number of ranks. Megatron-FSDP v2 did this by averaging over the
group in which a weight is replicated. An expert receives the tokens of all ranks of its
expert-parallel group, so its gradient sums over these ranks before any collective, but
its group for the average does not contain them. Expert gradients came out as many times
too large as there are ranks in the expert-parallel group.

    dense layer:  mean over 2 ranks              of 2 ranks' gradients
    expert:       mean over 1 rank (its group)   of 2 ranks' gradients  -> 2 times

The program has one layer of experts, on two ranks. Find the bug and mend it.
"""

from fractions import Fraction

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def expert_mean(rank: Rank) -> None:
    parts = {l: rank.world if rank.signatures[l].sliced else 1 for l in rank.layers}
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index % parts[l], parts[l])

    x, inputs, residual = rank.load_batch(rank.share()), list[Value](), list[Value]()
    for l in rank.layers:
        if parts[l] > 1:  # experts: tokens go to the ranks that have theirs, and come back
            inputs.append(await rank.all_to_all(x))
            x = await rank.all_to_all(rank.forward(l, inputs[l], rank.weights[l]))
        else:
            inputs.append(x)
            x, *residual = rank.forward(l, (x, *residual), rank.weights[l])
    gradient = rank.loss(x)

    residual = []
    for l in reversed(rank.layers):
        if parts[l] > 1:
            gradient = await rank.all_to_all(gradient)
            grad_weight, gradient = rank.backward(l, inputs[l], gradient, rank.weights[l])
            gradient = await rank.all_to_all(gradient)
        else:
            grad_weight, gradient, *residual = rank.backward(l, inputs[l], (gradient, *residual), rank.weights[l])

        grad_weight = rank.scale(grad_weight, rank.world)  # of a mean over this rank's own tokens
        # BEGIN SOLUTION
        if parts[l] == 1:
            grad_weight = await rank.all_reduce(grad_weight, reduction="mean")
        else:
            grad_weight = rank.scale(grad_weight, Fraction(1, rank.world))
        # START
        # if parts[l] == 1:
        #     grad_weight = await rank.all_reduce(grad_weight, reduction="mean")
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=109,
    name="expert_mean",
    title="Expert gradients are averaged over too few ranks",
    goals=Goals("NVIDIA/Megatron-LM#5956"),
    mesh=Mesh(ep=2),
    layers=Sizes.mixture(1),
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#5956",
    mistakes=(
        Mistake(
            "experts are not divided by the ranks whose tokens they get",
            (
                (
                    "        if parts[l] == 1:\n"
                    '            grad_weight = await rank.all_reduce(grad_weight, reduction="mean")\n'
                    "        else:\n"
                    "            grad_weight = rank.scale(grad_weight, Fraction(1, rank.world))\n"
                ),
                (
                    "        if parts[l] == 1:\n"
                    '            grad_weight = await rank.all_reduce(grad_weight, reduction="mean")\n'
                ),
            ),
            r"times 2",
            "whose tokens are in an expert's gradient, and what is it divided by?",
        ),
    ),
    hints=(
        "The refusal says by which factor the gradient is too large. Which layer is it?",
        "An expert has the tokens of all ranks in its gradient, and no collective divides by their number.",
        "Scale the gradient of an expert by `Fraction(1, rank.world)`.",
    ),
)
