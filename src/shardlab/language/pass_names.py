"""Passes by name: which there are, and which a text stands for. `shardlab.simulate.passes` has what they do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from shardlab.common.errors import UserError, unknown
from shardlab.common.fields import word

# Where a rank keeps what it needs later: on its device, or offloaded.


Place = Literal["", "host", "disk"]


@dataclass(frozen=True)
class Homes:
    """Where a rank keeps what it needs later ("": on its device).

    Attributes:
        parameters, optimizer: from step to step.
        gradients: sums of weights' gradients, until the update.
        activations: what blocks' backward passes begin with; the blocks are computed again from there.
    """

    parameters: Place = ""
    optimizer: Place = ""
    gradients: Place = ""
    activations: Place = ""

    def __str__(self) -> str:
        """As a pass is given them."""
        return "+".join(f"{each.name}:{home}" for each in fields(self) if (home := getattr(self, each.name)))

    @classmethod
    def of(cls, words: Iterable[str]) -> Homes:
        """Read homes as a command line says them.

        >>> Homes.of(["optimizer=host", "activations=disk"])
        Homes(parameters='', optimizer='host', gradients='', activations='disk')

        Raises:
            UserError: for what is not kept, for no place, and for gradients on the disk, where nothing is added.
        """
        kept = [field.name for field in fields(cls)]
        found: dict[str, Place] = {}
        for given in words:
            name, equals, place = given.strip().partition("=")
            if not equals:
                raise UserError(f"cannot offload {given!r}; say what goes where, such as optimizer=host")
            if name not in kept:
                raise unknown("thing to offload", name, kept)
            if place not in ("host", "disk"):
                raise unknown("place to offload to", place, ("host", "disk"))
            found[name] = "host" if place == "host" else "disk"
        if found.get("gradients") == "disk":
            raise UserError("gradients=disk was given, but nothing is added up on the disk; give gradients=host")
        return cls(**found)


TILE = "tile"
"""The pass whose number says how layers are cut, before the program is traced; it is run first."""

OFFLOAD = "offload"
"""The pass whose setting are words, what goes where; it is run only where it is asked for."""

AHEAD = "uses ahead"
"""What a pass's number means that starts ops early, each of which may be left where it is."""


@dataclass(frozen=True)
class Ahead:
    """How early ops start.

    Attributes:
        number: uses ahead.
        but: those that stay where they are, numbered among all, from 0.
    """

    number: int
    but: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """The setting as it stands after a pass's name.

        >>> str(Ahead(2)), str(Ahead(2, frozenset({7, 3})))
        ('2', '2~3~7')
        """
        return "~".join(map(str, (self.number, *sorted(self.but))))


Setting = int | Ahead | Homes
"""How a pass is to go about it: by a number, or by words."""

PASS_NAMES = {
    TILE: "tiles of each layer",
    OFFLOAD: "what goes where",
    "prefetch": AHEAD,
    "receive-early": AHEAD,
    "bucket": "buckets at least",
    "defer": "more under way",
    "update-early": "",
    "fuse-steps": "gathers of the next step",
    "copy-early": AHEAD,
    "arena": "",
}
"""Every pass, in the order in which they are run, and what its setting means ("": it takes none)."""

UNSAID = "all"
"""What rewrites the program of a run where nobody says which passes do."""

ONLY_NAMED = (TILE, OFFLOAD, "arena")
"""Passes that are run only where they are named: no price says what they gain."""

PASSES_FIELD = replace(word(), metavar="all|none|NAME,...")
"""The field of a plan that names passes."""


class NamedPass(NamedTuple):
    """A pass that is asked for; without a setting (None), it is to find the best one.

    Attributes:
        by_name: whether it is named itself; `all` names none.
    """

    name: str
    setting: Setting | None
    by_name: bool = True


