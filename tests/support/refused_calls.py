"""The smallest calls, programs and tapes that each break a rule, by the name of the mistake."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator
from random import Random
from typing import Any, cast

from shardlab.check import check
from shardlab.common.user_code import trace_limits
from shardlab.language import Handle, Kind, Mesh, Rank, Sizes, Strategy, Value, trace
from shardlab.learn.puzzles import Model, Weight, WeightGrad
from shardlab.learn.puzzles.grader import find, timeline_of_strategy
from tests.check import unsound_programs as unsound

Calls = dict[str, Callable[[], object]]


def alone(lines: Callable[[Rank], object], microbatches: int = 2) -> Callable[[], object]:
    """Plain lines on a world of one rank and one layer."""

    async def strategy(rank: Rank) -> None:
        lines(rank)

    return lambda: trace(strategy, 1, 1, microbatches)


def two(lines: Callable[[Rank], Any]) -> Callable[[], object]:
    """A program of two ranks and one layer."""

    async def strategy(rank: Rank) -> None:
        await lines(rank)

    return lambda: check(trace(strategy, 2, 1, 2))


def run_to_loss(rank: Rank) -> tuple[Any, Any, Any]:
    """(input, gradient of the output, weight) of the layer after its forward pass and the loss."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    return rank.activations[0], rank.grad_activations[1], rank.weights[0]


async def single(rank: Rank) -> None:
    gradient, rank.grad_activations[0] = rank.backward(0, *run_to_loss(rank))
    del rank.activations[0], rank.grad_activations[0], rank.grad_activations[1]
    rank.weights[0], rank.opt_states[0] = rank.update(0, gradient, rank.weights[0], rank.opt_states[0])


async def reducing(rank: Rank) -> None:
    """Run `single` on ranks that each have one microbatch."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([rank.index])
    gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    grad_weight, _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])
    total = await rank.all_reduce(grad_weight)
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


async def drops_the_sum(rank: Rank) -> None:
    gradient = await own_gradient(rank)
    await rank.all_reduce(gradient)
    rank.update(0, gradient, rank.weights[0], rank.opt_states[0])


async def awaits_no_sum(rank: Rank) -> None:
    gradient = await own_gradient(rank)
    rank.all_reduce(gradient)
    rank.update(0, gradient, rank.weights[0], rank.opt_states[0])


async def own_gradient(rank: Rank) -> Value:
    """Compute the gradient of one microbatch."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([rank.index])
    gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    return rank.backward(0, rank.activations[0], gradient, rank.weights[0])[0]


async def clipped(rank: Rank, with_norm: bool) -> None:
    gradient, rank.grad_activations[0] = rank.backward(0, *run_to_loss(rank))
    rank.grad_weights[0] = gradient
    del rank.activations[0], rank.grad_activations[0], rank.grad_activations[1]
    norm = rank.norm(0, gradient) if with_norm else None
    inputs = rank.grad_weights.pop(0), rank.weights[0], rank.opt_states[0]
    rank.weights[0], rank.opt_states[0] = rank.update(0, *inputs, norm)


async def forever(rank: Rank) -> None:
    while True:
        rank.load_batch([0])


def endless() -> object:
    with trace_limits(ops=100):
        return trace(forever, 1, 1, 1)


async def spinning(rank: Rank) -> None:
    rank.load_batch([0])
    while True:
        pass


def stalled() -> object:
    with trace_limits(seconds=0.05):
        return trace(spinning, 1, 1, 1)


async def sends_late(rank: Rank) -> None:
    await reducing(rank)
    if rank.index:
        rank.send(rank.weights[0], to=0)


async def waits_for_each_other(rank: Rank) -> None:
    await rank.recv(source=1 - rank.index)


async def passes_on_its_state(rank: Rank) -> None:
    await reducing(rank)
    await rank.broadcast(rank.opt_states[0] if rank.index == 0 else None, root=0)


async def awaits_nothing(rank: Rank) -> None:
    class Other:
        def __await__(self) -> Any:
            yield 1

    await Other()


async def in_two_orders(rank: Rank) -> None:
    weight = rank.load_weight(0, rank.index, 2)
    await (rank.all_gather(weight) if rank.index else rank.all_reduce(weight))


async def expects_another(rank: Rank) -> None:
    if rank.index:
        await rank.send(rank.load_weight(0), to=0)
    else:
        await rank.recv(source=1, expect=("activations", 0, 0))


