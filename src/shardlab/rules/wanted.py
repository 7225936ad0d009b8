"""What several rules want of the values that they are given, and the refusals when it is not so."""

from __future__ import annotations

from shardlab.errors import About, Refused
from shardlab.rules.kind import Kind
from shardlab.rules.place import want_here, want_together
from shardlab.rules.spec import Spec

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
