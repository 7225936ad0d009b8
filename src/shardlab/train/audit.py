"""`train --audit-every N`: ranks that keep or compute the same are compared, so that a silent fault is found.

After every N steps, first the hashes of all replicas of weights; then the tape is run once more with one microbatch in
the place of each, which changes nothing, and every result that several ranks have computed is compared.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check import Checked, drifts_of
from shardlab.check.replicas import COMPARED, Replica, Result, replicas_of, results_of
from shardlab.common.errors import UserError
from shardlab.execute import Executor, Sampler
from shardlab.execute.state import State
from shardlab.execute.update_ops import Instruction
from shardlab.language import Holds, OpKind
from shardlab.language.rules.kinds import common
from shardlab.train.faults import names
from shardlab.train.steps import Callback, Training

Value = TypeVar("Value")

Prints = dict[Hashable, dict[int, list[tuple[float, float]]]]
"""What ranks have computed: key of the result, then rank, to (random projection, length) of each such result."""


class OneMicrobatch:
    """Gives one microbatch in the place of all."""

    def __init__(self, batches: Sampler) -> None:
        self._batches = batches
        self.micro_batch_size = batches.micro_batch_size

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self._batches.microbatch(step, 0)

    def counted(self, step: int, microbatches: int) -> int:
        return microbatches * max(1, int((self.microbatch(step, 0)[1] >= 0).sum()))


class Audit:
    """Compares the ranks of a training; all ranks do it together, and all know the result.

    Args:
        executor: of a rank's tape, before anything is put around its instructions.

    Attributes:
        state: its tensors.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self.state = executor, executor.state
        checked = executor.state.checked
        self._replicas = replicas_of(checked)
        self._results = results_of(checked)
        self._signs: dict[int, Tensor] = {}
        self._prints: list[tuple[float, float]] = []
        mine: dict[int, list[Result]] = defaultdict(list)
        for result in self._results[executor.state.rank]:
            mine[result.op].append(result)
        plain = enumerate(zip(executor.state.tape, executor.instructions, strict=True))
        self._instructions = [self._printing(run, mine[at]) if op.kind in COMPARED else run for at, (op, run) in plain]

    def fault(self) -> str:
        """Compare: gives a sentence that names the rank that differs, or nothing."""
        return self._differing_weights() or self._differing_results()

    def _differing_weights(self) -> str:
        hashes = [0] * len(self._replicas)
        for number, replica in enumerate(self._replicas):
            if self.state.rank in replica.ranks:
                hashes[number] = hash_of(copy_of(self.state, replica))
        of_ranks = self._gathered(torch.tensor(hashes, dtype=torch.int64))
        apart: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
        for number, replica in enumerate(self._replicas):
            camps = camps_of({rank: int(of_ranks[rank][number]) for rank in replica.ranks}, int.__eq__)
            if len(camps) > 1:
                apart[camps].append(replica.layer)
        for camps, layers in apart.items():
            what = f"weights[{layers[0]}]" + (f" (and {len(layers) - 1} more)" if layers[1:] else "")
            return f"{what}, which ranks keep bit by bit alike, differ: {accusation(camps)}"
        return ""

    def _differing_results(self) -> str:
        first = self._rehearsed()
        found = differing(first)
        if found is None:
            return ""
        key, camps = found
        what = f"one microbatch, computed by all, gives other results in {_op_text(key)}: "
        if len(camps) == 1:
            return f"{what}{names(camps[0])} does not even repeat its own"
        if len(camps[0]) > len(camps[1]):
            return what + accusation(camps)
        again = self._rehearsed()[key]
        changed = [rank for camp in camps for rank in camp if not near(first[key][rank][0], again[rank][0])]
        if changed:
            return f"{what}recomputed, {names(changed)} sides with the others, so it erred before"
        return f"{what}{accusation(camps)}; recomputed, each repeats its own"

    def _rehearsed(self) -> Prints:
        """Run the tape on one microbatch: what every rank made of it."""
        self._prints.clear()
        self._executor.rehearse(OneMicrobatch(self._executor.batches), self._instructions)
        length = max(map(len, self._results))
        mine = torch.zeros(length, 2, dtype=torch.float64)
        if self._prints:
            mine[: len(self._prints)] = torch.tensor(self._prints, dtype=torch.float64)
        prints: Prints = defaultdict(lambda: defaultdict(list))
        for rank, (of_rank, results) in enumerate(zip(self._gathered(mine), self._results, strict=True)):
            for (projection, size), result in zip(
                cast(list[tuple[float, float]], of_rank.tolist()), results, strict=False
            ):
                prints[result.key][rank].append((projection, size))
        return prints

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self.state.settings.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return [each.cpu() for each in everyone]

    def _printing(self, instruction: Instruction, results: Sequence[Result]) -> Instruction:
        def run() -> None:
            instruction()
            for result in results:
                self._prints.append(self._print(self.state.values[result.number]))

        return run

    def _print(self, value: object) -> tuple[float, float]:
        """Sum up a value as its projection on random signs, always the same, and its length."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return 0.0, 0.0
        flat = value.detach().flatten().double()
        if len(flat) not in self._signs:
            signs = torch.randint(2, (len(flat),), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
            self._signs[len(flat)] = (2 * signs - 1).to(flat.device)
        eps = torch.finfo(value.dtype).eps ** 0.5  # rounding in another order is far below it
        return float(flat @ self._signs[len(flat)].double()), float(flat @ flat) ** 0.5 * eps


def copy_of(state: State, replica: Replica) -> Tensor:
    """This rank's copy of a replica that it keeps, perhaps in several parts, which are put together in their order."""
    layer, missing = replica.layer, replica.holds
    parts: list[tuple[int, Tensor]] = []
    for key in state.analysis.kept.loaded.values():
        if key[0] == layer:
            mine, wanted = common(key[1], missing)
            held = Holds(mine.mask & wanted.mask, mine.of)
            missing = Holds(wanted.mask & ~mine.mask, mine.of)
            starts = [start for start, _ in state.shapes.ranges(layer, held)]
            places = state.shapes.places(layer, key[1], held)
            parts += [(at, state.kept[key][start:stop]) for at, (start, stop) in zip(starts, places, strict=True)]
    return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])


