"""The rules of reductions: of what is summed, and of what is the same on all members or only looked at.

Everywhere `op` begins the sentence of a refusal, and `names` says who gave each value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from shardlab.errors import About, Refused
from shardlab.rules import sums
from shardlab.rules.factor import factor_of
from shardlab.rules.kind import Kind, Reduction
from shardlab.rules.pieces import Holds, common
from shardlab.rules.spec import KEY, Form, Spec


def reduce(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of the members' values.

    Raises:
        Refused: when a contribution would be counted twice, or values are no terms of one sum.
    """
    form, total = specs[0][0], 0
    if form.kind is Kind.GRAD_WEIGHT:
        for spec in specs:
            if spec[0] is not form or spec[1] & total:
                break
            total |= spec[1]
        else:
            return Spec(form, total)
    elif form.term is not None:
        cells = specs[0][1]
        if all(spec[1] == cells for spec in specs):
            united = _united_terms(tuple([spec[0] for spec in specs]))
            if united is not None:
                return Spec(united, cells, specs[0][2])
    if form.term is not None and form.term.merged:
        given = f"{specs[0]} is no term of a sum, since each rank has its own queries"
        raise Refused("merged terms", op, given, "add what one rank's queries have met")
    return sums.add(op, specs, names)


@lru_cache(maxsize=1 << 12)
def _united_terms(forms: tuple[Form, ...]) -> Form | None:
    """The form of the sum of terms; None where they do not fit, or where the cells tell when a sum is complete."""
    first, bare, total = forms[0], forms[0].but(term=None), 0
    assert first.term is not None
    over = first.term.over
    for form in forms:
        term = form.term
        if term is None or term.over != over or term.bits & total or form.but(term=None) is not bare:
            return None
        total |= term.bits
    count = math.prod(first.space.count(index) for index in over)
    if over == KEY:
        return None
    return bare if total == (1 << count) - 1 else first.but(term=first.term._replace(bits=total))


def replicas(op: About, reduction: Reduction, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The mean, least or largest of values that are the same on all members: the value itself.

    Of different weights it would be neither's, whatever they hold. The mean of different gradients is their sum divided
    by the number of ranks, and keeps that factor: a microbatch's loss is weighted by its share of the step's tokens, so
    that sums are exact means already, and who takes a mean must have scaled by that number. Scalars may differ, for
    what is taken of them is only to be looked at (the largest is infinite if any rank's is): no norm, and no update
    takes it.

    Raises:
        Refused: for other values than these, or when they differ.
    """
    first = specs[0]
    by, op = reduction.value, op._replace(text=f"{op.text} by {reduction.value}")
    if first.kind not in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.SCALAR):
        remedy = "reduce weights, their gradients and scalars by anything"
        raise Refused("wrong kind", op, f"{first} was given", remedy)
    other = next((at for at, spec in enumerate(specs) if spec != first), None)
    if other is None:
        return first
    gave = f"{names[0]} gave {first} and {names[other]} {specs[other]}"
    if first.kind is Kind.SCALAR:
        return _figures(op, gave, reduction, specs)
    if first.kind is Kind.WEIGHT:
        given = f"{gave}; the {by} of different weights is no weight"
        raise Refused("replicas differ", op, given, "give the same on all ranks")
    if reduction is Reduction.MEAN:
        return sums.multiplied(op, reduce(op, specs, names), 1 / factor_of(len(specs)))
    given = f"{gave}; the {by} of different gradients is no gradient"
    raise Refused("replicas differ", op, given, 'take reduction="sum"')


def _figures(op: About, gave: str, reduction: Reduction, specs: Sequence[Spec]) -> Spec:
    """Combine scalars that may differ: about every part of the model that any of them is about."""
    mixes = {Reduction.SUM} if reduction is Reduction.MEAN else {Reduction.SUM, reduction}
    first = specs[0]
    holds = first.holds
    for spec in specs:
        if spec.kind is not Kind.SCALAR or spec.step != first.step or spec.form.reduction not in mixes:
            remedy = f"take a {reduction.value} of scalars of one step, all sums or all such themselves"
            raise Refused("other values", op, gave, remedy)
        mine, theirs = common(holds, spec.holds)
        holds = Holds(mine.mask | theirs.mask, mine.of)
    return Spec(first.form.but(holds=holds, reduction=reduction))
