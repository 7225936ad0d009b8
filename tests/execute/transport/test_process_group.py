"""torch.distributed's collectives on shared memory give what they give on gloo, and refuse what they cannot do."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportDeprecated=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport.neighbours import Neighbours
from shardlab.execute.transport.process_group import BACKEND, SharedProcessGroup, register_backend
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]


def _group(backend: str) -> Any:
    register_backend()
    return dist.new_group(backend=backend)


def all_spellings(rank: int, backend: str) -> list[Tensor]:
    """Results of every collective of torch.distributed, with the last rank as the root."""
    group, size = _group(backend), dist.get_world_size()
    assert isinstance(group, SharedProcessGroup) is (backend == BACKEND)
    root = size - 1
    values = torch.arange(2.0 * size) + 10 * rank
    values.requires_grad_(backend == BACKEND)  # autograd sees none of it; gloo fails
    results: list[Tensor] = []

    def output(elements: int) -> Tensor:
        results.append(torch.zeros(elements))
        return results[-1]

    def copy_of(tensor: Tensor) -> Tensor:
        results.append(tensor.detach().clone())
        return results[-1]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        dist.all_reduce(copy_of(values), op, group=group)
    total = values.detach().clone()
    dist.reduce(total, root, group=group)
    results.append(total if rank == root else torch.zeros(1))
    dist.broadcast(copy_of(values), root, group=group)
    dist.all_gather([output(2 * size) for _ in range(size)], values, group=group)
    dist.all_gather_into_tensor(output(2 * size * size), values, group=group)
    dist.reduce_scatter(output(2 * size), [values * n for n in range(size)], group=group)
    dist.reduce_scatter_tensor(output(2), values, group=group)
    dist.all_to_all_single(output(2 * size), values, group=group)
    dist.scatter(output(2 * size), [values + n for n in range(size)] if rank == root else None, root, group=group)
    dist.gather(values.detach(), [output(2 * size) for _ in range(size)] if rank == root else None, root, group=group)
    dist.barrier(group)
    messages = [dist.P2POp(dist.isend, values.detach(), (rank + 1) % size, group)]
    messages.append(dist.P2POp(dist.irecv, output(2 * size), (rank - 1) % size, group))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": member} for member in range(size)]
    works: list[Any] = [dist.all_reduce(copy_of(values * n), group=group, async_op=True) for n in range(3)]
    for work in works:
        work.wait()
    assert not any(result.requires_grad for result in results)
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_of_torch_gives_what_gloo_gives(ranks: World, size: int) -> None:
    on_memory, on_gloo = (ranks(size).call(all_spellings, backend) for backend in (BACKEND, "gloo"))
    for ours, gloos in zip(on_memory, on_gloo, strict=True):
        assert len(ours) == len(gloos)
        assert all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True))


def handles(rank: int) -> list[bool]:
    """Whether a work is completed: once it started, after its wait, and after its future was taken."""
    group, tensor = _group(BACKEND), torch.ones(3)
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    completed = [work.is_completed()]
    work.wait()
    completed.append(work.is_completed())
    other: Any = dist.all_reduce(tensor, group=group, async_op=True)
    assert torch.equal(other.get_future().value()[0], torch.full((3,), 4.0))
    assert torch.equal(other.result()[0], tensor)
    return [*completed, other.is_completed()]


def test_a_work_is_completed_when_somebody_has_waited(ranks: World) -> None:
    assert ranks(2).call(handles) == [[False, True, True]] * 2


def refused(rank: int) -> list[str]:
    """What the backend says of calls that it cannot carry out."""
    group, four = _group(BACKEND), torch.ones(4)
    with pytest.raises(NotImplementedError) as product:
        dist.all_reduce(four, dist.ReduceOp.PRODUCT, group=group)
    with pytest.raises(NotImplementedError) as unequal:
        dist.all_to_all_single(torch.empty(4), four, [1, 3], [1, 3], group=group)
    return [str(product.value), str(unequal.value)]


def test_calls_that_shared_memory_cannot_carry_out_are_refused(ranks: World) -> None:
    product, unequal = ranks(2).call(refused)[0]
    assert product == "the shardlab backend reduces with SUM, AVG, MIN or MAX, not with RedOpType.PRODUCT; use gloo"
    assert unequal == "the shardlab backend sends equal pieces in an all_to_all, not [1, 3] and [1, 3] rows; use gloo"


def not_connected(rank: int) -> tuple[bool, float]:
    """A group of the backend whose ranks share no memory."""
    with Neighbours.not_used():
        group = _group(BACKEND)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return isinstance(group, SharedProcessGroup), float(tensor)


def test_a_group_without_shared_memory_is_gloos(ranks: World) -> None:
    assert ranks(2).call(not_connected) == [(False, 2.0)] * 2
