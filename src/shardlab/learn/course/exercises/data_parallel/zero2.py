"""Exercise 7: ZeRO-2. Gradients in shards, while they are summed over microbatches.

   two microbatches on each of 4 ranks

            after microbatch 0         after microbatch 1
   ZeRO-1   |GGGG|                     |GGGG| += |GGGG|    one reduce-scatter at the end
   ZeRO-2   |GGGG| -> |G   |           |G   | += |G   |    a reduce-scatter each time
            whole for a moment         the sum is a quarter

ZeRO-1 keeps a whole gradient of every layer from the first microbatch to the update.
But a rank updates only one slice. ZeRO-2 (Rajbhandari et al. 2020, arXiv 1910.02054)
sums each microbatch's gradient over the ranks at once, keeps its slice, and adds that
to the slices of the microbatches before it.

The price: a gradient is sent for every microbatch instead of once. The goal for the
elements sent shows it: with two microbatches, gradients are sent twice instead of once.
With one microbatch, ZeRO-2 sends as much as ZeRO-1.

New here: nothing. `rank.share()` gives each rank two of the eight microbatches;
`rank.accumulate` adds shards as it adds whole gradients.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids, live_at_most, loads_at_least, loads_at_most, microbatches_each


async def zero2(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=rank.index, of=rank.world)

    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
            )
            # BEGIN SOLUTION
            rank.accumulate(await rank.reduce_scatter(grad_weight))
            # START
            # rank.accumulate(grad_weight)  # whole
            # END SOLUTION
        del rank.grad_activations[0]

    for l in rank.layers:
        # BEGIN SOLUTION
        gradient = rank.grad_weights.pop(l)
        # START
        # gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))
        # END SOLUTION
        new_slice, rank.opt_states[l] = rank.update(l, gradient, rank.weights.pop(l), rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new_slice)


# END OF THE EXERCISE

WEIGHT = 512 * 512
"""Number of elements of a layer's weight, and of its gradient."""

EXERCISE = Exercise(
    number=7,
    name="zero2",
    title="ZeRO-2: a shard of the gradients",
    goals=Goals("the reference solution", time=28.16, memory=2_359_296, sent=2_359_296),
    mesh=Mesh(dp_shard=4),
    microbatches=8,
    techniques=(
        loads_at_most(Kind.OPT_STATE, Fraction(1, 4), "a rank keeps {found} of a layer's optimizer state, not 1/4."),
        avoids(
            frozenset({OpKind.ALL_REDUCE}),
            "{found} gives every rank the whole sum; each rank updates one slice only.",
            of=Kind.GRAD_WEIGHT,
        ),
        loads_at_least(Kind.WEIGHT, Fraction(1), "a rank keeps {found} of a layer's weight; ZeRO-2 keeps it whole."),
        microbatches_each(1, "a forward pass computes {found} microbatches at once; compute one."),
        live_at_most(
            Kind.GRAD_WEIGHT,
            9 * WEIGHT // 4,
            "a rank holds {found} elements of gradients at once. Allowed are one whole gradient, the one that is "
            "being reduced, and a shard of each other layer.",
        ),
    ),
    mistakes=(
        Mistake(
            "whole gradients are accumulated",
            (
                "            rank.accumulate(await rank.reduce_scatter(grad_weight))\n"
                "        del rank.grad_activations[0]\n\n    for l in rank.layers:\n"
                "        gradient = rank.grad_weights.pop(l)\n",
                "            rank.accumulate(grad_weight)\n"
                "        del rank.grad_activations[0]\n\n    for l in rank.layers:\n"
                "        gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))\n",
            ),
            "a rank holds 1,572,864",
            "several gradients are whole at once, and most of each is for other ranks. When is each one reduced?",
        ),
        Mistake(
            "the shards of the microbatches are added at the end",
            (
                "            rank.accumulate(await rank.reduce_scatter(grad_weight))\n"
                "        del rank.grad_activations[0]\n\n    for l in rank.layers:\n"
                "        gradient = rank.grad_weights.pop(l)\n",
                "            rank.grad_weights[l, m] = await rank.reduce_scatter(grad_weight)\n"
                "        del rank.grad_activations[0]\n\n    for l in rank.layers:\n"
                "        gradient = sum(rank.grad_weights.pop((l, m)) for m in rank.share())\n",
            ),
            "a rank holds 786,432",
            "each layer has a shard for each microbatch until the update. When can they be added up?",
        ),
        Mistake(
            "gradients are all-reduced for each microbatch",
            (
                "rank.accumulate(await rank.reduce_scatter(grad_weight))",
                "rank.accumulate(rank.slice(await rank.all_reduce(grad_weight), rank.index, rank.world))",
            ),
            "gives every rank the whole sum",
            "an all-reduce sends twice as much as this needs. Which of its two halves is enough?",
        ),
        Mistake(
            "shards are reduced again",
            ("gradient = rank.grad_weights.pop(l)", "gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))"),
            r"reduce_scatter.*sum equal slices",
            "the shards are sums over all ranks already. What would a second reduction add up?",
        ),
        Mistake(
            "a whole gradient is added to a shard",
            (
                "rank.accumulate(await rank.reduce_scatter(grad_weight))",
                "rank.accumulate(grad_weight)\n"
                "            rank.grad_weights[l] = await rank.reduce_scatter(rank.grad_weights.pop(l))",
            ),
            r"add\(.*all of the layer",
            "the gradient of the first microbatch is a shard already, and that of the second is whole. Is each one "
            "reduced before it is added?",
        ),
        Mistake(
            "a shard replaces the sum",
            (
                "rank.accumulate(await rank.reduce_scatter(grad_weight))",
                "rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)",
            ),
            r"update.*: microbatches 0, 2, 4, 6 are missing",
            "the update sees the last microbatch of every rank only. Where are the shards of the first?",
        ),
        Mistake(
            "the reductions of a microbatch are awaited at its end",
            (
                "            rank.accumulate(await rank.reduce_scatter(grad_weight))\n",
                "            rank.grad_weights[l, 'whole'] = grad_weight\n"
                "        for l in rank.layers:\n"
                "            rank.accumulate(await rank.reduce_scatter(rank.grad_weights.pop((l, 'whole'))))\n",
            ),
            "a rank holds 1,376,256",
            "whole gradients of all layers wait for each other. How many have to exist at the same time?",
        ),
    ),
    hints=(
        "Which values become more during the backward passes of the first microbatch, and stay until the update?",
        "Reduce-scatter a layer's gradient as soon as its backward pass has made it, and accumulate the shard.",
        "`rank.accumulate(await rank.reduce_scatter(grad_weight))` in the loop; the update then takes "
        "`rank.grad_weights.pop(l)` as it is.",
    ),
)
