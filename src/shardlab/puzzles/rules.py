"""Where the face is laxer than `shardlab.rules`, so that what is published keeps running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.errors import About, Refused, of_layer
from shardlab.program import Holds, Kind, Spec
from shardlab.rules import update as steps
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import bits, common, listed, microbatches_text, plural
from shardlab.rules.spec import missing_text


def spec_of(op: About, what: str, value: Any) -> Spec:
    """The spec of a value that was given; anything else is refused."""
    spec = getattr(value, "spec", None)
    if not isinstance(spec, Spec):
        raise Refused("no value", op, f"the {what} given is {value!r}", "give a value of the puzzles")
    return spec


def gather(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one value, put together. Replicas are accepted, and pieces need not adjoin."""
    first = specs[0]
    holds = first.holds
    for spec, who in zip(specs, names, strict=True):
        if spec.kind in ROW_KINDS:
            given = f"{who} gave {spec}, and activations are not cut into shards"
            raise Refused("wrong kind", op, given, "put weights, optimizer states and their gradients together")
        if spec.form.but(holds=first.holds) is not first.form or spec.cells != first.cells:
            why = "of one value" if spec.cells == first.cells else "that sum the same microbatches"
            given = f"{names[0]} gave {first} and {who} {spec}"
            raise Refused("other values", op, given, f"put pieces {why} together")
        mine, theirs = common(holds, spec.holds)
        holds = Holds(mine.mask | theirs.mask, mine.of)
    return first._replace(form=first.form.but(holds=holds))


def update(layer: int, gradient: Spec, weight: Spec, state: Spec) -> None:
    """Refuse an update that is not of the whole batch; the optimizer state may hold more than the weight."""
    step = steps.full_sum(gradient.form)
    surplus = gradient.cells & ~step
    if surplus and gradient.layer == layer:
        given = f"{gradient} has {microbatches_text(surplus)} in it"
        remedy = f"the step's microbatches are {listed(bits(step))}, sum these"
        raise Refused("unknown microbatch", of_layer("update", layer), given, remedy)
    if state.layer == weight.layer == layer and not state.holds.contains(weight.holds):
        given = f"the weight holds slices {weight.holds}, but the optimizer state only {state.holds}"
        raise Refused("missing slices", of_layer("update", layer), given, "give the state of the same slices")
    if gradient.holds.contains(state.holds):
        state = state._replace(form=state.form.but(holds=weight.holds))
    steps.update(layer, gradient, weight, state)


def fresh(op: About, weight: Spec, updated: Mapping[int, Holds]) -> None:
    """Refuse a weight from before an update that this rank has made of the same slices."""
    if weight.kind is Kind.WEIGHT and weight.step == 0 and weight.layer in updated:
        done, mine = common(updated[weight.layer], weight.holds)
        stale = done.mask & mine.mask
        if stale:
            given = (
                f"the weight given is {weight}, a stale copy; slice {listed(bits(stale))} of {done.of} was already "
                "updated on this rank"
            )
            remedy = "finish every use of a weight before its update; a new Model starts a new run"
            raise Refused("stale weight", op, given, remedy)


def updated_once(layer: int, given: Mapping[int, Any]) -> None:
    """Refuse final weights of a layer, by rank, that are not all of it, updated exactly once."""
    op = About("Model.check", layer)
    if not given:
        none = f"no rank has set the final weight of layer {layer}"
        raise Refused("not kept", op, none, "call set_final_weight")
    specs: list[Spec] = []
    for rank, weight in given.items():
        spec = spec_of(op, f"final weight of layer {layer} on rank {rank}", weight)
        if spec.layer != layer or spec.step != 1:
            final = f"rank {rank}'s final weight of layer {layer} is {spec}, of optimizer step {spec.step}"
            raise Refused("wrong step", op, final, f"give weights[{layer}] of step 1, updated exactly once")
        specs.append(spec)
    holds = gather(op, specs, [f"rank {rank}" for rank in given]).holds
    if not holds.complete:
        missing = ~holds.mask & (1 << holds.of) - 1
        lacks = missing_text("slice", missing, f" of {holds.of}")
        partial = f"the final weights[{layer}] of {plural('rank', len(given))} {listed(given)} lack a part; {lacks}"
        raise Refused("missing slices", op, partial, "let some rank update it", missing=bits(missing))
