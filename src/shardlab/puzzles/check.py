"""Whether a run has updated every weight."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.puzzles import rules
from shardlab.puzzles.calls import refuse_forgotten
from shardlab.puzzles.puzzle_compute import PuzzleCompute
from shardlab.puzzles.refusal import PuzzleRefused, judged
from shardlab.rules.pieces import bits, listed


def verify(ranks: Sequence[PuzzleCompute], layers: int) -> None:
    """Refuse final weights that are missing, of another layer, or not updated exactly once.

    Replicas are accepted, and the shards of a layer may lie on any ranks.

    Raises:
        PuzzleRefused: naming the layer, and the rank or the elements at fault.
    """
    if not ranks:
        raise PuzzleRefused("Model.check: no models were given; give those of all ranks.")
    for stores in ranks:
        refuse_forgotten(stores.forgotten)
        stores.memory()  # refuses what is no value, such as a call that was not awaited
    for layer in range(layers):
        _verify_layer(ranks, layer)


def _verify_layer(ranks: Sequence[PuzzleCompute], layer: int) -> None:
    final = {stores.rank: stores.final_weights[layer] for stores in ranks if layer in stores.final_weights}
    if not final:
        raise PuzzleRefused(f"Model.check: no rank has set the final weight of layer {layer} (set_final_weight).")
    with judged():
        names = [f"rank {rank}" for rank in final]
        specs = [
            rules.spec_of(f"Model.check: {name}", f"final weight of layer {layer}", weight)
            for name, weight in zip(names, final.values(), strict=True)
        ]
        for name, spec in zip(names, specs, strict=True):
            if spec.layer != layer or spec.step != 1:
                raise PuzzleRefused(
                    f"Model.check: {name}'s final weight of layer {layer} is {spec}, of optimizer step {spec.step}; "
                    f"it must be weights[{layer}] of step 1: updated exactly once."
                )
        holds = rules.gather("Model.check", specs, names).holds
    if not holds.complete:
        missing = listed(bits(~holds.mask & ((1 << holds.of) - 1)))
        raise PuzzleRefused(
            f"Model.check: the final weights[{layer}] of ranks {listed(final)} are not complete; slice {missing} of "
            f"{holds.of} is missing."
        )
