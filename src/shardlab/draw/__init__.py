"""Pictures: timelines with memory, and the values that a rank holds, as SVG."""

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
