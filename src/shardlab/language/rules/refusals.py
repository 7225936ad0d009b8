"""What several rules want of the values that they are given, and the refusals when it is not so."""

from __future__ import annotations

from shardlab.common.errors import About, Refused
from shardlab.language.rules.kinds import ROW_KINDS, Kind
from shardlab.language.rules.spec import Spec

ALIKE = "scale them alike first, since values that are scaled by different factors do not belong together"
"""What to do with gradients of unequal factors."""

REDUCE_TERMS = (
    "put all together first: reduce the terms over the ranks that have them (all_reduce, or reduce_scatter along the "
    "sequence)"
)

OWN_PIECES = (
    "this {layer} layer's {index}s take their own {index}s of it and no others",
    "give what this rank has of the layer before, ungathered, or gather the weight",
)
OWN = {
    "expert": (
        "experts compute on their own buffers and on no others",
        "exchange the buffers by all_to_all, and give the weight of the slice that came",
    )
}
"""What parts of a layer take, and so what to do, where it is not said as for others."""


def want_kind(op: About, what: str, spec: Spec, kind: Kind, *, here: bool = True) -> None:
    """Refuse a value of another kind than the op reads, in other numbers than it computes in, or in another place.

    Norms and updates compute with a weight's gradient in any dtype, all others in that of the value's kind.

    Args:
        what: what the op takes it for.
        here: whether the op is computed on the device alone.
    """
    form = spec.form
    if form.kind is not kind:
        raise Refused("wrong kind", op, said_of(what, spec), f"give a value of {kind.value}")
    if form.dtype and kind is not Kind.GRAD_WEIGHT:
        raise Refused("other dtypes", op, said_of(what, spec), "cast it back first, with no dtype named")
    if here:
        want_here(op, spec)


def want_alike(op: About, first: Spec, spec: Spec, one: str, other: str) -> None:
    """Refuse two values that are scaled by other factors, are in other numbers, or lie in different places.

    Args:
        one, other: who gave them.
    """
    if spec.form.factor is not first.form.factor:
        raise Refused("other factors", op, f"{one} gave {first} and {other} {spec}", ALIKE)
    if spec.form.dtype != first.form.dtype:
        raise Refused("other dtypes", op, f"{one} gave {first} and {other} {spec}", "cast them alike first")
    want_together(op, first, spec)


def said_of(what: str, spec: Spec) -> str:
    """`the weight given is weights[3]`."""
    return f"the {what} given {'are' if what.startswith(('queries', 'keys')) else 'is'} {spec}"


def are_missing(what: str) -> str:
    """What `cells_text` or `summed_text` says is missing."""
    several = " and " in what or what.startswith(("microbatches", "sequence slices"))
    return f"{what} {'are' if several else 'is'} missing"


def other_tokens(op: About, one: str, cells: str, other: str, other_cells: str) -> Refused:
    """The refusal of two values that are of these unequal cells."""
    given = f"the {one} is of {cells} and the {other} of {other_cells}"
    return Refused("other tokens", op, given, "give both of the same tokens and step")


def no_slices(op: About) -> Refused:
    """The refusal to cut a scalar or to lay it beside others."""
    return Refused("wrong kind", op, "a scalar has no slices", "all_reduce it")


# Where values may lie beside a rank's device, and the rules of the copies between these places.
#
# What lies elsewhere is only kept there, but for what is added up and updated in the host's memory (Ren et al. 2021,
# ZeRO-Offload, arXiv 2101.06840, section 4).


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
