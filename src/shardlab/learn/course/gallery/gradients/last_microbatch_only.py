"""Bug 103: only the last microbatch reaches the optimizer.

Hybrid sharding reduces within a group of ranks at every microbatch, and between the
groups once, after the last. In Megatron-FSDP v2 every microbatch counted as the last
one: the sum was finished each time, and the next microbatch cleared it. So the
optimizer saw the gradient of one microbatch out of many.

    reduce-scatter within a group   m0 -> sum   m1 -> sum   ...
    all-reduce between the groups                           once, of the sum

The program has two groups of two ranks, and two microbatches on each rank. Find the bug
and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def last_microbatch_only(rank: Rank) -> None:
    shards = len(rank.group("dp_shard").ranks)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.coordinate("dp_shard"), shards)

    sums: dict[int, Value] = {}
    for m in rank.share():
        inputs = [rank.load_batch([m])]
        for l in rank.layers:
            inputs.append(rank.forward(l, inputs[l], await rank.all_gather(rank.weights[l], axis="dp_shard")))
        gradient = rank.loss(inputs.pop())
        for l in reversed(rank.layers):
            weight = await rank.all_gather(rank.weights[l], axis="dp_shard")
            grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, weight)

            part = await rank.reduce_scatter(grad_weight, axis="dp_shard")
            # BEGIN SOLUTION
            sums[l] = sums[l] + part if l in sums else part
            # START
            # sums[l] = part
            # END SOLUTION

    for l in rank.layers:
        total = await rank.all_reduce(sums[l], axis="dp_replicate")
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=103,
    name="last_microbatch_only",
    title="Only the last microbatch reaches the optimizer",
    goals=Goals("NVIDIA/Megatron-LM#7186"),
    mesh=Mesh(dp_replicate=2, dp_shard=2),
    layers=2,
    microbatches=8,
    seen_in="NVIDIA/Megatron-LM#7186",
    mistakes=(
        Mistake(
            "the sum is overwritten",
            ("sums[l] = sums[l] + part if l in sums else part", "sums[l] = part"),
            r"reduce_scatter.*dropped|missing",
            "what becomes of the first microbatch's part when the second one arrives?",
        ),
    ),
    hints=(
        "Count: how many microbatches does each rank compute, and how many are in `sums` at the end?",
        "An assignment in a loop keeps the last value only.",
        "Add to the sum: `sums[l] = sums[l] + part if l in sums else part`.",
    ),
)
