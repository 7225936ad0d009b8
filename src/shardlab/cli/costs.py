"""Option `--costs NAME=TIME,...`: what ops take, in any unit."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Annotated

import tyro

from shardlab.program import UserError
from shardlab.timeline import Costs

CostsText = Annotated[str | None, tyro.conf.arg(metavar="NAME=TIME,...", help_behavior_hint="")]
"""The option; it is read by `costs_of`."""

NAMES = [field.name for field in fields(Costs) if field.name != "link_latency"]


def costs_of(text: str) -> Costs:
    """The costs in `forward=18.5,backward_input=18.1,backward_weight=9.3,send=0.6`; those left out are 0.

    A send's time is spent on a link that carries any number of messages at once.

    Raises:
        UserError: for what is no cost, or none that there is, or one given twice.
    """
    given = dict.fromkeys(NAMES, 0.0)
    seen: set[str] = set()
    for part in text.split(","):
        name, equals, time = (word.strip() for word in part.partition("="))
        if not equals:
            raise UserError(f"--costs: {part.strip()!r} is not a cost; give NAME=TIME,... such as forward=1,send=0.2")
        if name == "backward":
            raise UserError("--costs: give backward_input and backward_weight; an unsplit backward costs their sum")
        if name not in given:
            raise UserError(f"--costs: there is no cost {name!r}; give some of {', '.join(NAMES)}")
        if name in seen:
            raise UserError(f"--costs: {name} is given twice; give it once")
        seen.add(name)
        given[name] = _time(name, time)
    return Costs(**given, link_latency=True)


def _time(name: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise UserError(f"--costs: {name}={text} is not a time; give a number, 0 or more")
    return time
