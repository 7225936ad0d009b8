"""The colours that ops name (see `shardlab.program.ops`): in a picture, in a terminal, and in Chrome's trace viewer."""

from __future__ import annotations

from typing import NamedTuple

from shardlab.program.ops import Color


class Hue(NamedTuple):
    """A colour wherever an op is shown.

    Attributes:
        drawn: in a picture; of a pass, whose boxes have shades, the darkest.
        terminal: in a terminal (rich's name); signs tell apart those that are alike there.
        lightest: the lightest of a pass's shades.
        chrome: a name of Chrome's viewer (catapult's color_scheme.html); without one it takes its own.
    """

    drawn: str
    terminal: str
    lightest: str = ""
    chrome: str = ""


HUES: dict[Color, Hue] = {
    "blue": Hue("#2a62b8", "dodger_blue2", "#a9cbf5", "rail_response"),
    "light blue": Hue("#2a62b8", "dodger_blue2", "#a9cbf5", "thread_state_runnable"),
    "orange": Hue("#e0761b", "dark_orange", "#fad0a0", "rail_idle"),
    "teal": Hue("#10908f", "dark_cyan", "#98dcd6", "background_memory_dump"),
    "green": Hue("#5d9c1f", "green", "#c5e39a", "rail_load"),
    "black": Hue("#24292f", "bold", chrome="black"),
    "brown": Hue("#9a6700", "bold"),
    "grey": Hue("#8c959f", "bold"),
    "light grey": Hue("#8c959f", "dim"),
    "yellow": Hue("#f2c811", "yellow"),
    "magenta": Hue("#c763a5", "magenta"),
    "red": Hue("#b3243f", "red"),
    "violet": Hue("#8a63c7", "cyan"),
    "lilac": Hue("#c3b1e1", "yellow"),
    "pink": Hue("#ecc3de", "magenta"),
    "cream": Hue("#f8e79b", "yellow"),
    "rose": Hue("#dc98a3", "red"),
    "slate": Hue("#57606a", "yellow"),
    "light slate": Hue("#a4adb6", "magenta"),
    "olive": Hue("#6f7a1e", "cyan"),
    "light olive": Hue("#bfc777", "cyan"),
}
