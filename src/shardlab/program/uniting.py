"""How values are put together: *sums* and *holds* that must be disjoint, or why they are not."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.values import ROW_KINDS, Holds, Kind, Spec, bits, common, listed, pieces_text


def unite_sums(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of weight gradients: their *sums* must be disjoint, their slices the same."""
    first = specs[0]
    total = 0
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not Kind.GRAD_WEIGHT:
            raise Refused(f"{op}: {name} gave {spec}; only weight gradients are sums of contributions.")
        if spec.layer != first.layer or spec.step != first.step:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; only gradients of one layer are summed.")
        if not (spec.holds == first.holds or spec.holds.same(first.holds)):
            raise Refused(
                f"{op}: {names[0]} gave slices {first.holds} and {name} {spec.holds}; only equal slices can be summed."
            )
        twice = total & spec.sums
        if twice:
            mask = twice & -twice
            other = next(n for s, n in zip(specs, names, strict=True) if s.sums & mask)
            raise Refused(
                f"{op}: {pieces_text(twice, spec.grid)} would be counted twice ({other} and {name} both "
                "summed it); each microbatch may reach a gradient once."
            )
        total |= spec.sums
    return first._replace(sums=total)


def unite_scalars(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of sums of squares: each parameter may be in it once, so replicas must not be added up."""
    mask, of, step = 0, 1, specs[0].step
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not Kind.SCALAR or spec.step != step:
            raise Refused(f"{op}: {names[0]} gave {specs[0]} and {name} {spec}; only scalars of one step are summed.")
        mine, theirs = common(Holds(mask, of), spec.holds)
        if mine.mask & theirs.mask:
            raise Refused(
                f"{op}: parts {listed(bits(mine.mask & theirs.mask))} of {mine.of} of the model come from {name} and "
                "from an earlier one as well; each parameter's square counts once. Sum replicas on one of them."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    return Spec(Kind.SCALAR, 0, Holds(mask, of), 0, step)


def unite_slices(op: str, specs: Sequence[Spec], names: Sequence[str], *, gathers: bool) -> Spec:
    """Terms of one value, or slices of it that lie side by side: each slice once."""
    first = specs[0]
    what, into, again = ("slice", "whole", "gathering") if gathers else ("slice's term", "sum", "summing")
    total = 0
    for spec, name in zip(specs, names, strict=True):
        alike = spec.kind is first.kind and spec.layer == first.layer and spec.step == first.step
        if not alike or spec.holds != first.holds:
            each = "slices" if gathers else "terms"
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; only {each} of one value are put together."
            )
        if not spec.sums:
            raise Refused(f"{op}: {name} gave {spec}, which is complete; {again} it again would count it twice.")
        if total & spec.sums:
            raise Refused(
                f"{op}: slice {listed(bits(total & spec.sums))} would be counted twice ({name} and an earlier rank "
                f"both have it); each {what} belongs into the {into} once."
            )
        total |= spec.sums
    complete = total == (1 << first.grid.width) - 1
    return first._replace(sums=0 if complete else total)


def unite_holds(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The pieces laid side by side: their *holds* must be disjoint, all else the same."""
    first = specs[0]
    mask, of = 0, first.holds.of
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; only pieces of one value can be gathered.")
        if spec.sums != first.sums:
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; the pieces sum different microbatches, so together "
                "they are the gradient of neither. Reduce before gathering."
            )
        mine, theirs = common(Holds(mask, of), spec.holds)
        if mine.mask & theirs.mask:
            what = "microbatch" if spec.kind in ROW_KINDS else "slice"
            raise Refused(
                f"{op}: {what} {listed(bits(mine.mask & theirs.mask))} of {mine.of} comes from {name} and from an "
                "earlier rank as well; the pieces of an all_gather must not overlap."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    return first._replace(holds=gathered(first.kind, Holds(mask, of)))


def gathered(kind: Kind, holds: Holds) -> Holds:
    """Slices put together again are what they were before they were cut; microbatches are always counted singly."""
    return holds if kind in ROW_KINDS else holds.simplified()
