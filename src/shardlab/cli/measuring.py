"""Options that both benches share, and an ending that says and keeps what was measured."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.cli.console import print_json, print_path, stdout_console
from shardlab.cli.new_file import writing
from shardlab.cli.options import Flag, NewFile
from shardlab.program import UserError
from shardlab.starting import INTERRUPTED

if TYPE_CHECKING:
    from shardlab.measure.points import Point

PLOTS = (".svg", ".png", ".pdf")
"""Formats of a plot; each can say who drew it."""

ProfileFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the user's cache)")]
"""Where the profile is kept."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options of both benches."""

    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 0.2
    """Time for which each collective is measured at each size."""

    save: bool = True
    """Save the fit in this machine's profile."""

    profile: ProfileFile = None
    """Profile file. A profile that is kept elsewhere is named FILE.json, and --cluster accepts it."""

    plot: NewFile = None
    """Draw the measurements into this file."""

    verbose: Flag = False
    """Also print every size and layer, and every fitted rate."""

    force: Flag = False
    """Replace --plot even if Shardlab did not write that file."""

    json: Flag = False
    """Print only JSON."""

    def measure(
        self,
        ranks: int,
        function: Callable[..., bool],
        bench: Any,
        show: Callable[[list[Point], bool], None],
        draw: Callable[[list[Point], Path], None],
    ) -> int:
        """Run a bench on its ranks, and tell what was measured; the exit status.

        Args:
            function: `function(rank, device, bench, file)` writes points into the file and says whether this process
                is the one that tells.
            show, draw: print the points, with or without each of them, and draw them into a file.
        """
        from shardlab.measure.points import read_points
        from shardlab.measure.saving import profile_to_update
        from shardlab.train.launch import run_ranks
        from shardlab.train.processes import RankFailed

        if self.profile is not None and self.profile.suffix != ".json":
            raise UserError(
                f"--profile {self.profile}: its name must end in .json, so that --cluster recognizes a profile"
            )
        if self.plot is not None and self.plot.suffix.lower() not in PLOTS:
            raise UserError(f"--plot {self.plot}: its name must end in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
        if self.save:
            profile_to_update(self.profile)  # before minutes of measuring, not after
        failure, status, tells = "", 0, True
        with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
            file = Path(folder, "points.jsonl")
            try:
                tells = run_ranks(ranks, function, bench, file)
            except RankFailed as error:
                failure, status = str(error), 1
            except KeyboardInterrupt:
                failure, status = "interrupted", INTERRUPTED
            points = read_points(file)
        if tells and points:
            self._tell(points, failure, show, draw)
        if failure:
            kept = "; the above was measured before" if points and not self.json else ""
            print(f"shardlab: {failure}{kept}", file=sys.stderr)
        return status

    def _tell(
        self,
        points: list[Point],
        failure: str,
        show: Callable[[list[Point], bool], None],
        draw: Callable[[list[Point], Path], None],
    ) -> None:
        from shardlab.measure.report import as_json
        from shardlab.measure.saving import save

        where = save(points, self.profile) if self.save else None
        if self.plot is not None:
            with writing("--plot", self.plot):
                draw(points, self.plot)
        if self.json:
            print_json(
                {**as_json(points), "profile": None if where is None else str(where), "failure": failure or None}
            )
            return
        show(points, self.verbose)
        for what, path in (("profile", where), ("drawn in", self.plot)):
            if path is not None:
                print_path(stdout_console(), what, path)


def check_seconds(seconds: float) -> float:
    """Refuse what is no time.

    Raises:
        UserError: saying so.
    """
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds is {seconds}; give a positive number of seconds")
    return seconds


def default_ranks() -> int:
    """Ranks if nobody says: one for each GPU, or each core if there is none; or as many as a launcher started."""
    from shardlab.measure.saving import this_machine
    from shardlab.train.launch import ranks_here

    return ranks_here(this_machine().places)
