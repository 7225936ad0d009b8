"""An exercise of the course: its statement, its goals, typical mistakes, and the files generated from its module.

Every exercise is one Python module of `exercises/` or `gallery/`. The module is the reference solution. The texts for
students are made from its source:

- its docstring is the statement: one screen, with a figure in ASCII;
- `file_text` returns the file of a student. At the start, each region between `# BEGIN SOLUTION` and `# END SOLUTION`
  is replaced by the lines after `# START` in that region, without their `# `, or else by `# Your code here.`;
- what follows `# END OF THE EXERCISE` is for the grader, and students do not see it: `EXERCISE`, an `Exercise`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardlab.check import Checked
from shardlab.language import Mesh, Sizes

Technique = Callable[[Checked], str]
"""Function that returns "" if a program uses the required technique, or else one sentence for the student."""

Kind = Literal["rank", "schedule", "plan"]
"""Form of a solution: a program of a `Rank`, a pipeline schedule, or a function that returns a `Plan`."""


@dataclass(frozen=True)
class Goals:
    """Largest figures with which a solution passes, in teaching costs or on a cluster (`Exercise`). None: no limit.

    Attributes:
        source: origin of the goals: a paper with its section or equation, or "the reference solution".
        time: end of the step.
        memory: largest number of live elements on any rank.
        sent: largest number of elements that any rank sends.
    """

    source: str
    time: float | None = None
    memory: int | None = None
    sent: int | None = None


@dataclass(frozen=True)
class Mistake:
    """A typical mistake.

    Attributes:
        name: the mistake in a few words, such as "the gradients are not reduced".
        edit: text of the solution, and the text that replaces it in a program with this mistake. A test applies it.
        shows: regular expression that the verdict on such a program matches: the refusal of the check, the sentence of
            a technique, or "time", "memory" or "sent" for a goal that is not reached.
        advice: what to look at next, without the solution.
    """

    name: str
    edit: tuple[str, str]
    shows: str
    advice: str


@dataclass(frozen=True)
class Exercise:
    """An exercise.

    Attributes:
        number: position in the course; a bug of the gallery has a number from 101 on.
        name: name of the function that the student writes, and of the file.
        title: title in a few words.
        goals: figures to reach.
        mistakes: typical mistakes, at least four (in the gallery: one, the bug).
        hints: three hints, each of which says more than the one before.
        mesh: device mesh on which a solution is graded.
        techniques: functions that check whether a solution uses the required techniques.
        kind: whether the solution is a program, a schedule or a plan.
        layers: number of layers of the puzzles' model, or sizes of another model.
        microbatches: number of microbatches of the global batch.
        stages_per_rank: pipeline stages of each rank, for a schedule.
        puzzle: name of the LLM Training Puzzle with the same task, whose published figures are shown as well ("":
            none).
        seen_in: report of a bug of the gallery, such as "NVIDIA/Megatron-LM#1446".
        model, cluster: names of model and cluster for `shardlab plan`, if plans are predicted on a cluster. Goals are
            in seconds and bytes then, a microbatch is one sequence, and no technique is required ("": solutions are
            simulated in teaching costs).
    """

    number: int
    name: str
    title: str
    goals: Goals
    mistakes: tuple[Mistake, ...]
    hints: tuple[str, str, str]
    mesh: Mesh
    techniques: tuple[Technique, ...] = ()
    kind: Kind = "rank"
    layers: int | Sizes = 4
    microbatches: int = 4
    stages_per_rank: int = 1
    puzzle: str = ""
    seen_in: str = ""
    model: str = ""
    cluster: str = ""

    @property
    def trains(self) -> bool:
        """Whether a small GPT can be trained with a solution, by `shardlab learn run`."""
        return not self.cluster and (isinstance(self.layers, int) or not self.layers.tied)


END = "# END OF THE EXERCISE"
BEGIN_SOLUTION, START, END_SOLUTION = "# BEGIN SOLUTION", "# START", "# END SOLUTION"


def file_text(module: str, *, solved: bool) -> str:
    """Return a student's file, from the text of an exercise's module.

    Args:
        solved: whether the file has the reference solution, rather than the lines with which a student starts.
    """
    lines: list[str] = []
    solution, start = False, False  # whether the line is in a solution, and whether it is after its `# START`
    lines_before = 0  # number of lines before this solution
    for line in module.partition(END)[0].rstrip().splitlines():
        mark = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if mark == BEGIN_SOLUTION:
            solution, lines_before = True, len(lines)
        elif solution and mark == END_SOLUTION:
            if not solved and len(lines) == lines_before:
                lines.append(f"{indent}# Your code here.")
            solution = start = False
        elif solution and mark == START:
            start = True
        elif not solution or (solved and not start):
            lines.append(line)
        elif start and not solved:
            lines.append((indent + line.lstrip().removeprefix("#").removeprefix(" ")).rstrip())
    return _without_imports_of_the_grader("\n".join(lines) + "\n", module)


def _without_imports_of_the_grader(text: str, module: str) -> str:
    """Return a student's file without the names that only the grader's part of the module uses.

    The start keeps names that only the solution uses, because the student will need them.
    """
    lines = text.splitlines(keepends=True)
    program = ast.parse(module.partition(END)[0])
    used_names = {node.id for node in ast.walk(program) if isinstance(node, ast.Name)}
    for node in reversed([node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]):
        grader = (node.module or "").startswith("shardlab.learn.course")
        names = [] if grader else [name.name for name in node.names if name.name in used_names]
        if names != [name.name for name in node.names]:
            line = [f"from {node.module} import {', '.join(names)}\n"] if names else []
            lines[node.lineno - 1 : node.end_lineno] = line
    return re.sub(r'(?<=""")\n{3,}', "\n\n", "".join(lines), count=1)
