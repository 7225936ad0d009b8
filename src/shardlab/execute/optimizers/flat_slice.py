"""Optimizer of a slice of a layer's flat weights (`Slice`), and updates of several slices in one call.

Muon orthogonalizes whole matrices, but a slice may have only parts of a matrix. It then receives the direction of the
whole matrix (`Direction`), which the program has gathered.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab.execute.offload import OffloadableTensors
from shardlab.execute.optimizers.algorithms import (
    SGD,
    AdamW,
    Average,
    Lion,
    Muon,
    TensorOptimizer,
    iterated_in,
    length,
    orthogonal,
    update_by_adamw,
)
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.transport.collectives import Wait
from shardlab.models.matrices import WholeMatrix


def torch_optimizers(
    config: OptimizerConfig,
    decayed: list[Tensor],
    others: list[Tensor],
    matrices: Sequence[Tensor] = (),
    *,
    fused: bool = True,
) -> list[TensorOptimizer]:
    """Return the optimizers of some tensors, and last their moving average.

    Muon updates `matrices`. The optimizer of `config` updates the rest, or AdamW if that is Muon. `matrices` and
    `decayed` have weight decay, `others` do not. An optimizer without tensors is left out.
    """
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups, rate = [group for group in groups if group["params"]], config.learning_rate
    optimizers: list[TensorOptimizer] = []
    if matrices:
        optimizers.append(Muon([{"params": matrices, "weight_decay": config.weight_decay}], rate, config.momentum))
    if groups and config.optimizer == "sgd":
        optimizers.append(SGD(groups, rate, config.momentum, fused=fused))
    elif groups and config.optimizer == "lion":
        optimizers.append(Lion(groups, rate, config.betas))
    elif groups:
        optimizers.append(AdamW(groups, rate, config.betas, config.eps, fused=fused))
    if config.ema is not None and (averaged_tensors := [*decayed, *others, *matrices]):
        optimizers.append(Average(averaged_tensors, config.ema))
    return optimizers


class SteppedRun(NamedTuple):
    """Contiguous elements of a slice that are updated in the same way.

    Attributes:
        leaf: view of the weights that the optimizer updates, or of their exact copy if there is one.
        begin, end: range of the elements in the slice.
        matrix: the matrix to which the elements belong, if the optimizer updates whole matrices.
        piece, start: index of the matrix's piece with these elements, and the first element in that piece.
    """

    leaf: Tensor
    begin: int
    end: int
    matrix: WholeMatrix | None = None
    piece: int = 0
    start: int = 0


class Slice:
    """Optimizer of a slice of a layer's flat weights, with the state that it keeps from step to step."""

    def __init__(
        self,
        weights: list[Tensor],
        starts: list[int],
        decayed: list[tuple[int, int]],
        config: OptimizerConfig,
        exact: Tensor | None = None,
        matrices: Sequence[WholeMatrix] = (),
    ) -> None:
        """Create the optimizer.

        Args:
            weights: the contiguous runs of the slice, which are updated in place.
            starts: element of the layer's buffer at which each run begins.
            decayed: ranges (start, stop) of the layer's buffer with weight decay.
            config: settings of the optimizer.
            exact: copy of the weights in more bits, (elements,). It is updated, and the weights are rounded from it.
            matrices: matrices of the layer that Muon updates. The slice may have parts of them.
        """
        self.weights = weights
        self.exact: Sequence[Tensor] = () if exact is None else torch.split(exact, [len(run) for run in weights])
        self.config = config
        self._offloadable = OffloadableTensors()
        self._ranges = [(start, start + len(run)) for run, start in zip(weights, starts, strict=True)]
        runs = [(start, start + m.size, m, piece) for m in matrices for piece, start in enumerate(m.starts)]
        edges = {place for run in (*decayed, *(run[:2] for run in runs)) for place in run}
        self.leaves: list[tuple[int, Tensor]] = []  # (first element in the buffer, updated tensor)
        self._parts: list[SteppedRun] = []
        self._matrices: dict[WholeMatrix, list[SteppedRun]] = defaultdict(list)
        roles: list[list[Tensor]] = [[], [], []]
        offset = 0
        for run, (start, stop) in zip(self.exact or weights, self._ranges, strict=True):
            inner = {place for place in edges if start < place < stop}
            for begin, end in pairwise(sorted({start, stop} | inner)):
                leaf, bounds = run[begin - start : end - start].detach(), (offset + begin - start, offset + end - start)
                matrix_runs = (
                    SteppedRun(leaf, *bounds, m, i, begin - first)
                    for first, last, m, i in runs
                    if first <= begin < last
                )
                part = next(matrix_runs, SteppedRun(leaf, *bounds))
                self._parts.append(part)
                decays = any(first <= begin and end <= last for first, last in decayed)
                self.leaves.append((begin, leaf))
                roles[2 if part.matrix else 0 if decays else 1].append(leaf)
                if part.matrix:
                    self._matrices[part.matrix].append(part)
            offset += len(run)
        self.optimizers = torch_optimizers(config, *roles)
        self._muon = next((optimizer for optimizer in self.optimizers if isinstance(optimizer, Muon)), None)
        self.dropped: Tensor | None = None  # (), 1 if the update must drop the gradient of `take`; None: it need not
        self.copied = 0  # bytes of copies of the gradient in `take`

    def carry(self, weights: list[Tensor]) -> None:
        """From now on, update `weights` instead of earlier tensors: copies of weights kept on the host or disk."""
        self.weights = weights
        if self.exact:
            return
        flat_places = list(accumulate((0, *map(len, weights))))
        for part in self._parts:
            run = bisect_right(flat_places, part.begin) - 1
            part.leaf.data = weights[run][part.begin - flat_places[run] : part.end - flat_places[run]]

    def offload(self, allocate: Callable[[int], torch.UntypedStorage]) -> Wait:
        """Start to copy the optimizer state to memory from `allocate`. The returned wait frees its old memory."""
        return self._offloadable.offload(
            [tensor for tensor in (*self.moments, *self.exact) if tensor.numel() > 1], allocate
        )

    def reload(self) -> Wait:
        """Start to copy the optimizer state back to the memory in which it is updated."""
        return self._offloadable.reload()

    def current(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the optimizer state: `tensor` itself or, while it is offloaded, a view of its copy."""
        return self._offloadable.current(tensor)

    def make_moments(self, updates: int) -> None:
        """Allocate the optimizer state that exists after `updates` updates, by an update with a zero gradient.

        The state lies in the memory in which it is updated. The caller fills in its values.
        """
        freed_runs = [run for run in self.weights if not run.untyped_storage().nbytes()]  # each update gets a copy
        for run in freed_runs:
            memory, end = run.untyped_storage(), (int(run.storage_offset()) + len(run)) * run.itemsize
            memory.resize_(max(memory.nbytes(), end))
            run.zero_()
        for part in self._parts:
            part.leaf.grad = torch.zeros_like(part.leaf)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):  # Muon updates whole matrices, of which the slice may have parts
                for part in chain(*self._matrices.values()):
                    optimizer.moment(part.leaf)
            else:
                optimizer.step()
        for part in self._parts:
            part.leaf.grad = None
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"] * 0 + updates  # a number, or a tensor with a number
        for run in freed_runs:
            run.untyped_storage().resize_(0)

    @property
    def flat(self) -> Tensor:
        """Return the slice's current weights, (elements,): a view if the slice is one run, else a copy."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    @property
    def average(self) -> Tensor:
        """Return the moving average of the slice's weights, (elements,), offloaded or not."""
        average = self.optimizers[-1]
        assert isinstance(average, Average), "an average was asked for"
        return torch.cat([self.current(average.average_of(part.leaf)) for part in self._parts])

    @property
    def moments(self) -> list[Tensor]:
        """Return the tensors of the optimizer state."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [moment for state in states for moment in state.values() if isinstance(moment, Tensor)]

    def direction(self, gradient: Tensor, squared_norm: float | Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Return the direction of Muon's update for a gradient of the slice; zero where Muon does not update.

        Args:
            squared_norm, scale: as for `take`.
        """
        return self._direction(self._clipped(gradient, squared_norm, scale))

    def take(
        self,
        gradient: Tensor,
        rate: float | Tensor,
        squared_norm: float | Tensor | None = None,
        *,
        scale: float = 1.0,
        direction: Direction | None = None,
    ) -> bool:
        """Set the gradient, (elements,), of the next update (see `step_together`).

        Args:
            rate: learning rate; in a captured step a float32 tensor () on the device.
            squared_norm: squared norm of the whole model's gradient, by which the gradient is clipped to `config.clip`
                (Pascanu et al. 2013, arXiv 1211.5063, algorithm 1, as torch.nn.utils.clip_grad_norm_). If the norm is
                not finite, the gradient is dropped: now, or by the update if the norm is a tensor () on the device.
            scale: factor that `gradient` includes and `squared_norm` does not. The gradient is divided by it.
            direction: direction of all matrices of which the slice has parts (None: the slice has only whole matrices).

        Returns:
            False if the gradient is dropped now.
        """
        self.dropped = None
        if isinstance(squared_norm, Tensor):
            self.dropped = squared_norm.isfinite().logical_not().float()
        elif squared_norm is not None and not math.isfinite(squared_norm):
            return False
        raw_gradient, gradient = gradient, self._clipped(gradient, squared_norm, scale)
        self.copied = 0 if gradient is raw_gradient else gradient.nbytes
        if self._muon is not None:
            whole = direction or Direction(self._direction(gradient), self._ranges)
            self._muon.part_updates = self._part_updates(whole)
        for part in self._parts:
            part.leaf.grad = gradient[part.begin : part.end]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return True

    @property
    def may_wait(self) -> bool:
        """Return whether the update may be delayed to run together with later ones: if AdamW updates a single run."""
        return len(self.weights) == 1 and all(isinstance(optimizer, AdamW) for optimizer in self.optimizers[:1])

    def finish(self) -> None:
        """Finish an update: drop the gradient, and round the weights from their exact copy if there is one."""
        for part in self._parts:
            part.leaf.grad = None
        if self.exact:
            for run, exact in zip(self.weights, self.exact, strict=True):
                run.copy_(exact)

    def _clipped(self, gradient: Tensor, squared_norm: float | Tensor | None, scale: float) -> Tensor:
        gradient = gradient.to((self.exact or self.weights)[0].dtype)
        if scale != 1.0:
            gradient = gradient / scale
        if squared_norm is not None and self.config.clip is not None:
            factor = _factor(self.config.clip, squared_norm)
            if isinstance(factor, Tensor) or factor < 1.0:
                gradient = gradient * factor
        return gradient

    def _direction(self, gradient: Tensor) -> Tensor:
        """Return the direction for a clipped gradient, in the dtype in which matrices are orthogonalized."""
        direction = torch.zeros_like(gradient, dtype=iterated_in(gradient))
        for part in chain(*self._matrices.values()):
            assert self._muon is not None
            span = slice(part.begin, part.end)
            direction[span] = self._muon.direction(part.leaf, gradient[span])
        return direction

    def _part_updates(self, direction: Direction) -> dict[Tensor, tuple[Tensor, float]]:
        """Return (orthogonalized direction, length of the update) of each part of a matrix, by the part's weights.

        Each matrix is orthogonalized once.
        """
        updates: dict[Tensor, tuple[Tensor, float]] = {}
        for matrix, parts in self._matrices.items():
            pieces = orthogonal(direction.whole(matrix)).chunk(len(matrix.starts), matrix.dim)
            for part in parts:
                flat = pieces[part.piece].reshape(-1)
                updates[part.leaf] = flat[part.start : part.start + part.end - part.begin], length(matrix.shape)
        return updates


class Direction(NamedTuple):
    """Direction of an optimizer's update.

    Attributes:
        flat: direction of some ranges of a layer's flat buffer, concatenated, (elements,).
        ranges: (start, stop) of each range in the buffer.
    """

    flat: Tensor
    ranges: Sequence[tuple[int, int]]

    def whole(self, matrix: WholeMatrix) -> Tensor:
        """Return the direction of a whole matrix, assembled from its pieces."""
        pieces: list[Tensor] = []
        for begin in matrix.starts:
            offset = 0
            for start, stop in self.ranges:
                if start <= begin < stop:
                    place = offset + begin - start
                    pieces.append(self.flat[place : place + matrix.size].view(matrix.piece))
                offset += stop - start
        return torch.cat(pieces, matrix.dim)


def step_together(slices: Sequence[Slice]) -> None:
    """Update all slices by the gradients that were set with `Slice.take`.

    AdamW updates all weights that decay in one call, and all others in another one. A slice's first update runs alone,
    because it allocates the optimizer state.
    """
    calls: dict[float, list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
    settings: dict[str, Any] = {}
    dropped = next((part.dropped for part in slices if part.dropped is not None), None)  # one norm clips all slices
    single_optimizers: list[TensorOptimizer] = []
    for part in slices:
        for optimizer in part.optimizers:
            is_batched = len(slices) > 1 or dropped is not None
            if isinstance(optimizer, AdamW) and optimizer.state and is_batched:
                for group in optimizer.param_groups:
                    settings = group
                    calls[group["weight_decay"]] += [(leaf, optimizer.state[leaf]) for leaf in group["params"]]
            else:  # the first update allocates the state
                single_optimizers.append(optimizer)
    with torch.no_grad():
        for decay, leaves in calls.items():
            weights, states = [leaf for leaf, _ in leaves], [state for _, state in leaves]
            gradients = [gradient for leaf in weights if (gradient := leaf.grad) is not None]
            update_by_adamw(
                {**settings, "weight_decay": decay}, weights, gradients, states, fused=True, found_inf=dropped
            )
    for optimizer in single_optimizers:
        optimizer.step()
    for part in slices:
        part.finish()


def _factor(clip: float, squared_norm: float | Tensor) -> float | Tensor:
    """Return the factor that clips a gradient to a norm of at most `clip`."""
    if isinstance(squared_norm, Tensor):
        return (clip / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
    return min(1.0, clip / (math.sqrt(squared_norm) + 1e-6))
