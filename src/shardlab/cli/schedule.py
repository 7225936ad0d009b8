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
    """Write a pipeline schedule as PyTorch's CSV: a row for each rank, a cell for each thing that it does.

    `shardlab simulate --schedule FILE.csv`, and verify and train, take such files as schedules.
    """

    schedule: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCHEDULE")]
    """A built-in name, path/to/file.py:generator, or a CSV to be checked and written in another form."""

    pp: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """Pipeline ranks."""

    microbatches: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4, or the file's)")] = None
    """How many microbatches a step has."""

    stages_per_rank: OptionalCount = None
    """Stages on each rank, of a schedule that leaves the choice."""

    max_ops: MaxOps = None
    """Passes at most, messages not counted."""

    max_seconds_per_op: MaxSeconds = None
    """CPU time until the schedule's next pass: more is refused, as that of a loop that never ends."""

    form: Form = "compute_comms"
    """Passes alone, or also messages and the steps of sharded stages."""

    csv: NewFile = None
    """Write into this file, rather than to the terminal."""

    force: Flag = False
    """Replace a file that has something else in it."""

    json: Flag = False
    """Print JSON alone."""

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
