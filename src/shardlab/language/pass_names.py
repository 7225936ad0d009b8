"""Names and settings of tape passes. The passes themselves are in `shardlab.simulate.passes`.

`named_passes` parses a text such as `bucket=4,prefetch`. Settings that are more than a number have classes:
`OffloadTargets` and `EarlyStart`. Last come `Lag` and `MOST_BYTES_BY_MESSAGES`, which describe communication for
several packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from shardlab.common.errors import UserError, unknown_name
from shardlab.common.fields import name_or

Place = Literal["", "host", "disk"]


@dataclass(frozen=True)
class OffloadTargets:
    """Places to which a rank offloads values ("": they stay on its device).

    Attributes:
        parameters, optimizer: place of the weights and of the optimizer states between steps.
        gradients: place of the accumulated gradients of weights until the update.
        activations: place of the inputs of blocks, from which the backward pass recomputes the blocks.
    """

    parameters: Place = ""
    optimizer: Place = ""
    gradients: Place = ""
    activations: Place = ""

    def __str__(self) -> str:
        """Return the setting as it is written after the pass's name."""
        return "+".join(f"{field.name}:{target}" for field in fields(self) if (target := getattr(self, field.name)))

    @classmethod
    def parse(cls, words: Iterable[str]) -> OffloadTargets:
        """Parse the targets of a command line.

        >>> OffloadTargets.parse(["optimizer=host", "activations=disk"])
        OffloadTargets(parameters='', optimizer='host', gradients='', activations='disk')

        Raises:
            UserError: for an unknown name or place, two places of one name, and for gradients on the disk, where they
                cannot be added.
        """
        names = [field.name for field in fields(cls)]
        places: dict[str, Place] = {}
        for word in words:
            name, equals, place = word.strip().partition("=")
            if not equals:
                raise UserError(f"cannot offload {word!r}; say what goes where, such as optimizer=host")
            if name not in names:
                raise unknown_name("thing to offload", name, names)
            if place not in ("host", "disk"):
                raise unknown_name("place to offload to", place, ("host", "disk"))
            if name in places:
                raise UserError(f"{name} is offloaded to two places; give one of them")
            places[name] = "host" if place == "host" else "disk"
        if places.get("gradients") == "disk":
            raise UserError("gradients=disk was given, but nothing is added up on the disk; give gradients=host")
        return cls(**places)


TILE = "tile"
"""Pass that cuts layers into tiles; its number is the number of tiles. It runs before the program is traced."""

OFFLOAD = "offload"
"""Pass whose setting assigns values to places. It runs only if it is named."""

USES_AHEAD = "uses ahead"
"""Meaning of the number of a pass that starts ops early (`EarlyStart.number`)."""


@dataclass(frozen=True)
class EarlyStart:
    """Setting of a pass that starts ops early.

    Attributes:
        number: how many places ahead an op starts. With 2, for example, a gather starts before the first use of the
            weight that comes from the gather two places earlier.
        but: numbers of the ops that are not moved, counted from 0 over the ops that the pass could move.
    """

    number: int
    but: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """Return the setting as it is written after the pass's name.

        >>> str(EarlyStart(2)), str(EarlyStart(2, frozenset({7, 3})))
        ('2', '2~3~7')
        """
        return "~".join(map(str, (self.number, *sorted(self.but))))


Setting = int | EarlyStart | OffloadTargets
"""Setting of a pass."""

PASS_NAMES = {
    TILE: "tiles of each layer",
    OFFLOAD: "what goes where",
    "prefetch": USES_AHEAD,
    "receive-early": USES_AHEAD,
    "bucket": "buckets at least",
    "defer": "reductions in flight",
    "update-early": "",
    "fuse-steps": "gathers of the next step",
    "copy-early": USES_AHEAD,
    "arena": "",
}
"""Meaning of each pass's setting ("": it takes none), by name, in the order in which passes run."""

DEFAULT_PASSES = "all"
"""Passes that a run may apply if the user names none."""

ONLY_NAMED = (TILE, OFFLOAD, "arena")
"""Passes that run only if they are named: the cost model does not predict their gain."""


def _passes_wanted(value: object) -> str:
    return "" if isinstance(value, str) else 'names in quotes, such as "prefetch,bucket=4"'


PASSES_FIELD = replace(name_or(), metavar="all|none|NAME,...", check=_passes_wanted)
"""The field of a plan that names passes."""


class NamedPass(NamedTuple):
    """Pass that a user asks for, with its setting (None: the pass searches for the best one).

    Attributes:
        by_name: whether the text contains the pass's name, and not only `all`.
    """

    name: str
    setting: Setting | None
    by_name: bool = True


