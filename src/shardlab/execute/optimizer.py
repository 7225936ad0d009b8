"""An optimizer of a slice of a layer's flat weights."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.execute.average import Average
from shardlab.execute.lion import Lion
from shardlab.execute.muon import Muon
from shardlab.execute.places import Parked
from shardlab.execute.shapes import Shapes
from shardlab.models import Model
from shardlab.models.layout import Parameter
from shardlab.optimizers import OptimizerConfig
from shardlab.program import OpKind


def torch_optimizers(
    config: OptimizerConfig,
    decayed: list[Tensor],
    others: list[Tensor],
    matrices: Sequence[Tensor] = (),
    *,
    fused: bool = True,
) -> list[torch.optim.Optimizer]:
    """The optimizers of some leaf tensors: of Muon's `matrices`, which decay, and of the rest; last an average."""
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups, rate = [group for group in groups if group["params"]], config.learning_rate
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon([{"params": matrices, "weight_decay": config.weight_decay}], rate, config.momentum))
    if groups and config.optimizer == "sgd":
        found.append(torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=fused))
    elif groups and config.optimizer == "lion":
        found.append(Lion(groups, rate, config.betas))
    elif groups:
        found.append(torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused))
    if config.ema is not None:
        found.append(Average([*decayed, *others, *matrices], config.ema))
    return found


def matrices_of(tensor: Tensor, parameter: Parameter) -> list[Tensor]:
    """The matrices of a parameter, each of which Muon steps by itself: one for each expert, and each section of those.

    Queries, keys and values are sections, as Jordan does it.
    """
    each: Sequence[Tensor] = tensor.view(-1, *parameter.shape[-2:]).unbind()
    lengths = list(parameter.sections) or [parameter.shape[-2]]
    return [part for matrix in each for part in torch.split(matrix, lengths)]