def hash_of(tensor: Tensor) -> int:
    """63 bits that tell tensors apart which differ in one bit."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.data, digest_size=8).digest(), "little") >> 1


def near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two results differ by no more than rounding."""
    if not math.isfinite(one[0]) or not math.isfinite(other[0]):
        return str(one[0]) == str(other[0])
    return abs(one[0] - other[0]) <= max(one[1], other[1])


def camps_of(of_rank: Mapping[int, Value], alike: Callable[[Value, Value], bool]) -> tuple[tuple[int, ...], ...]:
    """Ranks that agree, the largest camp first."""
    camps: list[list[int]] = []
    for rank, value in of_rank.items():
        camp = next((camp for camp in camps if alike(of_rank[camp[0]], value)), None)
        if camp is None:
            camps.append([rank])
        else:
            camp.append(rank)
    return tuple(tuple(camp) for camp in sorted(camps, key=len, reverse=True))


def differing(prints: Prints) -> tuple[Hashable, tuple[tuple[int, ...], ...]] | None:
    """Find the first result on which ranks differ, with their camps; a camp alone is a rank that contradicts itself."""
    for key, of_rank in sorted(prints.items(), key=_computed):
        for rank, results in of_rank.items():
            if not all(near(results[0], each) for each in results):
                return key, ((rank,),)
        camps = camps_of({rank: results[0] for rank, results in of_rank.items()}, near)
        if len(camps) > 1:
            return key, camps
    return None


def _computed(found: tuple[Hashable, object]) -> tuple[int, int]:
    """The order in which a microbatch's results follow from one another, also from rank to rank."""
    kind, layer = cast(tuple[OpKind, int], found[0])[:2]
    if kind in (OpKind.FORWARD, OpKind.ATTEND):
        return 0, layer
    return (1, 0) if kind is OpKind.LOSS else (2, -layer)


def accusation(camps: Sequence[tuple[int, ...]]) -> str:
    """Name the ranks that differ from the most; where there is no most, all."""
    most, *others = camps
    odd = sorted(rank for camp in others for rank in camp)
    if len(most) > len(others[0]):
        return f"{names(odd)} from {names(most)}"
    return f"{' and '.join(names(camp) for camp in camps)} differ, and two opinions cannot tell who is right"


def advice(checked: Checked) -> str:
    """Say what to do about a fault: a host is to blame only where the program keeps all replicas equal."""
    if drifts := drifts_of(checked):
        return f"It may be rounding, and no host's fault: {str(drifts[0]).removesuffix('.')}"
    return "Leave the host out, and go on from what was saved before the last audit that passed"


def _op_text(key: Hashable) -> str:
    kind, layer = cast(tuple[OpKind, int], key)[:2]
    return f"{kind.value}(layer {layer})"


class Auditing(Callback):
    """Callback that audits the ranks after every so many steps.

    Args:
        audits: of each of the training's executors.
        every: how many steps are between audits.
        saved: tells what is saved by now.
    """

    def __init__(self, audits: Sequence[Audit], every: int, saved: Callable[[], str]) -> None:
        self._audits, self._every, self._saved = audits, every, saved

    def on_step_end(self, training: Training) -> None:
        """Audit, if it is time.

        Raises:
            UserError: on rank 0, when the audit finds a fault; the other ranks just end.
        """
        state = training.state
        if state.step % self._every:
            return
        audit = next(audit for audit in self._audits if audit.state is state)
        if fault := audit.fault():
            if state.rank:
                raise SystemExit(1)
            raise UserError(
                f"the audit after step {state.step} found a silent fault: {fault}. Training has stopped; "
                f"{self._saved()}. {advice(state.checked)}"
            )
