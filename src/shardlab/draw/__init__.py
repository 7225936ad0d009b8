"""Pictures: timelines with memory, and the values that a rank holds, as SVG."""

from shardlab.draw.comparison import comparison_svg, save_comparison
from shardlab.draw.network import network_svg, store_svg, value_svg
from shardlab.draw.timeline import save_timeline, timeline_svg

__all__ = [
    "comparison_svg",
    "network_svg",
    "save_comparison",
    "save_timeline",
    "store_svg",
    "timeline_svg",
    "value_svg",
]
