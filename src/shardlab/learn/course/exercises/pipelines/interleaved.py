"""Exercise 17: an interleaved pipeline, breadth-first.

    rank r has the stages r and r + 4      F: stage r     f: stage r + 4

    rank 0    F0 F1 F2 F3 f0 f1 f2 f3                  b0 b1 b2 b3 B0 B1 B2 B3
    rank 1       F0 F1 F2 F3 f0 f1 f2 f3            b0 b1 b2 b3 B0 B1 B2 B3
    rank 2          F0 F1 F2 F3 f0 f1 f2 f3      b0 b1 b2 b3 B0 B1 B2 B3
    rank 3             F0 F1 F2 F3 f0 f1 f2 f3 b0 b1 b2 b3 B0 B1 B2 B3

A pipeline waits p - 1 passes until its last rank starts. Make the passes shorter: cut
the model into v times as many stages and give each rank v of them, every p-th. A
microbatch then goes v times round the ranks. A pass and the bubble take 1 / v of the
time: the bubble is (p - 1) / (v m + p - 1) of the step. The price is v times as many
messages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

The order of passes is free. Interleaved 1F1B saves activations. *Breadth-first* takes
all microbatches through a stage before the next stage of the rank begins. It saves
something else: if the weights are sharded (FSDP), a stage is gathered for one run of
forward passes and one run of backward passes, not for every microbatch (Lamy-Poirier
2022, arXiv 2211.05953, fig. 4). So with FSDP, breadth-first is the better order.

Here p = 4, v = 2 and m = 8 (in the figure 4): rank r has the stages r and r + p, since
stage s is on rank s % p. A backward pass goes through the stages in reverse.

The start has the right stages, but takes each microbatch through both (depth-first).
"""

from collections.abc import Iterator

from shardlab.language import Mesh
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import in_one_run
from shardlab.strategies.schedules import Action, Backward, Forward


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    stages = range(rank, ranks * stages_per_rank, ranks)
    # BEGIN SOLUTION
    for stage in stages:
        for i in range(microbatches):
            yield Forward(stage, i)
    for stage in reversed(stages):
        for i in range(microbatches):
            yield Backward(stage, i)
    # START
    # for i in range(microbatches):
    #     for stage in stages:
    #         yield Forward(stage, i)
    # for i in range(microbatches):
    #     for stage in reversed(stages):
    #         yield Backward(stage, i)
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=17,
    name="interleaved",
    title="An interleaved pipeline, breadth-first",
    goals=Goals("the reference solution", time=58.720003, memory=4_456_448, sent=4_194_306),
    mesh=Mesh(pp=4),
    kind="schedule",
    layers=8,
    microbatches=8,
    stages_per_rank=2,
    techniques=(in_one_run("the passes of {found} are not one run; FSDP would gather its weights several times."),),
    mistakes=(
        Mistake(
            "depth-first in the forward passes",
            (
                "    for stage in stages:\n        for i in range(microbatches):\n            yield Forward",
                "    for i in range(microbatches):\n        for stage in stages:\n            yield Forward",
            ),
            "not one run",
            "which loop is the outer one: that over the stages, or that over the microbatches?",
        ),
        Mistake(
            "the stages in the same order, backward",
            ("for stage in reversed(stages):", "for stage in stages:"),
            "cannot go on",
            "the gradient comes from the last stage; it reaches stage r + p before stage r.",
        ),
        Mistake(
            "consecutive stages",
            ("range(rank, ranks * stages_per_rank, ranks)", "range(2 * rank, 2 * rank + 2)"),
            "but that rank has stages",
            "stage s is on rank s % p, so that a microbatch goes round all ranks twice.",
        ),
        Mistake(
            "backward passes of one stage only",
            ("for stage in reversed(stages):", "for stage in [rank]:"),
            "no Backward",
            "both stages of a rank need their backward passes.",
        ),
        Mistake(
            "microbatches backward in reverse",
            (
                "        for i in range(microbatches):\n            yield Backward(stage, i)",
                "        for i in reversed(range(microbatches)) if stage < ranks else range(microbatches):\n"
                "            yield Backward(stage, i)",
            ),
            "too slow",
            "the gradient of microbatch 0 comes first. Why should stage r begin with the last one?",
        ),
        Mistake(
            "one stage only",
            ("range(rank, ranks * stages_per_rank, ranks)", "range(rank, ranks, ranks)"),
            "no Forward of stage [4-7]",
            "a rank has two stages: r and r + p.",
        ),
        Mistake(
            "one pass too few",
            (
                "        for i in range(microbatches):\n            yield Forward",
                "        for i in range(1, microbatches):\n            yield Forward",
            ),
            r"no Forward of stage \d and microbatch 0",
            "microbatches are numbered from 0.",
        ),
    ),
    hints=(
        "Look at row 0 of the figure: which passes come before f0?",
        "Two nested loops, twice: the outer one is over the stages of the rank. Backward, the stages come in reverse.",
        "`for stage in stages:` `for i in range(microbatches):` `yield Forward(stage, i)`, and the same over "
        "`reversed(stages)` with `Backward`.",
    ),
)