async def gives_to_the_other(rank: Rank) -> None:
    SHARED[rank.index] = rank.activations[0] = rank.load_batch([0])
    rank.slice(SHARED[0], 0, 1)


SHARED: dict[int, Any] = {}


async def batches_twice(rank: Rank) -> None:
    with rank.batch_p2p(), rank.batch_p2p():
        pass


def expecting(expect: Any) -> Callable[[], object]:
    """A receive with this expected value."""
    return two(lambda rank: rank.recv(source=1 - rank.index, expect=expect))


def dropped_key(rank: Rank) -> None:
    rank.activations[0] = batch = rank.load_batch([0])
    del rank.activations[0]
    rank.loss(batch)


def updated(rank: Rank) -> None:
    activation, gradient, weight = run_to_loss(rank)
    grad_weight, _ = rank.backward(0, activation, gradient, weight)
    rank.weights["new"], rank.opt_states["new"] = rank.update(0, grad_weight, weight, rank.opt_states[0])
    rank.forward(0, activation, weight)


def raising(_: Rank) -> None:
    raise KeyError("cheese")


async def crossing(rank: Rank) -> None:
    await reducing(rank)
    await rank.send(rank.weights[0], to=1 - rank.index)
    await rank.recv(source=1 - rank.index)


async def head_alone(rank: Rank) -> None:
    rank.load_weight(len(rank.layers) - 1)


async def loads_nothing(rank: Rank) -> None:
    rank.load_batch([0])


def raises(refusal: Exception | None) -> None:
    assert refusal is not None
    raise refusal


PROGRAMS: Calls = {
    "another rank's value": two(gives_to_the_other),
    "awaited something else": two(awaits_nothing),
    "batch of messages, in a batch": two(batches_twice),
    "deadlock": two(waits_for_each_other),
    "endless": endless,
    "stalled": stalled,
    "the program raised": alone(raising),
    "freed": alone(dropped_key),
    "replaced": alone(updated),
    "loaded twice": alone(lambda rank: [rank.load_weight(0), rank.load_weight(0)]),
    "no value": alone(lambda rank: rank.loss(cast(Any, 3))),
    "no value, a tuple": alone(lambda rank: rank.loss(cast(Any, (3, 4)))),
    "not awaited": two(lambda rank: rank.loss(cast(Any, rank.all_gather(rank.load_weight(0, rank.index, 2))))),
    "no forward, second half": alone(lambda rank: rank.backward_weight(0, *run_to_loss(rank)[:2])),
    "tied weight": lambda: trace(head_alone, 1, Sizes.half_blocks(1, tied=True), 1),
    "no operator, a product": alone(lambda rank: cast(Any, rank.zero_gradient(0)) * 0.5),
    "no operator, a step": alone(lambda rank: cast(Any, rank.load_weight(0)) - rank.zero_gradient(0)),
    "unused result": two(drops_the_sum),
    "not awaited, and needed": two(awaits_no_sum),
    "unknown verb": alone(lambda rank: cast(Any, rank).weight),
    "unknown verb, of a value": alone(lambda rank: cast(Any, rank.load_weight(0)).grad),
    "unknown axis": alone(lambda rank: rank.group("rows")),
    "unknown key": alone(lambda rank: rank.weights[3]),
    "unknown layer": alone(lambda rank: rank.load_weight(7)),
    "unknown microbatch": alone(lambda rank: rank.load_batch([7])),
    "unknown microbatch, a number": alone(lambda rank: rank.load_batch(cast(Any, 0))),
    "unknown microbatch, tokens": alone(lambda rank: rank.tokens([7])),
    "unknown microbatch, expected": expecting(("weights", 0, 9)),
    "unknown slice": alone(lambda rank: rank.load_weight(0, 2, 2)),
    "unknown slice, no number": alone(lambda rank: rank.load_weight(0, cast(int, "a"), 2)),
    "unknown slice, of a batch": alone(lambda rank: rank.load_batch([0], [3])),
    "unknown slice, of a value": alone(lambda rank: rank.slice(rank.load_batch([0]), cast(int, 0.5), 2)),
    "unknown rank": alone(lambda rank: rank.recv(source=3)),
    "unknown rank, itself": alone(lambda rank: rank.recv(source=0)),
    "unknown rank, no number": alone(lambda rank: rank.recv(source=cast(int, "0"))),
    "unknown group": alone(lambda rank: rank.all_reduce(rank.load_weight(0), among=[4])),
    "unknown group along an axis": alone(lambda rank: rank.all_reduce(rank.load_weight(0), axis="tp", among=[0, 1])),
    "wrong expectation": expecting(("weight", 0, 0)),
    "wrong expectation, of one word": expecting("weight"),
    "wrong factor": alone(lambda rank: rank.scale(run_to_loss(rank)[1], 0)),
    "wrong root, given nothing": alone(lambda rank: rank.broadcast(None, root=0)),
    "wrong root, given too much": two(lambda rank: rank.broadcast(rank.load_weight(0), root=0)),
    "no reduction": alone(lambda rank: rank.all_reduce(rank.load_weight(0), reduction=cast(Any, "median"))),
    "wrong store": alone(lambda rank: rank.weights.__setitem__(0, rank.load_batch([0]))),
    "wrong number, nothing to concatenate": alone(lambda rank: rank.concatenate([])),
    "other order": two(in_two_orders),
    "other message": two(expects_another),
    "moved twice": lambda: check(trace(unsound.two_states_of_one_weight, 2, 1, 2)),
    "stepped again": lambda: check(trace(unsound.stepped_after_it_arrived, 2, 1, 2)),
    "in flight, written": lambda: check(trace(unsound.sent_while_it_is_written, 2, 1, 2)),
    "not received": two(sends_late),
    "not loaded": lambda: check(trace(cast(Any, loads_nothing), 1, 1, 2)),
    "not runnable": lambda: raises(check(trace(passes_on_its_state, 2, 1, 2)).why_not("gloo")),
    "can hang": lambda: raises(check(trace(crossing, 2, 1, 2)).why_not("gloo")),
}


