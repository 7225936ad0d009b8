"""Pictures as SVG documents: timelines of a step with its memory, and values that a rank holds.

Read `timeline.py` first: it lays out a page. `rows.py` chooses the rows and boxes of a page, `panels.py` draws them
with their legend and the memory, and `canvas.py` has the page and its colours. `trace_events.py` writes the same
timelines for trace viewers. `values.py` draws tensors, for the puzzles. `viewer` makes interactive pages.

The package itself is callable: `shardlab.draw(...)` draws a step or a value (see `shardlab.api`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.draw.timeline import comparison_svg, save_comparison, save_timeline, timeline_svg
    from shardlab.draw.values import network_svg, store_svg, value_svg

__all__ = ["comparison_svg", "save_comparison", "save_timeline", "timeline_svg"]
__all__ += ["network_svg", "store_svg", "value_svg"]


def __getattr__(name: str) -> Any:
    """Import a function on first use, since drawing imports matplotlib."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardlab.draw import timeline, values

    return getattr(values if name in vars(values) else timeline, name)