class Slice:
    """An optimizer's state for a slice of a layer's flat weights: what a rank keeps from step to step."""

    def __init__(
        self,
        weights: list[Tensor],
        starts: list[int],
        decayed: list[tuple[int, int]],
        config: OptimizerConfig,
        exact: Tensor | None = None,
        matrices: Mapping[int, Parameter] | None = None,
    ) -> None:
        """`weights` are the slice's runs, updated in place; run i begins at element `starts[i]` of the layer's buffer.

        Of that buffer the runs `decayed` (start, stop) decay. With `exact`, (elements,), a copy of the weights in more
        bits, the copy is updated and the weights are rounded from it. `matrices` are those of Muon, by the element of
        the buffer at which they begin.

        Raises:
            UserError: if only a part of a matrix lies in the slice.
        """
        self.weights = weights
        self.exact: Sequence[Tensor] = () if exact is None else torch.split(exact, [len(run) for run in weights])
        self._config = config
        self._parked = Parked()
        self._parts: list[tuple[Sequence[Tensor], Parameter | None, int, int]] = []
        self.leaves: list[tuple[int, Tensor]] = []  # what is stepped, each with the buffer's element that begins it
        whole = matrices or {}
        edges = [place for runs in decayed for place in runs]
        edges += [place for begin, parameter in whole.items() for place in (begin, begin + parameter.numel)]
        decaying: list[Tensor] = []
        others: list[Tensor] = []
        orthogonal: list[Tensor] = []
        at = 0
        for run, start in zip(self.exact or weights, starts, strict=True):
            stop = start + len(run)
            cuts = {place for place in edges if start < place < stop}
            for begin, end in pairwise(sorted({start, stop} | cuts)):
                part = run[begin - start : end - start].detach()
                parameter = whole.get(begin)
                leaves = [part] if parameter is None else matrices_of(part, parameter)
                decays = any(first <= begin and end <= last for first, last in decayed)
                (decaying if decays else others).extend(leaves) if parameter is None else orthogonal.extend(leaves)
                self._parts.append((leaves, parameter, at + begin - start, at + end - start))
                self.leaves += zip(accumulate((leaf.numel() for leaf in leaves), initial=begin), leaves, strict=False)
            at += len(run)
        self.optimizers = torch_optimizers(config, decaying, others, orthogonal)

    def carry(self, weights: list[Tensor]) -> None:
        """Step these tensors from now on, of the same runs: a copy of weights that are kept elsewhere."""
        self.weights = weights
        if self.exact:
            return
        flat_places = list(accumulate((0, *map(len, weights))))
        for leaves, _, begin, end in self._parts:
            run = bisect_right(flat_places, begin) - 1
            (leaf,) = leaves
            leaf.data = weights[run][begin - flat_places[run] : end - flat_places[run]]

    def offload(self, room: Callable[[int], torch.UntypedStorage]) -> None:
        """Copy what the optimizer keeps into new room, and free its memory on the device."""
        self._parked.offload([kept for kept in (*self.moments, *self.exact) if kept.numel() > 1], room)

    def reload(self) -> None:
        """Bring back what the optimizer keeps."""
        self._parked.reload()

    @contextmanager
    def at_hand(self) -> Generator[None]:
        """Have what the optimizer keeps on the device for a while, also where it is offloaded between steps."""
        with self._parked.back():
            yield

    def make_moments(self, updates: int) -> None:
        """Make what the optimizers keep after so many updates, to be filled in; a step by a gradient of zero does."""
        with self.at_hand():
            if not all(run.untyped_storage().nbytes() for run in self.weights):
                self.carry([torch.zeros_like(run) for run in self.weights])
            self.update(torch.zeros_like(self.flat), 0)
            for optimizer in self.optimizers:
                for kept in optimizer.state.values():
                    if "step" in kept:
                        kept["step"] = kept["step"] * 0 + updates  # a number, or a tensor of it

    @property
    def flat(self) -> Tensor:
        """The slice's weights now, (elements,); itself where the slice is one run, else a copy."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    @property
    def average(self) -> Tensor:
        """The average of the slice's weights over the steps, (elements,); what was offloaded comes back for it."""
        self.reload()
        kept = self.optimizers[-1]
        assert isinstance(kept, Average), "an average was asked for"
        return torch.cat([kept.of(leaf).flatten() for leaves, *_ in self._parts for leaf in leaves])

    @property
    def moments(self) -> list[Tensor]:
        """What the optimizers keep."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [moment for state in states for moment in state.values() if isinstance(moment, Tensor)]

    def update(self, gradient: Tensor, step: int, squared_norm: float | None = None, *, scale: float = 1.0) -> None:
        """One step with a gradient of the same length.

        Args:
            squared_norm: of the whole model's gradient. The gradient is clipped by it (Pascanu et al. 2013, arXiv
                1211.5063, algorithm 1, as torch.nn.utils.clip_grad_norm_), and dropped if it is not finite.
            scale: by what the gradient was multiplied on its way; the norm was not.
        """
        gradient = gradient.to(self._parts[0][0][0].dtype)
        if scale != 1.0:
            gradient = gradient / scale
        if squared_norm is not None:
            if not math.isfinite(squared_norm):
                return
            if self._config.clip is not None:
                gradient = gradient * min(1.0, self._config.clip / (math.sqrt(squared_norm) + 1e-6))
        for leaves, parameter, begin, end in self._parts:
            given = gradient[begin:end]
            parts = [given] if parameter is None else matrices_of(given, parameter)
            for leaf, part in zip(leaves, parts, strict=True):
                leaf.grad = part
        rate = self._config.rate(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for leaves, *_ in self._parts:
            for leaf in leaves:
                leaf.grad = None
        if self.exact:
            for run, exact in zip(self.weights, self.exact, strict=True):
                run.copy_(exact)


def muon_matrices(model: Model, layer: int, length: int) -> dict[int, Parameter]:
    """The matrices of a layer whose flat buffer has `length` elements, by the element at which each begins.

    Raises:
        UserError: if tensor parallelism cuts one.
    """
    layout, run = model.layout(layer), model.run(layer)
    found: dict[int, Parameter] = {}
    for offset, parameter in zip(layout.offsets, layout.parameters, strict=True):
        if parameter.hidden_matrix:
            if any(run.own_pieces.get(index, 1) > 1 for index in parameter.indices[-2:]):
                raise _cut(layer, parameter)
            found |= {slice * length // layout.slices + offset: parameter for slice in range(layout.slices)}
    return found


def want_whole_matrices(checked: Checked, model: Model, config: OptimizerConfig) -> None:
    """Refuse Muon for a program some of whose ranks would step a part of a matrix.

    Raises:
        UserError: naming a layer and a matrix, and what to do.
    """
    if config.optimizer != "muon":
        return
    shapes = Shapes(checked, model, 1)
    loads = {(op.layer, op.holds) for tape in checked.program.tapes for op in tape if op.kind is OpKind.LOAD_OPT_STATE}
    for layer, holds in loads:
        assert holds is not None
        matrices = muon_matrices(model, layer, shapes.flat[layer])
        for start, stop in shapes.ranges(layer, holds):
            for begin, parameter in matrices.items():
                end = begin + parameter.numel
                if start < end and begin < stop and not start <= begin < end <= stop:
                    raise _cut(layer, parameter)


def _cut(layer: int, parameter: Parameter) -> UserError:
    return UserError(
        f"muon steps whole matrices, but {parameter.name} of layer {layer} is cut among ranks (by zero, fsdp or tp); "
        "let each rank keep the optimizer's state of whole layers, as ddp and pipelines do, or take adamw, sgd or lion"
    )