async def collective_in_a_batch(rank: Rank) -> None:
    with rank.batch_p2p():
        rank.barrier()


async def exchange_in_a_batch(rank: Rank) -> None:
    weight = rank.load_weight(0)
    with rank.batch_p2p():
        rank.exchange(weight, to=1 - rank.index, source=1 - rank.index)


async def root_gives_another(rank: Rank) -> None:
    weight = rank.load_weight(0) if rank.index == 0 else None
    await rank.broadcast(weight, root=0, expect=("weights", 1, None))


async def written_over(rank: Rank) -> None:
    """An update of a gathered copy of the weight, followed by a read of the loaded weight."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0, rank.index, 2)
    full = rank.weights["full"] = await rank.all_gather(rank.weights[0])
    rank.activations[0] = rank.load_batch([rank.index])
    gradient = rank.loss(rank.forward(0, rank.activations[0], full))
    total = await rank.reduce_scatter(rank.backward(0, rank.activations.pop(0), gradient, full)[0])
    rank.weights["new"], rank.opt_states[0] = rank.update(0, total, full, rank.opt_states[0])
    await rank.all_gather(rank.weights.pop(0))


async def clipped_on_rank_1(rank: Rank) -> None:
    await clipped(rank, with_norm=rank.index == 1)


async def clipped_twice(rank: Rank) -> None:
    """Two slices of a layer, of which one is updated with the norm."""
    weight = rank.load_weight(0)
    states = [rank.load_opt_state(0, place, 2) for place in range(2)]
    rank.weights[0] = weight
    rank.activations[0] = rank.load_batch(rank.microbatches)
    gradient = rank.loss(rank.forward(0, rank.activations[0], weight))
    grad_weight = rank.grad_weights[0] = rank.backward(0, rank.activations.pop(0), gradient, weight)[0]
    halves = [rank.slice(weight, place, 2) for place in range(2)]
    norm = rank.norm(0, grad_weight)
    rank.weights["a"], rank.opt_states["a"] = rank.update(0, grad_weight, halves[0], states[0], norm)
    rank.weights["b"], rank.opt_states["b"] = rank.update(0, grad_weight, halves[1], states[1])


async def parted(rank: Rank, part: tuple[int, int]) -> None:
    rank.forward(0, rank.load_batch([0]), rank.load_weight(0), part=part)


def to_the_last_norm(rank: Rank, *, save: bool = True) -> Value:
    """Gradient of norm 5's output after a forward pass of half-blocks; optionally, this norm saves nothing."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
    rank.activations[0] = rank.load_batch([0])
    branch = rank.forward(0, rank.activations[0], rank.weights[0])
    residual: list[Value] = []
    for l in (1, 3, 5):
        rank.activations[l] = branch
        inputs = branch, *residual
        rank.activations[l + 1], *residual = rank.forward(l, inputs, rank.weights[l], save=save or l < 5)
        branch = rank.forward(l + 1, rank.activations[l + 1], rank.weights[l + 1])
    return rank.backward(6, rank.activations[6], rank.loss(branch), rank.weights[6])[1]


