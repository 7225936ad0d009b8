"""Learning rates over a run: a warm-up, perhaps a plateau, and a decay."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd", "constant"]


def rate_factor(schedule: Schedule, step: int, steps: int, warmup: int, decay: int, least: float) -> float:
    """The learning rate of a step, as a share of the largest one.

    It rises linearly over `warmup` steps, stays, and comes down to `least` over the last `decay` of `steps` steps:

    - cosine: along half a cosine (Loshchilov and Hutter 2017, SGDR, arXiv 1608.03983, eq. 5; as in nanoGPT);
    - linear: along a line;
    - wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv 2404.06395, section 4.2): exponentially;
    - constant: it does not come down.

    >>> [rate_factor("linear", step, 10, 2, 4, 0.0) for step in (0, 1, 5, 6, 8, 10)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]

    Args:
        step: counted from 0; after `steps` the rate stays as it is.
        least: the share that is left at the end, unless `decay` is 0; more than 0 for wsd.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or not decay:
        return 1.0
    progress = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    if schedule == "wsd":
        return least**progress
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return least + (1 - least) * left
