"""Figures of a planner's choice: its step, speed and memory, and what its critical path is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.planner.reasons import TELLING
from shardlab.predict.held import left_out
from shardlab.timeline.units import bytes_text, room_text, seconds_text, share_text, unit_of

if TYPE_CHECKING:
    from shardlab.planner.chosen import PlanChoice

BAR = 40
"""Characters of the memory's bar."""

SIGNS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "gathered": "g",
    "communication": "c",
}
"""A letter of the bar for each category of memory; what else is held is `+`."""


def figures(choice: PlanChoice) -> list[tuple[str, str, str]]:
    """The chosen plan's figures, each with its name and words beside it."""
    problem, best = choice.problem, choice.best
    workload, memory = problem.workload(best.candidate), best.forecast.memory
    room, shares = problem.cluster.device.memory, choice.answer.shares
    speed, of_room = problem.tokens / best.seconds, f"of {room_text(room)} on the fullest device"
    return [
        ("step time", seconds_text(best.seconds), str(shares or choice.unknown)),
        ("tokens/s", f"{speed:,.0f}", f"{speed / problem.cluster.size:,.0f} on each device"),
        ("MFU", share_text(workload.mfu(best.seconds)), f"of {problem.cluster.device.name}'s peak"),
        ("memory", bytes_text(memory.total), "; ".join(filter(None, (of_room, left_out(workload))))),
    ]


def memory_bar(choice: PlanChoice) -> str:
    """The fullest device's memory by category, and the amounts."""
    memory, room = choice.best.forecast.memory, choice.problem.cluster.device.memory
    peak = max(choice.best.forecast.peaks, key=lambda peak: peak.bytes)
    shares = sorted(peak.by_category.items(), key=lambda item: -item[1])
    shares.append(("beyond tensors", max(0, int(memory.total - peak.bytes))))
    bar = "".join(SIGNS.get(name, "+") * round(bytes / room * BAR) for name, bytes in shares)[:BAR]
    _, size = unit_of(peak.bytes)
    words = [f"{SIGNS.get(name, '+')} {name} {bytes / size:,.1f}" for name, bytes in shares if bytes >= 0.05 * size]
    return f"[{bar:·<{BAR}}] {', '.join(words)}"


def path_text(path: dict[str, float]) -> str:
    """The parts of a step's critical path, each with its share."""
    step = sum(path.values())
    shown = [f"{name} {seconds / step:.1%}" for name, seconds in path.items() if seconds >= TELLING * step]
    rest = 1 - sum(seconds for seconds in path.values() if seconds >= TELLING * step) / step
    return ", ".join([*shown, *([f"others {rest:.1%}"] if rest >= 0.0005 else [])])