async def other_half(rank: Rank) -> None:
    """A forward pass with whole weights, and a backward pass with half of one."""
    gradient = to_the_last_norm(rank)
    rank.weights["half"] = rank.load_weight(4, 0, 2)
    _, gradient, _ = rank.backward(5, rank.activations[5], (gradient,), rank.weights[5])
    rank.backward(4, rank.activations[4], gradient, rank.weights["half"])


async def one_gradient(rank: Rank) -> None:
    gradient = to_the_last_norm(rank)
    rank.backward(5, rank.activations[5], gradient, rank.weights[5])


async def nothing_saved(rank: Rank) -> None:
    gradient = to_the_last_norm(rank, save=False)
    rank.backward(5, rank.activations[5], (gradient,), rank.weights[5])


def in_half_blocks(strategy: Strategy) -> Callable[[], object]:
    return lambda: trace(strategy, Mesh(tp=2), Sizes.half_blocks(1), 1)


def beyond_the_experts(rank: Rank) -> None:
    activation, _, weight = run_to_loss(rank)
    rank.forward(0, activation, weight, part=(2, 2))


async def one_output(rank: Rank) -> None:
    to_the_last_norm(rank)
    rank.forward(1, rank.activations[1], rank.weights[1])


PROGRAMS.update(
    {
        "batch of messages, with a collective": two(collective_in_a_batch),
        "batch of messages, with an exchange": two(exchange_in_a_batch),
        "other message, from a root": two(root_gives_another),
        "unknown slice, of the experts": alone(beyond_the_experts),
        "wrong number, of outputs": in_half_blocks(one_output),
        "wrong number, of gradients": in_half_blocks(one_gradient),
        "no forward, saved": in_half_blocks(nothing_saved),
        "other forward": in_half_blocks(other_half),
        "written over": lambda: check(trace(written_over, 2, 1, 2)),
        "norm on some ranks": lambda: check(trace(clipped_on_rank_1, 2, 1, 1)),
        "norm for some": lambda: check(trace(clipped_twice, 1, 1, 1)),
    }
)


