"""Exercise 9: FSDP. Weights, gradients and optimizer state in shards.

             each of 4 ranks keeps           one layer, backward
   DDP       |WWWW|  |GGGG|  |OOOO|
   ZeRO-1    |WWWW|  |GGGG|  |O   |          gather W      |W   | --> |WWWW|
   ZeRO-2    |WWWW|  |G   |  |O   |          B             |GGGG|
   FSDP      |W   |  |G   |  |O   |          reduce-scatter|GGGG| --> |G   |
                                             update        |W   |, |G   |, |O   |

In exercise 8 only the gradients were still whole on every rank. Rank r updates slice r,
so it only needs slice r of the sum: reduce-scatter each layer's gradient as soon as it
is complete. This is torch's FullyShardedDataParallel, and stage 3 of ZeRO (Rajbhandari
et al. 2020, arXiv 1910.02054).

For a layer of W elements, each of n ranks sends:

    gather, forward       (n - 1)/n W
    gather, backward      (n - 1)/n W
    reduce-scatter        (n - 1)/n W

For large n that is 3 W, against 2 W for DDP's all-reduce: 1.5 times the traffic, and in
return a model n times as large fits. Beyond the shards, a rank has one whole layer, one
whole gradient and the activations in memory.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids, loads_at_most, uses


async def fsdp(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        full = await rank.all_gather(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    # BEGIN SOLUTION
    for l in reversed(rank.layers):
        full = await rank.all_gather(rank.weights[l])
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
        )
        rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )
    # START
    # # Write the backward passes and the updates, with gradients in shards.
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=9,
    name="fsdp",
    title="FSDP: everything in shards",
    goals=Goals("the reference solution", time=24.24, memory=1_966_080, sent=3_538_944),
    mesh=Mesh(dp_shard=4),
    layers=6,
    puzzle="fsdp",
    techniques=(
        loads_at_most(Kind.WEIGHT, Fraction(1, 4), "a rank keeps {found} of a layer's weight, not 1/4."),
        loads_at_most(Kind.OPT_STATE, Fraction(1, 4), "a rank keeps {found} of a layer's optimizer state, not 1/4."),
        uses(OpKind.ALL_GATHER, "no rank gathers weights.", of=Kind.WEIGHT),
        avoids(
            frozenset({OpKind.ALL_REDUCE}),
            "{found} gives every rank the whole sum; each rank updates one slice only.",
            of=Kind.GRAD_WEIGHT,
        ),
        uses(OpKind.REDUCE_SCATTER, "no rank reduce-scatters gradients.", of=Kind.GRAD_WEIGHT),
    ),
    mistakes=(
        Mistake(
            "the gradients are all-reduced",
            ("rank.reduce_scatter(grad_weight)", "rank.all_reduce(grad_weight)"),
            "gives every rank the whole sum",
            "a rank keeps the whole sum and updates a quarter of it. Which collective leaves it that quarter?",
        ),
        Mistake(
            "the gradients wait for the last backward pass",
            (
                "        rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)\n",
                "        rank.grad_weights[l] = grad_weight\n    for l in rank.layers:\n"
                "        rank.grad_weights[l] = await rank.reduce_scatter(rank.grad_weights.pop(l))\n",
            ),
            "too much memory.*gradients",
            "at its peak a rank holds more than one whole gradient. When is each of them complete, and when is it "
            "reduced?",
        ),
        Mistake(
            "the gathered weights of the forward pass are kept",
            (
                "        rank.activations[l + 1] = rank.forward",
                "        rank.weights[l, 'full'] = full\n        rank.activations[l + 1] = rank.forward",
            ),
            "too much memory.*gathered weights",
            "a whole weight stays after its last use, beside that of another layer. How long is each of them used?",
        ),
        Mistake(
            "the backward pass reuses a shard",
            (
                "        full = await rank.all_gather(rank.weights[l])\n        grad_weight",
                "        full = rank.weights[l]\n        grad_weight",
            ),
            "backward.*shard",
            "the gathered weight of the forward pass is gone. The backward pass needs the whole weight as well.",
        ),
        Mistake(
            "the gradients are not reduced",
            ("rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)", "rank.grad_weights[l] = grad_weight"),
            r"update.*: microbatches .* missing",
            "this rank's gradient knows its own microbatch. The slice that it updates needs all four.",
        ),
        Mistake(
            "gathered weights replace the shards",
            (
                "        full = await rank.all_gather(rank.weights[l])\n"
                "        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)\n",
                "        rank.weights[l] = await rank.all_gather(rank.weights[l])\n"
                "        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])\n",
            ),
            "all_gather.*all of it would come from",
            "the whole weight took the shard's place in the store. What does the backward pass gather then?",
        ),
        Mistake(
            "the updated weight is gathered at once",
            (
                "            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]\n        )\n",
                "            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]\n        )\n"
                "        rank.weights[l] = await rank.all_gather(rank.weights[l])\n",
            ),
            "the step ends without.*not kept",
            "the next step loads a shard, so this one leaves a shard. Who gathers the weight when it is used?",
        ),
    ),
    hints=(
        "The backward loop is that of exercise 8, with one more line. A layer can be updated in it, or after it.",
        "Gather, backward, then reduce-scatter the new gradient, in every turn of the loop. An update takes shards of "
        "gradient, weight and state.",
        "`grad_weight, rank.grad_activations[l] = rank.backward(...)`, then `rank.grad_weights[l] = await "
        "rank.reduce_scatter(grad_weight)`; after the loop update each layer with `rank.grad_weights.pop(l)`.",
    ),
)
