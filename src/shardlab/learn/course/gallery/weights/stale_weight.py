"""Bug 119: a layer computes with the previous step's weight.

With a distributed optimizer, each rank updates a slice of every weight, and the slices
are gathered while the next forward pass already runs. Megatron-LM gathered buckets in
the order in which parameters were registered. A layer that ran earlier than its
position in this order did not wait for a gather, and computed with its weight of the
previous step.

    update of slices  ->  gather bucket 1, 2, ...  ->  forward in another order

A program is one step, so the stale weight shows at its end: the step must leave every
rank with the new weights. The program has two ranks, whole weights and halves of the
optimizer state. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def stale_weight(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, rank.index, rank.world)

    inputs = [rank.load_batch(rank.share())]
    for l in rank.layers:
        inputs.append(rank.forward(l, inputs[l], rank.weights[l]))
    gradient = rank.loss(inputs.pop())
    new_slices: dict[int, Value] = {}
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, rank.weights[l])
        part = await rank.reduce_scatter(grad_weight)
        new_slices[l], rank.opt_states[l] = rank.update(l, part, rank.weights[l], rank.opt_states[l])
    # BEGIN SOLUTION
    for l in rank.layers:
        rank.weights[l] = await rank.all_gather(new_slices[l])
    # START
    # for l in rank.layers[:-1]:
    #     rank.weights[l] = await rank.all_gather(new_slices[l])
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=119,
    name="stale_weight",
    title="A layer computes with the previous step's weight",
    goals=Goals("NVIDIA/Megatron-LM#950"),
    mesh=Mesh(dp_shard=2),
    layers=3,
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#950",
    mistakes=(
        Mistake(
            "a layer's slices are not gathered",
            (
                ("    for l in rank.layers:\n        rank.weights[l] = await rank.all_gather(new_slices[l])\n"),
                ("    for l in rank.layers[:-1]:\n        rank.weights[l] = await rank.all_gather(new_slices[l])\n"),
            ),
            r"ends without the updated weights",
            "which layers have their new weight on every rank when the step ends?",
        ),
    ),
    hints=(
        "The refusal names a weight that is missing at the end. Which half of it is where?",
        "After the update, a rank has the new half only. A gather brings the other.",
        "Gather the slices of every layer.",
    ),
)
