"""Pipeline schedules: the order in which each rank runs the passes of its stages.

`published` has eight schedules of papers as short generators; read its `gpipe` and `one_f_one_b` first.
`building_blocks` has two more, which need less memory. `actions` defines the actions that they yield. `steps` turns a
schedule into the steps of every rank: it checks that the schedule is complete and inserts the messages between stages.
`pytorch_csv` reads and writes the schedule files of PyTorch, and `find` looks a schedule up by name.
"""

from shardlab.strategies.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    loop,
    vee,
)
from shardlab.strategies.schedules.building_blocks import v_half, v_min
from shardlab.strategies.schedules.published import (
    breadth_first,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe, "Huang et al. 2019, arXiv 1811.06965, fig. 2c"),
        Schedule("1f1b", one_f_one_b, "arXiv 2104.04473, fig. 4, top"),
        Schedule("interleaved-1f1b", interleaved, "arXiv 2104.04473, fig. 4, bottom", stages_per_rank=None),
        Schedule("breadth-first", breadth_first, "arXiv 2211.05953, fig. 4", stages_per_rank=None),
        Schedule("zb-h1", zb_h1, "Qi et al. 2023, arXiv 2401.10241, fig. 3, top"),
        Schedule("zb-h2", zb_h2, "Qi et al. 2023, arXiv 2401.10241, fig. 3, bottom"),
        Schedule("zb-v", zb_v, "Qi et al. 2023, arXiv 2401.10241, fig. 8", vee, stages_per_rank=2),
        Schedule("v-half", v_half, "Qi et al. 2024, arXiv 2405.15362, fig. 4", vee, stages_per_rank=2),
        Schedule("v-min", v_min, "Qi et al. 2024, arXiv 2405.15362, fig. 4", vee, stages_per_rank=2),
        Schedule("dualpipe-v", dualpipe_v, "DeepSeek 2025, github.com/deepseek-ai/DualPipe", vee, stages_per_rank=2),
    )
}
"""Built-in schedules by name."""

__all__ = ["SCHEDULES", "Action", "Backward", "BackwardInput", "BackwardWeight", "Forward", "Schedule", "loop", "vee"]
