"""Write a parallel-training strategy once: it is checked, drawn, timed and really run.

Values, stores and timelines show themselves as pictures in a notebook. The drawing, and matplotlib with it, is
imported when the first one does.
"""

from __future__ import annotations

from shardlab import starting

starting.leave_when_interrupted()  # before all other imports, which take a while

from shardlab.program import Store, Value  # noqa: E402
from shardlab.program.picture import picture  # noqa: E402
from shardlab.timeline import Timeline  # noqa: E402


@picture.register(Timeline)
def _(timeline: Timeline) -> str:
    from shardlab.draw import timeline_svg

    return timeline_svg(timeline)


@picture.register(Value)
def _(value: Value) -> str:
    from shardlab.draw import value_svg

    return value_svg(value)


@picture.register(Store)
def _(store: Store) -> str | None:
    from shardlab.draw import store_svg

    return store_svg(store)
