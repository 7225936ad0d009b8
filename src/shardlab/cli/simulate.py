"""`shardlab simulate STRATEGY`: check a strategy, and say how long a step takes and how much memory it needs."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Any

from shardlab.check import ChannelModel, Checked
from shardlab.cli.costs import CostsText, costs_of
from shardlab.cli.options import Count, Flag, Layers, NewFile, Ranks, StrategyName
from shardlab.cli.picture import check_new_file, save_picture
from shardlab.cli.plan_options import NO_FLAGS, Layout
from shardlab.cli.report import print_report
from shardlab.cli.strategy import checked
from shardlab.simulate import UNIT_COSTS, Timeline, bubble, simulate
from shardlab.strategies.entry import Entry


@dataclass(frozen=True)
class Simulate:
    """Check a strategy, and time it in the unit costs of the LLM Training Puzzles, or in those of --costs.

    One microbatch through one layer takes 1, an update 0.5, a collective 0.3, a send or a receive 0.2.
    """

    strategy: StrategyName = None
    """A built-in name, or path/to/file.py:function; or none, for a plan by flags or --plan."""

    ranks: Ranks = None
    """How many ranks."""

    layers: Layers = None
    """How many layers the model has."""

    microbatches: Count = 4
    """How many microbatches the global batch has."""

    costs: CostsText = None
    """What ops take; those left out take no time. An unsplit backward takes backward_input + backward_weight, and a
    send's time is its link's, which carries any number of messages at once."""

    svg: NewFile = None
    """Draw the timeline into this file."""

    json: Flag = False
    """Print JSON alone."""

    layout: Layout = NO_FLAGS

    def run(self) -> int:
        check_new_file("--svg", self.svg, "timeline.svg")
        costs = costs_of(self.costs) if self.costs is not None else UNIT_COSTS
        entry, ranks = self.layout.entry(self.strategy, self.ranks)
        layers = self.layers or entry.default_layers(ranks, at_least=1 if self.costs else 4)
        proof = checked(entry, ranks, layers, self.microbatches)
        timeline = simulate(proof, costs)
        save_picture(timeline, self.svg, entry.name)
        if self.json:
            print(json_format.dumps(as_json(entry, proof, timeline), indent=2))
        else:
            print_report(entry.name, proof, timeline, self.svg)
        return 0


def as_json(entry: Entry, proof: Checked, timeline: Timeline) -> dict[str, Any]:
    """What is known of a strategy, for other programs."""
    program = proof.program
    return {
        "strategy": entry.name,
        **({"plan": entry.plan(program.ranks).as_dict()} if entry.plan else {}),
        "ranks": program.ranks,
        "mesh": {axis: size for axis, size in program.mesh.sizes().items() if size > 1},
        "layers": program.layers,
        "microbatches": program.microbatches,
        "steps": timeline.steps,
        "end": timeline.end,
        "bubble": bubble(timeline),
        "peak_memory": timeline.peak_memory,
        "peak_memory_by_rank": timeline.peak_memory_by_rank,
        "ops": sum(map(len, program.tapes)),
        "channel_models": {model.value: proof.models[model] is None for model in ChannelModel},
        "deadlocks": {model.value: why for model, why in proof.models.items() if why is not None},
        "backends": proof.backends(),
    }
