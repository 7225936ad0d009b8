"""Bug 108: slices of different places are summed.

Megatron-FSDP v2 keeps a shared embedding on two pipeline stages, in slices. The stages
cut it differently, so two ranks that belong together held different parts of the
matrix. Their local slices were all-reduced as they were, which adds unrelated elements.

    copy A:  rank 0 [ first half ]   rank 1 [ second half ]
    copy B:  rank 2 [ second half ]  rank 3 [ first half ]      0 + 2, 1 + 3: wrong

The program has two replicas in place of the two stages. The second one keeps its slices
in the opposite order. There is memory for a whole gradient. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def shared_slices(rank: Rank) -> None:
    replica, shard = rank.coordinate("dp_replicate"), rank.coordinate("dp_shard")
    own_shard = shard if replica == 0 else 1 - shard
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, own_shard, 2)

    inputs = [rank.load_batch(rank.share())]
    for l in rank.layers:
        inputs.append(rank.forward(l, inputs[l], await rank.all_gather(rank.weights[l], axis="dp_shard")))
    gradient = rank.loss(inputs.pop())
    for l in reversed(rank.layers):
        weight = await rank.all_gather(rank.weights[l], axis="dp_shard")
        grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, weight)
        whole = await rank.all_reduce(grad_weight, axis="dp_shard")
        # BEGIN SOLUTION
        total = rank.slice(await rank.all_reduce(whole, axis="dp_replicate"), own_shard, 2)
        # START
        # total = await rank.all_reduce(rank.slice(whole, own_shard, 2), axis="dp_replicate")
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=108,
    name="shared_slices",
    title="Slices of different places are summed",
    goals=Goals("NVIDIA/Megatron-LM#6500"),
    mesh=Mesh(dp_replicate=2, dp_shard=2),
    layers=2,
    microbatches=4,
    seen_in="NVIDIA/Megatron-LM#6500",
    mistakes=(
        Mistake(
            "slices of different places are reduced",
            (
                'total = rank.slice(await rank.all_reduce(whole, axis="dp_replicate"), own_shard, 2)',
                'total = await rank.all_reduce(rank.slice(whole, own_shard, 2), axis="dp_replicate")',
            ),
            r"all_reduce",
            "which half of the gradient does each of the two members of a group give?",
        ),
    ),
    hints=(
        "Write down `own_shard` for the four ranks. Which ranks meet along `dp_replicate`?",
        "The members of a group must give the same elements. Before the cut, they do.",
        "Reduce the whole gradient over the replicas first, and cut the slice out of the sum.",
    ),
)
