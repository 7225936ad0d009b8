"""`shardlab plan --recipe NAME --write FOLDER`: write the chosen plan as files of the recipe's framework."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.cli.console import Report, print_path
from shardlab.cli.options import check_new_file, writing
from shardlab.common.errors import UserError

if TYPE_CHECKING:
    from shardlab.frameworks.writers.write import Written
    from shardlab.planner.choose import PlanChoice
    from shardlab.planner.problem import Problem


def check_folder(folder: Path, problem: Problem, *, force: bool) -> None:
    """Check before the search that the files of the recipe's framework can be written into a folder.

    Raises:
        UserError: if Shardlab writes no files for the recipe's framework, if the folder is a file or its parent does
            not exist, or if a file would be overwritten that Shardlab did not write.
    """
    from shardlab.frameworks.writers.write import WRITERS, framework_of

    framework = framework_of(problem.recipe)
    if folder.is_file():
        raise UserError(f"--write {folder}: this is a file; give a folder, which is made if it does not exist")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise UserError(f"--write {folder}: the folder {folder.parent} does not exist; make it first")
    if folder.exists():
        for writer in WRITERS[framework]:
            *others, last = writer.files
            check_new_file("--write", folder / last, last, force=force)
            if not (folder / last).is_file():  # the mark in it counts for all files, since JSON has no comments
                for name in others:
                    check_new_file("--write", folder / name, name, force=force)


def write_files(folder: Path, choice: PlanChoice, model: str) -> Written:
    """Write the chosen plan as the files of its recipe's framework.

    Raises:
        UserError: if a file cannot be written.
    """
    from shardlab.frameworks.writers.write import write_step

    files = write_step(choice.problem.workload(choice.best.candidate), model)
    with writing("--write", folder):
        folder.mkdir(exist_ok=True)
        for name, text in files.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return files


def add_written(report: Report, folder: Path, files: Written) -> None:
    """Add the written files to a report, and the settings that they cannot express."""
    report.facts("not said", files.unsaid)
    for name in files.texts:
        report.draw(partial(print_path, label="written to", path=folder / name))
    report.data["written"] = {"files": [str(folder / name) for name in files.texts], "unsaid": files.unsaid}
