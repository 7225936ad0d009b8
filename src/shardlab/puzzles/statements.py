"""The eight puzzles: what to write, on how many ranks, and what to reach.

Targets are those of the LLM Training Puzzles (github.com/srush/LLM-Training-Puzzles, `Distributed.py`), which rounds
them; beside them stands what the solutions published there reach.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from textwrap import wrap

from shardlab.program import UserError
from shardlab.rules.pieces import counted


@dataclass(frozen=True, repr=False)
class Puzzle:
    """One puzzle.

    Attributes:
        number: 0 to 7.
        name: the strategy that it asks for, as `grade` takes it.
        title, text: what to write.
        ranks, layers, batches: the sizes that it is graded at.
        target_steps, target_memory: the published targets: when the last op starts, and the peak in elements.
        known_steps, known_memory: what the published solution reaches.
    """

    number: int
    name: str
    title: str
    text: str
    ranks: int
    layers: int
    batches: int
    target_steps: float
    target_memory: int
    known_steps: float
    known_memory: int

    @property
    def headline(self) -> str:
        """Number and title, and the sizes that it is graded at."""
        sizes = ((self.ranks, "rank"), (self.layers, "layer"), (self.batches, "microbatch"))
        return f"Puzzle {self.number}: {self.title} ({', '.join(counted(*size) for size in sizes)})"

    def __repr__(self) -> str:
        goal = f"Goal: {self.goal_steps:g} steps, {self.goal_memory:,} elements at most on a rank."
        return "\n".join([self.headline, *wrap(self.text, 80), goal, f'grade("{self.name}", my_solution)'])

    @property
    def goal_steps(self) -> float:
        """What a solution must reach: the target, but no more than is known to be possible."""
        return max(self.target_steps, self.known_steps)

    @property
    def goal_memory(self) -> int:
        """The same for memory."""
        return max(self.target_memory, self.known_memory)


PUZZLES = (
    Puzzle(
        0,
        "standard",
        "Standard training",
        "One rank trains on the whole batch at once: all layers forward, the loss, all layers backward, an update of "
        "every layer. Free each activation and each gradient as soon as nothing needs it.",
        *(1, 2, 4),
        *(17, 2_600_000),
        *(16.5, 2_621_440),
    ),
    Puzzle(
        1,
        "grad_accum",
        "Gradient accumulation",
        "One rank again, with less memory: run one microbatch after the other, add each weight gradient to those "
        "before it, and update once at the end.",
        *(1, 2, 4),
        *(17, 2_000_000),
        *(16.5, 1_966_080),
    ),
    Puzzle(
        2,
        "ddp",
        "Distributed data parallel",
        "Every rank holds all weights and runs the microbatch with its own number. `allreduce` sums the weight "
        "gradients of all ranks, so that every rank can make the same update.",
        *(4, 2, 4),
        *(5, 1_800_000),
        *(5.1, 1_835_008),
    ),
    Puzzle(
        3,
        "wsdp",
        "Weight-sharded data parallel",
        "As before, but a rank keeps only its own shard of each layer's weight and optimizer state. `allgather` puts a "
        "layer together when it is needed, forward and backward; gradients are still summed whole with `allreduce`.",
        *(4, 6, 4),
        *(20, 2_800_000),
        *(19.9, 2_752_512),
    ),
    Puzzle(
        4,
        "fsdp",
        "Fully sharded data parallel",
        "Now gradients are sharded too: `scatterreduce` sums a layer's gradient and leaves each rank the shard that it "
        "updates.",
        *(4, 6, 4),
        *(20, 2_300_000),
        *(19.9, 2_359_296),
    ),
    Puzzle(
        5,
        "pipeline",
        "Pipeline",
        "Each rank owns the same number of consecutive layers. Activations of the whole batch go to the next rank with "
        "`pass_to`, their gradients come back with it; ranks never meet all at once.",
        *(4, 8, 4),
        *(66, 3_300_000),
        *(66.9, 3_145_728),
    ),
    Puzzle(
        6,
        "gpipe",
        "GPipe",
        "Fill the pipeline's bubble: send one microbatch at a time, so that the next rank can begin early. First all "
        "microbatches forward, then all backward, then one update.",
        *(4, 8, 4),
        *(33, 4_100_000),
        *(33.3, 4_194_304),
    ),
    Puzzle(
        7,
        "pipeline_fsdp",
        "Pipeline and fully sharded data parallel",
        "Sixteen ranks, four layers: four pipelines of four ranks, each with a microbatch of its own. Rank r computes "
        "layer r mod 4, and every weight is cut into sixteen shards. All ranks meet for every layer, also those that "
        "do not compute it; `fake_grad(layer, [])` is the zero that they bring.",
        *(16, 4, 4),
        *(15, 1_000_000),
        *(15.5, 966_656),
    ),
)


def find(puzzle: int | str) -> Puzzle:
    """A puzzle by its number or name.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    for candidate in PUZZLES:
        if puzzle in (candidate.number, candidate.name, str(candidate.number)):
            return candidate
    near = difflib.get_close_matches(str(puzzle), [p.name for p in PUZZLES], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(f"{p.number} {p.name}" for p in PUZZLES)
    raise UserError(f"there is no puzzle {puzzle!r}; {hint}The puzzles are {names}")
