"""The table of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.check import Checked
from shardlab.passes.arena import arena
from shardlab.passes.bucket import bucket
from shardlab.passes.defer import defer
from shardlab.passes.early_copies import early_copies
from shardlab.passes.early_receives import early_receives, receives_ahead
from shardlab.passes.early_updates import early_updates
from shardlab.passes.fuse_steps import fuse_steps
from shardlab.passes.offload import offload
from shardlab.passes.prefetch import gathers_ahead, prefetch
from shardlab.passes.rewriting import Tapes
from shardlab.passes.tile import tile
from shardlab.program import Op, Spec
from shardlab.program.pass_names import PASS_NAMES, Setting, named_passes

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
"""By name, in the order in which they are run: that of `shardlab.program.pass_names`."""


def find_passes(text: str) -> list[TapePass]:
    """The passes that a text stands for (see `named_passes`).

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    return [
        PASSES[name] if setting is None else replace(PASSES[name], tried=(setting,), chosen=True)
        for name, setting, _ in named_passes(text)
    ]
