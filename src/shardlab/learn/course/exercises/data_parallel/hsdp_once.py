"""Exercise 12: HSDP that reduces once over its replicas.

   mesh: 2 replicas x 2 shards         fast links within a replica, slow ones between

                 dp_shard ->           for each microbatch          once for the step
                 shard 0   shard 1
   replica 0     rank 0 == rank 1      gather W, F, gather W, B,    all-reduce the
   dp_replicate     |        |         reduce-scatter dW            shards of dW
   replica 1     rank 2 == rank 3      along dp_shard (==)          along dp_replicate

FSDP over all devices of a cluster gathers every layer over the slowest link. Hybrid
sharding (HSDP) cuts the model over the ranks of one node, along the mesh axis
`dp_shard`, and keeps a replica of it on each node. Only gradients cross the nodes, as
in DDP.

With gradient accumulation, they need not cross for every microbatch. A sum can be
computed in any order: add up the shards of the microbatches on each rank, then reduce
over the replicas once. torch's FSDP2 reduces in every microbatch unless it is told
otherwise, by `set_requires_all_reduce(False)` (pytorch#126166). Levanter (issue 325)
also shards the optimizer state over both axes.

New here:

    axis="dp_shard"                  the ranks that a collective joins, along this axis
    rank.coordinate("dp_shard")      position of this rank along the axis: 0 or 1
    rank.mesh.dp_shard               number of ranks along it: 2

`rank.share()` gives each of the four ranks two microbatches.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import REDUCTIONS, at_most_of, loads_at_most


async def hsdp_once(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(
            l, shard=rank.coordinate("dp_shard"), of=rank.mesh.dp_shard
        )

    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            full = await rank.all_gather(rank.weights[l], axis="dp_shard")
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            full = await rank.all_gather(rank.weights[l], axis="dp_shard")
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
            )
            # BEGIN SOLUTION
            rank.accumulate(await rank.reduce_scatter(grad_weight, axis="dp_shard"))
            # START
            # shard = await rank.reduce_scatter(grad_weight, axis="dp_shard")
            # rank.accumulate(await rank.all_reduce(shard, axis="dp_replicate"))  # in every microbatch
            # END SOLUTION
        del rank.grad_activations[0]

    for l in rank.layers:
        # BEGIN SOLUTION
        gradient = await rank.all_reduce(rank.grad_weights.pop(l), axis="dp_replicate")
        # START
        # gradient = rank.grad_weights.pop(l)
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=12,
    name="hsdp_once",
    title="HSDP that reduces once over its replicas",
    goals=Goals("the reference solution", time=30.08, memory=2_490_368, sent=3_670_016),
    mesh=Mesh(dp_replicate=2, dp_shard=2),
    microbatches=8,
    techniques=(
        loads_at_most(Kind.WEIGHT, Fraction(1, 2), "a rank keeps {found} of a layer's weight, not 1/2."),
        at_most_of(
            REDUCTIONS,
            1,
            "a layer's gradient is reduced {found} times over the replicas; once for the step is enough.",
            of=Kind.GRAD_WEIGHT,
            axis="dp_replicate",
        ),
        at_most_of(
            REDUCTIONS,
            0,
            "a layer's gradient is reduced over all ranks at once; use the two axes.",
            of=Kind.GRAD_WEIGHT,
            axis="world",
        ),
    ),
    mistakes=(
        Mistake(
            "every microbatch is reduced over the replicas",
            (
                '            rank.accumulate(await rank.reduce_scatter(grad_weight, axis="dp_shard"))\n',
                '            shard = await rank.reduce_scatter(grad_weight, axis="dp_shard")\n'
                '            rank.accumulate(await rank.all_reduce(shard, axis="dp_replicate"))\n',
            ),
            r"all_reduce.*microbatches 0-7 would be counted twice|over the replicas",
            "is a sum reduced over the replicas more than once, or do both replicas compute the same microbatches? "
            "Each rank adds up its own microbatches, and the slow link carries the sum once.",
        ),
        Mistake(
            "the replicas are not reduced",
            ('await rank.all_reduce(rank.grad_weights.pop(l), axis="dp_replicate")', "rank.grad_weights.pop(l)"),
            r"update.*: microbatches [04]-[37] are missing",
            "each replica has the gradients of its own microbatches. Which axis joins the replicas?",
        ),
        Mistake(
            "the microbatches of a rank are not added up",
            ("            rank.accumulate(await", "            rank.grad_weights[l] = (await"),
            r"update.*: microbatches .* missing",
            "of the two microbatches of a rank, one is missing. Which line adds them up, and has every rank added both "
            "before the sum is reduced or used?",
        ),
        Mistake(
            "gradients are reduced over all ranks",
            (
                'await rank.all_reduce(rank.grad_weights.pop(l), axis="dp_replicate")',
                "await rank.all_reduce(rank.grad_weights.pop(l))",
            ),
            "all_reduce.*sum equal slices",
            "which ranks does this collective join? Without an axis, all. Only ranks with the same shard can sum it.",
        ),
        Mistake(
            "whole gradients are accumulated",
            (
                'rank.accumulate(await rank.reduce_scatter(grad_weight, axis="dp_shard"))\n        del '
                "rank.grad_activations[0]\n\n    for l in rank.layers:\n        gradient = await "
                'rank.all_reduce(rank.grad_weights.pop(l), axis="dp_replicate")\n',
                "rank.accumulate(grad_weight)\n        del rank.grad_activations[0]\n\n    for l in rank.layers:\n"
                '        shard = await rank.reduce_scatter(rank.grad_weights.pop(l), axis="dp_shard")\n'
                '        gradient = await rank.all_reduce(shard, axis="dp_replicate")\n',
            ),
            "too much memory.*gradients",
            "the sum over microbatches is whole on both ranks of a replica. Each of them updates half of it.",
        ),
        Mistake(
            "shards are counted over all ranks",
            (
                'l, shard=rank.coordinate("dp_shard"), of=rank.mesh.dp_shard',
                "l, shard=rank.index, of=rank.world",
            ),
            r"forward.*weights\[0\] \(shard 0 of 2\)",
            "a replica is a whole model on two ranks. Over how many ranks is each layer cut?",
        ),
    ),
    hints=(
        "Count the all-reduces along `dp_replicate` of one layer. How many does the sum over the replicas need?",
        "Accumulate the shards that the reduce-scatter along `dp_shard` gives, and all-reduce the sums along "
        "`dp_replicate` after the last microbatch.",
        '`rank.accumulate(await rank.reduce_scatter(grad_weight, axis="dp_shard"))` in the loop, and before the update '
        '`gradient = await rank.all_reduce(rank.grad_weights.pop(l), axis="dp_replicate")`.',
    ),
)
