"""Whether a run has updated every weight."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.puzzles import rules
from shardlab.puzzles.calls import refuse_forgotten
from shardlab.puzzles.refusal import PuzzleRefused, judged
from shardlab.puzzles.stores import Stores
from shardlab.rules.pieces import bits, listed


def check(ranks: Sequence[Stores], layers: int) -> None:
    """Print "Correct!".

    Raises:
        PuzzleRefused: naming the layer, and the rank or the elements at fault.
    """
    verify(ranks, layers)
    print("Correct!")


def verify(ranks: Sequence[Stores], layers: int) -> None:
    """Refuse final weights that are missing, of another layer, or not updated exactly once.

    Replicas are accepted, and the shards of a layer may lie on any ranks.
    """
    if not ranks:
        raise PuzzleRefused("Model.check: no models were given; give those of all ranks.")
    for stores in ranks:
        refuse_forgotten(stores.forgotten)
        stores.memory()  # refuses what is no value, such as a call that was not awaited
    for layer in range(layers):
        _verify_layer(ranks, layer)


def _verify_layer(ranks: Sequence[Stores], layer: int) -> None:
    final = {stores.rank: stores.final_weights[layer] for stores in ranks if layer in stores.final_weights}
    if not final:
        raise PuzzleRefused(f"Model.check: no rank has set the final weight of layer {layer} (set_final_weight).")
    for rank, weight in final.items():
        with judged():
            spec = rules.spec_of(f"Model.check: rank {rank}", f"final weight of layer {layer}", weight)
        if spec.layer != layer or spec.step != 1:
            raise PuzzleRefused(
                f"Model.check: rank {rank}'s final weight of layer {layer} is {spec}, of optimizer step {spec.step}; "
                f"it must be weights[{layer}] of step 1: updated exactly once."
            )
    with judged():
        whole = rules.gather("Model.check", [w.spec for w in final.values()], [f"rank {rank}" for rank in final])
    if not whole.holds.complete:
        missing = listed(bits(~whole.holds.mask & ((1 << whole.holds.of) - 1)))
        raise PuzzleRefused(
            f"Model.check: the final weights[{layer}] of ranks {listed(final)} are not complete; slice {missing} of "
            f"{whole.holds.of} is missing."
        )
