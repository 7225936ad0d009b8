"""Exercise 3: data parallelism that overlaps.

   compute    F0 F1 F2 F3 L | B3    B2    B1    B0    |
   exercise 2                                          AR0 AR1 AR2 AR3 U U U U
   overlapped                       [AR3] [AR2] [AR1] [AR0] U3 U2 U1 U0

The gradient of layer 3 is complete after the first of four backward passes. Its
all-reduce needs the network, the next backward pass needs the processor, so they can
run at the same time. Only the last reduction, that of layer 0, has no backward pass
left to hide behind.

A verb that communicates starts when it is called. It returns a handle, and the rank
goes on computing until it awaits that handle:

    handle = rank.all_reduce(dw)        starts, and returns at once
    ...                                 other work
    total = await handle                the sum

A picture shows compute in capital letters; a small letter is compute while the rank
also communicates. `=` is a rank that waits for an all-reduce.

There is a price: a gradient and its sum stay in memory until the handle is awaited. So
do not keep all of them in flight: await the reduction of layer l + 1 before you start
that of layer l. Handles are not values; keep them in variables or in a dict of your
own.
"""

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import BACKWARDS, hidden, starts_before_last


async def ddp_overlap(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    # BEGIN SOLUTION
    handle = None
    for l in reversed(rank.layers):
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
        if handle is not None:
            rank.grad_weights[l + 1] = await handle
        handle = rank.all_reduce(grad_weight)
    assert handle is not None
    rank.grad_weights[0] = await handle
    # START
    # for l in reversed(rank.layers):
    #     grad_weight, rank.grad_activations[l] = rank.backward(
    #         l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
    #     )
    #     rank.grad_weights[l] = await rank.all_reduce(grad_weight)  # the rank stands still here
    # END SOLUTION

    for l in reversed(rank.layers):
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=3,
    name="ddp_overlap",
    title="Data parallelism that overlaps",
    goals=Goals("the reference solution", time=13.46, memory=3_407_872, sent=1_572_864),
    mesh=Mesh(dp_shard=4),
    techniques=(
        starts_before_last(
            frozenset({OpKind.ALL_REDUCE}),
            "the first all-reduce starts after the last backward pass.",
            of=Kind.GRAD_WEIGHT,
            passes=BACKWARDS,
        ),
        hidden(
            frozenset({OpKind.ALL_REDUCE}),
            "{found} all-reduces run while a backward pass computes; all but the last can.",
            of=Kind.GRAD_WEIGHT,
            behind=BACKWARDS,
        ),
    ),
    mistakes=(
        Mistake(
            "each reduction is awaited at once",
            (
                "        if handle is not None:\n            rank.grad_weights[l + 1] = await handle\n"
                "        handle = rank.all_reduce(grad_weight)\n    assert handle is not None\n"
                "    rank.grad_weights[0] = await handle\n",
                "        rank.grad_weights[l] = await rank.all_reduce(grad_weight)\n",
            ),
            "^0 of 4 all-reduces",
            "`await` stops the rank until the sum is there. What could it compute before it needs that sum?",
        ),
        Mistake(
            "the reductions start after the last backward pass",
            (
                "        if handle is not None:\n            rank.grad_weights[l + 1] = await handle\n"
                "        handle = rank.all_reduce(grad_weight)\n    assert handle is not None\n"
                "    rank.grad_weights[0] = await handle\n",
                "        rank.grad_weights[l] = grad_weight\n"
                "    handles = [rank.all_reduce(rank.grad_weights[l]) for l in rank.layers]\n"
                "    for l in rank.layers:\n        rank.grad_weights[l] = await handles[l]\n",
            ),
            "after the last backward pass",
            "the gradient of layer 3 is complete long before that of layer 0. When can its reduction start?",
        ),
        Mistake(
            "all reductions stay in flight",
            (
                "        if handle is not None:\n            rank.grad_weights[l + 1] = await handle\n"
                "        handle = rank.all_reduce(grad_weight)\n    assert handle is not None\n"
                "    rank.grad_weights[0] = await handle\n",
                "        handle = {**(handle or {}), l: rank.all_reduce(grad_weight)}\n"
                "    for l in reversed(rank.layers):\n        rank.grad_weights[l] = await handle[l]\n",
            ),
            "too much memory.*(gradients|not awaited yet)",
            "a reduction in flight holds a gradient and its sum. How many have to be in flight at once?",
        ),
        Mistake(
            "the last reduction is not awaited",
            ("    rank.grad_weights[0] = await handle\n", ""),
            r"grad_weights\[0\] does not exist",
            "when the loop ends, one reduction is still in flight. Who awaits it?",
        ),
    ),
    hints=(
        "When the backward pass of layer l has ended, the reduction of layer l + 1 has run during that pass.",
        "Keep the handle of one reduction in a variable. In each turn of the loop: backward pass, await the handle of "
        "the turn before, start the next reduction.",
        "`handle = None` before the loop. After the backward pass: `if handle is not None: rank.grad_weights[l + 1] = "
        "await handle`, then `handle = rank.all_reduce(grad_weight)`. After the loop, `rank.grad_weights[0] = await "
        "handle`.",
    ),
)
