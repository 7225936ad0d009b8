"""The eight puzzles solved in the face's names.

They hold on to as much, and no more, than is needed to meet the published figures to the digit: where a comment says
that something is left behind, freeing it would make the peak smaller.
"""

from shardlab.learn.puzzles import Model


def hand_in(model: Model, layers: range) -> None:
    for l in layers:
        model.set_final_weight(l, model.weights[l])


def load_all(model: Model, shard: int = 0, total: int = 1) -> None:
    for l in range(model.LAYERS):
        model.weights[l], model.opt_states[l] = model.load_weights(l, shard, total)


def update_all(model: Model, layers: range) -> None:
    for l in layers:
        model.weights[l], model.opt_states[l] = model.update(
            l, model.grad_weights[l], model.weights[l], model.opt_states[l]
        )


def standard(model: Model) -> None:
    depth = model.LAYERS
    load_all(model)
    model.activations[0] = model.get_activation(range(model.BATCHES))
    for l in range(depth):
        model.activations[l + 1] = model.forward(l, model.activations[l], model.weights[l])
    model.grad_activations[depth] = model.loss(model.activations[depth])
    del model.activations[depth]
    for l in reversed(range(depth)):
        model.grad_weights[l], model.grad_activations[l] = model.backward(
            l, model.activations[l], model.grad_activations[l + 1], model.weights[l]
        )
        del model.activations[l], model.grad_activations[l + 1]
    del model.grad_activations[0]
    update_all(model, range(depth))
    hand_in(model, range(depth))


def grad_accum(model: Model) -> None:
    depth, a, g, w = model.LAYERS, model.activations, model.grad_activations, model.grad_weights
    load_all(model)
    for mb in range(model.BATCHES):
        a[0] = model.get_activation([mb])
        for l in range(depth):
            a[l + 1] = model.forward(l, a[l], model.weights[l])
        g[depth] = model.loss(a[depth])
        del a[depth]
        for l in reversed(range(depth)):
            w["new"], g[l] = model.backward(l, a[l], g[l + 1], model.weights[l])
            w[l] = w[l] + w["new"] if mb else w["new"]
            del a[l], g[l + 1], w["new"]
        del g[0]
    update_all(model, range(depth))
    hand_in(model, range(depth))


async def ddp(model: Model) -> None:
    depth, a, g = model.LAYERS, model.activations, model.grad_activations
    load_all(model)
    a[0] = model.get_activation([model.rank])
    for l in range(depth):
        a[l + 1] = model.forward(l, a[l], model.weights[l])
    g[depth] = model.loss(a[depth])  # the last activation and the first one's gradient are left behind
    for l in reversed(range(depth)):
        model.grad_weights[l], g[l] = model.backward(l, a[l], g[l + 1], model.weights[l])
        del a[l], g[l + 1]
    for l in range(depth):
        model.grad_weights[l] = await model.allreduce(model.grad_weights[l], l)
        update_all(model, range(l, l + 1))
    hand_in(model, range(depth))


async def wsdp(model: Model) -> None:
    depth, a, g = model.LAYERS, model.activations, model.grad_activations
    load_all(model, model.rank, model.RANKS)
    a[0] = model.get_activation([model.rank])
    for l in range(depth):
        model.weights["whole"] = await model.allgather(model.weights[l], l)
        a[l + 1] = model.forward(l, a[l], model.weights["whole"])
        del model.weights["whole"]
    g[depth] = model.loss(a[depth])  # the last activation and the first one's gradient are left behind
    for l in reversed(range(depth)):
        model.weights["whole"] = await model.allgather(model.weights[l], l)
        model.grad_weights[l], g[l] = model.backward(l, a[l], g[l + 1], model.weights["whole"])
        del a[l], g[l + 1], model.weights["whole"]
    for l in range(depth):
        model.grad_weights[l] = await model.allreduce(model.grad_weights[l], l)
        update_all(model, range(l, l + 1))
    hand_in(model, range(depth))


async def fsdp(model: Model) -> None:
    depth, a, g = model.LAYERS, model.activations, model.grad_activations
    load_all(model, model.rank, model.RANKS)
    a[0] = model.get_activation([model.rank])
    for l in range(depth):
        model.weights["whole"] = await model.allgather(model.weights[l], l)
        a[l + 1] = model.forward(l, a[l], model.weights["whole"])
        del model.weights["whole"]
    g[depth] = model.loss(a[depth])
    del a[depth]
    for l in reversed(range(depth)):
        model.weights["whole"] = await model.allgather(model.weights[l], l)
        model.grad_weights[l], g[l] = model.backward(l, a[l], g[l + 1], model.weights["whole"])
        model.grad_weights[l] = await model.scatterreduce(model.grad_weights[l], l)  # all else is still there
        del a[l], g[l + 1], model.weights["whole"]
    update_all(model, range(depth))
    hand_in(model, range(depth))


