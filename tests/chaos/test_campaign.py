"""A small campaign: runs that are killed end as if nobody had killed them, and a campaign sees what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, Found, campaign
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.starts_ranks


def played(options: Campaign, folder: Path, warm: WarmStarts) -> Found:
    *_, (_, _, found) = campaign(options, folder, warm)
    return found


def test_runs_that_are_killed_end_as_if_nobody_had(tmp_path: Path, warm: WarmStarts) -> None:
    found = played(
        Campaign(kills=2, cases=("fsdp",), steps=12, save_every=2, moments=("step", "commit")), tmp_path, warm
    )
    assert found.all_wrong == []
    assert any(kill.reached for kill in found.kills)


@pytest.mark.thorough
def test_a_restore_that_forgets_something_fails_the_campaign(tmp_path: Path, warm: WarmStarts) -> None:
    case = str(Path(__file__).with_name("forgetful.py")) + ":ddp"
    found = played(Campaign(kills=1, cases=(case,), steps=24, save_every=2, moments=("step",)), tmp_path, warm)
    assert any(kill.reached for kill in found.kills)
    assert any("differs" in wrong or "differ" in wrong for wrong in found.all_wrong)
