"""Programs that are right although they are unusual: each gives the numbers of one device, and none may be refused."""

from __future__ import annotations

from shardlab.language import Mesh, Rank, Store, Value
from shardlab.language.rules.kinds import ONE, Factor


def terms_added_by_hand_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks)


async def summed(rank: Rank, store: Store, terms: Value) -> Value:
    """The sum of two ranks' terms, as overlapped rings and rotated tensor parallelism make it."""
    other = 1 - rank.index
    store["mine"] = terms
    theirs = await rank.exchange(terms, to=other, source=other)
    return store.pop("mine") + theirs


async def terms_added_by_hand(rank: Rank) -> None:
    """Tensor parallelism on two ranks that exchange their terms and add them: an all-reduce by hand."""
    last = rank.layers[-1]
    for l in rank.layers:
        cut = (0, 1) if rank.sizes.signatures[l].carries else (rank.index, rank.world)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    residual: list[Value] = []
    for l in rank.layers:
        if rank.sizes.signatures[l].carries:
            rank.activations[l + 1], *residual = rank.forward(l, (rank.activations[l], *residual), rank.weights[l])
        else:
            terms = rank.forward(l, rank.activations[l], rank.weights[l])
            rank.activations[l + 1] = await summed(rank, rank.activations, terms) if l < last else terms
    stats = await rank.all_gather(rank.loss_stats(rank.activations[last + 1]), axis="tp")
    gradient, residual = rank.loss(rank.activations.pop(last + 1), stats), []
    for l in reversed(rank.layers):
        x = rank.activations.pop(l)
        if rank.sizes.signatures[l].carries:
            gradients = gradient, *residual
            rank.grad_weights[l], gradient, *residual = rank.backward(l, x, gradients, rank.weights[l])
        else:
            rank.grad_weights[l], terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await summed(rank, rank.grad_activations, terms) if l else terms
    _update(rank)


def _update(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


def logits_gathered_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks)


async def logits_gathered(rank: Rank) -> None:
    """Tensor parallelism that gathers the logits and has every rank compute the whole loss, as Megatron-LM does with
    `parallel_output=False`; the head's slices take their own of the gradient.
    """
    last, residual = rank.layers[-1], list[Value]()
    for l in rank.layers:
        cut = (0, 1) if rank.sizes.signatures[l].carries else (rank.index, rank.world)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    for l in rank.layers:
        if rank.sizes.signatures[l].carries:
            rank.activations[l + 1], *residual = rank.forward(l, (rank.activations[l], *residual), rank.weights[l])
        else:
            output = rank.forward(l, rank.activations[l], rank.weights[l])
            whole = rank.all_gather(output, axis="tp") if l == last else rank.all_reduce(output, axis="tp")
            rank.activations[l + 1] = await whole
    gradient, residual = rank.loss(rank.activations.pop(last + 1)), []
    for l in reversed(rank.layers):
        x = rank.activations.pop(l)
        if rank.sizes.signatures[l].carries:
            rank.grad_weights[l], gradient, *residual = rank.backward(l, x, (gradient, *residual), rank.weights[l])
        else:
            rank.grad_weights[l], terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
    _update(rank)


def experts_interleaved_batch_mesh(ranks: int) -> Mesh:
    return Mesh(ep=ranks)


async def experts_interleaved_batch(rank: Rank, loss: Factor = ONE) -> None:
    """Microbatches dealt as a distributed sampler does, m % world; they go to the experts, and come home.

    Args:
        loss: by what the loss is multiplied, and gradients are divided before the update.
    """
    last = len(rank.layers)
    for l in rank.layers:
        cut = (rank.index, rank.world) if "expert" in rank.sizes.signatures[l].cut else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch([m for m in rank.microbatches if m % rank.world == rank.index])
    carried = list[Value]()  # the residual stream and the routing, beside the activations
    for l in rank.layers:
        if "expert" in rank.sizes.signatures[l].cut:
            rank.activations[l] = await rank.all_to_all(rank.activations.pop(l))
            rank.activations[l + 1] = await rank.all_to_all(rank.forward(l, rank.activations[l], rank.weights[l]))
        else:
            inputs = (rank.activations[l], *carried)
            rank.activations[l + 1], *carried = rank.forward(l, inputs, rank.weights[l])
    grad = rank.loss(rank.activations.pop(last))
    rank.grad_activations[last] = grad if loss is ONE else rank.scale(grad, loss)
    for l in reversed(rank.layers):
        x, gradient = rank.activations.pop(l), rank.grad_activations.pop(l + 1)
        if "expert" in rank.sizes.signatures[l].cut:
            gradient = await rank.all_to_all(gradient)
            rank.grad_weights[l], gradient = rank.backward(l, x, gradient, rank.weights[l])
            rank.grad_activations[l] = await rank.all_to_all(gradient)
        else:
            grad_weight, rank.grad_activations[l], *carried = rank.backward(l, x, (gradient, *carried), rank.weights[l])
            rank.grad_weights[l] = await rank.all_reduce(grad_weight)
    if loss is not ONE:
        for l in rank.layers:
            rank.grad_weights[l] = rank.scale(rank.grad_weights.pop(l), 1 / loss)
    _update(rank)


