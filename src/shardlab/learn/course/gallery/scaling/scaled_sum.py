"""Bug 111: the sum is divided in place of the new gradient.

Megatron-FSDP divides the gradient of each microbatch by the number of data-parallel
ranks and adds it to a buffer. Instead of the new gradient, it divided the buffer. So
the first microbatch was divided several times and the last one never.

    wanted:  g0/2 + g1/2            seen:  g0/2 + g1

The program has two ranks with two microbatches each. Their losses are means over the
rank's own tokens. Find the bug and mend it.
"""

from fractions import Fraction

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def scaled_sum(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)

    sums: dict[int, Value] = {}
    for m in rank.share():
        inputs = [rank.load_batch([m])]
        for l in rank.layers:
            inputs.append(rank.forward(l, inputs[l], await rank.all_gather(rank.weights[l])))
        gradient = rank.loss(inputs.pop())
        for l in reversed(rank.layers):
            weight = await rank.all_gather(rank.weights[l])
            grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, weight)
            part = await rank.reduce_scatter(rank.scale(grad_weight, rank.world))  # of a mean over own tokens
            # BEGIN SOLUTION
            part = rank.scale(part, Fraction(1, rank.world))
            if l in sums:
                sums[l] = sums[l] + part
            # START
            # if l in sums:
            #     sums[l] = rank.scale(sums[l], Fraction(1, rank.world)) + part
            # END SOLUTION
            else:
                sums[l] = part

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(l, sums[l], rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=111,
    name="scaled_sum",
    title="The sum is divided in place of the new gradient",
    goals=Goals("NVIDIA/Megatron-LM#3023"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=4,
    seen_in="NVIDIA/Megatron-LM#3023",
    mistakes=(
        Mistake(
            "the sum is scaled in place of the gradient",
            (
                (
                    "            part = rank.scale(part, Fraction(1, rank.world))\n"
                    "            if l in sums:\n"
                    "                sums[l] = sums[l] + part\n"
                ),
                (
                    "            if l in sums:\n"
                    "                sums[l] = rank.scale(sums[l], Fraction(1, rank.world)) + part\n"
                ),
            ),
            r"add",
            "by what are the two values multiplied that are added here?",
        ),
    ),
    hints=(
        "The refusal names two factors. Where does each come from?",
        "Every microbatch must be divided once, whatever comes after it.",
        "Scale `part` by `Fraction(1, rank.world)` before it is added or kept.",
    ),
)
