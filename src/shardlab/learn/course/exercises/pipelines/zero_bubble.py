"""Exercise 18: zero bubble, or what a backward pass consists of.

    backward pass of a layer y = x W:  dx = dy W^T   the rank below waits for it     I
                                       dW = x^T dy   only the optimizer waits        W

    1F1B     rank 2    F0 F1    B---0 F2 B---1 F3 B---2 ...       B---6    B---7
             rank 3       F0 B---0 F1 B---1 F2 B---2 ...      F7 B---7
    ZB-H1    rank 2    F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 ...  I6 W4 I7 W5 W6 W7
             rank 3       F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 ...   I7 W4 W5 W6 W7

A backward pass has two halves. The rank below waits for the gradient of its *input*
only. The gradient of the *weights* can wait until the update, and fill the gaps in
which a rank has nothing else to do (Qi et al. 2023, arXiv 2401.10241).

    BackwardInput(stage, microbatch)       I, as early as possible
    BackwardWeight(stage, microbatch)      W, at any time after it

But a weight half keeps the activation alive, so it must not come as late as possible.
ZB-H1 stays within the memory of 1F1B, p microbatches on each rank: W is r passes behind
I on rank r, so that all ranks hold p microbatches while the pipeline is full, and r
weight halves are left for the end. The warm-up is that of 1F1B. In the terms of the
paper the bubble is (p - 1) (F + B - W), here p - 1: a third of that of 1F1B.

The start is 1F1B with halves that are computed together.
"""

from collections.abc import Iterator

from shardlab.language import Mesh, OpKind
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import in_flight_at_most, uses
from shardlab.strategies.schedules import Action, BackwardInput, BackwardWeight, Forward


def zero_bubble(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    warmup = ranks - rank - 1
    for i in range(warmup):
        yield Forward(rank, i)
    # BEGIN SOLUTION
    for i in range(microbatches):
        if warmup + i < microbatches:
            yield Forward(rank, warmup + i)
        yield BackwardInput(rank, i)
        if i >= rank:
            yield BackwardWeight(rank, i - rank)
    for i in range(microbatches - rank, microbatches):
        yield BackwardWeight(rank, i)
    # START
    # for i in range(microbatches):
    #     if warmup + i < microbatches:
    #         yield Forward(rank, warmup + i)
    #     yield BackwardInput(rank, i)
    #     yield BackwardWeight(rank, i)
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=18,
    name="zero_bubble",
    title="Zero bubble, or what a backward pass consists of",
    goals=Goals("the reference solution", time=29.920003, memory=2_228_224, sent=2_097_154),
    mesh=Mesh(pp=4),
    kind="schedule",
    layers=4,
    microbatches=8,
    techniques=(
        in_flight_at_most((4, 3, 2, 1), "{found} microbatches in flight; rank r may have 4 - r."),
        uses(OpKind.BACKWARD_WEIGHT, "the backward passes are not split into halves."),
    ),
    mistakes=(
        Mistake(
            "the weight half follows its input half",
            (
                "        if i >= rank:\n            yield BackwardWeight(rank, i - rank)\n"
                "    for i in range(microbatches - rank, microbatches):\n        yield BackwardWeight(rank, i)\n",
                "        yield BackwardWeight(rank, i)\n",
            ),
            "^too slow[^;]*$",
            "nobody waits for a weight half, but the rank below waits for the next input half. Where are gaps?",
        ),
        Mistake(
            "all weight halves come last",
            (
                "        if i >= rank:\n            yield BackwardWeight(rank, i - rank)\n"
                "    for i in range(microbatches - rank, microbatches):\n        yield BackwardWeight(rank, i)\n",
                "    for i in range(microbatches):\n        yield BackwardWeight(rank, i)\n",
            ),
            "too much memory.*activations",
            "a microbatch's activations live until its weight half is done. How many may a rank hold?",
        ),
        Mistake(
            "the last weight halves are missing",
            ("    for i in range(microbatches - rank, microbatches):\n        yield BackwardWeight(rank, i)\n", ""),
            "no Backward or BackwardWeight of .*microbatch [5-7]",
            "each rank is r weight halves behind at the end.",
        ),
        Mistake(
            "the first weight halves are missing",
            ("i >= rank", "i > rank"),
            "no Backward or BackwardWeight",
            "on rank r, after which input half does the weight half of microbatch 0 come?",
        ),
        Mistake(
            "the backward pass comes first",
            (
                "        if warmup + i < microbatches:\n            yield Forward(rank, warmup + i)\n"
                "        yield BackwardInput(rank, i)\n",
                "        yield BackwardInput(rank, i)\n        if warmup + i < microbatches:\n"
                "            yield Forward(rank, warmup + i)\n",
            ),
            "cannot go on: .*rank 3 at BackwardInput",
            "the last rank has no warm-up, so it would go backward with a microbatch that has not gone forward.",
        ),
        Mistake(
            "the weight half comes before its input half",
            (
                "        yield BackwardInput(rank, i)\n        if i >= rank:\n"
                "            yield BackwardWeight(rank, i - rank)\n",
                "        if i >= rank:\n            yield BackwardWeight(rank, i - rank)\n"
                "        yield BackwardInput(rank, i)\n",
            ),
            "cannot go on: rank 0 at BackwardWeight",
            "a weight half needs the gradient that its own input half has read.",
        ),
        Mistake(
            "the last weight halves begin at the wrong microbatch",
            ("range(microbatches - rank, microbatches)", "range(rank, microbatches)"),
            r"BackwardWeight.* came twice",
            "count the weight halves that rank r has not done when the loop ends.",
        ),
    ),
    hints=(
        "In the figure, by how many microbatches is W behind I on rank 3? And on rank 2?",
        "After the input half of microbatch i comes the weight half of microbatch i - r, once there is one. The last r "
        "weight halves come at the end.",
        "`if i >= rank:` `yield BackwardWeight(rank, i - rank)`; after the loop the microbatches from `microbatches - "
        "rank` on.",
    ),
)
