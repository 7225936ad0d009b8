"""Bug 116: a rank without tokens does not join a reduction.

ZeRO stage 3 starts a reduce-scatter when a parameter's gradient is ready. In a mixture
of experts, an expert may get no token on some ranks. Its backward pass then does not
run there, and these ranks never start the reduce-scatter that the others wait for.

    rank 0: backward of the layer -> reduce-scatter ... waits for rank 1
    rank 1: no token              -> nothing

The program has two ranks and one microbatch, which rank 0 computes. Rank 1 has no
token. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def unused_expert(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)

    weights = {l: await rank.all_gather(rank.weights[l]) for l in rank.layers}
    gradients: dict[int, Value] = {}
    if rank.index == 0:
        inputs = [rank.load_batch(rank.microbatches)]
        for l in rank.layers:
            inputs.append(rank.forward(l, inputs[l], weights[l]))
        gradient = rank.loss(inputs.pop())
        for l in reversed(rank.layers):
            gradients[l], gradient = rank.backward(l, inputs.pop(), gradient, weights[l])

    for l in reversed(rank.layers):
        # BEGIN SOLUTION
        grad_weight = gradients[l] if l in gradients else rank.zero_gradient(l)
        part = await rank.reduce_scatter(grad_weight)
        # START
        # if l not in gradients:
        #     continue
        # part = await rank.reduce_scatter(gradients[l])
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, part, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=116,
    name="unused_expert",
    title="A rank without tokens does not join a reduction",
    goals=Goals("deepspeedai/DeepSpeed#5008"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=1,
    seen_in="deepspeedai/DeepSpeed#5008",
    mistakes=(
        Mistake(
            "a rank skips a collective",
            (
                (
                    "        grad_weight = gradients[l] if l in gradients else rank.zero_gradient(l)\n"
                    "        part = await rank.reduce_scatter(grad_weight)\n"
                ),
                (
                    "        if l not in gradients:\n"
                    "            continue\n"
                    "        part = await rank.reduce_scatter(gradients[l])\n"
                ),
            ),
            r"deadlock",
            "which ranks have to call this collective, and which do?",
        ),
    ),
    hints=(
        "The refusal names the rank that has ended. Which call does it skip?",
        "Every rank of a group must join its collectives, whether it has something to add or not.",
        "A rank without tokens gives zeros: `rank.zero_gradient(l)`.",
    ),
)