def named_passes(text: str) -> list[NamedPass]:
    """Parse a text into passes, in the order in which they run.

    >>> [(entry.name, entry.setting) for entry in named_passes("bucket=4, prefetch")]
    [('prefetch', None), ('bucket', 4)]

    Args:
        text: `none`, or names of passes separated by commas. `all` stands for every pass that is not named, except
            those in `ONLY_NAMED`. A name may have a setting: a number; for a pass that starts ops early also the ops
            that are not moved, as in `prefetch=2~3~7`; for `offload` the places, as in
            `offload=optimizer:host+activations:disk`.

    Raises:
        UserError: for an unknown name, with the nearest one, and for a setting that the pass does not take.
    """
    if text == "none":
        return []
    passes: dict[str, NamedPass] = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().partition("=")
        if name == "all" and not equals:
            others = (other for other in PASS_NAMES if other not in ONLY_NAMED)
            passes = {other: NamedPass(other, None, by_name=False) for other in others} | passes
            continue
        if name not in PASS_NAMES:
            raise unknown_name("pass", name, [option for option in ("all", "none", *PASS_NAMES) if option != name])
        meaning = PASS_NAMES[name]
        if name == OFFLOAD:
            passes[name] = NamedPass(name, OffloadTargets.parse(value.replace(":", "=").split("+")))
            continue
        if name == TILE and not (value.isdecimal() and int(value) > 1):
            raise UserError(f"the pass {name} was given {value!r}; it takes a whole number, 2 or more ({meaning})")
        number, *but = value.split("~") if meaning == USES_AHEAD else [value]
        if equals and not (meaning and number.isdecimal() and int(number) and all(map(str.isdecimal, but))):
            accepted = f"a whole number, 1 or more ({meaning})" if meaning else "no number"
            raise UserError(f"the pass {name} was given {value!r}; it takes {accepted}")
        setting = EarlyStart(int(number), frozenset(map(int, but))) if but else int(number) if equals else None
        passes[name] = NamedPass(name, setting if meaning else 1)
    return [passes[name] for name in PASS_NAMES if name in passes]


def tiles_of(passes: str) -> int:
    """Return the number of tiles into which passes cut each layer (1: none does).

    >>> tiles_of("prefetch,tile=4"), tiles_of("all")
    (4, 1)
    """
    settings = [named_pass.setting for named_pass in named_passes(passes) if named_pass.name == TILE]
    return next((setting for setting in settings if isinstance(setting, int)), 1)


def needs_norm(passes: str) -> bool:
    """Return whether a program that may clip the gradient computes the gradient's norm under these passes.

    It computes no norm if `update-early` is requested by name (`all` does not count): the norm of all layers is known
    only after the last backward pass, when no layer could be updated early any more.

    >>> needs_norm("all"), needs_norm("prefetch,update-early")
    (True, False)
    """
    return not any(named_pass.by_name and named_pass.name == "update-early" for named_pass in named_passes(passes))


def require_half_blocks(tiles: int, *, planned: bool) -> None:
    """Refuse tiles for a program that is not written for half-blocks: no other layers can be tiled.

    Args:
        planned: whether the program follows a plan, or cuts layers over tensor-parallel ranks.

    Raises:
        UserError: if the program cannot be cut.
    """
    if tiles > 1 and not planned:
        raise UserError(
            "the pass tile cuts blocks into half-blocks, for which this program is not written; take a plan, such as "
            "zero-3, or leave the pass out"
        )


def with_offload(passes: str | None, words: Iterable[str]) -> str:
    """Return a text of passes with `offload` added, and with `copy-early`, so that copies run beside compute.

    >>> with_offload(None, ["optimizer=host", "activations=disk"])
    'offload=optimizer:host+activations:disk,copy-early'

    Args:
        passes: the other passes that are asked for, if any.
        words: the targets, such as `optimizer=host` (see `OffloadTargets`).

    Raises:
        UserError: for words that name no target.
    """
    words = list(words)
    OffloadTargets.parse(words)
    others = [] if passes in (None, "none") else [entry for entry in passes.split(",") if not entry.startswith(OFFLOAD)]
    if not {"all", "copy-early"} & {entry.strip().partition("=")[0] for entry in others}:
        others.append("copy-early")
    return ",".join([f"{OFFLOAD}={'+'.join(word.replace('=', ':') for word in words)}", *others])


@dataclass(frozen=True)
class Lag:
    """Time that ranks lose when they wait for each other, on machines whose cores also run the communication.

    The rank whose data arrives first resumes computing at once. The communication of the other rank then has no core
    until the first rank stops or the system's scheduler intervenes.

    Attributes:
        share: lost seconds per second that a rank has computed since it last waited.
        most: upper limit of the seconds lost at one wait.
        hidden: fraction of these seconds that is lost if the communication was complete before the wait.
    """

    share: float
    most: float
    hidden: float = 0.0

    def seconds(self, computed: float, *, hidden: bool = False) -> float:
        """Return the seconds that a rank loses at a wait.

        Args:
            computed: seconds that the rank has computed since its last wait.
            hidden: whether the communication was complete before the wait.
        """
        return min(self.share * computed, self.most) * (self.hidden if hidden else 1.0)


NO_LAG = Lag(0.0, 0.0)


MOST_BYTES_BY_MESSAGES = 2 * 2**20
"""On gloo, the most bytes that a member receives for a sum by direct messages; larger sums go around a ring."""
