"""Logs of torchtitan, Megatron-LM and nanotron: the measured figures of a run.

`read_log` finds the lines of steps, whatever rank or scheduler has written before them, and returns the median step and
the largest memory. The first line of a run is warm-up (compilation, allocation, NCCL) and is left out if others follow.
Steps that save checkpoints or evaluate hardly change the median. `read_measured` reads the words after `--measured`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from shardlab.common.errors import UserError, why_unreadable
from shardlab.common.files import require_regular_file
from shardlab.common.text import counted

MemoryKind = Literal["allocated", "reserved", "nvidia-smi"]
"""Scope of a figure of memory: tensors at their peak, what the allocator has reserved, or all that the GPU holds."""

MOST_LOG_BYTES = 2**28

COLORS = re.compile(r"\x1b\[[0-9;]*m")

NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Units of nanotron's numbers (`human_format` in src/nanotron/logging/base.py)."""


@dataclass(frozen=True)
class Measured:
    """Measured figures of a run. None stands for a figure that is not given.

    Attributes:
        seconds: seconds of a step.
        tokens_per_second: tokens/s of all devices together.
        tokens_per_device: tokens/s of each device.
        memory: bytes of the fullest device.
        kind: what `memory` counts.
        mfu: model FLOPs utilization, from 0 to 1.
        sequences: sequences of the global batch.
        notes: remarks on how the log was read.
    """

    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_device: float | None = None
    memory: float | None = None
    kind: MemoryKind = "nvidia-smi"
    mfu: float | None = None
    sequences: int | None = None
    notes: tuple[str, ...] = ()

    def step_seconds(self, tokens: int, devices: int) -> float | None:
        """Return the seconds of a step, from the speed if they are not given; None if neither is given.

        Args:
            tokens, devices: tokens of a step, and number of devices.
        """
        if self.seconds is not None:
            return self.seconds
        speed = self.tokens_per_second or (self.tokens_per_device and self.tokens_per_device * devices)
        return tokens / speed if speed else None


class LogLine(NamedTuple):
    """Figures of one step in a log. None stands for a figure that the line lacks."""

    step: int
    seconds: float | None = None
    tokens_per_device: float | None = None
    memory: float | None = None
    kind: MemoryKind = "reserved"
    mfu: float | None = None
    sequences: int | None = None


def _number(match: re.Match[str] | None) -> float | None:
    return None if match is None else float(match[1].replace(",", ""))


def _human(text: str, name: str) -> float | None:
    """Return a number of nanotron's log, such as 6.66K."""
    match = re.search(rf"\b{name}: ([0-9.]+)([KMBT]?)(?=\s|$)", text)
    return None if match is None else float(match[1]) * UNITS[match[2]]


def _torchtitan(line: str) -> LogLine | None:
    """Read `step: 10  loss:  8.1  memory: 47.28GiB(59.06%)  tps: 6,432 ...` (torchtitan/components/metrics.py)."""
    match = re.search(r"\bstep:\s*(\d+)\s", line)
    memory = re.search(r"\bmemory:\s*([0-9.]+)GiB", line)
    speed = re.search(rf"\b(?:tps|wps):\s*{NUMBER}(?=\s|$)", line)
    if match is None or (memory is None and speed is None):
        return None
    share = re.search(r"\bmfu:\s*([0-9.]+)%", line)
    return LogLine(
        int(match[1]),
        tokens_per_device=_number(speed),
        memory=None if memory is None else float(memory[1]) * 2**30,
        mfu=None if share is None else float(share[1]) / 100,
    )


