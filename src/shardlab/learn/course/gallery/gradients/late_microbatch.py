"""Bug 104: the last microbatch misses the reduction.

With ZeRO stage 1 and bf16, DeepSpeed reduced the accumulated gradients at the last
microbatch, but added that microbatch's own gradient only afterwards. So each rank's
update had only its own last microbatch, and the gradients of the ranks differed.

    rank 0:  m0  m1     sum of m0       -> all-reduce -> m0 + m2   then + m1
    rank 1:  m2  m3     sum of m2       -> all-reduce -> m0 + m2   then + m3

The program has two ranks with two microbatches each. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def late_microbatch(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    sums: dict[int, Value] = {}
    for m in rank.share():
        inputs, gradients = [rank.load_batch([m])], dict[int, Value]()
        for l in rank.layers:
            inputs.append(rank.forward(l, inputs[l], rank.weights[l]))
        gradient = rank.loss(inputs.pop())
        for l in reversed(rank.layers):
            gradients[l], gradient = rank.backward(l, inputs.pop(), gradient, rank.weights[l])
        for l in rank.layers:
            # BEGIN SOLUTION
            sums[l] = sums[l] + gradients[l] if l in sums else gradients[l]
            if m == rank.share()[-1]:
                sums[l] = await rank.all_reduce(sums[l])
            # START
            # if m == rank.share()[-1]:
            #     sums[l] = await rank.all_reduce(sums[l])
            # sums[l] = sums[l] + gradients[l] if l in sums else gradients[l]
            # END SOLUTION

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(l, sums[l], rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=104,
    name="late_microbatch",
    title="The last microbatch misses the reduction",
    goals=Goals("deepspeedai/DeepSpeed#7985"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=4,
    seen_in="deepspeedai/DeepSpeed#7985",
    mistakes=(
        Mistake(
            "the reduction comes before the last addition",
            (
                (
                    "            sums[l] = sums[l] + gradients[l] if l in sums else gradients[l]\n"
                    "            if m == rank.share()[-1]:\n"
                    "                sums[l] = await rank.all_reduce(sums[l])\n"
                ),
                (
                    "            if m == rank.share()[-1]:\n"
                    "                sums[l] = await rank.all_reduce(sums[l])\n"
                    "            sums[l] = sums[l] + gradients[l] if l in sums else gradients[l]\n"
                ),
            ),
            r"update.*missing",
            "which microbatches are in the sum when it is reduced?",
        ),
    ),
    hints=(
        "The refusal says which microbatch is missing. On which rank was it computed, and when?",
        "Look at the order of two statements at the last microbatch.",
        "Add the gradient first, then reduce the sum.",
    ),
)
