"""The table of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from shardlab.check import Checked
from shardlab.passes.bucket import bucket
from shardlab.passes.defer import defer
from shardlab.passes.early_copies import early_copies
from shardlab.passes.early_receives import early_receives
from shardlab.passes.early_updates import early_updates
from shardlab.passes.offload import offload
from shardlab.passes.prefetch import prefetch
from shardlab.passes.rewriting import CannotApply, Tapes
from shardlab.program.homes import Homes
from shardlab.program.pass_names import PASS_NAMES, NamedPass, named_passes


@dataclass(frozen=True)
class TapePass:
    """One way to a better program.

    Attributes:
        name: what the command line calls it.
        does: in a few words.
        rewrite: makes other tapes of a program, by a number. It raises CannotApply where it has nothing to do.
        numbers: those that are tried.
        chosen: whether the number was given: then what it makes is taken, if it is right.
        words: given in the place of a number.
    """

    name: str
    does: str
    rewrite: Callable[[Checked, int], Tapes]
    numbers: tuple[int, ...] = (1, 2, 4, 8)
    chosen: bool = False
    words: str = ""

    @property
    def means(self) -> str:
        """What its number says ("": it takes none)."""
        return PASS_NAMES[self.name]


def _offload(homes: Homes, checked: Checked, _: int) -> Tapes:
    return offload(checked, homes)


def _nothing(_: Checked, __: int) -> Tapes:
    raise CannotApply("nothing is said to go elsewhere")


PASSES = {
    each.name: each
    for each in (
        TapePass("offload", "keeps what is needed later in the host's memory or on the disk", _nothing, (1,), True),
        TapePass("prefetch", "gathers weights ahead of their use", prefetch),
        TapePass("copy-early", "overlaps copies to the host or the disk, and back", early_copies),
        TapePass("receive-early", "posts receives before they are needed", early_receives),
        TapePass("bucket", "makes one collective of small ones", bucket, (1, 2, 4, 8, 16, 32)),
        TapePass("defer", "awaits reductions of gradients late", defer),
        TapePass("update-early", "updates a layer as soon as its gradient is final", early_updates, (1,)),
    )
}
"""By name, in the order in which they are run: that of `shardlab.program.pass_names`."""


def find_passes(text: str) -> list[TapePass]:
    """The passes that a text stands for (see `named_passes`).

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    return [_asked(each) for each in named_passes(text)]


def _asked(named: NamedPass) -> TapePass:
    known = PASSES[named.name]
    if named.homes is not None:
        return replace(known, rewrite=partial(_offload, named.homes), words=str(named.homes))
    return known if named.number is None else replace(known, numbers=(named.number,), chosen=True)
