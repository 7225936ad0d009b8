"""Bug 101: the final LayerNorm is left out of the reduction.

With tensor and sequence parallelism on, the gradients of the final LayerNorm were
different on the ranks of one tensor-parallel group when the optimizer stepped, although
all of them keep a copy of its weight. The copies then drift apart.

    rank 0: tokens of slice 0 -> norm -> its gradient sums slice 0 only
    rank 1: tokens of slice 1 -> norm -> its gradient sums slice 1 only

Sequence parallelism gives each rank of the group the same norm but other tokens. So the
gradient of a norm has to be summed over the group, as in data parallelism.

The program is a transformer block between an embedding and a head, on two ranks. Find
the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def sequence_parallel_norm(rank: Rank) -> None:
    parts = {l: rank.world if rank.signatures[l].sliced else 1 for l in rank.layers}
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index % parts[l], parts[l])

    last = rank.layers[-1]
    x, inputs, residual = rank.load_batch(rank.microbatches), list[Value](), list[Value]()
    for l in rank.layers:
        if parts[l] == 1:  # a norm, which also reads and makes the residual
            inputs.append(x)
            x, *residual = rank.forward(l, (x, *residual), rank.weights[l])
        else:
            inputs.append(await rank.all_gather(x, axis="tp") if l else x)
            x = rank.forward(l, inputs[l], rank.weights[l])
            if l < last:
                x = await rank.reduce_scatter(x, axis="tp")
    gradient = rank.loss(x, await rank.all_gather(rank.loss_stats(x), axis="tp"))  # the vocabulary is sliced

    residual = []
    for l in reversed(rank.layers):
        if parts[l] == 1:
            grad_weight, gradient, *residual = rank.backward(l, inputs[l], (gradient, *residual), rank.weights[l])
            # BEGIN SOLUTION
            grad_weight = await rank.all_reduce(grad_weight, axis="tp")
            # START
            # if l < last - 1:
            #     grad_weight = await rank.all_reduce(grad_weight, axis="tp")
            # END SOLUTION
        else:
            if l < last:
                gradient = await rank.all_gather(gradient, axis="tp")
            grad_weight, gradient = rank.backward(l, inputs[l], gradient, rank.weights[l])
            if l:
                gradient = await rank.reduce_scatter(gradient, axis="tp")
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=101,
    name="sequence_parallel_norm",
    title="The final LayerNorm is left out of the reduction",
    goals=Goals("NVIDIA/Megatron-LM#1446"),
    mesh=Mesh(tp=2),
    layers=Sizes.half_blocks(1),
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#1446",
    mistakes=(
        Mistake(
            "the final norm is not reduced",
            (
                '            grad_weight = await rank.all_reduce(grad_weight, axis="tp")\n',
                (
                    "            if l < last - 1:\n"
                    '                grad_weight = await rank.all_reduce(grad_weight, axis="tp")\n'
                ),
            ),
            r"update.*layer 5.*missing",
            "which layers see only a part of the tokens on each rank, and which of them is not summed?",
        ),
    ),
    hints=(
        "The refusal names a layer. What is that layer, and which tokens does each rank give it?",
        "Three layers are norms. The condition in the backward pass lets only two of them be summed.",
        "Sum the gradient of every norm over `tp`, without a condition.",
    ),
)
