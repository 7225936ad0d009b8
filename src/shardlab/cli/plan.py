"""`shardlab plan --grade RUNS.json`: how good the choices are that predictions make among measured runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardlab.cli.grade_report import print_grades
from shardlab.cli.options import Flag
from shardlab.cli.recipe_option import RecipeName, recipe_called


@dataclass(frozen=True)
class PlanCommand:
    """Grade the choices that predictions make among configurations that others have measured.

    Of every model and number of devices in the file, the configuration that is predicted fastest is chosen among those
    that leave the recipe's margin of memory free; its measured speed is compared with the best one's.
    """

    grade: Annotated[Path, tyro.conf.arg(metavar="RUNS.json", help_behavior_hint="")]
    """A JSON list of runs, as `shardlab validate` takes them."""

    recipe: RecipeName = None

    json: Flag = False
    """Print JSON alone: every run with what is predicted and measured, and every cell with its choice."""

    def run(self) -> int:
        print_grades(self.grade, None if self.recipe is None else recipe_called(self.recipe), json=self.json)
        return 0