def _megatron(line: str) -> LogLine | None:
    """Read `iteration 10/ 500 | ... | elapsed time per iteration (ms): 987.6 | ...` (megatron/training/training.py)."""
    match = re.search(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|", line)
    if match is None:
        return None
    seconds = _number(re.search(rf"elapsed time per iteration \(ms\):\s*{NUMBER}\s*\|", line))
    sequences = re.search(r"global batch size:\s*(\d+)\s*\|", line)
    if seconds is None:
        return None
    return LogLine(int(match[1]), seconds / 1e3, sequences=int(sequences[1]) if sequences else None)


def _megatron_memory(line: str) -> LogLine | None:
    """Read `[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | ...`."""
    match = re.search(r"\(after (\d+) iterations\) memory \(MB\)", line)
    if match is None:
        return None
    kinds: dict[str, MemoryKind] = {"max reserved": "reserved", "max allocated": "allocated"}
    for name, kind in kinds.items():
        if (megabytes := _number(re.search(rf"\b{name}:\s*{NUMBER}(?=\s|$|\|)", line))) is not None:
            return LogLine(int(match[1]), memory=megabytes * 2**20, kind=kind)
    return None


def _nanotron(line: str) -> LogLine | None:
    """Read `iteration: 10 / 2000 | ... | tokens_per_sec_per_gpu: 6.66K | ...` (src/nanotron/trainer.py)."""
    match = re.search(r"\biteration: (\d+) / \d+ \|", line)
    if match is None:
        return None
    milliseconds = _human(line, "(?:elapsed_)?time_per_iteration_ms")
    speed, memory = _human(line, "tokens_per_sec_per_gpu"), _human(line, "cuda_max_memory_reserved")
    if milliseconds is None and speed is None and memory is None:
        return None
    return LogLine(int(match[1]), milliseconds and milliseconds / 1e3, speed, memory)


READERS = (_megatron, _megatron_memory, _nanotron, _torchtitan)


def read_log(text: str, file: str) -> Measured:
    """Return the figures of a log: the median of its steps without the first, and the largest memory.

    Raises:
        UserError: if the log has no line of a step.
    """
    notes: list[str] = []
    lines = COLORS.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    if lines[-1].strip() and any(reader(lines[-1] + " ") for reader in READERS):
        notes.append("the last line does not end, and is left out")
    entries = [entry for line in lines[:-1] for reader in READERS if (entry := reader(line)) is not None]
    if not entries:
        raise UserError(
            f"{file} has no line of a step of torchtitan, Megatron-LM or nanotron; give figures, as in --measured "
            "step=2.4s memory=71GiB"
        )
    timed_entries = [entry for entry in entries if entry.seconds is not None or entry.tokens_per_device is not None]
    steps = sorted({entry.step for entry in timed_entries})
    if len(steps) > 1:
        timed_entries = [entry for entry in timed_entries if entry.step != steps[0]]
        notes.append(f"{counted(len(steps) - 1, 'logged step')} after step {steps[0]}, which is warm-up; their median")
    elif steps:
        notes.append(f"step {steps[0]} alone, which may be warm-up")
    by_step: dict[int, list[LogLine]] = {}
    for entry in timed_entries:
        by_step.setdefault(entry.step, []).append(entry)
    if any(len(group) > 1 for group in by_step.values()):
        notes.append("several ranks log each step; the slowest rank's time and the fullest rank's memory count")
    seconds = [max(entry.seconds for entry in group if entry.seconds) for group in by_step.values() if group[0].seconds]
    speeds = [
        min(entry.tokens_per_device for entry in group if entry.tokens_per_device)
        for group in by_step.values()
        if group[0].tokens_per_device
    ]
    memory_entries = [entry for entry in entries if entry.memory is not None]
    shares = [entry.mfu for entry in timed_entries if entry.mfu is not None]
    batches = [entry.sequences for entry in timed_entries if entry.sequences is not None]
    return Measured(
        median(seconds) if seconds else None,
        None,
        median(speeds) if speeds else None,
        max((entry.memory for entry in memory_entries if entry.memory), default=None),
        memory_entries[0].kind if memory_entries else "reserved",
        median(shares) if shares else None,
        batches[-1] if batches else None,
        tuple(notes),
    )


TIMES = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "": 1.0}

BYTES = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6}

WANTED = (
    "step=2.4s, tokens/s=52000, tokens/s/device=6500, memory=71GiB, reserved=70GiB, allocated=62GiB, mfu=38%, or "
    "the path of a log"
)


def read_measured(words: Sequence[str]) -> Measured:
    """Return the figures of the command line: NAME=VALUE, or the path of a log.

    Raises:
        UserError: for a word that is neither.
    """
    figures: dict[str, Any] = {}
    kind: MemoryKind = "nvidia-smi"
    log: Measured | None = None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or Path(word).exists():
            log = _read_file(Path(word))
            continue
        match = re.fullmatch(rf"{NUMBER}\s*([A-Za-z%]*)", value.strip())
        unit = match[2].lower() if match else ""
        number = _number(match) or 0.0
        key = name.strip().lower()
        if key in ("step", "time", "seconds") and unit in TIMES and number:
            figures["seconds"] = number * TIMES[unit]
        elif key in ("tokens/s", "tokens") and not unit and number:
            figures["tokens_per_second"] = number
        elif key in ("tokens/s/device", "tokens/s/gpu", "tps", "wps") and not unit and number:
            figures["tokens_per_device"] = number
        elif key in ("memory", "reserved", "allocated") and unit in BYTES and number:
            figures["memory"] = number * BYTES[unit]
            kind = "reserved" if key == "reserved" else "allocated" if key == "allocated" else "nvidia-smi"
        elif key == "mfu" and unit in ("%", "") and number:
            figures["mfu"] = number / 100 if unit == "%" or number > 1 else number
        else:
            raise UserError(f"--measured {word} is not understood; give {WANTED}")
    if log is not None and figures:
        raise UserError("--measured has both a log and figures; give one of them")
    return log or Measured(**figures, kind=kind)


def _read_file(path: Path) -> Measured:
    try:
        require_regular_file(path)
    except UserError:
        if "." not in path.name and "/" not in str(path):
            raise UserError(f"--measured {path} is not understood; give {WANTED}") from None
        raise
    try:
        with path.open("rb") as file:
            data = file.read(MOST_LOG_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    return read_log(data.decode("utf-8", "replace"), str(path))
