"""Bug 102: the sum doubles with each microbatch.

When a gradient buffer's data-parallel group had one rank only, Megatron-FSDP doubled
the content of the buffer at every microbatch: 2^N times the gradient after N of them.
After a few microbatches, gradients were merely large, and clipping hid it. With 128,
the norm overflowed and clipping multiplied every gradient by zero.

    microbatch    0       1           2                3
    buffer        g0   2 g0 + g1   4 g0 + 2 g1 + g2   ...

The program accumulates four microbatches on one rank. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def doubled_buffer(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    sums: dict[int, Value] = {}
    for m in rank.microbatches:
        inputs = [rank.load_batch([m])]
        for l in rank.layers:
            inputs.append(rank.forward(l, inputs[l], rank.weights[l]))
        gradient = rank.loss(inputs.pop())
        for l in reversed(rank.layers):
            grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, rank.weights[l])
            # BEGIN SOLUTION
            sums[l] = sums[l] + grad_weight if l in sums else grad_weight
            # START
            # sums[l] = sums[l] + sums[l] + grad_weight if l in sums else grad_weight
            # END SOLUTION

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(l, sums[l], rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=102,
    name="doubled_buffer",
    title="The sum doubles with each microbatch",
    goals=Goals("NVIDIA/Megatron-LM#6660"),
    mesh=Mesh(dp_shard=1),
    layers=2,
    microbatches=4,
    seen_in="NVIDIA/Megatron-LM#6660",
    mistakes=(
        Mistake(
            "the buffer is added to itself",
            (
                "sums[l] = sums[l] + grad_weight if l in sums else grad_weight",
                "sums[l] = sums[l] + sums[l] + grad_weight if l in sums else grad_weight",
            ),
            r"add.*twice",
            "how often does the sum contain microbatch 0 after the second one?",
        ),
    ),
    hints=(
        "Follow microbatch 0 through the loop. Which line adds it a second time?",
        "The right-hand side has the old sum in it more than once.",
        "`sums[l] = sums[l] + grad_weight` adds each microbatch once.",
    ),
)
