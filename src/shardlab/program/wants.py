"""What ops want of the values that they are given."""

from __future__ import annotations

from shardlab.program.errors import Refused
from shardlab.program.values import Kind, Spec, listed


def want_kind(op: str, what: str, got: Spec, kind: Kind) -> None:
    """Refuse a value of another kind."""
    if got.kind is not kind:
        raise Refused(f"{op}: the {what} given is {got}; give a value of {kind.value}.")


def want_weight(op: str, layer: int, weight: Spec, step: int, owner: int | None = None) -> None:
    """A complete weight of this layer (or the `owner` that it is tied to), from the step that the batch belongs to."""
    want_kind(op, "weight", weight, Kind.WEIGHT)
    owner = layer if owner is None else owner
    if weight.layer != owner:
        raise Refused(f"{op}: the weight given is {weight}; layer {layer} computes with weights[{owner}].")
    if not weight.holds.complete:
        missing = listed(i for i in range(weight.holds.of) if not weight.holds.mask >> i & 1)
        raise Refused(
            f"{op}: the weight given is partial, {weight}; slices {missing} of {weight.holds.of} are missing. "
            "Gather the whole layer first (all_gather)."
        )
    if weight.step != step:
        raise Refused(
            f"{op}: the weight given is {weight}, of optimizer step {weight.step}, but the batch belongs to step "
            f"{step}: it was already updated. Compute with the weight from before its update."
        )
