"""`shardlab schedule NAME`: a pipeline schedule as the CSV that PyTorch's pipelining reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from shardlab.cli.console import print_json
from shardlab.cli.new_file import check_new_file, writing
from shardlab.cli.options import Flag, MaxOps, MaxSeconds, NewFile, OptionalCount
from shardlab.program import Mesh
from shardlab.program.files import write_whole
from shardlab.rules.pieces import counted
from shardlab.strategies.plan import Plan
from shardlab.strategies.schedules.csv_schedule import Form, csv_of_steps
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.steps import Steps


@dataclass(frozen=True)
class ScheduleCommand:
    """Write a pipeline schedule as a CSV file of PyTorch: a row for each rank, a cell for each action.

    simulate, verify and train accept such files, as in `shardlab simulate --schedule FILE.csv`.
    """

    schedule: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCHEDULE")]
    """Built-in name, path/to/file.py:generator, or a CSV file to check and write in another form."""

    pp: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """Number of pipeline ranks."""

    microbatches: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """Number of microbatches in a step."""

    stages_per_rank: OptionalCount = None
    """Stages on each rank, for a schedule without a fixed number."""

    max_ops: MaxOps = None
    """Refuse a schedule with more passes. Messages do not count."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a schedule that needs more CPU time until its next pass, because it may loop forever."""

    form: Form = "compute_comms"
    """Write only the passes, or also the messages and the actions of sharded stages."""

    csv: NewFile = None
    """Write into this file instead of the terminal."""

    force: Flag = False
    """Replace a file with other contents."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        check_new_file("--csv", self.csv, "schedule.csv", force=True)  # its folder, before any work
        steps = self.steps()
        text = csv_of_steps(steps, form=self.form)
        check_new_file("--csv", self.csv, "schedule.csv", force=self.force, content=text.encode())
        if self.csv is not None:
            with writing("--csv", self.csv):
                write_whole(self.csv, text)
        if self.json:
            facts = {
                "schedule": self.schedule,
                "ranks": len(steps.of_ranks),
                "microbatches": steps.microbatches,
                "stages": steps.stages,
                "form": self.form,
                "rows": [row.split(",") for row in text.splitlines()],
            }
            print_json(facts)
        elif self.csv is None:
            print(text, end="")
        else:
            print(
                f"{self.csv}: {self.schedule} for {counted(len(steps.of_ranks), 'rank')}, "
                f"{counted(steps.stages, 'stage')} and {counted(steps.microbatches, 'microbatch')}, "
                f"{text.count(',') + text.count(chr(10))} steps"
            )
        return 0

    def steps(self) -> Steps:
        """The schedule made out for the sizes that were asked for.

        Raises:
            UserError: if there is no such schedule, or it does not have these sizes.
        """
        order = find_schedule(self.schedule)
        ranks, microbatches = (len(order.of_ranks), order.microbatches) if isinstance(order, Steps) else (4, 4)
        plan = Plan(Mesh(pp=self.pp or ranks), self.schedule, self.stages_per_rank)
        return plan.steps(plan.natural_layers(), self.microbatches or microbatches)
