"""Exercise 19: V-Half, half the memory of 1F1B.

    building block of V-Half on 4 ranks, in slots (I: input half of the backward pass)

    slot      0         5         10        15        20        25
    rank 0    F . . . . . . . . . F . . . I . . . . . . . . . . I
    rank 1    . . F . . . . . . F . . . . . . I . . . . . . . I .
    rank 2    . . . . F . . . F . . . . . . . . . I . . . . I . .
    rank 3    . . . . . . F F . . . . . . . . . . . . I . I . . .

In 1F1B rank 0 holds p microbatches: each goes down p ranks and up again before it is
back. Put the stages into a V instead: rank r has stage r and stage 2p - 1 - r. Then
each rank has a stage whose activations live long and one whose activations live for a
short time.

A schedule can be made from the timetable of one microbatch, its *building block*. Start
a microbatch every 6 slots, since a rank makes 6 passes for each (F, I and W in two
stages). Then a stage holds one microbatch for every 6 slots between its F and its I, so
the block sets the memory: (p + 2) // 2 microbatches on all ranks (Qi et al. 2024, arXiv
2405.15362, fig. 4).

Write the slots of a rank's four passes, and put the weight halves into free slots:

1. No two passes of a rank may meet, whatever multiple of 6 lies between them.
2. A microbatch that goes down one slot a rank has no time for its messages. So the
   first F go down two slots a rank, the second F come up one, and the I do the same.
3. A weight half goes into the first free slot after its input half.

In the start, a microbatch takes one slot a rank, and weight halves come at the end. The
paper also moves passes of the warm-up and the end into gaps; you need not.
"""

from collections.abc import Iterator

from shardlab.language import Mesh, OpKind
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import in_flight_at_most, uses
from shardlab.strategies.schedules import Action, BackwardInput, BackwardWeight, Forward, Schedule, vee


def block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Return the slots of microbatch 0: of F in stages r and 2p - 1 - r, then of I in stages 2p - 1 - r and r."""
    # BEGIN SOLUTION
    gap = 3 if ranks % 2 == 0 else 0  # without it, passes would meet
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2
    # START
    # return rank, 2 * ranks - rank - 1, 2 * ranks + rank, 4 * ranks - rank - 1
    # END SOLUTION


def actions(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    down_stage, up_stage = rank, 2 * ranks - 1 - rank
    timetable: dict[int, Action] = {}
    for i in range(microbatches):
        passes = Forward(down_stage, i), Forward(up_stage, i), BackwardInput(up_stage, i), BackwardInput(down_stage, i)
        timetable.update({slot + 6 * i: action for slot, action in zip(block(rank, ranks), passes, strict=True)})

    halves: list[Action] = []
    # BEGIN SOLUTION
    for slot in range(max(timetable) + 1):
        if slot in timetable:
            action = timetable[slot]
            yield action
            if isinstance(action, BackwardInput):
                halves.append(BackwardWeight(action.stage, action.microbatch))
        elif halves:
            yield halves.pop(0)
    # START
    # for slot in sorted(timetable):
    #     action = timetable[slot]
    #     yield action
    #     if isinstance(action, BackwardInput):
    #         halves.append(BackwardWeight(action.stage, action.microbatch))
    # END SOLUTION
    yield from halves


v_half = Schedule("v_half", actions, placement=vee, stages_per_rank=2)


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=19,
    name="v_half",
    title="V-Half, half the memory of 1F1B",
    goals=Goals("time: the reference solution; memory: arXiv 2405.15362", 87.720003, 3_145_728, 6_291_458),
    mesh=Mesh(pp=4),
    kind="schedule",
    layers=8,
    microbatches=12,
    stages_per_rank=2,
    techniques=(
        in_flight_at_most(3, "{found} microbatches in flight; V-Half has at most (p + 2) // 2, here 3."),
        uses(OpKind.BACKWARD_WEIGHT, "the backward passes are not split into halves."),
    ),
    mistakes=(
        Mistake(
            "the input halves wait for a period too long",
            ("6 * ranks + gap - rank - 2", "6 * ranks + gap - rank + 10"),
            "in flight",
            "the longer a microbatch is under way, the more of them are there. When could this input half be made?",
        ),
        Mistake(
            "the last slot is left out",
            ("range(max(timetable) + 1)", "range(max(timetable))"),
            "no Backward or BackwardInput of .*microbatch 11",
            "the last pass of the timetable is missing. Does the loop reach its slot?",
        ),
        Mistake(
            "passes meet in a slot",
            ("gap = 3 if ranks % 2 == 0 else 0", "gap = 0"),
            "no (Forward|Backward or BackwardInput) of",
            "look at the slots of a rank modulo 6: two passes in one slot, and one of them is lost.",
        ),
        Mistake(
            "one slot a rank",
            (
                "2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2",
                "rank, 2 * ranks - rank - 1, 2 * ranks + rank, 4 * ranks - rank - 1",
            ),
            "^too slow[^;]*$",
            "a message takes time: does the block leave a slot for it between two ranks? And does a weight half ever "
            "come before a pass whose slot it is?",
        ),
        Mistake(
            "all weight halves come last",
            ("        elif halves:\n            yield halves.pop(0)\n", ""),
            "too much memory.*activations",
            "a microbatch's activations live until its weight halves are done. The block has free slots for them.",
        ),
        Mistake(
            "the last weight halves are missing",
            ("            yield halves.pop(0)\n    yield from halves\n", "            yield halves.pop(0)\n"),
            "no Backward or BackwardWeight",
            "after the last slot of the timetable some weight halves still wait.",
        ),
        Mistake(
            "the stages form a loop",
            ("placement=vee, ", ""),
            "but that rank has stage",
            "without a placement, stage s is on rank s % p. In a V, rank r has the stages r and 2p - 1 - r.",
        ),
    ),
    hints=(
        "Write down the four slots of rank 0 and of rank 3 from the figure, for p = 4, and each of them modulo 6.",
        "The slots are linear in r: 2r, then 3p - 2 - r, and the input halves 2r and -r after where these begin. The "
        "figure has p = 4, where the input halves start 3 slots later than for an odd p, because passes would meet.",
        "`gap = 3 if ranks % 2 == 0 else 0`; `return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, "
        "6 * ranks + gap - rank - 2`. Then go through all slots: an action of the timetable, or else a weight half "
        "that waits.",
    ),
)
