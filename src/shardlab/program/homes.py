"""Where a rank keeps what it needs later: on its device, or offloaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from shardlab.errors import UserError, unknown

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
        for word in words:
            name, equals, place = word.strip().partition("=")
            if not equals:
                raise UserError(f"cannot offload {word!r}; say what goes where, such as optimizer=host")
            if name not in kept:
                raise unknown("thing to offload", name, kept)
            if place not in ("host", "disk"):
                raise unknown("place to offload to", place, ("host", "disk"))
            found[name] = "host" if place == "host" else "disk"
        if found.get("gradients") == "disk":
            raise UserError("gradients=disk was given, but nothing is added up on the disk; give gradients=host")
        return cls(**found)