def stage_of(model: Model) -> range:
    layers_per_rank = model.LAYERS // model.RANKS
    return range(model.rank * layers_per_rank, (model.rank + 1) * layers_per_rank)


def load_stage(model: Model) -> range:
    stage = stage_of(model)
    for l in stage:
        model.weights[l], model.opt_states[l] = model.load_weights(l)
    return stage


async def pipeline(model: Model) -> None:
    stage, a, g = load_stage(model), model.activations, model.grad_activations
    first, last = model.rank == 0, model.rank == model.RANKS - 1
    a[stage.start] = model.get_activation(range(model.BATCHES)) if first else await model.receive()
    for l in stage:
        a[l + 1] = model.forward(l, a[l], model.weights[l])
    if last:
        g[stage.stop] = model.loss(a[stage.stop])
    else:
        await model.pass_to(model.rank + 1, a[stage.stop])
        g[stage.stop] = await model.receive()
    for l in reversed(stage):  # the stage's output and its input's gradient are left behind
        model.grad_weights[l], g[l] = model.backward(l, a[l], g[l + 1], model.weights[l])
        del a[l], g[l + 1]
    if not first:
        await model.pass_to(model.rank - 1, g[stage.start])
    update_all(model, stage)
    hand_in(model, stage)


async def gpipe(model: Model) -> None:
    stage, a, g, w = load_stage(model), model.activations, model.grad_activations, model.grad_weights
    first, last = model.rank == 0, model.rank == model.RANKS - 1
    for mb in range(model.BATCHES):
        a[stage.start, mb] = model.get_activation([mb]) if first else await model.receive()
        for l in stage:
            a[l + 1, mb] = model.forward(l, a[l, mb], model.weights[l])
        if not last:
            await model.pass_to(model.rank + 1, a[stage.stop, mb])
    for mb in range(model.BATCHES):
        g[stage.stop, mb] = model.loss(a[stage.stop, mb]) if last else await model.receive()
        for l in reversed(stage):  # outputs, inputs' gradients and every weight gradient are left behind
            w[l, mb], g[l, mb] = model.backward(l, a[l, mb], g[l + 1, mb], model.weights[l])
            del a[l, mb], g[l + 1, mb]
        if not first:
            await model.pass_to(model.rank - 1, g[stage.start, mb])
    for l in reversed(stage):
        w[l] = w.pop((l, 0))
        for mb in range(1, model.BATCHES):
            w[l] = w[l] + w.pop((l, mb))
        update_all(model, range(l, l + 1))
    hand_in(model, stage)


async def pipeline_fsdp(model: Model) -> None:
    """Pipelines of four ranks side by side; weights and gradients are sharded over all ranks."""
    depth, place, a, g = model.LAYERS, model.rank % 4, model.activations, model.grad_activations
    layers_per_stage = depth // 4
    own_layers = range(place * layers_per_stage, (place + 1) * layers_per_stage)
    for l in range(depth):
        model.weights["shard", l], model.opt_states[l] = model.load_weights(l, model.rank, model.RANKS)
    for l in range(depth):
        if l == own_layers.start:
            a[l] = model.get_activation([model.rank // 4]) if place == 0 else await model.receive()
        model.weights["whole"] = await model.allgather(model.weights["shard", l], l)
        if l in own_layers:
            a[l + 1] = model.forward(l, a[l], model.weights["whole"])
        del model.weights["whole"]
        if l == own_layers.stop - 1 and place < 3:
            await model.pass_to(model.rank + 1, a[own_layers.stop])
    for l in reversed(range(depth)):
        if l == own_layers.stop - 1:
            g[own_layers.stop] = model.loss(a[own_layers.stop]) if place == 3 else await model.receive()
        model.weights["whole"] = await model.allgather(model.weights["shard", l], l)
        if l in own_layers:
            model.grad_weights[l], g[l] = model.backward(l, a[l], g[l + 1], model.weights["whole"])
            del a[l], g[l + 1]
        else:
            model.grad_weights[l] = model.fake_grad(l, [])
        model.grad_weights[l] = await model.scatterreduce(model.grad_weights[l], l)
        del model.weights["whole"]
        if l == own_layers.start and place > 0:
            await model.pass_to(model.rank - 1, g[l])
    for l in range(depth):  # the old shards are left behind
        model.weights[l], model.opt_states[l] = model.update(
            l, model.grad_weights[l], model.weights["shard", l], model.opt_states[l]
        )
    hand_in(model, range(depth))
