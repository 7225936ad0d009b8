"""Exercise 10: FSDP that gathers ahead, within a memory limit.

   exercise 9   AG0 F0 AG1 F1 AG2 F2 ...          ... AG2 B2 RS2 AG1 B1 RS1 AG0 B0 RS0
   here         AG0 F0  F1  F2  F3 ...            ...  B2   B1   B0
                    AG1 AG2 AG3 ...                    AG1  AG0  |
                                                       RS3  RS2  RS1  RS0

In exercise 9 the rank waits for each collective. The next weight is known in advance,
so it can be gathered while the current layer computes. This is called prefetching:
start the gather of layer l + 1, compute layer l, then await the gather. In the backward
pass the next layer is l - 1, and the reduce-scatter of layer l + 1 can run at the same
time.

Every gather in flight has its whole result in memory. One layer ahead is enough to
hide a gather that takes less time than a layer's pass. The memory goal leaves room for
two whole weights at once, and for one reduction in flight. The weight of the last
layer need not be gathered twice: its backward pass follows its forward pass.

`await` returns the whole weight. A value that only a variable holds is freed after the
next op that uses it. Keep a value that is used twice in a store, such as
`rank.weights["full"]`, and delete it later.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import hidden, live_at_most, loads_at_most, uses


async def fsdp_prefetch(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())

    # BEGIN SOLUTION
    gather = rank.all_gather(rank.weights[0])
    for l in rank.layers:
        rank.weights["full"] = await gather
        if l + 1 < last:
            gather = rank.all_gather(rank.weights[l + 1])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights["full"])
    # START
    # for l in rank.layers:
    #     full = await rank.all_gather(rank.weights[l])
    #     rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    # END SOLUTION
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    # BEGIN SOLUTION
    reduction = None
    for l in reversed(rank.layers):
        if l > 0:
            gather = rank.all_gather(rank.weights[l - 1])
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights.pop("full")
        )
        if reduction is not None:
            rank.grad_weights[l + 1] = await reduction
        reduction = rank.reduce_scatter(grad_weight)
        if l > 0:
            rank.weights["full"] = await gather
    assert reduction is not None
    rank.grad_weights[0] = await reduction
    # START
    # for l in reversed(rank.layers):
    #     full = await rank.all_gather(rank.weights[l])
    #     grad_weight, rank.grad_activations[l] = rank.backward(
    #         l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
    #     )
    #     rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)
    # END SOLUTION

    for l in reversed(rank.layers):
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

WEIGHT = 512 * 512
"""Number of elements of a layer's weight."""

EXERCISE = Exercise(
    number=10,
    name="fsdp_prefetch",
    title="FSDP that gathers ahead, within a memory limit",
    goals=Goals("the reference solution", time=18.96, memory=2_424_832, sent=3_342_336),
    mesh=Mesh(dp_shard=4),
    layers=6,
    techniques=(
        loads_at_most(Kind.WEIGHT, Fraction(1, 4), "a rank keeps {found} of a layer's weight, not 1/4."),
        hidden(
            frozenset({OpKind.ALL_GATHER}),
            "{found} gathers of weights run while a layer computes; all but the first can.",
            of=Kind.WEIGHT,
        ),
        uses(OpKind.REDUCE_SCATTER, "no rank reduce-scatters gradients.", of=Kind.GRAD_WEIGHT),
        hidden(
            frozenset({OpKind.REDUCE_SCATTER}),
            "{found} reduce-scatters run while a layer computes; all but the last can.",
            of=Kind.GRAD_WEIGHT,
        ),
        live_at_most(
            Kind.WEIGHT,
            6 * WEIGHT // 4 + 2 * WEIGHT,
            "a rank holds {found} elements of weights at once: more than two whole layers beside its shards.",
        ),
    ),
    mistakes=(
        Mistake(
            "a gather is awaited at once",
            (
                "    gather = rank.all_gather(rank.weights[0])\n    for l in rank.layers:\n"
                '        rank.weights["full"] = await gather\n'
                "        if l + 1 < last:\n"
                "            gather = rank.all_gather(rank.weights[l + 1])\n",
                "    gather = None\n    for l in rank.layers:\n"
                '        rank.weights["full"] = await rank.all_gather(rank.weights[l])\n',
            ),
            r"^\d of \d+ gathers",
            "the rank stands still for a gather. What could it compute between the start of the gather and its await?",
        ),
        Mistake(
            "the last layer is gathered twice",
            (
                "    reduction = None\n",
                '    reduction = None\n    rank.weights["full"] = await rank.all_gather(rank.weights[last - 1])\n',
            ),
            "^10 of 12 gathers",
            "the weight of the last layer is there when its forward pass ends. Its backward pass is the next one.",
        ),
        Mistake(
            "all gathers start at once",
            (
                "    gather = rank.all_gather(rank.weights[0])\n    for l in rank.layers:\n"
                '        rank.weights["full"] = await gather\n'
                "        if l + 1 < last:\n"
                "            gather = rank.all_gather(rank.weights[l + 1])\n",
                "    gathers = [rank.all_gather(rank.weights[l]) for l in rank.layers]\n    for l in rank.layers:\n"
                '        rank.weights["full"] = await gathers[l]\n',
            ),
            "a rank holds",
            "each gather in flight has a whole layer in memory. How far ahead is far enough?",
        ),
        Mistake(
            "the reduce-scatters are awaited at once",
            (
                "        if reduction is not None:\n            rank.grad_weights[l + 1] = await reduction\n"
                "        reduction = rank.reduce_scatter(grad_weight)\n"
                "        if l > 0:\n"
                '            rank.weights["full"] = await gather\n'
                "    assert reduction is not None\n"
                "    rank.grad_weights[0] = await reduction\n",
                "        rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)\n"
                "        if l > 0:\n"
                '            rank.weights["full"] = await gather\n',
            ),
            "reduce-scatters run",
            "the rank stands still until the gradient is reduced. Which backward pass could run meanwhile?",
        ),
        Mistake(
            "all reductions stay in flight",
            (
                "        if reduction is not None:\n            rank.grad_weights[l + 1] = await reduction\n"
                "        reduction = rank.reduce_scatter(grad_weight)\n"
                "        if l > 0:\n"
                '            rank.weights["full"] = await gather\n'
                "    assert reduction is not None\n"
                "    rank.grad_weights[0] = await reduction\n",
                "        reduction = [*(reduction or []), rank.reduce_scatter(grad_weight)]\n"
                "        if l > 0:\n"
                '            rank.weights["full"] = await gather\n'
                "    for l in rank.layers:\n"
                "        rank.grad_weights[l] = await reduction[last - 1 - l]\n",
            ),
            "too much memory.*(gradients|not awaited yet)",
            "a reduction in flight holds a whole gradient. Await that of layer l + 1 before that of layer l starts.",
        ),
    ),
    hints=(
        "In the picture of exercise 9, every `+` is a rank that waits for a gather. What does it compute right after?",
        "Hold one gather in a variable. In each turn: await it, start the next one, compute. Going backward, the next "
        "layer is l - 1; hold one reduction as in exercise 3.",
        "Forward: `rank.weights['full'] = await gather`, start the gather of l + 1, `forward` with it. Backward: start "
        "the gather of l - 1, `backward` with `rank.weights.pop('full')`, await the reduction of l + 1, start that of "
        "l, then `rank.weights['full'] = await gather`.",
    ),
)