def auxiliary_loss_scaled_mesh(ranks: int) -> Mesh:
    return Mesh(ep=ranks)


async def auxiliary_loss_scaled(rank: Rank) -> None:
    """The gradient that a router adds for its auxiliary loss is multiplied as the loss's own is."""
    await experts_interleaved_batch(rank, rank.tokens() / 2)


def striped_context_mesh(ranks: int) -> Mesh:
    return Mesh(cp=ranks)


async def striped_context(rank: Rank) -> None:
    """Striped attention (Brandon et al. 2023, arXiv 2311.09431): rank r has slices r, r + cp, ... of every sequence."""
    xs = rank.activations
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    xs[0], residual = rank.load_batch(rank.microbatches, [rank.index, rank.index + rank.world]), list[Value]()
    for l in rank.layers:
        if rank.sizes.signatures[l].carries:
            xs[l + 1], *residual = rank.forward(l, (xs[l], *residual), rank.weights[l])
        elif rank.sizes.signatures[l].projects:
            rank.queries[l], block = rank.forward(l, (xs[l],), rank.weights[l])
            rank.keys_values[l] = await rank.all_gather(block, axis="cp")
            xs[l + 1] = rank.attend(l, rank.queries[l], rank.keys_values[l])
        else:
            xs[l + 1] = rank.forward(l, xs[l], rank.weights[l])
    gradient, grad_residual = rank.loss(xs.pop(len(rank.layers))), list[Value]()
    for l in reversed(rank.layers):
        if rank.sizes.signatures[l].carries:
            grad_weight, gradient, *grad_residual = rank.backward(
                l, xs.pop(l), (gradient, *grad_residual), rank.weights[l]
            )
        elif rank.sizes.signatures[l].projects:
            mixed = xs.pop("mixed")
            of_queries, of_all = rank.attend_backward(l, rank.queries[l], rank.keys_values[l], mixed, gradient)
            rank.grad_queries[l] = of_queries
            mine = await rank.reduce_scatter(of_all, axis="cp")
            grad_weight, gradient = rank.backward(l, xs.pop(l), (rank.grad_queries.pop(l), mine), rank.weights[l])
        else:
            if l and rank.sizes.signatures[l - 1].projects:
                xs["mixed"] = xs[l]
            grad_weight, gradient = rank.backward(l, xs.pop(l), gradient, rank.weights[l])
        rank.grad_weights[l] = grad_weight
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l), axis="cp")
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def fine_tuned(rank: Rank) -> None:
    """Only the last layer is trained; the others have no optimizer state, and stay as they are."""
    last = len(rank.layers) - 1
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
    rank.opt_states[last] = rank.load_opt_state(last)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(last + 1))
    grad_weight, _ = rank.backward(last, rank.activations[last], gradient, rank.weights[last])
    total = await rank.all_reduce(grad_weight)
    rank.weights[last], rank.opt_states[last] = rank.update(last, total, rank.weights[last], rank.opt_states[last])


async def fine_tuned_in_shards(rank: Rank) -> None:
    """The middle layer is frozen, all layers are sharded, and gradients are clipped to the norm of what is trained."""
    place, of, n = rank.index, rank.world, len(rank.layers)
    trained = [l for l in rank.layers if l != n // 2]
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, place, of)
    for l in trained:
        rank.opt_states[l] = rank.load_opt_state(l, place, of)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.weights["full", l] = await rank.all_gather(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights["full", l])
    rank.grad_activations[n] = rank.loss(rank.activations.pop(n))
    for l in reversed(rank.layers):
        x, gradient, weight = rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights.pop(("full", l))
        grad_weight, rank.grad_activations[l] = rank.backward(l, x, gradient, weight)
        if l in trained:
            rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)
    for l in trained:
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    rank.scalars["norm"] = await rank.all_reduce(rank.scalars.pop(0))
    for l in trained:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"]
        )


async def kept_in_parts(rank: Rank) -> None:
    """Data parallelism in which rank r keeps each weight in r + 1 parts, and puts them together to compute."""
    parts = range(rank.index + 1)
    last = len(rank.layers)
    for l in rank.weighted_layers:
        for part in parts:
            rank.weights[l, part], rank.opt_states[l, part] = rank.load_weights(l, part, len(parts))
        rank.weights[l] = rank.concatenate([rank.weights[l, part] for part in parts])
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[rank.weight_of(l)])
    gradient = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        mine, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[rank.weight_of(l)])
        rank.accumulate(await rank.all_reduce(mine))
    for l in rank.weighted_layers:
        del rank.weights[l]
        for part in parts:
            weight, state = rank.weights[l, part], rank.opt_states[l, part]
            rank.weights[l, part], rank.opt_states[l, part] = rank.update(l, rank.grad_weights[l], weight, state)
        del rank.grad_weights[l]
