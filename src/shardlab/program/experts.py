"""The rules of expert parallelism: a mixture of experts cut before and after its experts (Lepikhin et al. 2020, arXiv
2006.16668, section 3.2; Fedus et al. 2021, arXiv 2101.03961).

A DENSE layer routes its microbatch's tokens into buffers, one for each expert; an EXPERTS layer computes on the
buffers of the experts whose parameters it is given. ALL_TO_ALL stands between: each rank gives all experts' buffers of
its own microbatches, and receives its own experts' buffers of all microbatches; or the other way round. So *sums*
tells of which slices of the experts a value has the buffers (0: all), and *holds* of which microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.sizes import LayerKind
from shardlab.program.sliced import slices_of
from shardlab.program.values import Holds, Kind, Spec, bits, listed, microbatches_text
from shardlab.program.wants import want_kind

BUFFERS = frozenset({Kind.ACTIVATION, Kind.GRAD_ACTIVATION})


def forward(layer: int, activation: Spec, weight: Spec, op: str = "forward") -> Spec:
    """Some experts' buffers through these experts."""
    op = f"{op}(layer {layer})"
    sums = _want_buffers(op, layer, activation, weight)
    return activation._replace(layer=layer + 1, sums=sums)


def backward(layer: int, activation: Spec, gradient: Spec, weight: Spec) -> tuple[Spec, Spec]:
    """The gradient of these experts' parameters, for all microbatches in the buffers; and the buffers'."""
    op = f"backward(layer {layer})"
    _want_buffers(op, layer, activation, weight)
    _want_gradient(op, layer, activation, gradient)
    own = activation._replace(kind=Kind.GRAD_WEIGHT, holds=weight.holds, sums=activation.holds.mask)
    return own, activation._replace(kind=Kind.GRAD_ACTIVATION)


def backward_weight(layer: int, activation: Spec, gradient: Spec, weight_slices: int) -> Spec:
    """The half of a backward pass that needs no weight, by the slices of the experts that the other half had."""
    op = f"backward_weight(layer {layer})"
    want_kind(op, "activation", activation, Kind.ACTIVATION)
    _want_gradient(op, layer, activation, gradient)
    of = activation.grid.width
    holds = Holds(weight_slices, of).simplified() if weight_slices else Holds(1, 1)
    return activation._replace(kind=Kind.GRAD_WEIGHT, holds=holds, sums=activation.holds.mask)


def all_to_all(specs: Sequence[Spec], ranks: Sequence[int], kinds: Sequence[LayerKind]) -> list[Spec]:
    """All experts' buffers of each member's microbatches become each member's experts' of all, or back again."""
    first, count, of = specs[0], len(specs), specs[0].grid.width
    op = f"all_to_all({first.kind.value}[{first.layer}])"
    if first.kind not in BUFFERS or not _between(first.layer, kinds):
        raise Refused(f"{op}: {first} was given; an all_to_all exchanges what goes into experts or comes out of them.")
    for spec, rank in zip(specs, ranks, strict=True):
        alike = spec.kind is first.kind and spec.layer == first.layer and spec.step == first.step
        if not alike or (spec.sums == 0) != (first.sums == 0):
            raise Refused(
                f"{op}: rank {ranks[0]} gave {first} and rank {rank} {spec}; all give buffers of all experts, or all "
                "give some experts' buffers, of one layer."
            )
    if of % count:
        raise Refused(f"{op}: {of} slices of the experts do not divide among {count} ranks; meet on the axis ep.")
    runs = [((1 << of // count) - 1) << place * (of // count) for place in range(count)]
    return _gather_experts(op, specs, ranks, runs) if first.sums else _scatter_experts(op, specs, ranks, runs)


def _scatter_experts(op: str, specs: Sequence[Spec], ranks: Sequence[int], runs: Sequence[int]) -> list[Spec]:
    """Each member receives its run of the experts, with the microbatches of all members."""
    first, mask = specs[0], 0
    for spec, rank in zip(specs, ranks, strict=True):
        twice = mask & spec.holds.mask
        if twice:
            raise Refused(
                f"{op}: {microbatches_text(twice)} would come from rank {rank} and from an earlier rank as well; the "
                "members of an all_to_all must have different microbatches."
            )
        if spec.holds.pieces != first.holds.pieces:
            raise Refused(f"{op}: rank {ranks[0]} gave {first} and rank {rank} {spec}; give equally many microbatches.")
        mask |= spec.holds.mask
    holds = first.holds._replace(mask=mask)
    if runs[0] == (1 << first.grid.width) - 1:  # a group of one
        return [first._replace(holds=holds)]
    return [first._replace(holds=holds, sums=run) for run in runs]


def _gather_experts(op: str, specs: Sequence[Spec], ranks: Sequence[int], runs: Sequence[int]) -> list[Spec]:
    """Each member receives its run of the microbatches, with the buffers of all experts."""
    first = specs[0]
    for spec, rank, run in zip(specs, ranks, runs, strict=True):
        if spec.sums != run:
            raise Refused(
                f"{op}: rank {rank} gave {spec}; the group's ranks have runs of the experts in order, so this one must "
                f"give slices {listed(bits(run))}."
            )
        if spec.holds != first.holds:
            raise Refused(f"{op}: rank {ranks[0]} gave {first} and rank {rank} {spec}; give the same microbatches.")
    if first.holds.pieces % len(specs):
        raise Refused(f"{op}: {first} does not divide among {len(specs)} ranks; each takes equally many microbatches.")
    return [first._replace(holds=holds, sums=0) for holds in first.holds.split(len(specs))]


def refuse_sum(op: str, spec: Spec) -> None:
    """Refuse to sum what experts make: their buffers lie side by side."""
    raise Refused(f"{op}: {spec} was given; experts' buffers are no terms of a sum. Exchange them by all_to_all.")


def _between(index: int, kinds: Sequence[LayerKind]) -> bool:
    """Whether activation `index` enters experts or comes out of them."""
    around = kinds[max(0, index - 1) : index + 1]
    return 0 < index < len(kinds) and LayerKind.EXPERTS in around


def _want_buffers(op: str, layer: int, activation: Spec, weight: Spec) -> int:
    """The slices of the experts that both are of (0: all)."""
    want_kind(op, "activation", activation, Kind.ACTIVATION)
    if activation.layer != layer:
        raise Refused(f"{op}: the activation given is {activation}; this op reads activations[{layer}].")
    sums = slices_of(op, layer, layer, weight, activation)
    if activation.sums != sums:
        raise Refused(
            f"{op}: the activation given is {activation} and the weight {weight}; experts compute on their own buffers "
            "and on no others. Exchange the buffers by all_to_all, and give the weight of the slice that came."
        )
    return sums


def _want_gradient(op: str, layer: int, activation: Spec, gradient: Spec) -> None:
    want_kind(op, "gradient", gradient, Kind.GRAD_ACTIVATION)
    for what, got, wanted in (("activation", activation, layer), ("gradient", gradient, layer + 1)):
        if got.layer != wanted:
            raise Refused(f"{op}: the {what} given is {got}; this op reads {got.kind.value}[{wanted}].")
    if (gradient.holds, gradient.sums, gradient.step) != (activation.holds, activation.sums, activation.step):
        raise Refused(
            f"{op}: the gradient given is {gradient} and the activation {activation}; both must be of the same "
            "microbatches, experts and step."
        )
