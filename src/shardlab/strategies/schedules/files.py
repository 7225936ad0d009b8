"""Files of a schedule for one size of pipeline, which `shardlab train --schedule` and `simulate` read."""

from __future__ import annotations

from shardlab.strategies.schedules.pytorch_csv import export_csv
from shardlab.strategies.schedules.steps import Steps


def schedule_files(steps: Steps) -> dict[str, str]:
    """Return a schedule as files that `shardlab train --schedule` reads: file names with their texts. The CSV files are
    in PyTorch's formats.
    """
    rows = export_csv(steps, form="compute_only").splitlines()
    program = PROGRAM.format(
        rows="".join(f'    "{row.replace(",", " ")}",\n' for row in rows),
        ranks=", ".join(map(str, steps.ranks_of_stages)),
        each=steps.stages // len(steps.of_ranks),
        sizes=f"{len(steps.of_ranks)} ranks and {steps.microbatches} microbatches",
    )
    return {
        "schedule.csv": export_csv(steps, form="compute_only"),
        "schedule-with-messages.csv": export_csv(steps, form="compute_comms"),
        "schedule.py": program,
    }


PROGRAM = '''"""Pipeline schedule for {sizes}: --schedule schedule.py:edited."""

from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward, Schedule

KINDS = {{"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}}
RANKS_OF_STAGES = ({ranks},)
ACTIONS = (
{rows})


def actions(rank, ranks, microbatches, stages_per_rank):
    for word in ACTIONS[rank].split():
        kind = next(letter for letter in word if letter in KINDS)
        stage, microbatch = map(int, word.split(kind))
        yield KINDS[kind](stage, microbatch)


edited = Schedule("edited", actions, placement=lambda stage, ranks: RANKS_OF_STAGES[stage], stages_per_rank={each})
'''
