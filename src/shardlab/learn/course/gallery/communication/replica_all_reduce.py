"""Bug 120: replicas reduce after every microbatch.

Hybrid sharding reduces gradients within a group of ranks, and then between the groups,
which is the slow part: groups are different hosts. With gradient accumulation,
torchtitan did both at every microbatch. The result is right, and the slow reduction
runs as many times as there are microbatches, where once is enough.

    seen:    reduce-scatter, all-reduce    reduce-scatter, all-reduce   ...
    wanted:  reduce-scatter, add           reduce-scatter, add, all-reduce

The program has two groups of two ranks, and two microbatches on each rank. Find the bug
and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def replica_all_reduce(rank: Rank) -> None:
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
            # START
            # part = await rank.all_reduce(part, axis="dp_replicate")
            # END SOLUTION
            sums[l] = sums[l] + part if l in sums else part

    for l in rank.layers:
        # BEGIN SOLUTION
        total = await rank.all_reduce(sums[l], axis="dp_replicate")
        # START
        # total = sums[l]
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=120,
    name="replica_all_reduce",
    title="Replicas reduce after every microbatch",
    goals=Goals("pytorch/torchtitan#1929", sent=1_835_008),
    mesh=Mesh(dp_replicate=2, dp_shard=2),
    layers=2,
    microbatches=8,
    seen_in="pytorch/torchtitan#1929",
    mistakes=(
        Mistake(
            "the replicas reduce at every microbatch",
            (
                (
                    "            sums[l] = sums[l] + part if l in sums else part\n"
                    "\n"
                    "    for l in rank.layers:\n"
                    '        total = await rank.all_reduce(sums[l], axis="dp_replicate")\n'
                ),
                (
                    '            part = await rank.all_reduce(part, axis="dp_replicate")\n'
                    "            sums[l] = sums[l] + part if l in sums else part\n"
                    "\n"
                    "    for l in rank.layers:\n"
                    "        total = sums[l]\n"
                ),
            ),
            r"sent",
            "how many reductions between the replicas does a step need for each layer?",
        ),
    ),
    hints=(
        "The program is right. What does it send more often than it has to?",
        "Sums can be added before they are reduced over the replicas.",
        "Add up the parts of all microbatches, and all-reduce each sum once, at the end.",
    ),
)
