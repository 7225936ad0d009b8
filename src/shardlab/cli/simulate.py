"""`shardlab simulate STRATEGY`: check a strategy, and say how long a step takes and how much memory it needs."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Any

from shardlab.check import ChannelModel, Checked
from shardlab.cli.options import Count, Flag, NewFile, Ranks, StrategyName
from shardlab.cli.picture import check_picture, save_picture
from shardlab.cli.report import print_report
from shardlab.cli.strategy import checked
from shardlab.simulate import Timeline, simulate
from shardlab.strategies.load import load


@dataclass(frozen=True)
class Simulate:
    """Check a strategy, and time it in the unit costs of the LLM Training Puzzles.

    One microbatch through one layer takes 1, an update 0.5, a collective 0.3, a send or a receive 0.2.
    """

    strategy: StrategyName
    """A built-in name, or path/to/file.py:function."""

    ranks: Ranks = None
    """How many ranks."""

    layers: Count = 4
    """How many layers the model has."""

    microbatches: Count = 4
    """How many microbatches the global batch has."""

    svg: NewFile = None
    """Draw the timeline into this file."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        check_picture(self.svg)
        entry = load(self.strategy)
        proof = checked(entry, self.ranks or entry.ranks, self.layers, self.microbatches)
        timeline = simulate(proof)
        save_picture(timeline, self.svg, entry.name)
        if self.json:
            print(json_format.dumps(as_json(entry.name, proof, timeline), indent=2))
        else:
            print_report(entry.name, proof, timeline, self.svg)
        return 0


def as_json(name: str, proof: Checked, timeline: Timeline) -> dict[str, Any]:
    """What is known of a strategy, for other programs."""
    program = proof.program
    return {
        "strategy": name,
        "ranks": program.ranks,
        "mesh": {axis: size for axis, size in program.mesh.sizes().items() if size > 1},
        "layers": program.layers,
        "microbatches": program.microbatches,
        "steps": timeline.steps,
        "end": timeline.end,
        "peak_memory": timeline.peak_memory,
        "peak_memory_by_rank": timeline.peak_memory_by_rank,
        "ops": sum(map(len, program.tapes)),
        "channel_models": {model.value: proof.models[model] is None for model in ChannelModel},
        "deadlocks": {model.value: why for model, why in proof.models.items() if why is not None},
        "backends": proof.backends(),
    }