async def frozen_but_kept(rank: Rank) -> None:
    """Layer 0 is not trained; the others are."""
    layers = rank.layers
    for l in layers:
        rank.weights[l] = rank.load_weight(l)
        if l:
            rank.opt_states[l] = rank.load_opt_state(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    for l in layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(len(layers)))
    for l in reversed(layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        if l:
            rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


async def frozen_and_dropped(rank: Rank) -> None:
    await frozen_but_kept(rank)
    del rank.weights[0]


PROGRAMS["frozen and not kept"] = lambda: check(trace(frozen_and_dropped, 1, 2, 1))


def made_up() -> Exception:
    model = Model(rank=0)
    model.fake_grad(0, [0])
    return model.fakes[0]


def standing(call: Callable[[], object]) -> Callable[[], object]:
    """A call on rank 0 before its first op."""
    return lambda: (Model(rank=0).storage(), call())


OF_PUZZLES: Calls = {
    "made up": lambda: raises(made_up()),
    "frozen": lambda: timeline_of_strategy(frozen_but_kept, find("grad_accum")),
    "partial": lambda: WeightGrad(0, 1, {0}, 2, {0}, 2).shard(0, 2),
    "no value": lambda: Weight(0, 1, 0).combine(cast(Any, "cheese")),
    "other values": lambda: Weight(0, 2, 0, {0}, 2).combine(Weight(1, 2, 0, {1}, 2)),
    "unknown slice": lambda: Weight(0, 1, 0, {4}, 4),
    "unknown slice, no number": lambda: Weight(0, 1, 0, cast(Any, 4), 4),
    "wrong number": lambda: Model.check([]),
    "not kept": lambda: Model.check([Model(rank=0, layers=1)]),
    "not awaited": lambda: Model(rank=0).receive().cheese,
    "unknown layer": lambda: Model(rank=0, layers=1).forward(3, cast(Any, None), cast(Any, None)),
}
PUZZLES = {name: standing(call) for name, call in OF_PUZZLES.items()}


# The usual collectives by way of a root, or by hand: what random programs issue now and then instead of them.


class Done:
    """Awaitable that is done."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __await__(self) -> Generator[None, None, Value]:
        yield from ()
        return self.value


class Detour:
    """Issues collectives unchanged, by way of one rank of their group, or as messages between slices.

    Choices that all members share are drawn from the seed and the number of earlier calls of the group.
    """

    def __init__(self, rank: Rank, seed: int, chance: float, by_hand: float) -> None:
        self.rank = rank
        self.seed = seed
        self.chance = chance
        self.chance_by_hand = by_hand
        self.calls: Counter[str | None] = Counter()
        self.hand = 0

    def by_hand(self, axis: str | None) -> bool:
        """Whether the next call is replaced by messages."""
        ranks = self.rank.group(axis).ranks
        return len(ranks) > 1 and Random(f"{self.seed} {axis} {self.calls[axis]} hand").random() < self.chance_by_hand

    def peers(self, axis: str | None, shift: int) -> tuple[int, int]:
        """The ranks at this distance after and before this one in the group."""
        ranks = self.rank.group(axis).ranks
        place = ranks.index(self.rank.index)
        return ranks[(place + shift) % len(ranks)], ranks[place - shift]

    async def gathered(self, value: Value, axis: str | None) -> Value:
        """All pieces, sent around a ring."""
        rank = self.rank
        store = rank.weights if value.spec.kind is Kind.WEIGHT else rank.grad_weights
        self.hand += 1
        keys = [("by hand", self.hand, hop) for hop in range(len(rank.group(axis).ranks))]
        store[keys[0]] = value
        to, source = self.peers(axis, 1)
        for key, next_key in itertools.pairwise(keys):
            store[next_key] = await rank.exchange(store[key], to=to, source=source)
        return rank.concatenate([store.pop(key) for key in keys])

    async def scattered(self, value: Value, axis: str | None) -> Value:
        """Each member's slice of the sum: every pair exchanges slices."""
        rank, ranks = self.rank, self.rank.group(axis).ranks
        self.hand += 1
        whole, mine = ("by hand", self.hand), ranks.index(rank.index)
        rank.grad_weights[whole] = value
        total = rank.slice(value, mine, len(ranks))
        pairs = [self.peers(axis, shift) for shift in range(1, len(ranks))]
        parts = [rank.slice(value, ranks.index(to), len(ranks)) for to, _ in pairs]
        if self.hand % 2:
            with rank.batch_p2p():
                for part, (to, _) in zip(parts, pairs, strict=True):
                    rank.send(part, to=to)
                receives = [rank.recv(source=source) for _, source in pairs]
            for handle in receives:
                total = await handle + total
        else:
            for part, (to, source) in zip(parts, pairs, strict=True):
                total = await rank.exchange(part, to=to, source=source) + total
        del rank.grad_weights[whole]
        return total

    def next_random(self, axis: str | None) -> Random:
        self.calls[axis] += 1
        return Random(f"{self.seed} {axis} {self.calls[axis]}")

    def root(self, axis: str | None) -> int:
        """The rank of the group by way of which a call goes (-1: none)."""
        random = self.next_random(axis)
        return random.choice(self.rank.group(axis).ranks) if random.random() < self.chance else -1

    async def all_gather(self, value: Value, axis: str | None) -> Handle[Value]:
        if self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.gathered(value, axis)))
        root = self.root(axis)
        if root < 0:
            return self.rank.all_gather(value, axis=axis)
        return self.rank.broadcast(await self.rank.gather(value, root=root, axis=axis), root=root, axis=axis)

    async def all_reduce(self, value: Value, axis: str | None) -> Handle[Value]:
        if value.spec.kind is Kind.GRAD_WEIGHT and self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.gathered(await self.scattered(value, axis), axis)))
        root = self.root(axis)
        if root < 0:
            mean = value.spec.kind is Kind.GRAD_WEIGHT and self.calls[axis] % 3 == 0
            return self.rank.all_reduce(value, axis=axis, reduction="mean" if mean else "sum")
        total = await self.rank.reduce(value, root=root, axis=axis)
        if root % 2:
            await self.rank.barrier(axis=axis)
        return self.rank.broadcast(total, root=root, axis=axis)

    async def reduce_scatter(self, value: Value, axis: str | None) -> Handle[Value]:
        if self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.scattered(value, axis)))
        root = self.root(axis)
        if root < 0:
            return self.rank.reduce_scatter(value, axis=axis)
        return self.rank.scatter(await self.rank.reduce(value, root=root, axis=axis), root=root, axis=axis)

    async def weight(self, value: Value, axis: str | None) -> Handle[Value]:
        """A whole weight that all members have, by a reduction that does not change it: mean, minimum or maximum."""
        by = self.next_random(axis).choice(("mean", "min", "max"))
        return self.rank.all_reduce(value, axis=axis, reduction=by)
