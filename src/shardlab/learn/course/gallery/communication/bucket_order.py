"""Bug 117: ranks reduce their layers in different orders.

ZeRO stage 2 reduces gradients as they become ready, and assumes that the order is the
same on all ranks. In one model, some ranks ran the parts in another order. The first
reduction of one rank then met the first of another rank, which was for other
parameters. Nothing failed, and the gradients were wrong.

    rank 0: all-reduce layer 1, then layer 0
    rank 1: all-reduce layer 0, then layer 1        the first meets the first

The program has two ranks, of which one reduces in the order of the forward pass. Find
the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def bucket_order(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    inputs = [rank.load_batch(rank.share())]
    for l in rank.layers:
        inputs.append(rank.forward(l, inputs[l], rank.weights[l]))
    gradient = rank.loss(inputs.pop())

    gradients: dict[int, Value] = {}
    for l in reversed(rank.layers):
        gradients[l], gradient = rank.backward(l, inputs.pop(), gradient, rank.weights[l])

    # BEGIN SOLUTION
    order = sorted(gradients)
    # START
    # order = sorted(gradients, reverse=rank.index == 0)
    # END SOLUTION
    for l in order:
        total = await rank.all_reduce(gradients[l])
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=117,
    name="bucket_order",
    title="Ranks reduce their layers in different orders",
    goals=Goals("deepspeedai/DeepSpeed#2343"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=2,
    seen_in="deepspeedai/DeepSpeed#2343",
    mistakes=(
        Mistake(
            "the order depends on the rank",
            ("order = sorted(gradients)", "order = sorted(gradients, reverse=rank.index == 0)"),
            r"one order",
            "which layer does each rank reduce first?",
        ),
    ),
    hints=(
        "The k-th collective of one rank meets the k-th of the others. Which layers meet first?",
        "The order of the loop must not depend on the rank.",
        "`order = sorted(gradients)` is the same on all ranks.",
    ),
)