def named_passes(text: str) -> list[NamedPass]:
    """The passes that a text stands for, in the order in which they are run.

    >>> [(each.name, each.setting) for each in named_passes("bucket=4, prefetch")]
    [('prefetch', None), ('bucket', 4)]

    Args:
        text: `none`, or words with commas between them: names, each perhaps with its number, and of those that start
            ops early with the ops that are left where they are, as in `prefetch=2~3~7`; of `offload` what goes
            where, such as `offload=optimizer:host+activations:disk`; `all` for all that are not named.

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    if text == "none":
        return []
    found: dict[str, NamedPass] = {}
    for each in text.split(","):
        name, equals, given = each.strip().partition("=")
        if name == "all" and not equals:
            others = (other for other in PASS_NAMES if other not in ONLY_NAMED)
            found = {other: NamedPass(other, None, by_name=False) for other in others} | found
            continue
        if name not in PASS_NAMES:
            raise unknown("pass", name, [known for known in ("all", "none", *PASS_NAMES) if known != name])
        means = PASS_NAMES[name]
        if name == OFFLOAD:
            found[name] = NamedPass(name, Homes.of(given.replace(":", "=").split("+")))
            continue
        if name == TILE and not (given.isdecimal() and int(given) > 1):
            raise UserError(f"the pass {name} was given {given!r}; it takes a whole number, 2 or more ({means})")
        number, *but = given.split("~") if means == AHEAD else [given]
        if equals and not (means and number.isdecimal() and int(number) and all(map(str.isdecimal, but))):
            takes = f"a whole number, 1 or more ({means})" if means else "no number"
            raise UserError(f"the pass {name} was given {given!r}; it takes {takes}")
        setting = Ahead(int(number), frozenset(map(int, but))) if but else int(number) if equals else None
        found[name] = NamedPass(name, setting if means else 1)
    return [found[name] for name in PASS_NAMES if name in found]


def tiles_of(passes: str) -> int:
    """Into how many tiles the passes that a text stands for cut each layer (1: none does).

    >>> tiles_of("prefetch,tile=4"), tiles_of("all")
    (4, 1)
    """
    settings = [each.setting for each in named_passes(passes) if each.name == TILE]
    return next((setting for setting in settings if isinstance(setting, int)), 1)


def want_norm(passes: str) -> bool:
    """Whether programs that can clip are to compute the gradient's norm: not where `update-early` is named, since no
    layer is updated before the norm of all is known.

    >>> want_norm("all"), want_norm("prefetch,update-early")
    (True, False)
    """
    return not any(each.by_name and each.name == "update-early" for each in named_passes(passes))


def want_half_blocks(tiles: int, *, planned: bool) -> None:
    """Refuse tiles of layers in a program that is not written for the half-blocks which can be cut.

    Args:
        planned: whether the program follows a plan, or has layers cut over tensor-parallel ranks.

    Raises:
        UserError: if so.
    """
    if tiles > 1 and not planned:
        raise UserError(
            "the pass tile cuts blocks into half-blocks, for which this program is not written; take a plan, such as "
            "zero-3, or leave the pass out"
        )


def with_offload(passes: str | None, words: Iterable[str]) -> str:
    """Name the passes that offload first what the words say; copies then go on beside what is computed.

    >>> with_offload(None, ["optimizer=host", "activations=disk"])
    'offload=optimizer:host+activations:disk,copy-early'

    Args:
        passes: what else is asked for, if anything.
        words: what goes where (see `Homes`).

    Raises:
        UserError: for words that say nothing.
    """
    words = list(words)
    Homes.of(words)
    others = [] if passes in (None, "none") else [each for each in passes.split(",") if not each.startswith(OFFLOAD)]
    if not {"all", "copy-early"} & {each.strip().partition("=")[0] for each in others}:
        others.append("copy-early")
    return ",".join([f"{OFFLOAD}={'+'.join(word.replace('=', ':') for word in words)}", *others])


# What ranks lose where they meet, on cores that communication needs as well.


@dataclass(frozen=True)
class Lag:
    """Seconds by which ranks come apart where they wait for each other, since communication needs their cores as well.

    The rank that has what it waited for computes at once, and the other one's communication stands in the queue for a
    core until that rank stops, or until the system's scheduler looks again.

    Attributes:
        share: of what a rank has computed since it last waited, what it loses where it stands still for others.
        most: seconds that it loses there at most.
        hidden: the part of these seconds that it loses where their communication was over before.
    """

    share: float
    most: float
    hidden: float = 0.0

    def seconds(self, computed: float, *, hidden: bool = False) -> float:
        """What a rank loses where it waits, having computed for so many seconds since it last did."""
        return min(self.share * computed, self.most) * (self.hidden if hidden else 1.0)


NO_LAG = Lag(0.0, 0.0)


# Which way a collective goes between processes on gloo.


BY_MESSAGES = 2 * 2**20
"""Bytes that a member may receive for a sum by messages; more is summed around a ring."""
