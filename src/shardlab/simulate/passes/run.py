"""Passes, one after the other: each candidate is checked and replayed, and the best is kept.

`run_passes` runs passes over a program and returns a `PassResult` for each. The `Goal` (prices and memory) decides
which program is better. If the ops that a pass starts early do not fit into memory, `crowding` finds those that are in
flight at the peak, and they are not moved. The table of all passes, `PASSES`, is at the end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.check import Checked, check
from shardlab.common.errors import Refused, UserError
from shardlab.language import Op, OpKind, Sizes, Spec
from shardlab.language.pass_names import PASS_NAMES, EarlyStart, Setting, named_passes
from shardlab.simulate.passes.bucket import arena, bucket
from shardlab.simulate.passes.fuse_steps import fuse_steps
from shardlab.simulate.passes.offload import offload
from shardlab.simulate.passes.reorder import (
    CannotApply,
    Tapes,
    defer,
    early_copies,
    early_receives,
    early_updates,
    gathers_ahead,
    prefetch,
    receives_ahead,
)
from shardlab.simulate.passes.tile import tile
from shardlab.simulate.timeline.costs import TEACHING_COSTS
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Clocks

GAIN = 1e-9
"""Smallest share of a step that a change must gain to be kept."""

MOST_TRIED = 24
"""Largest number of candidates of a pass, including those that start fewer ops early because memory is short."""


@dataclass(frozen=True)
class Goal:
    """Goal of passes: a faster program, or an equally fast one with less memory.

    Attributes:
        prices: times of ops.
        memory: largest number of bytes on a rank. If the program already needs more, passes must not raise its peak.
        kept_sizes: sizes of values as they lie in memory (None: those of the program).
        max_ops: largest number of ops to replay, summed over all candidates. Each pass has an equal share of it.
        least_gain: smallest share of a step that a pass must gain, if its setting is not given and it saves no memory.
    """

    prices: Prices = TEACHING_COSTS
    memory: float = math.inf
    kept_sizes: Sizes | None = None
    max_ops: float = math.inf
    least_gain: float = GAIN

    def of(self, checked: Checked) -> tuple[float, int]:
        """Return the end of a program's step, and the largest peak of a rank in bytes."""
        end = Clocks(checked, self.prices).run().end
        return end, max(memory.peak for memory in memory_in_bytes(checked, self.kept_sizes))


@dataclass(frozen=True)
class PassResult:
    """Result of a pass, or the program before the first pass.

    Attributes:
        name: name of the pass ("": the program before the first).
        checked: the program after the pass.
        end: end of the step, in the unit of the goal's prices.
        peak: bytes of the fullest rank at its peak.
        setting: the setting with which the pass has improved the program (None: it has not).
        why_not: a clause with the reason why the pass has not improved the program.
        applies: whether the pass had anything to do.
    """

    name: str
    checked: Checked
    end: float
    peak: int
    setting: Setting | None = None
    why_not: str = ""
    applies: bool = True

    def better(self, other: PassResult, memory: float) -> bool:
        """Return whether this program is faster than another, or equally fast with less memory.

        Args:
            other: the other program.
            memory: limit of the peak in bytes. If the other program exceeds the limit, its peak is the limit.
        """
        if self.peak > max(memory, other.peak):
            return False
        least_gain = GAIN * other.end
        return self.end < other.end - least_gain or (self.end <= other.end + least_gain and self.peak < other.peak)


def run_passes(checked: Checked, passes: Iterable[TapePass], goal: Goal | None = None) -> list[PassResult]:
    """Run passes over a program.

    After each pass, the program is at most as slow as before, fits into the memory (or has at most its old peak), and
    still runs on every backend on which it ran. If a pass has a given setting, only the last condition holds.

    Args:
        checked: the program.
        passes: passes in the order in which they run.
        goal: prices and memory (None: teaching costs and any memory).

    Returns:
        The original program, and the program after each pass.
    """
    goal, passes = goal or Goal(), list(passes)
    settings_per_pass = goal.max_ops / max(1, len(passes) * sum(map(len, checked.program.tapes)))
    results = [PassResult("", checked, *goal.of(checked))]
    for tape_pass in passes:
        previous = replace(results[-1], name=tape_pass.name, setting=None)
        try:
            best, why_not = _best(tape_pass, previous, goal, settings_per_pass)
            results.append(replace(best, why_not=why_not, applies=True))
        except CannotApply as reason:
            results.append(replace(previous, why_not=str(reason), applies=False))
    return results


