"""How values are put together: *sums* and *holds* that must be disjoint, or why they are not."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.values import ROW_KINDS, Holds, Kind, Reduction, Spec, bits, common, listed, pieces_text


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
        if spec.sums:
            raise Refused(f"{op}: {name} gave {spec}; only sums of squares add up to a norm.")
        mine, theirs = common(Holds(mask, of), spec.holds)
        if mine.mask & theirs.mask:
            raise Refused(
                f"{op}: parts {listed(bits(mine.mask & theirs.mask))} of {mine.of} of the model come from {name} and "
                "from an earlier one as well; each parameter's square counts once. Sum replicas on one of them."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    return Spec(Kind.SCALAR, 0, Holds(mask, of), 0, step)


def unite_replicas(op: str, reduction: Reduction, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The mean, least or largest of values that are the same on all members: the value itself.

    Of different weights or gradients it would be neither's, whatever they hold. In particular no mean of gradients is
    wanted: a microbatch's loss is weighted by its share of the step's tokens, so that sums are exact means already, and
    a mean over ranks would divide by their number once more. Scalars may differ, for what is taken of them is only to
    be looked at (the largest is infinite if any rank's is): no norm, and no update takes it.
    """
    first = specs[0]
    op = f"{op} by {reduction.value}"
    if first.kind not in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.SCALAR):
        raise Refused(f"{op}: {first} was given; only weights, their gradients and scalars are reduced by anything.")
    other = next((at for at, spec in enumerate(specs) if spec != first), None)
    if other is None:
        return first
    gave = f"{op}: {names[0]} gave {first} and {names[other]} {specs[other]}"
    if first.kind is Kind.SCALAR:
        return _unite_figures(gave, reduction, specs)
    if first.kind is Kind.WEIGHT:
        raise Refused(f"{gave}; the {reduction.value} of different weights is no weight. Give the same on all ranks.")
    why = (
        f"gradients are shares of the step's mean already, so a mean over ranks is 1/{len(specs)} of it"
        if reduction is Reduction.MEAN
        else f"the {reduction.value} of different gradients is no gradient"
    )
    raise Refused(f'{gave}; {why}. Take reduction="sum".')


def _unite_figures(gave: str, reduction: Reduction, specs: Sequence[Spec]) -> Spec:
    """What is taken of the ranks' scalars, about all parts of the model that any of them is about."""
    code = list(Reduction).index(reduction)
    mixes = {0} if reduction is Reduction.MEAN else {0, code}
    holds, step = specs[0].holds, specs[0].step
    for spec in specs:
        if spec.kind is not Kind.SCALAR or spec.step != step or spec.sums not in mixes:
            raise Refused(
                f"{gave}; a {reduction.value} is taken of scalars of one step, all sums or all such themselves."
            )
        mine, theirs = common(holds, spec.holds)
        holds = Holds(mine.mask | theirs.mask, mine.of)
    return Spec(Kind.SCALAR, 0, holds, code, step)


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
                "earlier rank as well; gathered pieces must not overlap."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    return first._replace(holds=gathered(first.kind, Holds(mask, of)))


def gathered(kind: Kind, holds: Holds) -> Holds:
    """Slices put together again are what they were before they were cut; microbatches are always counted singly."""
    return holds if kind in ROW_KINDS else holds.simplified()
