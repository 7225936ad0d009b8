"""The rules of half-blocks: each op's result, and each refusal once, by its words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.program import Holds, Kind, OpKind, Refused, Spec, sliced, transfer
from shardlab.rules.pieces import WHOLE
from shardlab.rules.spec import Grid  # FIXME
from tests.program.tapes import says

LAYERS = 7
"""Bodies 0, 2, 4, 6 and norms 1, 3, 5."""

GRID = Grid(2, 2)
"""Two tensor-parallel ranks."""

FIRST, SECOND = Holds(0b0001, 4), Holds(0b0010, 4)
"""The two slices of microbatch 0's sequences, of two microbatches."""

SEQUENCE = Holds(0b0011, 4)
BOTH = Holds(0b1111, 4)


def value(kind: Kind, layer: int, holds: Holds = SEQUENCE, sums: int = 0, step: int = 0) -> Spec:
    return Spec(kind, layer, holds, sums, step, GRID)


def x(layer: int, holds: Holds = SEQUENCE, sums: int = 0, step: int = 0) -> Spec:
    return value(Kind.ACTIVATION, layer, holds, sums, step)


def dx(layer: int, holds: Holds = SEQUENCE, sums: int = 0, step: int = 0) -> Spec:
    return value(Kind.GRAD_ACTIVATION, layer, holds, sums, step)


def r(layer: int, holds: Holds = SEQUENCE, sums: int = 0) -> Spec:
    return value(Kind.RESIDUAL, layer, holds, sums)


def dr(layer: int, holds: Holds = SEQUENCE) -> Spec:
    return value(Kind.GRAD_RESIDUAL, layer, holds)


def stats(sums: int = 0, holds: Holds = SEQUENCE) -> Spec:
    return value(Kind.STATS, LAYERS, holds, sums)


