"""Passes one after the other: each candidate is checked and replayed, and the best one is kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.check import Checked, check
from shardlab.common.errors import Refused, UserError
from shardlab.language import Op, OpKind, Sizes, Spec
from shardlab.language.pass_names import PASS_NAMES, Ahead, Setting, named_passes
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
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.simulate.timeline.prices import UNIT_COSTS, Prices
from shardlab.simulate.timeline.run import Clocks

GAIN = 1e-9
"""A share of the step: what gains less is left as it is."""

MOST_TRIED = 24
"""Programs that a pass makes of one at most, where memory has no room for all that it starts early."""


@dataclass(frozen=True)
class Goal:
    """What makes a program better than another: it is faster, or as fast with less memory.

    Attributes:
        prices: how long things take.
        memory: bytes of a rank that must not be exceeded; a program that needs more already must not need more still.
        kept: how large values are in memory, if not as traced.
        most: ops of rewritten programs that are looked at; passes share them evenly.
        least: the share of a step that a pass must gain whose number is not given, if it saves no memory.
    """

    prices: Prices = UNIT_COSTS
    memory: float = math.inf
    kept: Sizes | None = None
    most: float = math.inf
    least: float = GAIN

    def of(self, checked: Checked) -> tuple[float, int]:
        """When a program's step ends, and the bytes of its fullest rank."""
        end = Clocks(checked, self.prices).run().end
        return end, max(memory.peak for memory in memory_in_bytes(checked, self.kept))


@dataclass(frozen=True)
class Passed:
    """A program after a pass, or before the first.

    Attributes:
        name: of the pass ("": there was none yet).
        checked: the program.
        end: when its step ends.
        peak: bytes of its fullest rank.
        setting: with which the pass has found a better one (None: it has found none).
        why_not: why it has found none, in half a sentence.
        applies: whether it had anything to do.
    """

    name: str
    checked: Checked
    end: float
    peak: int
    setting: Setting | None = None
    why_not: str = ""
    applies: bool = True

    def better(self, other: Passed, memory: float) -> bool:
        """Whether this is to be preferred to another."""
        if self.peak > max(memory, other.peak):
            return False
        least = GAIN * other.end
        return self.end < other.end - least or (self.end <= other.end + least and self.peak < other.peak)


def run_passes(checked: Checked, passes: Iterable[TapePass], goal: Goal | None = None) -> list[Passed]:
    """Run passes over a program.

    No pass makes it slower, takes more memory than allowed, or makes it unfit for a backend on which it ran; one whose
    number was given may do the first two.

    Returns:
        The program as it was, and as each pass left it.
    """
    goal, passes = goal or Goal(), list(passes)
    each_most = goal.most / max(1, len(passes) * sum(map(len, checked.program.tapes)))
    found = [Passed("", checked, *goal.of(checked))]
    for each in passes:
        before = replace(found[-1], name=each.name, setting=None)
        try:
            best, why_not = _best(each, before, goal, each_most)
            found.append(replace(best, why_not=why_not, applies=True))
        except CannotApply as reason:
            found.append(replace(before, why_not=str(reason), applies=False))
    return found


def _best(each: TapePass, before: Passed, goal: Goal, most: float) -> tuple[Passed, str]:
    """The best that a pass makes of a program by so many of its settings; or the program as it was, and why."""
    best, why_not = before, "the program is so already" if each.tried else "it is not told what to do"
    settings = each.tried if each.chosen or most >= len(each.tried) else each.tried[: int(most)]
    if each.tried and not settings:
        why_not = "the program has too many ops to try it"
    tried, waiting = [before.checked.program.tapes], deque(settings)
    while waiting:
        setting = waiting.popleft()
        tapes = each.rewrite(before.checked, setting)
        if tapes in tried:
            continue
        tried.append(tapes)
        try:
            candidate = check(replace(before.checked.program, tapes=tapes))
        except Refused as refused:
            if each.chosen:
                raise UserError(f"the pass {each.name} makes of this program one that is refused: {refused}") from None
            why_not = f"the check refuses what it makes: {refused.rule}" if best is before else ""
            continue
        if not set(before.checked.backends()) <= set(candidate.backends()):
            why_not = "on a backend its ranks would wait for one another" if best is before else ""
            continue
        passed = Passed(each.name, candidate, *goal.of(candidate), setting)
        if len(tried) < MOST_TRIED and (fewer := _fewer(each, before, passed, best, goal)):
            waiting.appendleft(fewer)
        if each.chosen or passed.better(best, goal.memory):
            best, why_not = passed, ""
        elif best is before:
            faster = passed.better(before, math.inf)
            why_not = "what is faster takes more memory than there is" if faster else "no change is faster"
    if not each.chosen and best.peak >= before.peak and best.end > (1 - goal.least) * before.end:
        return before, why_not or f"it gains less than {goal.least:.0%}"
    return best, why_not


