"""Programs that weigh losses and gradients: those whose means are means, and those that divide wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardlab.language import Rank, Strategy, Value
from shardlab.language.rules.kinds import ONE, Factor
from tests.check.drifting import computed


async def weighed(
    rank: Rank, loss: dict[int, Factor], gradient: Factor = ONE, total: Factor = ONE, *, mean: bool = False
) -> None:
    """Data parallelism, a microbatch after the other.

    Args:
        loss: by what each microbatch's loss is multiplied.
        gradient, total: by what a rank's gradient is, and the reduced one.
        mean: whether gradients are averaged over the ranks.
    """
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        grad = scaled(rank, rank.loss(rank.activations.pop(len(rank.layers))), loss[m])
        for l in reversed(rank.layers):
            grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if l in rank.grad_weights else grad_weight
    for l in rank.layers:
        mine = rank.grad_weights["mine"] = scaled(rank, rank.grad_weights.pop(l), gradient)
        reduced = await rank.all_reduce(mine, reduction="mean" if mean else "sum")
        rank.grad_weights[l] = scaled(rank, reduced, total)
        del rank.grad_weights["mine"]
    for l in rank.layers:  # each parameter's square counts once
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if 0 in rank.scalars else part
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0])
        rank.weights[l], rank.opt_states[l] = update


def scaled(rank: Rank, value: Value, factor: Factor) -> Value:
    return value if factor is ONE else rank.scale(value, factor)


def for_all(rank: Rank, factor: Factor) -> dict[int, Factor]:
    return dict.fromkeys(rank.microbatches, factor)


async def mean_over_ranks(rank: Rank) -> None:
    """Each rank divides by its own microbatches; the mean over the ranks divides by the ranks."""
    factor = ONE * Fraction(len(rank.microbatches), len(rank.share()))
    await weighed(rank, for_all(rank, factor), mean=True)


async def sum_of_tokens(rank: Rank) -> None:
    """The sum over tokens is divided by their number at the very end."""
    await weighed(rank, for_all(rank, rank.tokens()), total=1 / rank.tokens())


async def means_weighted_by_tokens(rank: Rank) -> None:
    """The mean of each microbatch is weighted by its tokens among the rank's, and that by the rank's among all."""
    share = rank.share()
    mean_of = {m: rank.tokens() / rank.tokens([m]) for m in share}
    loss = {m: mean_of[m] * (rank.tokens([m]) / rank.tokens(share)) for m in share}
    await weighed(rank, loss, rank.tokens(share) / rank.tokens())


async def never_divided(rank: Rank) -> None:
    await weighed(rank, for_all(rank, rank.tokens()))


async def divided_twice(rank: Rank) -> None:
    await weighed(rank, for_all(rank, ONE / rank.world), mean=True)


async def a_mean_of_shares(rank: Rank) -> None:
    await weighed(rank, for_all(rank, ONE), mean=True)


async def means_of_means(rank: Rank) -> None:
    """Every microbatch counts alike, however many tokens it has."""
    await weighed(rank, {m: rank.tokens() / rank.tokens([m]) for m in rank.microbatches}, mean=True)


async def divided_at_each_step(rank: Rank) -> None:
    """The sum so far is halved whenever a gradient is added."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        rank.activations[0] = rank.load_batch([m])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
        so_far = rank.grad_weights[0] + grad_weight if m else grad_weight
        rank.grad_weights[0] = rank.scale(so_far, Fraction(1, 2))


async def in_shares(rank: Rank, microbatches: Sequence[int], share: Fraction, collective: str = "all_reduce") -> None:
    """A rank computes some microbatches, which others compute as well, and gives a share of its gradients to a sum."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    gradient = computed(rank, microbatches)
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        mine = rank.grad_weights["mine"] = rank.scale(grad_weight, share)
        if collective == "all_reduce":
            rank.grad_weights[l] = await rank.all_reduce(mine)
        elif collective == "reduce_scatter":
            rank.grad_weights["slice"] = await rank.reduce_scatter(mine)
            rank.grad_weights[l] = await rank.all_gather(rank.grad_weights.pop("slice"))
        else:
            theirs = await rank.exchange(mine, to=1 - rank.index, source=1 - rank.index)
            rank.grad_weights[l] = mine + theirs
        del rank.grad_weights["mine"]
        total = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def replicas_in_shares(rank: Rank) -> None:
    """Average gradients of replicated parameters as Megatron-LM does."""
    await in_shares(rank, rank.microbatches, Fraction(1, rank.world))


async def slices_of_replicas_in_shares(rank: Rank) -> None:
    await in_shares(rank, rank.microbatches, Fraction(1, rank.world), "reduce_scatter")


async def unequal_shares_by_message(rank: Rank) -> None:
    await in_shares(rank, rank.microbatches, Fraction(1 + rank.index, 3), "exchange")


async def each_on_two_of_three_ranks(rank: Rank) -> None:
    """No two ranks compute the same microbatches, and every microbatch is computed by two."""
    await in_shares(rank, [m for m in rank.microbatches if m % 3 != rank.index], Fraction(1, 2))


async def halves_of_different_microbatches(rank: Rank) -> None:
    await in_shares(rank, rank.share(), Fraction(1, rank.world))


async def shares_of_less_than_all(rank: Rank) -> None:
    await in_shares(rank, rank.microbatches, Fraction(1, rank.world + 1))


async def shares_that_vanish(rank: Rank) -> None:
    await in_shares(rank, rank.microbatches, Fraction(1 - 2 * rank.index))


async def shares_of_some_microbatches(rank: Rank) -> None:
    """Microbatch 0 is computed by all ranks, the others by one each: their sum has halves of these."""
    await in_shares(rank, sorted({0, *rank.share()}), Fraction(1, rank.world))


async def one_share_is_all(rank: Rank) -> None:
    await in_shares(rank, rank.microbatches, Fraction(1, 1 + rank.index))


RIGHT = (mean_over_ranks, sum_of_tokens, means_weighted_by_tokens)
SHARED: dict[Strategy, int] = {
    replicas_in_shares: 3,
    slices_of_replicas_in_shares: 2,
    unequal_shares_by_message: 2,
    each_on_two_of_three_ranks: 3,
}
"""Right programs in which ranks give shares of the same gradients, and how many ranks these are."""