def _best(tape_pass: TapePass, previous: PassResult, goal: Goal, max_settings: float) -> tuple[PassResult, str]:
    """Return the best candidate of a pass, or the unchanged program with the reason.

    Args:
        tape_pass: the pass.
        previous: the program.
        goal: prices and memory.
        max_settings: largest number of settings to try.
    """
    best, why_not = previous, "the program already does this" if tape_pass.settings else "it has no setting"
    settings = (
        tape_pass.settings
        if tape_pass.is_forced or max_settings >= len(tape_pass.settings)
        else tape_pass.settings[: int(max_settings)]
    )
    if tape_pass.settings and not settings:
        why_not = "the program has too many ops to try it"
    seen_tapes, queue = [previous.checked.program.tapes], deque(settings)
    while queue:
        setting = queue.popleft()
        tapes = tape_pass.rewrite(previous.checked, setting)
        if tapes in seen_tapes:
            continue
        seen_tapes.append(tapes)
        try:
            candidate = check(replace(previous.checked.program, tapes=tapes))
        except Refused as refused:
            if tape_pass.is_forced:
                raise UserError(f"the pass {tape_pass.name} makes a program that is refused: {refused}") from None
            why_not = f"the check refuses its result: {refused.rule}" if best is previous else ""
            continue
        if not set(previous.checked.backends()) <= set(candidate.backends()):
            why_not = "on a backend, ranks would wait for one another forever" if best is previous else ""
            continue
        result = PassResult(tape_pass.name, candidate, *goal.of(candidate), setting)
        if len(seen_tapes) < MOST_TRIED and (fewer := _fewer(tape_pass, previous, result, best, goal)):
            queue.appendleft(fewer)
        if tape_pass.is_forced or result.better(best, goal.memory):
            best, why_not = result, ""
        elif best is previous:
            faster = result.better(previous, math.inf)
            why_not = "every faster program takes more memory than there is" if faster else "no change is faster"
    if not tape_pass.is_forced and best.peak >= previous.peak and best.end > (1 - goal.least_gain) * previous.end:
        return previous, why_not or f"it gains less than {goal.least_gain:.0%}"
    return best, why_not


def _fewer(
    tape_pass: TapePass, previous: PassResult, candidate: PassResult, best: PassResult, goal: Goal
) -> EarlyStart | None:
    """Return a setting that starts fewer ops early than a candidate that is faster but needs too much memory.

    Returns None for any other candidate, or if there is no such setting.
    """
    too_large = candidate.peak > max(goal.memory, previous.peak)
    if tape_pass.is_forced or tape_pass.moves is None or not too_large or not candidate.better(best, math.inf):
        return None
    assert isinstance(candidate.setting, int | EarlyStart)
    setting = EarlyStart(candidate.setting) if isinstance(candidate.setting, int) else candidate.setting
    excluded = crowding(tape_pass.moves, previous.checked, candidate.checked, goal.kept_sizes) - setting.but
    return replace(setting, but=setting.but | excluded) if excluded else None


def run_named(checked: Checked, names: str, goal: Goal | None = None) -> list[PassResult]:
    """Run the passes that a text names (see `find_passes`).

    Returns:
        The original program, and the program after each pass.

    Raises:
        UserError: if a name is unknown, or a pass that is requested by name has nothing to do.
    """
    results = run_passes(checked, find_passes(names), goal)
    by_name = {tape_pass.name for tape_pass in named_passes(names) if tape_pass.by_name}
    for result in results:
        if not result.applies and result.name in by_name:
            raise UserError(f"the pass {result.name} has nothing to do: {result.why_not}; leave the pass out")
    return results


def apply_passes(checked: Checked, names: str) -> Checked:
    """Return a program after the passes that a text names, guided by teaching costs (see `run_named`)."""
    return run_named(checked, names)[-1].checked if names != "none" else checked


