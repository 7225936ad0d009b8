"""Audits of a training (`train --audit-every N`), which find ranks that compute silently wrong numbers.

After every N steps an `Audit` compares the ranks in two ways. First it compares hashes of all replicas of weights. Then
it runs the tape once more with the same microbatch for every microbatch number, and compares each result that several
ranks have computed. This run changes no weights. `Auditing` is the callback that audits a training.
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
from shardlab.check.replicas import COMPARED, OpResult, Replica, replicas_of, results_of
from shardlab.common.errors import UserError
from shardlab.execute.executor import Executor
from shardlab.execute.settings import Sampler
from shardlab.execute.state import State
from shardlab.execute.update_ops import Instruction
from shardlab.language import Holds, OpKind
from shardlab.language.rules.kinds import in_equal_pieces
from shardlab.train.faults import rank_names
from shardlab.train.steps import Callback, Training

Value = TypeVar("Value")

Fingerprints = dict[Hashable, dict[int, list[tuple[float, float]]]]
"""Fingerprints by key of a result (its kind of op and layer come first) and by rank.

A rank has a list of (random projection, tolerance), one for each of its results with this key.
"""


class RepeatedMicrobatch:
    """Sampler that returns the first microbatch of a step for every microbatch number.

    Args:
        batches: sampler of the training.
    """

    def __init__(self, batches: Sampler) -> None:
        self._batches = batches
        self.micro_batch_size = batches.micro_batch_size

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self._batches.microbatch(step, 0)

    def counted(self, step: int, microbatches: int) -> int:
        return microbatches * max(1, int((self.microbatch(step, 0)[1] >= 0).sum()))


class Audit:
    """Comparison of the ranks of a training. All ranks call its methods together, and receive the same result.

    Args:
        executor: executor of a rank's tape, before tracers or profilers wrap its instructions.

    Attributes:
        state: tensors of the executor.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self.state = executor, executor.state
        checked = executor.state.checked
        self._replicas = replicas_of(checked)
        self._results = results_of(checked)
        self._signs: dict[int, Tensor] = {}  # random signs, by length of the result
        self._recorded: list[tuple[float, float]] = []
        results_by_op: dict[int, list[OpResult]] = defaultdict(list)
        for result in self._results[executor.state.rank]:
            results_by_op[result.op].append(result)
        plain = enumerate(zip(executor.state.tape, executor.instructions, strict=True))
        self._instructions = [
            self._recording(run, results_by_op[index]) if op.kind in COMPARED else run for index, (op, run) in plain
        ]

    def find_fault(self) -> str:
        """Compare the ranks, and return a clause that names the ranks that differ; empty if none does."""
        return self._compare_weights() or self._compare_results()

    def _compare_weights(self) -> str:
        hashes = [0] * len(self._replicas)
        for number, replica in enumerate(self._replicas):
            if self.state.rank in replica.ranks:
                hashes[number] = hash_of(copy_of(self.state, replica))
        of_ranks = self._gather(torch.tensor(hashes, dtype=torch.int64))
        layers_by_groups: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
        for number, replica in enumerate(self._replicas):
            groups = group_ranks({rank: int(of_ranks[rank][number]) for rank in replica.ranks}, int.__eq__)
            if len(groups) > 1:
                layers_by_groups[groups].append(replica.layer)
        for groups, layers in layers_by_groups.items():
            weights = f"weights[{layers[0]}]" + (f" (and {len(layers) - 1} more)" if layers[1:] else "")
            return f"the copies of {weights} are not bitwise equal: {describe_groups(groups)}"
        return ""

    def _compare_results(self) -> str:
        first = self._compute_fingerprints()
        difference = first_difference(first)
        if difference is None:
            return ""
        key, groups = difference
        finding = f"one microbatch, computed by all ranks, gives different results in {_op_text(key)}: "
        if len(groups) == 1:
            return f"{finding}{rank_names(groups[0])} gets different results for the same input"
        if len(groups[0]) > len(groups[1]):
            return finding + describe_groups(groups)
        second = self._compute_fingerprints()[key]
        changed = [rank for ranks in groups for rank in ranks if not nearly_equal(first[key][rank][0], second[rank][0])]
        if changed:
            return f"{finding}{rank_names(changed)} agrees with the others on recomputation: its first result was wrong"
        return f"{finding}{describe_groups(groups)}; on recomputation, each repeats its result"

    def _compute_fingerprints(self) -> Fingerprints:
        """Run the tape with the same microbatch throughout, and return the fingerprints of all ranks' results."""
        self._recorded.clear()
        self._executor.rehearse(RepeatedMicrobatch(self._executor.batches), self._instructions)
        length = max(map(len, self._results))
        own_prints = torch.zeros(length, 2, dtype=torch.float64)
        if self._recorded:
            own_prints[: len(self._recorded)] = torch.tensor(self._recorded, dtype=torch.float64)
        prints: Fingerprints = defaultdict(lambda: defaultdict(list))
        for rank, (of_rank, results) in enumerate(zip(self._gather(own_prints), self._results, strict=True)):
            pairs = cast(list[tuple[float, float]], of_rank.tolist())
            for (projection, tolerance), result in zip(pairs, results, strict=False):
                prints[result.key][rank].append((projection, tolerance))
        return prints

    def _gather(self, vector: Tensor) -> list[Tensor]:
        vector = vector.to(self.state.settings.device)
        vectors = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
        dist.all_gather(vectors, vector)
        return [tensor.cpu() for tensor in vectors]

    def _recording(self, instruction: Instruction, results: Sequence[OpResult]) -> Instruction:
        def run() -> None:
            instruction()
            for result in results:
                self._recorded.append(self._fingerprint(self.state.values[result.number]))

        return run

    def _fingerprint(self, value: object) -> tuple[float, float]:
        """Return the projection of a value on fixed random signs, and by how much rounding may change it."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return 0.0, 0.0
        flat = value.detach().flatten().double()
        if len(flat) not in self._signs:
            signs = torch.randint(2, (len(flat),), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
            self._signs[len(flat)] = (2 * signs - 1).to(flat.device)
        eps = torch.finfo(value.dtype).eps ** 0.5  # far above the difference that another order of summation makes
        return float(flat @ self._signs[len(flat)].double()), float(flat @ flat) ** 0.5 * eps


def copy_of(state: State, replica: Replica) -> Tensor:
    """Return this rank's copy of the weights of a replica. If it keeps them in several parts, these are joined."""
    layer, missing_holds = replica.layer, replica.holds
    parts: list[tuple[int, Tensor]] = []
    for key in state.analysis.kept_weights.loads.values():
        if key[0] == layer:
            own_pieces, missing_pieces = in_equal_pieces(key[1], missing_holds)
            shared = Holds(own_pieces.mask & missing_pieces.mask, own_pieces.of)
            missing_holds = Holds(missing_pieces.mask & ~own_pieces.mask, own_pieces.of)
            starts = [start for start, _ in state.shapes.ranges(layer, shared)]
            ranges = state.shapes.places(layer, key[1], shared)
            parts += [
                (offset, state.kept[key][start:stop]) for offset, (start, stop) in zip(starts, ranges, strict=True)
            ]
    return torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])])


