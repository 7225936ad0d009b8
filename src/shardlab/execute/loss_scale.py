"""Loss scaling: gradients in float16 are made larger, so that small ones are not lost, and smaller again in updates."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.program.precision import Precision
from shardlab.rules.factor import MOST_DOUBLINGS_IN_FLOAT16

FIRST = 2.0**16
"""Scale of a run's first step: torch.amp.GradScaler's."""

CALM = 2000
"""Steps without an overflow after which the scale doubles, as torch.amp.GradScaler's."""


class LossScale:
    """By what a run's losses are multiplied: one number on all ranks, since all see the same norm of the gradient.

    A step whose gradient overflows is left out everywhere, and the scale is halved; after 2,000 without it is doubled
    (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; the numbers are torch.amp.GradScaler's).

    Attributes:
        scale: of the next step.
        calm: steps since the last overflow or doubling.
    """

    def __init__(self, scale: float = FIRST) -> None:
        self.scale = scale
        self.calm = 0

    def after(self, finite: bool) -> None:
        """A step has ended, with a gradient that was finite or not."""
        self.calm += 1
        if not finite:
            self.scale, self.calm = self.scale / 2, 0
        elif self.calm == CALM:
            self.scale, self.calm = self.scale * 2, 0


def want_scalable(precision: Precision, checked: Checked) -> None:
    """Refuse float16 for a program by which ranks would not know of one another's overflows, or that scales by much.

    Raises:
        UserError: with what to do.
    """
    if precision.scaled and not checked.clips:
        raise UserError(
            f"{precision.name} needs a program that gives updates the gradient's norm, which tells all ranks of an "
            "overflow; take fsdp or a plan, such as zero-3, or bf16"
        )
    if precision.scaled:
        factors = {spec.form.factor for specs in checked.specs for spec in specs.values()}
        for why in filter(None, (factor.beyond(MOST_DOUBLINGS_IN_FLOAT16) for factor in factors)):
            raise UserError(
                f"the program multiplies gradients by {why}, which {precision.name} has no room for beside its loss "
                "scale; scale by less, or take bf16"
            )