def helpful_results(results: Iterable[PassResult]) -> dict[str, PassResult]:
    """Return the original program (`as written`), and the program after each pass that has improved it.

    The key of a pass is its name and setting in the syntax of `find_passes`.
    """
    improved = (result for result in results if result.setting or not result.name)
    return {helpful_names([result]) if result.name else "as written": result for result in improved}


def helpful_names(results: Iterable[PassResult]) -> str:
    """Return the passes that were kept, in the syntax that `find_passes` parses, such as `prefetch=1,bucket=4`."""
    words = [
        f"{result.name}={result.setting}" if PASS_NAMES[result.name] else result.name
        for result in results
        if result.setting
    ]
    return ",".join(words) or "none"


def crowding(moves: Moves, original: Checked, rewritten: Checked, kept_sizes: Sizes | None = None) -> set[int]:
    """Return the ops that a pass has moved from after the peak of the fullest rank to before it.

    Args:
        moves: function that lists the ops of a tape that the pass starts early.
        original, rewritten: the program before and after the pass.
        kept_sizes: sizes of values as they lie in memory (None: those of the program).

    Returns:
        Positions of these ops in the list that `moves` returns.
    """
    peaks = memory_in_bytes(rewritten, kept_sizes)
    rank = max(range(len(peaks)), key=lambda rank: peaks[rank].peak)
    old, new, at_peak = original.program.tapes[rank], rewritten.program.tapes[rank], peaks[rank].peak_op
    place = {op.handle: index for index, op in enumerate(new) if op.handle >= 0 and op.kind is not OpKind.WAIT}
    old_peak = old.index(new[at_peak])
    started = moves(old, original.specs[rank])
    return {number for number, index in enumerate(started) if index > old_peak and place[old[index].handle] <= at_peak}


Moves = Callable[[Sequence[Op], Mapping[int, Spec]], list[int]]
"""Function of (tape, specs of its values) that lists the indices of some ops."""


@dataclass(frozen=True)
class TapePass:
    """Pass over tapes.

    Attributes:
        name: name on the command line.
        does: its effect, in a few words.
        rewrite: function of (program, setting) that returns new tapes. The function raises `CannotApply` if the pass
            has nothing to do.
        settings: settings of which the best is taken (empty: the pass only runs with a given setting).
        is_forced: whether the setting was given. Its candidate is then taken even if it is slower or needs more memory.
        moves: function that lists the ops that the pass starts early. If a candidate needs too much memory, the pass is
            tried again without moving some of these ops (None: it is not tried again).
    """

    name: str
    does: str
    rewrite: Callable[[Checked, Any], Tapes]
    settings: tuple[Setting, ...] = (1, 2, 4, 8)
    is_forced: bool = False
    moves: Moves | None = None

    @property
    def means(self) -> str:
        """Meaning of the pass's setting ("": the pass has no setting)."""
        return PASS_NAMES[self.name]


PASSES = {
    tape_pass.name: tape_pass
    for tape_pass in (
        TapePass("tile", "computes large layers in tiles, one after the other", tile, ()),
        TapePass("offload", "keeps what is needed later in the host's memory or on the disk", offload, ()),
        TapePass("prefetch", "gathers weights ahead of their use", prefetch, moves=gathers_ahead),
        TapePass("receive-early", "posts receives before they are needed", early_receives, moves=receives_ahead),
        TapePass("bucket", "merges small collectives into buckets", bucket, (1, 2, 4, 8, 16, 32)),
        TapePass("defer", "awaits reductions of gradients late", defer),
        TapePass("update-early", "updates a layer as soon as its gradient is final", early_updates, (1,)),
        TapePass("fuse-steps", "runs the next step's first gathers at the end of this step", fuse_steps),
        TapePass("copy-early", "overlaps copies to the host or the disk, and back", early_copies),
        TapePass("arena", "puts buffers into one allocation, made once", arena, (1,)),
    )
}
"""All passes by name, in the order in which they run, which is that of `shardlab.language.pass_names`."""


def find_passes(text: str) -> list[TapePass]:
    """Return the passes that a text names (see `named_passes`).

    Raises:
        UserError: if a name is unknown, or a setting is not one that its pass accepts.
    """
    return [
        PASSES[name] if setting is None else replace(PASSES[name], settings=(setting,), is_forced=True)
        for name, setting, _ in named_passes(text)
    ]