def weight(layer: int, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return Spec(Kind.WEIGHT, layer, holds, 0, step)


ONE_SLICE, OTHER_SLICE = Holds(0b01, 2), Holds(0b10, 2)


def forward(layer: int, activation: Spec, weight: Spec) -> Spec:
    return sliced.forward(layer, activation, weight, layers=LAYERS)


def test_a_slice_of_a_body_makes_its_term_and_the_whole_of_it_everything() -> None:
    assert forward(2, x(2), weight(2, OTHER_SLICE)) == x(3, sums=0b10)
    assert forward(2, x(2), weight(2)) == x(3)


def test_a_slice_may_be_counted_in_any_pieces() -> None:
    assert forward(2, x(2), weight(2, Holds(0b1100, 4))) == x(3, sums=0b10)


def test_backward_makes_the_slices_gradient_and_its_term_of_the_inputs() -> None:
    made = sliced.backward(2, x(2), dx(3), weight(2, ONE_SLICE), layers=LAYERS)
    assert made == (Spec(Kind.GRAD_WEIGHT, 2, ONE_SLICE, SEQUENCE.mask, 0, GRID), dx(2, sums=0b01))
    assert sliced.backward_weight(2, LAYERS, x(2), dx(3), 0b01) == made[0]


def test_the_heads_gradient_is_of_the_slice_of_its_logits() -> None:
    made = sliced.backward(6, x(6), dx(7, sums=0b10), weight(6, OTHER_SLICE), layers=LAYERS)
    assert made[1] == dx(6, sums=0b10)


def test_a_norm_works_on_any_slice_of_a_sequence() -> None:
    assert sliced.norm_forward(3, 5, x(3, SECOND), weight(3), r(3, SECOND)) == (x(4, SECOND), r(5, SECOND))
    own, branch, residual = sliced.norm_backward(3, 5, x(3, SECOND), dx(4, SECOND), weight(3), dr(5, SECOND))
    assert (branch, residual) == (dx(3, SECOND), dr(3, SECOND))
    assert own == Spec(Kind.GRAD_WEIGHT, 3, WHOLE, SECOND.mask, 0, GRID)


def test_the_first_norm_is_given_no_residual_and_the_last_hands_none_on() -> None:
    assert sliced.norm_forward(1, 3, x(1), weight(1)) == (x(2), r(3))
    assert sliced.norm_forward(5, -1, x(5), weight(5), r(5)) == (x(6), None)
    assert len(sliced.norm_backward(1, 3, x(1), dx(2), weight(1), dr(3))) == 2
    assert len(sliced.norm_backward(5, -1, x(5), dx(6), weight(5))) == 3


def test_terms_are_reduced_and_scattered_along_the_sequence() -> None:
    terms = [x(3, sums=0b01), x(3, sums=0b10)]
    assert transfer.collective(OpKind.ALL_REDUCE, terms, [0, 1], LAYERS) == [x(3)] * 2
    scattered = transfer.collective(OpKind.REDUCE_SCATTER, terms, [0, 1], LAYERS)
    assert scattered == [x(3, FIRST), x(3, SECOND)]
    assert transfer.collective(OpKind.ALL_GATHER, scattered, [0, 1], LAYERS) == [x(3)] * 2


def test_every_microbatchs_sequences_are_cut() -> None:
    terms = [x(3, BOTH, sums=0b01), x(3, BOTH, sums=0b10)]
    scattered = transfer.collective(OpKind.REDUCE_SCATTER, terms, [0, 1], LAYERS)
    assert [spec.holds.mask for spec in scattered] == [0b0101, 0b1010]


def test_the_loss_of_slices_of_the_logits_takes_the_stats_of_all() -> None:
    parts = [sliced.loss_stats(LAYERS, x(7, sums=0b01)), sliced.loss_stats(LAYERS, x(7, sums=0b10))]
    gathered = transfer.collective(OpKind.ALL_GATHER, parts, [0, 1], LAYERS)
    assert gathered == [stats()] * 2
    assert sliced.loss(LAYERS, x(7, sums=0b10), gathered[0]) == dx(7, sums=0b10)
    assert sliced.loss(LAYERS, x(7), None) == dx(7)


def meet(kind: OpKind, *members: Spec) -> object:
    return transfer.collective(kind, members, range(len(members)), LAYERS)


REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "forward, kind": (
        lambda: forward(2, dx(2), weight(2)),
        ["forward(layer 2): the activation given is grad_activations[2]", "give a value of activations"],
    ),
    "forward, layer": (lambda: forward(2, x(4), weight(2)), ["this op reads activations[2]"]),
    "forward, terms": (
        lambda: forward(2, x(2, sums=0b01), weight(2)),
        ["activations[2] (microbatch 0, slices 0 of 2 alone)", "slices 1 are missing", "reduce a body's terms"],
    ),
    "forward, sequence": (
        lambda: forward(2, x(2, SECOND), weight(2)),
        ["activations[2] (sequence slice 1 of microbatch 0)", "wants whole sequences. Gather their slices first"],
    ),
    "forward, weight cut finer": (
        lambda: forward(2, x(2), weight(2, Holds(0b1, 4))),
        ["weights[2] (shard 0 of 4), which is not made of whole slices of 2; gather a slice first"],
    ),
    "forward, weight across slices": (
        lambda: forward(2, x(2), weight(2, Holds(0b0110, 4))),
        ["not made of whole slices of 2"],
    ),
    "forward, weight's layer": (lambda: forward(2, x(2), weight(4)), ["layer 2 computes with weights[2]"]),
    "forward, weight's step": (lambda: forward(2, x(2), weight(2, step=1)), ["it was already updated"]),
    "backward, gradient's kind": (
        lambda: sliced.backward(2, x(2), x(3), weight(2), layers=LAYERS),
        ["the gradient given is activations[3]", "give a value of grad_activations"],
    ),
    "backward, gradient's layer": (
        lambda: sliced.backward(2, x(2), dx(2), weight(2), layers=LAYERS),
        ["this op reads grad_activations[3]"],
    ),
    "backward, gradient's terms": (
        lambda: sliced.backward(2, x(2), dx(3, sums=0b10), weight(2, ONE_SLICE), layers=LAYERS),
        ["the gradient given is grad_activations[3]", "slices 0 are missing"],
    ),
    "backward, head's gradient of all": (
        lambda: sliced.backward(6, x(6), dx(7), weight(6, ONE_SLICE), layers=LAYERS),
        ["the gradient given is grad_activations[7] (microbatch 0); give the slices that the weight has"],
    ),
    "backward, gradient's tokens": (
        lambda: sliced.backward(2, x(2), dx(3, BOTH), weight(2), layers=LAYERS),
        ["the gradient is grad_activations[3] (microbatches 0-1)", "both must be of the same tokens and step"],
    ),
    "backward, sequence": (
        lambda: sliced.backward(2, x(2, FIRST), dx(3, FIRST), weight(2), layers=LAYERS),
        ["backward(layer 2)", "wants whole sequences"],
    ),
    "backward_weight, other slices": (
        lambda: sliced.backward_weight(6, LAYERS, x(6), dx(7), 0b01),
        ["backward_weight(layer 6)", "give the slices that the weight has"],
    ),
    "norm, terms of a branch": (
        lambda: sliced.norm_forward(3, 5, x(3, sums=0b01), weight(3), r(3)),
        ["forward_norm(layer 3): the branch given is", "slices 1 are missing"],
    ),
    "norm, no residual": (
        lambda: sliced.norm_forward(3, 5, x(3), weight(3)),
        ["a residual is missing", "adds its branch to residuals[3]"],
    ),
    "norm, a residual too many": (
        lambda: sliced.norm_forward(1, 3, x(1), weight(1), r(1)),
        ["the first norm layer is given no residual"],
    ),
    "norm, another norm's residual": (
        lambda: sliced.norm_forward(3, 5, x(3), weight(3), r(5)),
        ["the residual given is residuals[5]", "this op reads residuals[3]"],
    ),
    "norm, the branch as residual": (
        lambda: sliced.norm_forward(3, 5, x(3), weight(3), x(3)),
        ["the residual given is activations[3]", "give a value of residuals"],
    ),
    "norm, other tokens": (
        lambda: sliced.norm_forward(3, 5, x(3, FIRST), weight(3), r(3, SECOND)),
        ["the residual is residuals[3] (sequence slice 1 of microbatch 0)", "must be of the same tokens"],
    ),
    "norm, sliced weight": (
        lambda: sliced.norm_forward(3, 5, x(3), weight(3, ONE_SLICE), r(3)),
        ["slices 1 of 2 are missing. Gather the whole layer first"],
    ),
    "norm backward, no gradient of the residual": (
        lambda: sliced.norm_backward(3, 5, x(3), dx(4), weight(3)),
        ["the residual's gradient is missing", "is given the next one's grad_residuals as well"],
    ),
    "norm backward, a gradient too many": (
        lambda: sliced.norm_backward(5, -1, x(5), dx(6), weight(5), dr(7)),
        ["the last norm layer hands on no residual"],
    ),
    "norm backward, the branch's gradient for the residual's": (
        lambda: sliced.norm_backward(3, 5, x(3), dx(4), weight(3), dx(5)),
        ["the residual's gradient given is grad_activations[5]", "give a value of grad_residuals"],
    ),
    "norm backward, other tokens": (
        lambda: sliced.norm_backward(3, 5, x(3, FIRST), dx(4, FIRST), weight(3), dr(5, SECOND)),
        ["the residual's gradient is grad_residuals[5] (sequence slice 1 of microbatch 0)"],
    ),
    "norm backward, terms": (
        lambda: sliced.norm_backward(3, 5, x(3), dx(4, sums=0b10), weight(3), dr(5)),
        ["the gradient given is grad_activations[4]", "slices 0 are missing"],
    ),
    "loss_stats, all logits": (
        lambda: sliced.loss_stats(LAYERS, x(7)),
        ["loss_stats: activations[7] (microbatch 0) was given; give slices of the logits, activations[7]"],
    ),
    "loss, no logits": (lambda: sliced.loss(LAYERS, x(6), None), ["the loss reads the last one, activations[7]"]),
    "loss, no stats": (
        lambda: sliced.loss(LAYERS, x(7, sums=0b01), None),
        ["was given without stats", "take the gathered loss_stats of all slices"],
    ),
    "loss, needless stats": (lambda: sliced.loss(LAYERS, x(7), stats()), ["activations[7] (microbatch 0) needs no"]),
    "loss, own stats": (
        lambda: sliced.loss(LAYERS, x(7, sums=0b01), stats(0b01)),
        ["the stats given is stats[7] (microbatch 0, slices 0 of 2 alone)", "slices 1 are missing"],
    ),
    "loss, other tokens": (
        lambda: sliced.loss(LAYERS, x(7, sums=0b01), stats(0, BOTH)),
        ["the stats is stats[7] (microbatches 0-1)", "same tokens"],
    ),
    "reduce, logits": (
        lambda: meet(OpKind.ALL_REDUCE, x(7, sums=0b01), x(7, sums=0b10)),
        ["all_reduce(activations[7]): slices of the logits are no terms of a sum"],
    ),
    "reduce, other tokens": (
        lambda: meet(OpKind.ALL_REDUCE, x(3, sums=0b01), x(3, BOTH, sums=0b10)),
        ["rank 0 gave activations[3] (microbatch 0, slices 0 of 2 alone)", "only terms of one value"],
    ),
    "reduce, complete": (
        lambda: meet(OpKind.ALL_REDUCE, x(3), x(3)),
        ["which is complete; summing it again would count it twice"],
    ),
    "reduce, twice": (
        lambda: meet(OpKind.REDUCE_SCATTER, x(3, sums=0b01), x(3, sums=0b01)),
        ["reduce_scatter(activations[3]): slice 0 would be counted twice (rank 1 and an earlier rank both have it)"],
    ),
    "reduce, a residual": (
        lambda: meet(OpKind.ALL_REDUCE, r(3, FIRST), r(3, FIRST)),
        ["only weight gradients are sums of contributions"],
    ),
    "scatter, sequences that do not divide": (
        lambda: meet(OpKind.REDUCE_SCATTER, x(3, FIRST, sums=0b01), x(3, FIRST, sums=0b10)),
        ["sequences of 2 slices do not divide among 2 ranks"],
    ),
    "gather, terms": (
        lambda: meet(OpKind.ALL_GATHER, x(3, FIRST, sums=0b01), x(3, SECOND, sums=0b10)),
        ["Reduce before gathering"],
    ),
    "gather, one sequence slice twice": (
        lambda: meet(OpKind.ALL_GATHER, x(3, FIRST), x(3, FIRST)),
        ["comes from rank 1 and from an earlier rank as well"],
    ),
    "gather, one slice's stats twice": (
        lambda: meet(OpKind.ALL_GATHER, stats(0b01), stats(0b01)),
        ["all_gather(stats[7]): slice 0 would be counted twice"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_a_rule_of_half_blocks_is_refused_with_what_was_given_and_wanted(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(Refused) as caught:
        call()
    says(caught.value, *words)
