"""Where the face is laxer than `shardlab.rules`, so that what is published keeps running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.program import Holds, Kind, Refused, Spec
from shardlab.rules import update as sums
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import bits, common, listed, microbatches_text


def spec_of(op: str, what: str, value: Any) -> Spec:
    """The spec of a value that was given; anything else is refused."""
    spec = getattr(value, "spec", None)
    if not isinstance(spec, Spec):
        raise Refused(f"{op}: the {what} given is {value!r}; give a value of the puzzles.")
    return spec


def gather(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one value, put together. Replicas are accepted, and pieces need not adjoin."""
    first = specs[0]
    holds = first.holds
    for spec, who in zip(specs, names, strict=True):
        if spec.kind in ROW_KINDS:
            raise Refused(f"{op}: {who} gave {spec}; activations are not cut into shards.")
        if spec.form.but(holds=first.holds) is not first.form or spec.cells != first.cells:
            why = "of one value" if spec.cells == first.cells else "that sum the same microbatches"
            raise Refused(f"{op}: {names[0]} gave {first} and {who} {spec}; only pieces {why} can be put together.")
        mine, theirs = common(holds, spec.holds)
        holds = Holds(mine.mask | theirs.mask, mine.of)
    return first._replace(form=first.form.but(holds=holds))


def update(layer: int, gradient: Spec, weight: Spec, state: Spec) -> None:
    """Refuse an update that is not of the whole batch; the optimizer state may hold more than the weight."""
    step = sums.full_sum(gradient.form)
    surplus = gradient.cells & ~step
    if surplus and gradient.layer == layer:
        raise Refused(
            f"update(layer {layer}): {gradient} has {microbatches_text(surplus)} in it, but the step's microbatches "
            f"are {listed(bits(step))}."
        )
    if state.layer == weight.layer == layer and not state.holds.contains(weight.holds):
        raise Refused(
            f"update(layer {layer}): the weight holds slices {weight.holds}, but the optimizer state only "
            f"{state.holds}; give the state of the same slices."
        )
    if gradient.holds.contains(state.holds):
        state = state._replace(form=state.form.but(holds=weight.holds))
    sums.update(layer, gradient, weight, state)


def fresh(op: str, weight: Spec, updated: Mapping[int, Holds]) -> None:
    """Refuse a weight from before an update that this rank has made of the same slices."""
    if weight.kind is Kind.WEIGHT and weight.step == 0 and weight.layer in updated:
        done, mine = common(updated[weight.layer], weight.holds)
        stale = done.mask & mine.mask
        if stale:
            raise Refused(
                f"{op}: the weight given is {weight}, a stale copy: slice {listed(bits(stale))} of {done.of} was "
                "already updated on this rank. Finish every use of a weight before its update. "
                "A new Model starts a new run."
            )


def updated_once(layer: int, given: Mapping[int, Any]) -> None:
    """Refuse final weights of a layer, by rank, that are not all of it, updated exactly once."""
    op = "Model.check"
    if not given:
        raise Refused(f"{op}: no rank has set the final weight of layer {layer} (set_final_weight).")
    specs: list[Spec] = []
    for rank, weight in given.items():
        spec = spec_of(f"{op}: rank {rank}", f"final weight of layer {layer}", weight)
        if spec.layer != layer or spec.step != 1:
            raise Refused(
                f"{op}: rank {rank}'s final weight of layer {layer} is {spec}, of optimizer step {spec.step}; it must "
                f"be weights[{layer}] of step 1: updated exactly once."
            )
        specs.append(spec)
    holds = gather(op, specs, [f"rank {rank}" for rank in given]).holds
    if not holds.complete:
        missing = listed(bits(~holds.mask & ((1 << holds.of) - 1)))
        raise Refused(
            f"{op}: the final weights[{layer}] of ranks {listed(given)} are not complete; slice {missing} of "
            f"{holds.of} is missing."
        )
