"""Exercise 8: weights in shards. Each layer is gathered just before it is used.

   rank r keeps       W0[r] W1[r] ... W5[r]   O0[r] ... O5[r]       a quarter of each
   forward    gather W0, F0, free   gather W1, F1, free   ...   gather W5, F5, free
   backward   gather W5, B5, free   gather W4, B4, free   ...   gather W0, B0, free

So far every rank has held the whole model. Here rank r keeps slice r of each layer's
weight and optimizer state. A layer can only compute with its whole weight, so all ranks
gather it first, use it, and free it at once: beside the shards, only one layer is whole
at a time. The backward pass needs the weight again, so it is gathered twice.

Gradients stay whole in this exercise: sum them with an all-reduce, as in DDP, after the
backward passes. Sharding them too makes it FSDP, the next exercise.

New here:

    rank.load_weights(l, shard=i, of=n)     slice i of n of weight and state
    full = await rank.all_gather(slice)     the whole weight

A value that only a variable holds, such as `full`, is freed after the op that uses it.
In a store it would stay until you delete it.

A step must end as it began: with a shard of each weight, now updated, in its store.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import loads_at_most, uses


async def wsdp(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        # BEGIN SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
        # START
        # rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        # END SOLUTION
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        # BEGIN SOLUTION
        full = await rank.all_gather(rank.weights[l])
        # START
        # full = rank.weights[l]
        # END SOLUTION
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for l in reversed(rank.layers):
        # BEGIN SOLUTION
        full = await rank.all_gather(rank.weights[l])
        # START
        # full = rank.weights[l]
        # END SOLUTION
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
        )

    for l in rank.layers:
        gradient = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=8,
    name="wsdp",
    title="Weight-sharded data parallelism",
    goals=Goals("the reference solution", time=26.22, memory=2_621_440, sent=4_718_592),
    mesh=Mesh(dp_shard=4),
    layers=6,
    puzzle="wsdp",
    techniques=(
        loads_at_most(Kind.WEIGHT, Fraction(1, 4), "a rank keeps {found} of a layer's weight, not 1/4."),
        loads_at_most(Kind.OPT_STATE, Fraction(1, 4), "a rank keeps {found} of a layer's optimizer state, not 1/4."),
        uses(OpKind.ALL_GATHER, "no rank gathers weights.", of=Kind.WEIGHT),
        uses(OpKind.ALL_REDUCE, "gradients are not all-reduced; this exercise keeps them whole.", of=Kind.GRAD_WEIGHT),
    ),
    mistakes=(
        Mistake(
            "a layer computes with a shard",
            (
                "        full = await rank.all_gather(rank.weights[l])\n        rank.activations[l + 1]",
                "        full = rank.weights[l]\n        rank.activations[l + 1]",
            ),
            r"forward\(layer 0\).*shard|forward.*slice",
            "a layer needs its whole weight, and this rank has a quarter of it. Who has the rest?",
        ),
        Mistake(
            "the gathered weights of all layers are kept",
            (
                "full = await rank.all_gather(rank.weights[l])\n        rank.activations[l + 1]",
                "full = await rank.all_gather(rank.weights[l])\n        rank.weights[l, 'full'] = full\n"
                "        rank.activations[l + 1]",
            ),
            "^too much memory.*gathered weights",
            "a whole weight stays after its last use, beside that of another layer. How long is each of them used?",
        ),
        Mistake(
            "only the weights are in shards",
            (
                "rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)",
                "rank.weights[l] = rank.load_weight(l, rank.index, rank.world)\n"
                "        rank.opt_states[l] = rank.load_opt_state(l)",
            ),
            "update.*optimizer state holds all",
            "a rank updates the slice that it keeps. Which part of the optimizer state does that take?",
        ),
        Mistake(
            "the gradients are not reduced",
            ("await rank.all_reduce(rank.grad_weights.pop(l))", "rank.grad_weights.pop(l)"),
            r"update.*: microbatches .* missing",
            "each rank updates its slice for all ranks, with the gradient of the whole batch. Where is the sum made?",
        ),
        Mistake(
            "every rank loads the same shard",
            ("shard=rank.index, of=rank.world", "shard=0, of=rank.world"),
            "all_gather.*would come from",
            "the shards of all ranks together are the layer. Which is this rank's, and is it still in its store?",
        ),
        Mistake(
            "the updated weight is gathered at once",
            (
                "rank.update(l, gradient, rank.weights[l], rank.opt_states[l])",
                "rank.update(l, gradient, rank.weights[l], rank.opt_states[l])\n"
                "        rank.weights[l] = await rank.all_gather(rank.weights[l])",
            ),
            "the step ends without.*not kept",
            "the next step loads a shard, so this one leaves a shard. Who gathers the weight when it is used?",
        ),
    ),
    hints=(
        "Three places change: what is loaded, and where the forward and the backward pass take their weight from.",
        "Load shard `rank.index` of `rank.world`. Before each pass of a layer, gather its weight into a variable.",
        "`full = await rank.all_gather(rank.weights[l])` in both loops, and pass `full` to `forward` and `backward`. "
        "The update takes the shard in `rank.weights[l]`, and the whole gradient.",
    ),
)