def _fewer(each: TapePass, before: Passed, passed: Passed, best: Passed, goal: Goal) -> Ahead | None:
    """The setting of what is faster but too large, with what stands at its peak left where it was; None: none is."""
    too_large = passed.peak > max(goal.memory, before.peak)
    if each.chosen or each.moves is None or not too_large or not passed.better(best, math.inf):
        return None
    assert isinstance(passed.setting, int | Ahead)
    setting = Ahead(passed.setting) if isinstance(passed.setting, int) else passed.setting
    more = crowding(each.moves, before.checked, passed.checked, goal.kept) - setting.but
    return replace(setting, but=setting.but | more) if more else None


def run_named(checked: Checked, names: str, goal: Goal | None = None) -> list[Passed]:
    """Run the passes that a text stands for (see `find_passes`).

    Returns:
        The program as it was, and as each pass left it.

    Raises:
        UserError: for a name that there is not, and for a pass that is named itself and cannot apply.
    """
    found = run_passes(checked, find_passes(names), goal)
    by_name = {each.name for each in named_passes(names) if each.by_name}
    for each in found:
        if not each.applies and each.name in by_name:
            raise UserError(f"the pass {each.name} has nothing to do: {each.why_not}; leave it out")
    return found


def passed(checked: Checked, names: str) -> Checked:
    """A program after the passes that a text stands for, which unit costs guide (see `run_named`)."""
    return run_named(checked, names)[-1].checked if names != "none" else checked


def helped(found: Iterable[Passed]) -> dict[str, Passed]:
    """The program as it was, and as each pass left it that has found something: by what `find_passes` reads of it."""
    return {settled([each]) if each.name else "as written": each for each in found if each.setting or not each.name}


def settled(found: Iterable[Passed]) -> str:
    """The passes that have found something, with their settings, as `find_passes` reads them."""
    words = [f"{each.name}={each.setting}" if PASS_NAMES[each.name] else each.name for each in found if each.setting]
    return ",".join(words) or "none"


# Where memory has no room for all that a pass starts early: which of it stands at the peak, and stays where it was.


def crowding(moves: Moves, before: Checked, after: Checked, kept: Sizes | None = None) -> set[int]:
    """The moves of a pass that are under way at the fullest rank's peak, and were not there before it.

    Args:
        moves: the ops of a tape that the pass starts early.
        before, after: a program, and the same in another order.
        kept: how large values are in memory, if not as traced.

    Returns:
        Their places among the moves.
    """
    peaks = memory_in_bytes(after, kept)
    rank = max(range(len(peaks)), key=lambda rank: peaks[rank].peak)
    old, new, at_peak = before.program.tapes[rank], after.program.tapes[rank], peaks[rank].peak_op
    place = {op.handle: at for at, op in enumerate(new) if op.handle >= 0 and op.kind is not OpKind.WAIT}
    then = old.index(new[at_peak])
    started = moves(old, before.specs[rank])
    return {number for number, at in enumerate(started) if at > then and place[old[at].handle] <= at_peak}


# The table of passes.


Moves = Callable[[Sequence[Op], Mapping[int, Spec]], list[int]]
"""A tape and the specs of its values to the indices of some ops."""


@dataclass(frozen=True)
class TapePass:
    """One way to a better program.

    Attributes:
        name: what the command line calls it.
        does: in a few words.
        rewrite: makes other tapes of a program, by a setting: a number, or of `offload` the homes. It raises
            CannotApply where it has nothing to do.
        tried: settings of which the best is taken (none: it does nothing unless it is told what).
        chosen: whether the setting was given: then what it makes is taken, if it is right.
        moves: the ops of a tape that it starts early; where memory has no room for all, some stay where they are.
    """

    name: str
    does: str
    rewrite: Callable[[Checked, Any], Tapes]
    tried: tuple[Setting, ...] = (1, 2, 4, 8)
    chosen: bool = False
    moves: Moves | None = None

    @property
    def means(self) -> str:
        """What its setting says ("": it takes none)."""
        return PASS_NAMES[self.name]


PASSES = {
    each.name: each
    for each in (
        TapePass("tile", "computes large layers in tiles, one after the other", tile, ()),
        TapePass("offload", "keeps what is needed later in the host's memory or on the disk", offload, ()),
        TapePass("prefetch", "gathers weights ahead of their use", prefetch, moves=gathers_ahead),
        TapePass("receive-early", "posts receives before they are needed", early_receives, moves=receives_ahead),
        TapePass("bucket", "makes one collective of small ones", bucket, (1, 2, 4, 8, 16, 32)),
        TapePass("defer", "awaits reductions of gradients late", defer),
        TapePass("update-early", "updates a layer as soon as its gradient is final", early_updates, (1,)),
        TapePass("fuse-steps", "makes the next step's first gathers in this step's tail", fuse_steps),
        TapePass("copy-early", "overlaps copies to the host or the disk, and back", early_copies),
        TapePass("arena", "puts buffers in one memory, taken once", arena, (1,)),
    )
}
"""By name, in the order in which they are run: that of `shardlab.language.pass_names`."""


def find_passes(text: str) -> list[TapePass]:
    """The passes that a text stands for (see `named_passes`).

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    return [
        PASSES[name] if setting is None else replace(PASSES[name], tried=(setting,), chosen=True)
        for name, setting, _ in named_passes(text)
    ]
