"""Requirements that several rules share, the refusals if they are not met, and the rules of copies between places.

A value lies on the rank's device, in the host's memory or on the disk. On the disk it can only be kept. In the host's
memory gradients can also be added and weights updated (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4).
"""

from __future__ import annotations

from shardlab.common.errors import About, Refused
from shardlab.language.rules.kinds import ROW_KINDS, Kind
from shardlab.language.rules.spec import Spec

SAME_FACTOR_REMEDY = "scale them by the same factor first, since values with different factors cannot be combined"
"""Remedy for gradients of unequal factors."""

HOST, DISK = "host", "disk"

PLACES = (HOST, DISK)
"""Places besides the device: the host's memory, and a file."""

_PARAMETERS = frozenset({Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT})
_OFFLOADED = _PARAMETERS | ROW_KINDS - {Kind.STATS}


def require_kind(op: About, noun: str, spec: Spec, kind: Kind, *, on_device: bool = True) -> None:
    """Refuse a value of a wrong kind, or in a dtype or a place in which the op cannot read it.

    Norms and updates read a weight's gradient in any dtype. All other ops read values in the dtype of their kind.

    Args:
        noun: noun for the value in the message.
        on_device: whether the op runs on the device only.
    """
    form = spec.form
    if form.kind is not kind:
        raise Refused("wrong kind", op, given_clause(noun, spec), f"give a value of {kind.value}")
    if form.dtype and kind is not Kind.GRAD_WEIGHT:
        raise Refused("other dtypes", op, given_clause(noun, spec), "cast it back first, with no dtype named")
    if on_device:
        require_on_device(op, spec)


def require_compatible(op: About, first: Spec, spec: Spec, one: str, other: str) -> None:
    """Refuse two values that differ in factor, dtype or place.

    Args:
        one, other: the names of the members that gave them.
    """
    if spec.form.factor is not first.form.factor:
        raise Refused("other factors", op, f"{one} gave {first} and {other} {spec}", SAME_FACTOR_REMEDY)
    if spec.form.dtype != first.form.dtype:
        raise Refused("other dtypes", op, f"{one} gave {first} and {other} {spec}", "cast them to the same dtype first")
    require_one_place(op, first, spec)


def offload(value: Spec, place: str) -> Spec:
    """Return the copy of a value in another place.

    Raises:
        Refused: for an unknown place; for a value that is not on the device; for scalars, statistics and terms of a
            sum; and for gradients of weights on the disk, where they cannot be added.
    """
    op, form = value.about("offload"), value.form
    require_place(op, place)
    require_on_device(op, value)
    if form.kind not in _OFFLOADED:
        fault = f"{value} was given"
        raise Refused("wrong kind", op, fault, "offload weights, their gradients, optimizer states or activations")
    if form.term is not None:
        fault = f"{value} was given, which is a term of a sum"
        raise Refused("missing terms", op, fault, "reduce the terms first, over the ranks that have them")
    if form.kind is Kind.GRAD_WEIGHT and place == DISK:
        fault = f"{value} was given, and values on the disk cannot be added to"
        raise Refused("elsewhere", op, fault, "offload it to the host")
    return value._replace(form=form.but(place=place))


def reload(value: Spec) -> Spec:
    """Return the copy on the device of a value that lies elsewhere.

    Raises:
        Refused: for a value that is on the device.
    """
    if not value.form.place:
        op = value.about("reload")
        raise Refused("elsewhere", op, f"{value} was given, which is on the device", "use it as it is")
    return value._replace(form=value.form.but(place=""))


def require_place(op: About, place: str) -> None:
    """Refuse an unknown place.

    Raises:
        Refused: with the known places.
    """
    if place not in PLACES:
        raise Refused("elsewhere", op, f"{place!r} is no place", f"name one of {', '.join(PLACES)}")


def require_on_device(op: About, value: Spec) -> None:
    """Refuse a value that is not on the device, for an op that runs only there.

    Raises:
        Refused: with the remedy.
    """
    if value.form.place:
        raise Refused("elsewhere", op, f"{value} was given", "reload it first")


def require_one_place(op: About, first: Spec, *others: Spec) -> None:
    """Refuse values that do not all lie on the device, or all in the host's memory.

    Raises:
        Refused: with two values that lie in different places.
    """
    place = first.form.place
    for other in others:
        if other.form.place != place:
            fault = f"{first} and {other} were given, which lie in different places"
            raise Refused("elsewhere", op, fault, "offload the one, or reload the other")
    if place == DISK:
        require_on_device(op, first)


def given_clause(noun: str, spec: Spec) -> str:
    """Return a clause such as `the weight given is weights[3]`."""
    return f"the {noun} given {'are' if noun.startswith(('queries', 'keys')) else 'is'} {spec}"


def missing_clause(subject: str) -> str:
    """Return a clause such as `microbatches 0-2 are missing`."""
    several = " and " in subject or subject.startswith(("microbatches", "sequence slices"))
    return f"{subject} {'are' if several else 'is'} missing"


def other_tokens_refusal(op: About, one: str, cells: str, other: str, other_cells: str) -> Refused:
    """Return the refusal of two values with different cells."""
    fault = f"the {one} is of {cells} and the {other} of {other_cells}"
    return Refused("other tokens", op, fault, "give both of the same tokens and step")


def no_slices_refusal(op: About) -> Refused:
    """Return the refusal to cut or concatenate scalars."""
    return Refused("wrong kind", op, "a scalar has no slices", "all_reduce it")
