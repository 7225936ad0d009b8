"""Tables of a step for the page: the ops, values and communications of a program, and its timelines.

`Step` is the content of a page, and `step_tables` packs it. The columns of ops have an entry for each op of each tape,
with the tapes concatenated. The column `rowStart` has the index at which each tape begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from shardlab.common.text import listed
from shardlab.draw.canvas import model_layer, model_layer_count
from shardlab.draw.rows import rank_name
from shardlab.draw.viewer.columns import Columns, Numbering
from shardlab.language import OpKind, Program, Spec
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import bits
from shardlab.language.world import gc_paused
from shardlab.simulate.timeline import Timeline
from shardlab.simulate.timeline.causes import Activity, Reason, activity_of, find_arrivals, find_causes, find_gaps
from shardlab.simulate.timeline.critical_path import PathLink
from shardlab.simulate.timeline.figures import Figures, figures_of
from shardlab.simulate.timeline.prices import Traced, rank_of
from shardlab.simulate.timeline.run import Counter, moments_of

FORMAT = 1
"""Version of the tables that the scripts of the page expect."""

REASONS = list(Reason)
KINDS = list(OpKind)
_KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class ShownTimeline:
    """Timeline of a page.

    Attributes:
        name: "predicted" or "measured"; empty if there is only one.
        timeline: timeline of the step.
        counters: memory of each row by category over time (empty: unknown).
        path: critical path of the timeline (None: the page computes it from the causes of the ops).
        bubble: bubble of the pipeline's schedule (None: unknown, or no pipeline).
    """

    name: str
    timeline: Timeline
    counters: Sequence[Counter] = ()
    path: Sequence[PathLink] | None = None
    bubble: float | None = None

    @cached_property
    def activity(self) -> Activity:
        """Ops of the timeline, with the communications that their ranks await."""
        return activity_of(self.timeline)


@dataclass(frozen=True)
class Step:
    """One optimizer step, as the page of the viewer shows it.

    Attributes:
        title: title of the page.
        note: sentence below the title.
        traced: traced program.
        timelines: timelines of the program, from top to bottom.
        schedule: name of the pipeline's schedule ("": none).
        lines: file and line that issued each op of each tape (empty: unknown).
        remarks: sentences below the figures, such as that there is no prediction.
    """

    title: str
    note: str
    traced: Traced
    timelines: Sequence[ShownTimeline]
    schedule: str = ""
    lines: Sequence[Sequence[tuple[str, int] | None]] = ()
    remarks: Sequence[str] = field(default_factory=list[str])

    @cached_property
    def figures(self) -> list[Figures]:
        """Six figures of each timeline."""
        return [figures_of(entry.timeline, self.schedule, entry.activity, entry.bubble) for entry in self.timelines]


def step_tables(step: Step) -> bytes:
    """Return the packed tables of a step."""
    with gc_paused():
        return _step_tables(step)


def step_header(title: str, note: str, *, in_seconds: bool) -> dict[str, Any]:
    """Return the entries of a header that do not depend on the program."""
    return {
        "format": FORMAT,
        "title": title,
        "note": note,
        "unit": "s" if in_seconds else "",
        "memory": "bytes" if in_seconds else "elements",
        "kinds": [
            {
                "name": kind.row.legend,
                "communicates": kind in COMMUNICATION,
                "pass": kind.row.part_of,
                "color": kind.row.color,
                "letters": kind.row.letters,
                "ends": [*kind.row.ends, *([kind.row.saved_input] if kind.row.saved_input >= 0 else [])],
            }
            for kind in KINDS
        ],
        "special": {kind.value: _KIND_NUMBER[kind] for kind in (OpKind.WAIT, OpKind.FREE, OpKind.SEND, OpKind.RECV)},
        "reasons": [reason.value for reason in REASONS],
    }


def add_op_columns(columns: Columns, ops: Mapping[str, Sequence[float]]) -> None:
    """Add the columns of ops that programs and traces have in common."""
    types = {"kind": "u8", "layer": "i32", "modelLayer": "i32", "text": "u32", "first": "i32", "communication": "i32"}
    for name, kind in types.items():
        columns.add(name, kind, ops[name])


def add_activity_columns(
    columns: Columns, number: int, activity: Activity, starts: Sequence[int], counters: Sequence[Counter]
) -> list[str]:
    """Add the columns of a timeline that are derived from its activity.

    Args:
        number: number of the timeline.
        starts: index of each row's first op in the columns of ops, and as last entry the total number of ops.
        counters: memory of each row over time.

    Returns:
        The categories of memory.
    """
    total, rows = starts[-1], activity.rows
    times = {name: np.full(total, np.nan) for name in ("start", "end")}
    cause = {name: np.full(total, -1, dtype=np.int64) for name in ("causeRow", "causeOp")}
    reason = np.zeros(total, dtype=np.uint8)
    for row, (ops, causes) in enumerate(zip(rows, find_causes(activity), strict=True)):
        for op, (op_reason, place) in zip(ops, causes, strict=True):
            index = starts[row] + op.op
            times["start"][index], times["end"][index] = op.start, op.end
            reason[index] = REASONS.index(op_reason)
            if place is not None:
                cause["causeRow"][index], cause["causeOp"][index] = place[0], rows[place[0]][place[1]].op
    last = {
        gap.row: rows[gap.row][gap.awaited].op
        for gap in find_gaps(activity)
        if gap.next_compute is None and gap.awaited is not None
    }
    for name, values in times.items():
        columns.add(f"{name}{number}", "f64", values)
    for name, values in cause.items():
        columns.add(f"{name}{number}", "i32", values)
    columns.add(f"reason{number}", "u8", reason)
    columns.add(f"lastAwaited{number}", "i32", [last.get(row, -1) for row in range(len(rows))])
    return _add_counters(columns, number, counters, len(rows))


def _step_tables(step: Step) -> bytes:
    columns, program = Columns(), step.traced.program
    header = step_header(step.title, step.note, in_seconds=step.timelines[0].timeline.in_seconds)
    header |= {"remarks": list(step.remarks), "microbatches": program.microbatches, "programLayers": program.layers}
    header |= {"layers": model_layer_count(program.sizes)}
    header["rows"] = [{"name": rank_name(program, row), "rank": rank_of(program, row)} for row in range(program.ranks)]
    header |= _add_ops(columns, step)
    header["timelines"] = [_add_timeline(columns, number, entry, step) for number, entry in enumerate(step.timelines)]
    return columns.pack(header)


def _add_counters(columns: Columns, number: int, counters: Sequence[Counter], rows: int) -> list[str]:
    names = list(dict.fromkeys(name for counter in counters for _, live in counter for name in live))
    names = [name for name in names if any(live.get(name) for counter in counters for _, live in counter)]
    sizes = [len(counter) for counter in counters] or [0] * rows
    columns.add(f"memoryRows{number}", "u32", [0, *np.cumsum(sizes).tolist()])
    columns.add(f"memoryTime{number}", "f64", [time for counter in counters for time, _ in counter])
    live = [bytes_.get(name, 0) for name in names for counter in counters for _, bytes_ in counter]
    columns.add(f"memory{number}", "f64", live)
    return names


def _add_ops(columns: Columns, step: Step) -> dict[str, Any]:
    """Add the columns of ops, values, communications and lines. Return the tables of texts to which they refer."""
    program, traced = step.traced.program, step.traced
    texts, groups, files = Numbering[str](), Numbering[str](), Numbering[str]()
    specs, forms, cells = Numbering[tuple[object, int]](), Numbering[object](), Numbering[int]()
    spec_texts: list[str] = []
    sizes: list[int] = []
    size_of = program.sizes.bytes if step.timelines[0].timeline.in_seconds else program.sizes.elements
    names = ("kind", "layer", "modelLayer", "text", "first", "communication", "group", "peer")
    ops: dict[str, list[int]] = {name: [] for name in (*names, "file", "line")}
    values: dict[str, list[int]] = {"inputStart": [0], "input": [], "outputStart": [0], "output": []}
    row_starts, value_starts, value_specs = [0], [0], list[int]()
    model_layer_of = cache(partial(model_layer, program.sizes))

    @cache
    def text_number(microbatches: int) -> int:
        return texts(listed(bits(microbatches)) if microbatches else "")

    def spec_number(spec: Spec) -> int:
        number = specs((spec.form, spec.cells))
        if number == len(spec_texts):
            spec_texts.append(str(spec))
            sizes.append(size_of(spec))
        return number

    for row, tape in enumerate(program.tapes):
        of_row, communication_of = traced.specs[row], traced.communication_of[row]
        count = max(of_row, default=-1) + 1
        value_specs += [spec_number(of_row[number]) if number in of_row else 0 for number in range(count)]
        value_starts.append(value_starts[-1] + count)
        lines = step.lines[row] if step.lines else [None] * len(tape)
        for op, line in zip(tape, lines, strict=True):
            first_value = (*op.inputs, *op.outputs)[:1]
            microbatches = of_row[first_value[0]].microbatches if first_value else 0
            ops["kind"].append(_KIND_NUMBER[op.kind])
            ops["layer"].append(op.layer)
            ops["modelLayer"].append(model_layer_of(op.layer) if op.layer >= 0 else -1)
            ops["text"].append(text_number(microbatches))
            ops["first"].append((microbatches & -microbatches).bit_length() - 1)
            ops["communication"].append(communication_of.get(op.handle, -1) if op.kind in COMMUNICATION else -1)
            ops["group"].append(groups(str(op.group)) if op.group is not None else -1)
            ops["peer"].append(op.peer)
            ops["file"].append(files(line[0]) if line else -1)
            ops["line"].append(line[1] if line else 0)
            values["input"] += op.inputs
            values["output"] += op.outputs
            values["inputStart"].append(len(values["input"]))
            values["outputStart"].append(len(values["output"]))
        row_starts.append(len(ops["kind"]))
    members = [[(row, op) for row, _, op in communication.participants] for communication in traced.communications]
    add_op_columns(columns, ops)
    for name in ("group", "peer", "file", "line"):
        columns.add(name, "i32", ops[name])
    for name, numbers in values.items():
        columns.add(name, "u32", numbers)
    columns.add("rowStart", "u32", row_starts)
    columns.add("valueStart", "u32", value_starts)
    columns.add("valueSpec", "u32", value_specs)
    columns.add("specForm", "u32", [forms(form) for form, _ in specs.items])
    columns.add("specCells", "u32", [cells(mask) for _, mask in specs.items])
    columns.add("specSize", "f64", sizes)
    add_members(columns, members)
    return {
        "texts": texts.items,
        "groups": groups.items,
        "files": files.items,
        "specs": spec_texts,
        "forms": [_form_as_json(form) for form in forms.items],
        "cells": [f"{mask:x}" for mask in cells.items],
    }


def add_members(columns: Columns, members: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Add the members of each communication: their rows and ops."""
    columns.add("memberStart", "u32", [0, *np.cumsum([len(group) for group in members]).tolist()])
    columns.add("memberRow", "u32", [row for group in members for row, _ in group])
    columns.add("memberOp", "u32", [op for group in members for _, op in group])


