"""Conditions at the end of a step: every slice loaded is one step on, or frozen, and nothing else is left."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.check.rank_state import RankState
from shardlab.errors import About
from shardlab.program import Holds, Kind, OpKind, Program, Refused, Spec
from shardlab.rules.pieces import bits, common, microbatches_text, numbered
from shardlab.rules.spec import form_of, microbatches_of

LOAD_OPT_STATE = OpKind.LOAD_OPT_STATE


def trained_layers(program: Program) -> int:
    """Find the layers whose optimizer state a rank loads, as a bit set; the others are frozen.

    They are all of them where no rank loads any: such a program trains nothing, and is refused for it.
    """
    sizes, trained = program.sizes, 0
    for layer in {op[1] for tape in program.tapes for op in tape if op[0] is LOAD_OPT_STATE}:
        if 0 <= layer < program.layers:  # a tape from a file may say anything
            trained |= sizes.layers_of_weight(layer)
    return trained or (1 << program.layers) - 1


def check_rank_ending(state: RankState) -> None:
    """Want nothing in flight, and alive exactly the slices that the rank loaded, updated once or frozen.

    Raises:
        Refused: naming what is missing or left over.
    """
    for issued in state.flying.values():
        state.refuse("in flight", "is still in flight when the step ends", "wait for it", issued)
    left = set(state.live.values())
    finals: set[Spec] = set()
    for (kind, layer, holds), loaded in state.loaded.items():
        trained = state.trained >> layer & 1
        final = Spec(form_of(kind, layer, trained, state.rules.space, holds, place=state.ops[loaded].place))
        finals.add(final)
        if final not in left and not trained:
            given = f"the step ends without {final}; no rank loads an optimizer state of layer {layer}, so it is frozen"
            state.refuse("frozen and not kept", given, "keep the weight that is loaded in a store", loaded)
        if final not in left:
            remedy = "update every slice that is loaded once, and keep the result in a store"
            state.refuse("not kept", f"the step ends without {final}", remedy, loaded)
    end = len(state.ops)
    for number, spec in state.live.items():
        if spec not in finals:
            given = f"the step ends with value {number}, {spec}, still live; a step leaves only the slices it loaded"
            state.refuse("left over", given, "free it", end)
        if spec not in left:
            given = f"the step ends with value {number}, {spec}, which is live already; a step leaves each slice once"
            state.refuse("left over", given, "free one of them", end)
        left.remove(spec)


def check_coverage(states: Sequence[RankState], layers: int) -> None:
    """Want the ranks together to load every slice of every layer, and all to clip its gradient or none.

    Raises:
        Refused: naming the first slice that nobody loads, or an update that does not clip as others do.
    """
    clips = {state.clips: state for state in reversed(states) if state.clips is not None}
    if len(clips) > 1:
        plain = clips[False]
        at = next(at for at, op in enumerate(plain.ops) if op.kind in (OpKind.UPDATE, OpKind.DIRECTION))
        given = (
            f"is not given the gradient's norm, but rank {clips[True].index}'s updates are; replicas would drift apart "
            "and layers learn at different rates"
        )
        plain.refuse("norm on some ranks", given, "give the norm to all updates", at)
    held = [Holds(0, 1)] * layers
    for state in states:
        for kind, layer, holds in state.loaded:
            if kind is not Kind.WEIGHT:
                continue
            mine, theirs = common(held[layer], holds)
            held[layer] = Holds(mine.mask | theirs.mask, mine.of)
    weight_of = states[0].program.sizes.weight_of
    for layer, (mask, of) in enumerate(held):
        if weight_of(layer) == layer and not held[layer].complete:
            missing = ~mask & (1 << of) - 1
            given = f"no rank loads {numbered('slice', missing)} of {of}, so nobody updates what is there"
            remedy = "load and update every slice of every layer on at least one rank"
            raise Refused("not loaded", About(f"weights[{layer}]", layer), given, remedy, missing=bits(missing))


def check_losses(states: Sequence[RankState]) -> None:
    """Want the loss of every piece of every microbatch on one rank at least, and no state of an optimizer.

    Raises:
        Refused: naming the first microbatch whose loss nobody computes, or what is loaded for updates.
    """
    computed = 0
    for state in states:
        for (kind, _, _), at in state.loaded.items():
            if kind is Kind.OPT_STATE:
                state.refuse("not kept", "is loaded, but nothing is trained here", "leave it out", at)
        for op in state.ops:
            if op.kind is OpKind.LOSS:
                computed |= state.specs[op.inputs[0]].cells
    space = states[0].rules.space
    if missing := ~computed & (1 << space.cells) - 1:
        given = f"nobody computes the loss of {microbatches_text(microbatches_of(missing, space))}"
        raise Refused("missing microbatches", "", given, "compute every microbatch's loss", missing=bits(missing))
