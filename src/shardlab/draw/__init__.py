"""Pictures as SVG documents: timelines of a step with its memory, and the values that a rank holds.

Read `timeline.py` first: it lays out a page. `rows.py` decides what the rows and boxes of a page are, `panels.py` draws
them, their legend and the memory, and `canvas.py` has the page and its colours. `trace_events.py` writes the same
timelines for trace viewers. `values.py` draws tensors, for the puzzles.
"""

from shardlab.draw.timeline import comparison_svg, save_comparison, save_timeline, timeline_svg
from shardlab.draw.values import network_svg, store_svg, value_svg

__all__ = [
    "comparison_svg",
    "network_svg",
    "save_comparison",
    "save_timeline",
    "store_svg",
    "timeline_svg",
    "value_svg",
]
