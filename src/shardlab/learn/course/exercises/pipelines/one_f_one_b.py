"""Exercise 15: 1F1B, a pipeline within p activations.

              time ->
    rank 0    F0 F1 F2 F3                B0    F4 B1    F5 B2    F6 B3 ...
    rank 1       F0 F1 F2          B0 F3    B1 F4    B2 F5    B3 ...
    rank 2          F0 F1    B0 F2    B1 F3    B2 F4    B3 F5 ...
    rank 3             F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 ...

GPipe keeps the activations of all m microbatches. But rank 3 could go backward with
microbatch 0 as soon as it has made its forward pass. In 1F1B a rank makes some forward
passes to warm up, then one backward pass for each forward pass, then the backward
passes that are left (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section
2.2.1). The bubble is that of GPipe, except that a rank now waits for messages more
often. And rank r has at most p - r microbatches in flight, however many there are,
since each must come back before another one is let in.

From here on most exercises ask for a *schedule*: a generator of the actions of one
rank, like a row of the figure. Shardlab makes the program from it: messages, gradients,
updates.

    Forward(stage, microbatch)      Backward(stage, microbatch)

With one stage on each rank, rank r has stage r. The generator runs for each rank, with

    rank, ranks            this rank, and their number p
    microbatches           their number m, here 8
    stages_per_rank        1

The start is GPipe.
"""

from collections.abc import Iterator

from shardlab.language import Mesh
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import in_flight_at_most
from shardlab.strategies.schedules import Action, Backward, Forward


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    # BEGIN SOLUTION
    warmup = min(ranks - rank - 1, microbatches)
    for i in range(warmup):
        yield Forward(rank, i)
    for i in range(microbatches - warmup):
        yield Forward(rank, warmup + i)
        yield Backward(rank, i)
    for i in range(microbatches - warmup, microbatches):
        yield Backward(rank, i)
    # START
    # for i in range(microbatches):
    #     yield Forward(rank, i)
    # for i in range(microbatches):
    #     yield Backward(rank, i)
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=15,
    name="one_f_one_b",
    title="1F1B, a pipeline within p activations",
    goals=Goals("the reference solution", time=36.520003, memory=1_835_008, sent=2_097_154),
    mesh=Mesh(pp=4),
    kind="schedule",
    layers=4,
    microbatches=8,
    techniques=(in_flight_at_most((4, 3, 2, 1), "{found} microbatches in flight; rank r may have 4 - r."),),
    mistakes=(
        Mistake(
            "all forward passes come first",
            ("min(ranks - rank - 1, microbatches)", "microbatches"),
            "rank 0 has 8",
            "this is GPipe. How many microbatches must rank 0 have let in when the first one comes back?",
        ),
        Mistake(
            "the warm-up is one pass too long",
            ("min(ranks - rank - 1, microbatches)", "min(ranks - rank, microbatches)"),
            "rank 0 has",
            "the last rank needs no warm-up at all: its first backward pass may follow its first forward pass.",
        ),
        Mistake(
            "every rank has the same warm-up",
            ("min(ranks - rank - 1, microbatches)", "min(ranks - 1, microbatches)"),
            "rank [123] has",
            "count the forward passes that rank 2 makes in the figure before its first backward pass.",
        ),
        Mistake(
            "there is no warm-up",
            ("min(ranks - rank - 1, microbatches)", "0"),
            "too slow",
            "only one microbatch is on its way at a time. What could rank 0 do until the first one is back?",
        ),
        Mistake(
            "the backward pass comes first",
            (
                "        yield Forward(rank, warmup + i)\n        yield Backward(rank, i)\n",
                "        yield Backward(rank, i)\n        yield Forward(rank, warmup + i)\n",
            ),
            "cannot go on",
            "the last rank has no warm-up, so it would go backward with a microbatch that has not gone forward.",
        ),
        Mistake(
            "the last backward passes are missing",
            (
                "    for i in range(microbatches - warmup, microbatches):\n        yield Backward(rank, i)\n",
                "",
            ),
            "no Backward",
            "the microbatches of the warm-up are still in flight when the forward passes end.",
        ),
        Mistake(
            "the last backward passes begin at the wrong microbatch",
            ("range(microbatches - warmup, microbatches)", "range(warmup, microbatches)"),
            "twice Backward",
            "in the steady phase, the backward passes have come to microbatch m - warm-up.",
        ),
        Mistake(
            "the stage is not the rank's",
            ("yield Forward(rank, warmup + i)", "yield Forward(0, warmup + i)"),
            "but that rank has stage",
            "the first argument is the stage; with one stage on each rank it is the rank.",
        ),
    ),
    hints=(
        "Read the rows of the figure from below. Rank 3 takes turns from the beginning. What does rank 2 do first?",
        "Rank r makes p - r - 1 forward passes ahead. After those, forward and backward passes take turns.",
        "`for i in range(microbatches - warmup):` `yield Forward(rank, warmup + i)` and `yield Backward(rank, i)`. "
        "Before it come `warmup` forward passes, and after it the backward passes that are left.",
    ),
)