def _form_as_json(form: Any) -> dict[str, Any]:
    """Return the data for a value's picture: its kind and layer, the pieces that it holds, and their total number."""
    sliced = next(((mask, form.space.count(index)) for index, mask in form.slices), None)
    return {
        "kind": form.kind.value,
        "layer": form.layer,
        "holds": [f"{form.holds.mask:x}", form.holds.of],
        "slices": [f"{sliced[0]:x}", sliced[1]] if sliced else None,
        "partial": form.term is not None,
        "sequence": form.space.sequence,
        "uses": form.space.cells,
    }


def _add_timeline(columns: Columns, number: int, entry: ShownTimeline, step: Step) -> dict[str, Any]:
    timeline, program = entry.timeline, step.traced.program
    activity = entry.activity
    starts = [0, *np.cumsum([len(tape) for tape in program.tapes]).tolist()]
    categories = add_activity_columns(columns, number, activity, starts, entry.counters)
    columns.add(f"reached{number}", "f64", _arrival_times(program, timeline, activity))
    path = entry.path
    if path is not None:
        columns.add(f"pathRow{number}", "u32", [link.row for link in path])
        columns.add(f"pathOp{number}", "u32", [link.op for link in path])
        columns.add(f"pathStart{number}", "f64", [link.start for link in path])
        columns.add(f"pathEnd{number}", "f64", [link.end for link in path])
    return {
        "name": entry.name,
        "end": timeline.end,
        "categories": categories,
        "path": path is not None,
        "figures": step.figures[number].as_dict(),
    }


def _arrival_times(program: Program, timeline: Timeline, activity: Activity) -> list[float]:
    """Return the time at which each rank reaches each op, including ops that take no time."""
    reached: list[float] = []
    for row, (ops, arrivals) in enumerate(zip(activity.rows, find_arrivals(activity), strict=True)):
        moments = moments_of(timeline, row)
        for op, arrival in zip(ops, arrivals, strict=True):
            moments[op.op] = arrival
        reached += moments
    return reached