def hash_of(tensor: Tensor) -> int:
    """Return a 63-bit hash of the bytes of a tensor."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.data, digest_size=8).digest(), "little") >> 1


def nearly_equal(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two fingerprints differ by no more than rounding."""
    if not math.isfinite(one[0]) or not math.isfinite(other[0]):
        return str(one[0]) == str(other[0])
    return abs(one[0] - other[0]) <= max(one[1], other[1])


def group_ranks(of_rank: Mapping[int, Value], equal: Callable[[Value, Value], bool]) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks whose values are equal, the largest group first."""
    groups: list[list[int]] = []
    for rank, value in of_rank.items():
        group = next((group for group in groups if equal(of_rank[group[0]], value)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return tuple(tuple(group) for group in sorted(groups, key=len, reverse=True))


def first_difference(prints: Fingerprints) -> tuple[Hashable, tuple[tuple[int, ...], ...]] | None:
    """Find the first result, in order of computation, on which ranks differ.

    Returns:
        Key of the result, and the groups of ranks that agree; None if all ranks agree. If there is only one
        group, it is one rank, which computed the result several times and did not always get the same.
    """
    for key, of_rank in sorted(prints.items(), key=_computation_order):
        for rank, results in of_rank.items():
            if not all(nearly_equal(results[0], result) for result in results):
                return key, ((rank,),)
        groups = group_ranks({rank: results[0] for rank, results in of_rank.items()}, nearly_equal)
        if len(groups) > 1:
            return key, groups
    return None


def describe_groups(groups: Sequence[tuple[int, ...]]) -> str:
    """Name the ranks that differ from the largest group; if two groups are largest, name all ranks."""
    largest, *others = groups
    odd = sorted(rank for group in others for rank in group)
    if len(largest) > len(others[0]):
        return f"{rank_names(odd)} {'differs' if len(odd) == 1 else 'differ'} from {rank_names(largest)}"
    return f"{' and '.join(rank_names(group) for group in groups)} differ, and there is no majority"


def advice(checked: Checked) -> str:
    """Return what to do about a fault. If the program lets replicas drift, say that it may be mere rounding."""
    if drifts := drifts_of(checked):
        return f"It may be rounding, and no host's fault: {str(drifts[0]).removesuffix('.')}"
    return "Leave the host out, and resume from the checkpoint before the last audit that passed"


class Auditing(Callback):
    """Callback that audits the ranks after every `interval` steps.

    Args:
        audits: audit of each executor of the training.
        interval: number of steps from one audit to the next.
        describe_saved: function that describes in a sentence what the run has saved so far, for the error message.
    """

    def __init__(self, audits: Sequence[Audit], interval: int, describe_saved: Callable[[], str]) -> None:
        self._audits, self._interval, self._describe_saved = audits, interval, describe_saved

    def on_step_end(self, training: Training) -> None:
        """Audit if that is due.

        Raises:
            UserError: on rank 0, if the audit finds a fault. The other ranks exit.
        """
        state = training.state
        if state.step % self._interval:
            return
        audit = next(audit for audit in self._audits if audit.state is state)
        if fault := audit.find_fault():
            if state.rank:
                raise SystemExit(1)
            raise UserError(
                f"the audit after step {state.step} found a silent fault: {fault}. Training has stopped; "
                f"{self._describe_saved()}. {advice(state.checked)}"
            )


def _computation_order(item: tuple[Hashable, object]) -> tuple[int, int]:
    """Return a sort key that puts the results of one microbatch into the order in which the ranks compute them."""
    kind, layer = cast(tuple[OpKind, int], item[0])[:2]
    if kind in (OpKind.FORWARD, OpKind.ATTEND):
        return 0, layer
    return (1, 0) if kind is OpKind.LOSS else (2, -layer)


def _op_text(key: Hashable) -> str:
    kind, layer = cast(tuple[OpKind, int], key)[:2]
    return f"{kind.value}(layer {layer})"
