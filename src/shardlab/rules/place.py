"""Where values may lie beside a rank's device, and the rules of the copies between these places.

What lies elsewhere is only kept there, but for what is added up and updated in the host's memory (Ren et al. 2021,
ZeRO-Offload, arXiv 2101.06840, section 4).
"""

from __future__ import annotations

from shardlab.errors import About, Refused
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.spec import Spec

HOST, DISK = "host", "disk"

PLACES = (HOST, DISK)
"""The host's memory, and a file."""

_PARAMETERS = frozenset({Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT})
_MOVED = _PARAMETERS | ROW_KINDS - {Kind.STATS}


def offload(value: Spec, place: str) -> Spec:
    """The copy of a value elsewhere.

    Raises:
        Refused: for a place that there is not, for what lies there already, for scalars, statistics and terms of a sum,
            and for gradients of weights on the disk, where nothing is added.
    """
    op, form = value.about("offload"), value.form
    want_place(op, place)
    want_here(op, value)
    if form.kind not in _MOVED:
        given = f"{value} was given"
        raise Refused("wrong kind", op, given, "offload weights, their gradients, optimizer states or activations")
    if form.term is not None:
        given = f"{value} was given, which is a term of a sum"
        raise Refused("missing terms", op, given, "reduce the terms first, over the ranks that have them")
    if form.kind is Kind.GRAD_WEIGHT and place == DISK:
        given = f"{value} was given, and the disk keeps what nothing is added to"
        raise Refused("elsewhere", op, given, "offload it to the host")
    return value._replace(form=form.but(place=place))


def reload(value: Spec) -> Spec:
    """The copy on the device of a value that lies elsewhere.

    Raises:
        Refused: for a value that is there.
    """
    if not value.form.place:
        op = value.about("reload")
        raise Refused("elsewhere", op, f"{value} was given, which is on the device", "use it as it is")
    return value._replace(form=value.form.but(place=""))


def want_place(op: About, place: str) -> None:
    """Refuse what is no place beside the device.

    Raises:
        Refused: naming those that there are.
    """
    if place not in PLACES:
        raise Refused("elsewhere", op, f"{place!r} is no place", f"name one of {', '.join(PLACES)}")


def want_here(op: About, value: Spec) -> None:
    """Refuse a value that is not on the device, where it is computed with and sent from.

    Raises:
        Refused: with what to do.
    """
    if value.form.place:
        raise Refused("elsewhere", op, f"{value} was given", "reload it first")


def want_together(op: About, first: Spec, *others: Spec) -> None:
    """Refuse values that do not lie in one place where computing is done: the device, or the host.

    Raises:
        Refused: naming two of them.
    """
    place = first.form.place
    for other in others:
        if other.form.place != place:
            given = f"{first} and {other} were given, which lie in different places"
            raise Refused("elsewhere", op, given, "offload the one, or reload the other")
    if place == DISK:
        want_here(op, first)
